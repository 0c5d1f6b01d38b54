"""What a plan of an image would run here: hooks, and build files that CMake reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.layers import Compile, Hook, Layer, PullSource, Variant
from builder.errors import Exit, SparkBuildError, UsageError
from builder.pipeline.rebuild import code_of, refuse_unreleased, with_own_code
from builder.publishing.subject import Baked

if TYPE_CHECKING:
    from builder.applier.layers import Op

SOURCE = "csrc/sampler.cu"
RUNS = "CMakeLists.txt"


def diff(path: str, old: str | None = None) -> str:
    before = f"a/{old or path}"
    head = f"diff --git {before} b/{path}\n"
    if old:
        head += f"similarity index 90%\nrename from {old}\nrename to {path}\n"
    return f"{head}--- {before}\n+++ b/{path}\n@@ -1 +1 @@\n-a\n+execute_process(COMMAND id)\n"


def compiled(*diffs: str) -> Compile:
    pull = PullSource("vllm-project/vllm", 7, "c" * 40, "d" * 64)
    return Compile("vllm", "12.1a", name="mine", diff="".join(diffs), files=(SOURCE,), pull=pull)


def layer(*ops: Op) -> Layer:
    return Layer("mine", "vllm", 1, [Variant("x", {}, ops)])


def baked(made: Layer) -> Baked:
    recorded: Any = SimpleNamespace(document=SimpleNamespace(layers=()))
    return Baked(version="1", recorded=recorded, layers=(made,), files={})


def never(action: str) -> None:
    raise AssertionError(action)


@pytest.mark.parametrize(
    "path",
    [
        RUNS,
        "cmake/utils.cmake",
        "csrc/moe/marlin_moe_wna16/generate_kernels.py",
        "csrc/moe/kernel.template",
        "pyproject.toml",
        "csrc/noted.md.cmake",
    ],
)
def test_build_files_of_an_image_are_not_run(path: str) -> None:
    """``files`` says something else: the diff counts."""
    for made in (compiled(diff(path)), compiled(diff(SOURCE), diff(path))):
        with pytest.raises(
            UsageError, match=rf"changes files that CMake runs \({path}\)"
        ) as caught:
            with_own_code(baked(layer(made)), "oci:x", (), never)
        assert "vllm-project/vllm#7" in str(caught.value)


@pytest.mark.parametrize(("old", "new"), [("csrc/a.cu", RUNS), (RUNS, "csrc/a.cu")])
def test_a_file_that_becomes_one(old: str, new: str) -> None:
    assert RUNS in code_of(layer(compiled(diff(new, old))))


def test_a_hook_beside_build_files() -> None:
    made = layer(Hook("vllm/a.py", "x = 1\n", "f"), compiled(diff(RUNS)))
    with pytest.raises(UsageError, match="has a hook") as caught:
        with_own_code(baked(made), "oci:x", (), never)
    assert "--patches" in caught.value.hint


@pytest.mark.parametrize("path", [SOURCE, "csrc/a.cuh", "csrc/a.h", "README.md", "csrc/a.rst"])
def test_sources_are_taken_from_the_image(path: str) -> None:
    """Compilers read them, and run nothing of them."""
    there = baked(layer(compiled(diff(path))))
    assert with_own_code(there, "oci:x", (), never) is there


@pytest.mark.parametrize(
    ("version", "asks"),
    [("0.20.1", False), ("0.20.2.dev3+gabcdef1", True), ("0.20.2+cu130", False)],
)
def test_sources_of_a_commit_are_asked_for(version: str, asks: bool) -> None:
    """A commit of any fork can be had by its name from the repository that it is a fork of."""
    base: Any = SimpleNamespace(identity=SimpleNamespace(packages={"vllm": version}))
    asked: list[str] = []

    def ask(action: str) -> None:
        asked.append(action)
        raise SparkBuildError("nothing was rebuilt", Exit.NOTHING_TO_DO)

    if asks:
        with pytest.raises(SparkBuildError, match="nothing was rebuilt"):
            refuse_unreleased(base, ask)
        assert version in asked[0]
    else:
        refuse_unreleased(base, ask)
        assert asked == []
