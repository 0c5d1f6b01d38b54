"""Layer ``ray``: what releases import of Ray is there, and what Ray requires comes with them."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from builder.applier.trees import OverlayTree
from builder.applier.values import normalize

from .states import expected

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.applier.trees import Tree

    from .support import Planned, Planner

WITHOUT_RAY = [r for r in expected()["vllm"].releases if not r.startswith("0.17.")]
EXECUTORS = "vllm/v1/executor"
#: Resolved for 0.18.0 and 0.20.1 on both architectures: these come with what vLLM requires
#: (click with uvicorn, jsonschema with mistral_common, packaging with transformers).
BROUGHT = {"click", "jsonschema", "packaging"}


def patched(made: Planned) -> OverlayTree:
    tree = OverlayTree(made.base.tree)
    tree.update(made.plan.changes)
    return tree


def imports(tree: Tree) -> Iterator[tuple[str, str, str]]:
    """File, module and name of all that vLLM's executors take from Ray."""
    for name in tree.children(EXECUTORS):
        if "ray" not in name or not name.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(tree.read(f"{EXECUTORS}/{name}") or b"")):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray":
                yield from ((name, str(node.module), alias.name) for alias in node.names)


def has(tree: Tree, module: str, name: str) -> bool:
    """Whether a module of Python, or of Cython, names it; or it is a module itself."""
    path = module.replace(".", "/")
    texts = (tree.read(f"{path}{end}") for end in (".py", "/__init__.py", ".pyi"))
    named = any(re.search(rb"\b%s\b" % name.encode(), text) for text in texts if text)
    return named or tree.read(f"{path}/{name}/__init__.py") is not None


def required(tree: Tree, distribution: str) -> set[str]:
    """Distributions that are required without an extra."""
    found = tree.distributions()[distribution]
    text = (tree.read(f"{found.info_dir}/METADATA") or b"").decode()
    rows = re.findall(r"^Requires-Dist: ([\w.-]+)(.*)$", text, re.MULTILINE)
    return {normalize(name) for name, rest in rows if "extra ==" not in rest}


@pytest.mark.parametrize("release", WITHOUT_RAY)
def test_what_a_release_imports_of_ray_is_there(planned: Planner, release: str) -> None:
    tree = patched(planned(f"pypi:vllm=={release}", "ray"))
    taken = list(imports(tree))
    assert len({file for file, _, _ in taken}) >= 2
    assert [one for one in taken if not has(tree, *one[1:])] == []
    assert not has(tree, "ray.util.placement_group", "PlacementGroupp")


@pytest.mark.parametrize("release", WITHOUT_RAY)
def test_what_ray_requires_is_there(planned: Planner, release: str) -> None:
    tree = patched(planned(f"pypi:vllm=={release}", "ray"))
    missing = required(tree, "ray") - required(tree, "vllm") - BROUGHT
    assert missing == {"msgpack"}
    assert tree.distributions()["msgpack"].version == "1.2.4"
    assert "ray" not in required(tree, "vllm")


@pytest.mark.parametrize("platform", ["linux/arm64", "linux/amd64"])
def test_the_wheels_are_of_the_platform(planned: Planner, platform: str) -> None:
    made = planned("pypi:vllm==0.33.0", "ray", platform)
    machine = {"linux/arm64": "aarch64", "linux/amd64": "x86_64"}[platform]
    wheels = [pin.filename for d in made.plan.decisions for pin in d.outcome.inputs]
    assert len(wheels) == 2
    assert all("cp312" in name and machine in name for name in wheels)
    mode = made.plan.changes["ray/core/src/ray/raylet/raylet"]
    assert mode is not None
    assert mode.mode == 0o755


def test_an_image_with_another_ray_keeps_it(planned: Planner) -> None:
    made = planned("pypi:vllm==0.17.1", "ray")
    assert made.states == {"ray": "upstream"}
    assert not made.plan.changes
