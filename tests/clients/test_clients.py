"""sparkrun, compose, LiteLLM and Kubernetes' schemas take every file that is made for them.

Each is seen to refuse a broken file too.  A client that cannot be had is an error, not a skip.
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from builder.errors import UsageError
from builder.serving.formats.all import rendered

from .programs import compose, environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from builder.serving.documents import Recipe

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


def test_sparkrun_takes_every_recipe(recipes: list[Recipe], tmp_path: Path) -> None:
    programs = environment(SPARKRUN, minor=12)
    files = list(written(recipes, "sparkrun", tmp_path, ".yaml"))
    assert len(files) >= len(recipes) // 2
    done = run(programs / "python", "-c", _VALIDATE, *files, home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    broken = files[0].with_name("broken.yaml")
    broken.write_text(files[0].read_text().replace("vllm-distributed", "vlm-distributed"))
    assert "vlm-distributed" in run(
        programs / "python", "-c", _VALIDATE, broken, home=tmp_path
    ).stdout  # fmt: skip


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
