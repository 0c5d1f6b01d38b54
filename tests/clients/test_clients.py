"""sparkrun, compose, LiteLLM and Kubernetes' schemas take every file that is made for them.

Each is seen to refuse a broken file too.  A client that cannot be had is an error, not a skip.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.errors import UsageError
from builder.serving.recipe import recipe_of
from builder.serving.recipeformats import rendered
from tests.unit.serving.served import HARD, request, with_hard_values

from .programs import compose, environment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.serving.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
SPARKRUN = "sparkrun==0.4.2"
LITELLM = "litellm[proxy]==1.106.2"
KUBERNETES = "kubernetes-validate==1.33.1"


def written(recipes: list[Recipe], form: str, folder: Path, ending: str) -> Iterator[Path]:
    """The files of a format, each in a folder of its own."""
    for number, recipe in enumerate(recipes):
        try:
            files = rendered(recipe, form)
        except UsageError:  # this format does not hold that topology
            continue
        for name, text in files.items():
            if name.endswith(ending):
                path = folder / str(number) / name
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, "utf-8")
                yield path


def run(*words: object, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a client that finds nothing of the user's."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    return subprocess.run(
        [str(word) for word in words],
        env={**kept, "HOME": str(home), **env},
        capture_output=True,
        text=True,
        check=False,
        cwd=home,
    )


def test_compose_takes_every_file(recipes: list[Recipe], tmp_path: Path) -> None:
    program = compose()
    files = list(written(recipes, "compose", tmp_path, ".yaml"))
    files = [path for path in files if path.name != "litellm.yaml"]
    assert len(files) > len(recipes)
    for path in files:
        done = run(program, "-f", path, "config", "--quiet", home=tmp_path)
        assert done.returncode == 0, (path.read_text(), done.stderr)
    broken = files[0].with_name("broken.yaml")
    broken.write_text(files[0].read_text().replace("    ipc:", "    ipcc:"))
    assert "ipcc" in run(program, "-f", broken, "config", home=tmp_path).stderr


def test_compose_reads_a_value_byte_for_byte(tmp_path: Path) -> None:
    recipe = with_hard_values(recipe_of(request()))
    (path,) = written([recipe], "compose", tmp_path, ".yaml")
    asked = ("-f", path, "config", "--format", "json")
    done = run(compose(), *asked, home=tmp_path, PORT="1", port="2")
    assert done.returncode == 0, done.stderr
    # its output is a file for itself: it doubles each dollar sign again
    service = json.loads(done.stdout.replace("$$", "$"))["services"][recipe.model]
    assert [*service["entrypoint"], *service["command"]] == recipe.command(recipe.nodes[0])
    assert service["environment"]["VLLM_DISABLED_KERNELS"] == HARD


_WORDS = r"""
import json, shlex, sys
from sparkrun.core.bootstrap import get_runtime, init_sparkrun
from sparkrun.core.recipe import Recipe
from sparkrun.core.env_templates import render_env_template
init_sparkrun()
recipe = Recipe.load(sys.argv[1])
asked = {"head_ip": "HEAD", "num_nodes": 1, "hosts": ["HEAD"]}
line = get_runtime(recipe.runtime).generate_command(recipe, {}, False, num_nodes=1)
env = {name: render_env_template(value, {}, {}) for name, value in recipe.env.items()}
words = shlex.split(line.replace(" \\\n  ", " "))
print(json.dumps({"words": words, "env": env}))
"""


@pytest.mark.parametrize("value", [HARD, "{port}", '{"a": {"b": 1}}', "{config.x}", "{{launch.y}"])
def test_sparkrun_reads_a_value_byte_for_byte(tmp_path: Path, value: str) -> None:
    recipe = with_hard_values(recipe_of(request()), value)
    (path,) = written([recipe], "sparkrun", tmp_path, ".yaml")
    done = run(
        environment(SPARKRUN, minor=12) / "python", "-c", _WORDS, path, home=tmp_path
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    for word in recipe.command(recipe.nodes[0]):
        assert word in seen["words"], (word, seen["words"])
    assert seen["env"]["VLLM_DISABLED_KERNELS"] == value


_VALIDATE = """
import sys
from pathlib import Path
from click.testing import CliRunner
from sparkrun.cli import main
for path in sys.argv[1:]:
    done = CliRunner().invoke(main, ["recipe", "validate", "--strict", path])
    if done.exit_code or "suggestion" in done.output:
        print(path, done.exit_code, done.output)
"""


def test_sparkrun_takes_every_recipe(
    recipes: list[Recipe], found_recipes: list[Recipe], tmp_path: Path
) -> None:
    programs = environment(SPARKRUN, minor=12)
    files = list(written([*recipes, *found_recipes], "sparkrun", tmp_path, ".yaml"))
    single = [recipe for recipe in recipes if recipe.topology != "two-solos"]
    assert len(files) == len(single) + len(found_recipes)
    done = run(programs / "python", "-c", _VALIDATE, *files, home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    broken = files[0].with_name("broken.yaml")
    broken.write_text(files[0].read_text().replace("vllm-distributed", "vlm-distributed"))
    assert "vlm-distributed" in run(
        programs / "python", "-c", _VALIDATE, broken, home=tmp_path
    ).stdout  # fmt: skip


_JOIN = r"""
import json, shlex, sys
from sparkrun.core.bootstrap import get_runtime, init_sparkrun
from sparkrun.core.recipe import Recipe
init_sparkrun()
made = []
for path in sys.argv[1:]:
    recipe = Recipe.load(path)
    runtime = get_runtime(recipe.runtime)
    if runtime.runtime_name == "vllm-ray":
        lines = [runtime.generate_command(recipe, {}, True, num_nodes=2, head_ip="HEAD")]
    else:
        asked = {"head_ip": "HEAD", "num_nodes": 2, "hosts": ["HEAD", "OTHER"]}
        lines = [
            runtime.generate_node_command(recipe, {}, node_rank=rank, **asked) for rank in (0, 1)
        ]
    made.append([shlex.split(line.replace("\\\n", " ")) for line in lines])
print(json.dumps(made))
"""


def test_sparkrun_joins_the_nodes_that_it_finds(
    found_recipes: list[Recipe], tmp_path: Path
) -> None:
    """What it adds is what joins them; all other words are the recipe's."""
    files = list(written(found_recipes, "sparkrun", tmp_path, ".yaml"))
    done = run(
        environment(SPARKRUN, minor=12) / "python", "-c", _JOIN, *files, home=tmp_path
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    named = ["--served-model-name"]
    for recipe, nodes in zip(found_recipes, json.loads(done.stdout), strict=True):
        added: list[list[str]] = [[], ["--headless"]]
        if recipe.topology == "tp2":
            for rank, words in enumerate(added):
                words += ["--nnodes", "2", "--node-rank", str(rank)]
                words += ["--master-addr", "HEAD", "--master-port", "25000"]
        for words, own in zip(nodes, added, strict=False):
            expected = [*recipe.command(recipe.nodes[0]), *own, *named, recipe.id]
            assert sorted(words) == sorted(expected)
        assert len(nodes) == (2 if recipe.topology == "tp2" else 1)


_ADD = """
import json, sys
from pathlib import Path
from click.testing import CliRunner
from sparkrun.cli import main
from sparkrun.core.config import SparkrunConfig
from sparkrun.core.mods import resolve_and_inject_mods
from sparkrun.core.recipe import Recipe, find_recipe

def call(*words):
    done = CliRunner().invoke(main, words)
    print(done.output, file=sys.stderr)
    if done.exit_code:
        raise SystemExit(done.output)
    return done.stdout

call("registry", "add", sys.argv[1])
listed = json.loads(call("recipe", "list", "--registry", "spark-build", "--json"))
found = {}
for name in sys.argv[2:]:
    scoped = f"@spark-build/{name}"
    call("recipe", "validate", "--strict", scoped)
    registries = SparkrunConfig().get_registry_manager()
    recipe = Recipe.load(find_recipe(scoped, registry_manager=registries))
    resolve_and_inject_mods(recipe, registries)
    copied = [item["copy"] for item in recipe.pre_exec if isinstance(item, dict)]
    found[name] = [sorted(path.name for path in Path(copy).iterdir()) for copy in copied]
print(json.dumps({"listed": listed, "mods": found}))
"""


def committed(folder: Path) -> Path:
    """What a user of this repository clones, as far as sparkrun reads it."""
    for name in (".sparkrun", "recipes", "mods"):
        shutil.copytree(ROOT / name, folder / name)
    git = ("git", "-C", folder, "-c", "user.name=x", "-c", "user.email=x@localhost")
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "registry")):
        done = run(*git, *words, home=folder)
        assert done.returncode == 0, done.stderr
    return folder


def add(folder: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Add a repository as a registry; git reaches no other one, so sparkrun's own are absent."""
    names = sorted(path.stem for path in (ROOT / "recipes" / "sparkrun").iterdir())
    python = environment(SPARKRUN, minor=12) / "python"
    home.mkdir()
    return run(python, "-c", _ADD, f"file://{folder}", *names, home=home, GIT_ALLOW_PROTOCOL="file")


def test_sparkrun_takes_the_registry(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    done = add(committed(folder), tmp_path / "home")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    files = {path.stem: path.read_text() for path in (ROOT / "recipes" / "sparkrun").iterdir()}
    assert len(said["listed"]) == len(files), "the recipes of the other form are not listed"
    for name, text in files.items():
        mod = re.search(r'"@spark-build/(.*)"', text)
        wanted = [sorted(path.name for path in (ROOT / "mods" / mod[1]).iterdir())] if mod else []
        assert said["mods"][name] == wanted
    assert any(said["mods"].values())


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        (".sparkrun/registry.yaml", '"spark-build"', '"sparkrun-build"', "sparkrun-build"),
        ("recipes/sparkrun/nemotron-3-super.yaml", "vllm-distributed", "vlm", "vlm"),
        (".sparkrun/registry.yaml", 'mods: "mods"', 'mods: "modes"', "sm121-b12x-full-enable"),
    ],
)
def test_sparkrun_refuses_a_broken_registry(
    tmp_path: Path, file: str, old: str, new: str, says: str
) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    committed(folder)
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))
    git = ("git", "-C", folder, "-c", "user.name=x", "-c", "user.email=x@localhost")
    assert run(*git, "commit", "-qam", "broken", home=folder).returncode == 0
    done = add(folder, tmp_path / "home")
    assert done.returncode != 0
    assert says in done.stderr


_BALANCE = """
import asyncio, sys
from litellm.proxy.proxy_server import ProxyConfig
for path in sys.argv[1:]:
    router, models, _ = asyncio.run(ProxyConfig().load_config(None, path))
    print(router.routing_strategy, len(router.model_list))
"""


def test_litellm_loads_every_configuration(recipes: list[Recipe], tmp_path: Path) -> None:
    programs = environment(LITELLM, minor=11)
    files = list(written(recipes, "docker", tmp_path, "litellm.yaml"))
    assert files
    local = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = run(programs / "python", "-c", _BALANCE, *files, home=tmp_path, **local)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("simple-shuffle")]
    assert lines == ["simple-shuffle 2"] * len(files)
    broken = files[0].with_name("broken.yaml")
    broken.write_text(files[0].read_text().replace("simple-shuffle", "simple-shuffel"))
    failed = run(programs / "python", "-c", _BALANCE, broken, home=tmp_path, **local)
    assert failed.returncode != 0
    assert "Invalid routing_strategy" in failed.stderr


@pytest.mark.parametrize("version", ["1.29.0", "1.33.0"])
def test_kubernetes_schemas_take_every_manifest(
    recipes: list[Recipe], tmp_path: Path, version: str
) -> None:
    program = (environment(KUBERNETES) / "python", "-m", "kubernetes_validate")
    files = list(written(recipes, "kubernetes", tmp_path, ".yaml"))
    assert files
    done = run(*program, "--strict", "-k", version, *files, home=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    broken = files[0].with_name("broken.yaml")
    broken.write_text(files[0].read_text().replace("containerPort:", "containerPrt:"))
    failed = run(*program, "--strict", "-k", version, broken, home=tmp_path)
    assert failed.returncode != 0
    assert "did not validate" in failed.stdout
