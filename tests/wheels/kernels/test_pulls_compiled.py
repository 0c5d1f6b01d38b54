"""Pull requests that change the real CUDA sources of vLLM 0.19.1: planned, not compiled.

The sources are those of the release's archive, so what a change reaches is what its own build
files say.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.states import Target
from builder.common.paths import cache_dir
from builder.compile.changes import rendered_change
from builder.compile.sources import release_source
from tests.forge import LocalForge, Pull, Repository
from tests.wheels.cli import Ran, called

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from builder.common.pypi import PackageIndex

pytestmark = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="NOT RUN: no nvcc, so no stage can be planned here"
)
RELEASE = "0.19.1"
CUTLASS = "csrc/quantization/w8a8/cutlass"
SCALED = f"{CUTLASS}/c3x/scaled_mm.cuh"
DISPATCH = f"{CUTLASS}/c3x/scaled_mm_sm120_fp8_dispatch.cuh"
ROCM, BINDINGS = "csrc/rocm/attention.cu", "csrc/torch_bindings.cpp"
LISTS = "CMakeLists.txt"
FILES = (SCALED, DISPATCH, ROCM, BINDINGS, LISTS)
FAMILY, ROCM_ONLY, OPERATOR, REVISION = 1, 2, 3, 4
KNOWN = rendered_change("sm120-family")["change"]


@pytest.fixture(scope="module")
def forge(index: PackageIndex, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalForge]:
    """A forge with some of the release's sources, and pull requests that change them."""
    root = release_source(index, RELEASE).root
    texts = {path: (root / path).read_text() for path in FILES}
    repository = Repository(tmp_path_factory.mktemp("compiled") / "vllm")
    repository.commit("release", dict(texts))
    repository.git("tag", f"v{RELEASE}")
    running = LocalForge(repository)

    def pull(number: int, path: str, old: str, new: str, *others: str) -> None:
        repository.branch(f"pr-{number}", f"v{RELEASE}")
        changed = {name: texts[name].replace(old, new) for name in (path, *others)}
        assert all(text != texts[name] for name, text in changed.items())
        head = repository.commit(f"Pull {number}", dict(changed))
        running.pulls[number] = Pull(head=head, title=f"Pull {number}")

    pull(FAMILY, DISPATCH, KNOWN["old"], KNOWN["new"], SCALED)
    pull(ROCM_ONLY, ROCM, "#include <torch/all.h>\n", "// first\n#include <torch/all.h>\n")
    silu = '  ops.def("silu_and_mul('
    pull(OPERATOR, BINDINGS, silu, f'  ops.def("fresh(Tensor! out) -> ()");\n{silu}')
    pull(REVISION, LISTS, 'set(CUTLASS_REVISION "', 'set(CUTLASS_REVISION "next-')
    with running:
        yield running


@pytest.fixture
def planned(forge: LocalForge, tmp_path: Path) -> Any:
    """Dry-run an image of pull requests; the release's build files are read once."""

    def plan(*numbers: int, more: tuple[str, ...] = ()) -> Ran:
        pulls = [w for n in numbers for w in ("--with-pr", f"vllm-project/vllm#{n}")]
        base = ("--base", f"pypi:vllm=={RELEASE}", "--platform", Target.here().platform)
        words = ("image", *pulls, *base, "--compile", "--dry-run", "--json", *more)
        env = {"SPARK_BUILD_FORGE": forge.root, "SPARK_BUILD_CACHE": str(cache_dir())}
        return called(*words, cwd=tmp_path, env=env)

    return plan


def test_the_change_of_the_family_as_a_pull_request(planned: Any) -> None:
    """The same files, units and operator as of the change that is known by name."""
    (layer,) = planned(FAMILY).json()["layers"]
    assert layer["state"] == "needed"
    (known,) = planned(more=("--layers", "sm120-family")).json()["layers"]
    ours, theirs = (row["compile"]["stage"] for row in (layer, known))
    same = ("files", "units", "operators", "module", "torch", "inputs", "compilers")
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
    assert ours["units"][0]["path"] == f"{CUTLASS}/c3x/scaled_mm_sm120_fp8.cu"


def test_combined_changes_are_compiled_once(planned: Any) -> None:
    first, last = planned(FAMILY, more=("--layers", "sm120-family")).json()["layers"]
    assert (first["compile"]["with"], last["name"]) == ("sm120-family", "sm120-family")
    assert last["compile"]["stage"]["change"] == "pr-vllm-1-sm120-family"


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (ROCM_ONLY, 3, f"comes from {ROCM}: no effect on SM121"),
        (OPERATOR, 10, "fresh are new"),
        (REVISION, 10, "fetches other sources that are not in the release's archive"),
    ],
    ids=["other-chips", "a-new-operator", "another-cutlass"],
)
def test_a_change_that_an_extension_wheel_cannot_contain(
    planned: Any, number: int, code: int, said: str
) -> None:
    ran = planned(number)
    assert ran.code == code
    assert said in ran.json()["error"]["message"]
