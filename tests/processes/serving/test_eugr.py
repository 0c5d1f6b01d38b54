"""Our recipes by the contract of spark-vllm-docker's ``run-recipe.py``, up to the words of vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from builder.serving.models import Models
from builder.serving.recipe import recipe_of
from builder.serving.recipeformats import rendered
from tests.unit.serving.served import request, served, with_hard_values
from tests.unit.serving.test_recipeformats import PLACES

from .eugr import OVERRIDES, RefusedError, launch_script, mod_folder, started

ROOT = Path(__file__).resolve().parents[3]
NODES = {"solo": 1, "tp2": 2}
#: Values that a shell reads between double quotes.
HARD = "VLLM_DISABLED_KERNELS=a \"b\" 'c' $HOME `id` \\ !x {y}"


def loaded(text: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(text)
    return document


@pytest.mark.parametrize("patched", [True, False])
@pytest.mark.parametrize("topology", NODES)
@pytest.mark.parametrize("model", sorted(Models.discover().files))
def test_it_starts_what_the_recipe_says(model: str, topology: str, patched: bool) -> None:
    profile = served() if patched else served(build="", mod="", image="vllm/vllm-openai:v0.33.0")
    recipe = recipe_of(
        request(
            model,
            place=PLACES[topology],
            served=profile,
            speculate=model == "nemotron-3-super",
            chosen=(HARD,),
        )
    )
    (text,) = rendered(recipe, "eugr").values()
    document, nodes = loaded(text), NODES[topology]
    for node in recipe.nodes:
        words, env = started(
            launch_script(document, nodes=nodes, rank=node.rank), *(s.name for s in recipe.env)
        )
        expected = recipe.command(node)
        if nodes == 1:
            expected += ["--tensor-parallel-size", "1"]
        assert sorted(words) == sorted(expected)
        assert words[:3] == expected[:3]
        assert env == {one.name: one.value for one in recipe.env}
        assert env["VLLM_DISABLED_KERNELS"] == HARD.partition("=")[2]
    for mod in document.get("mods", []):
        assert mod_folder(mod, ROOT)
    assert bool(document.get("mods")) == patched


def test_a_shell_gets_each_word_and_variable_byte_for_byte() -> None:
    recipe = with_hard_values(recipe_of(request()))
    (text,) = rendered(recipe, "eugr").values()
    words, env = started(launch_script(loaded(text)), "VLLM_DISABLED_KERNELS")
    assert sorted(words) == sorted(
        [*recipe.command(recipe.nodes[0]), "--tensor-parallel-size", "1"]
    )
    assert env == {"VLLM_DISABLED_KERNELS": recipe.env[-1].value}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes" / "eugr").iterdir()), ids=lambda p: p.stem
)
def test_it_takes_the_committed_recipes(path: Path) -> None:
    document = loaded(path.read_text("utf-8"))
    nodes = 2 if document.get("cluster_only") else 1
    words, _ = started(launch_script(document, nodes=nodes))
    assert words[:2] == ["vllm", "serve"]
    for mod in document.get("mods", []):
        mod_folder(mod, ROOT)


def test_its_overrides_reach_vllm() -> None:
    (text,) = rendered(recipe_of(request("nemotron-3-super")), "eugr").values()
    given: dict[str, Any] = {
        "port": 1, "host": "h", "tensor_parallel": 1, "gpu_memory_utilization": 0.5,
        "max_model_len": 9,
    }  # fmt: skip
    assert set(given) == set(OVERRIDES)
    words, _ = started(launch_script(loaded(text), **given))
    for name, value in given.items():
        flag = "--tensor-parallel-size" if name == "tensor_parallel" else f"--{name}"
        assert words[words.index(flag.replace("_", "-")) + 1] == str(value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": None}, "missing"),
        ({"runtime": "vllm"}, "unknown"),
        ({"recipe_version": 1}, "another type"),
        ({"mods": "mods/x"}, "another type"),
        ({"env": {"A": True}}, "YAML"),
        ({"command": "vllm serve {modle}"}, "no placeholder"),
        ({"command": 'vllm serve x --c {"a": 1}'}, "no placeholder"),
        ({"command": "vllm serve x --nnodes 2"}, "join nodes"),
        ({"cluster_only": True}, "more than one"),
    ],
)
def test_the_contract_refuses(change: dict[str, Any], says: str) -> None:
    """The checks above can fail."""
    good = {"name": "n", "recipe_version": "1", "container": "c", "command": "vllm serve {port}",
            "defaults": {"port": 8000}}  # fmt: skip
    assert started(launch_script(good))[0] == ["vllm", "serve", "8000"]
    broken = {name: value for name, value in {**good, **change}.items() if value is not None}
    with pytest.raises(RefusedError, match=says):
        launch_script(broken)


def test_a_mod_that_workers_would_lack_files_of(tmp_path: Path) -> None:
    folder = tmp_path / "mods" / "x"
    folder.mkdir(parents=True)
    with pytest.raises(RefusedError, match="no mod"):
        mod_folder("mods/x", tmp_path)
    (folder / "run.sh").touch()
    assert mod_folder("mods/x", tmp_path) == folder
    (folder / ".pins").touch()
    with pytest.raises(RefusedError, match="not on workers"):
        mod_folder("mods/x", tmp_path)
