"""What released sources compile to for SM121, by their own build files.

The table is what those files say; facts about single kernels come from the machine code.
"""

from __future__ import annotations

import pytest

from builder.common.pypi import PackageIndex
from builder.compile.plans import Outcome, outcome
from builder.compile.sources import release_source

KERNEL = "c3x/scaled_mm_sm120_fp8.cu"
#: release, CUDA, the build's own architectures for 12.1a, __CUDA_ARCH__, whether the kernel is dead
TABLE = [
    ("0.17.1", "13.0", "12.0", 1200, False),
    ("0.19.1", "13.0", "12.1a", 1210, True),
    ("0.20.1", "13.0", "12.0", 1200, False),
    ("0.20.1", "12.9", "12.1a", 1210, True),
    ("0.22.1", "12.9", "12.1a", 1210, False),
    ("0.33.0", "13.0", "12.0", 1200, False),
]


def compiled(release: str, cuda: str, changed: tuple[str, ...] = ()) -> Outcome:
    return outcome(release_source(PackageIndex(), release), "12.1a", cuda, changed)


@pytest.mark.parametrize(("release", "cuda", "archs", "arch", "dead"), TABLE)
def test_outcome_for_each_release(
    release: str, cuda: str, archs: str, arch: int, dead: bool
) -> None:
    found = compiled(release, cuda)
    (unit,) = [u for u in found.recipe.units.values() if u.path.endswith(KERNEL)]
    assert found.recipe.archs == (archs,)
    assert unit.cuda_arch == (arch,)
    assert (unit.path in found.dead) is dead


def test_one_unit_is_rebuilt_for_the_family_change() -> None:
    """The two headers of the change that 0.22.0 brought reach one unit of a hundred."""
    folder = "csrc/quantization/w8a8/cutlass/c3x"
    changed = (f"{folder}/scaled_mm.cuh", f"{folder}/scaled_mm_sm120_fp8_dispatch.cuh")
    found = compiled("0.19.1", "13.0", changed)
    assert [unit.path for unit in found.units] == [f"{folder}/scaled_mm_sm120_fp8.cu"]
    assert found.extensions == ["_C"]
    assert len(found.recipe.units) > 80
