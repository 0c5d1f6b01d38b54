"""A layer that must be compiled, with a cuobjdump that is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.applier.applying import apply_layers
from builder.applier.machinecode import (
    ABSENT,
    NO_CODE,
    RUNS,
    TRAP,
    UNLOADABLE,
    read_code,
)
from builder.applier.sources import PipSources
from builder.applier.states import UPSTREAM
from builder.applier.values import ApplyError
from builder.common.machinecode import BadBinary, images
from tests.unit.applier.test_compile_op import BASE, FAMILY, KERNELS, LAYER, NOT_LOADED, ONLY
from tests.unit.fakes import (
    TARGET,
    write_tree,
)

if TYPE_CHECKING:
    from pathlib import Path


# ------------------------------------------------------------------ in a container: no tool of ours


def cuobjdump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *images: tuple[str, str]) -> None:
    """A cuobjdump that lists one kernel an image."""
    text = "".join(
        f"Fatbin elf code:\n================\narch = {arch}\n\n"
        f"FUNC  GLOBAL 0 ENTRY _ZN7cutlass13device_kernelI17{guard}INS_4gemm\n\n"
        for arch, guard in images
    )
    (tmp_path / "listing").write_text(text or "cuobjdump info : File does not contain device code")
    tool = tmp_path / "bin" / "cuobjdump"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text(f"#!/bin/sh\nexec /bin/cat {tmp_path / 'listing'}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent))


@pytest.mark.parametrize(
    ("images", "how"),
    [
        ([("sm_120a", ONLY)], UNLOADABLE),
        ([("sm_90a", ONLY), ("sm_120a", ONLY)], UNLOADABLE),
        ([("sm_121a", ONLY)], TRAP),
        ([("sm_120", ONLY), ("sm_121a", ONLY)], TRAP),
        ([("sm_120", ONLY)], RUNS),
        ([("sm_120f", FAMILY)], RUNS),
        ([("sm_121a", FAMILY)], RUNS),
        ([("sm_90", "enable_sm90")], ABSENT),
        ([], NO_CODE),
    ],
)
def test_code_is_read_from_the_listing_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: list[tuple[str, str]], how: str
) -> None:
    cuobjdump(tmp_path, monkeypatch, *images)
    assert read_code(tmp_path / "listing", KERNELS).how == how


def test_the_listing_of_cuda_12_is_read_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cuobjdump that triton brings is one of CUDA 12.8."""
    cuobjdump(tmp_path, monkeypatch, ("sm_120a", ONLY))
    listing = tmp_path / "listing"
    as_12 = listing.read_text().replace("FUNC  GLOBAL 0 ENTRY", "STT_FUNC  STB_LOCAL  STO_ENTRY")
    listing.write_text(as_12)
    assert read_code(listing, KERNELS) == NOT_LOADED
    listing.write_text(as_12.replace("STO_ENTRY", "SOMETHING"))
    with pytest.raises(ApplyError, match="printed an unknown format"):
        read_code(listing, KERNELS)
    with pytest.raises(BadBinary, match="printed an unknown format"):
        images(listing)


def test_a_mod_refuses_a_layer_that_must_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_tree(tmp_path / "site", BASE)
    cuobjdump(tmp_path, monkeypatch, ("sm_120a", ONLY))
    with pytest.raises(ApplyError, match=r"needs a rebuild: .* does not load") as caught:
        apply_layers(root, [LAYER], PipSources(), TARGET)
    assert caught.value.code == 10
    assert "--compile" in caught.value.hint
    assert not (root / ".spark-build").exists()
    cuobjdump(tmp_path, monkeypatch, ("sm_120f", FAMILY))
    (outcome,) = apply_layers(root, [LAYER], PipSources(), TARGET)
    assert outcome.state == UPSTREAM


def test_a_mod_without_cuobjdump_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_tree(tmp_path / "site", BASE)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ApplyError, match="cuobjdump is not installed") as caught:
        apply_layers(root, [LAYER], PipSources(), TARGET)
    assert caught.value.code == 6
    beside = root / "triton" / "backends" / "nvidia" / "bin" / "cuobjdump"
    write_tree(root, {beside.relative_to(root).as_posix(): b"#!/bin/sh\nexit 3\n"})
    beside.chmod(0o755)
    with pytest.raises(ApplyError, match="cuobjdump cannot read"):
        apply_layers(root, [LAYER], PipSources(), TARGET)
