"""An image as the base of a compile stage: its torch is in its files, not on the index."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.sources import Stage
from builder.common import machinecode
from builder.common.pypi import PackageIndex
from builder.common.reference import Ref
from builder.compile.link import DISTRIBUTIONS
from builder.layers.catalog import Selection
from builder.layers.pinned import IndexSources
from builder.layers.planner import make_plan
from builder.pipeline.bases import identify_base
from tests.unit.applier.test_compile_op import LAYER, MODULE, NOT_LOADED, STAGE
from tests.unit.fakes import dist_files, vllm_files
from tests.unit.imagefiles import packed, put_image, python_items, site_items, tar_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

CUDA = "torch/lib/libtorch_cuda.so"
FILES = (
    vllm_files("0.19.1")
    | {MODULE: b"an extension"}
    | dist_files("torch", "2.10.0+cu129", {CUDA: "for CUDA"})
)
CHOSEN = Selection((LAYER,), ())


class Asked:
    """Stages that note beside which packages something would be compiled."""

    def __init__(self) -> None:
        self.packages: Mapping[str, str] = {}
        self.wheels: dict[str, Any] = {}

    def stage(
        self, ops: Sequence[Any], packages: Mapping[str, str], target: Any, module: Any
    ) -> Stage:
        del ops, target, module
        self.packages = packages
        return Stage(STAGE)


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machinecode, "read_module", lambda *_: NOT_LOADED)
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    layers = packed(tar_of(*python_items())), packed(tar_of(*site_items(FILES)))
    put_image(
        tmp_path / "image", *layers, architecture=machine, config={"Env": ["PATH=/opt/app/bin"]}
    )
    return f"oci:{tmp_path / 'image'}"


def test_a_stage_uses_the_torch_of_the_image(image: str) -> None:
    base = identify_base(Ref(image), CHOSEN, PackageIndex(), platform=None, libraries=DISTRIBUTIONS)
    asked = Asked()
    plan = make_plan(base, CHOSEN, IndexSources(PackageIndex(), asked))  # type: ignore[arg-type]
    assert asked.packages["torch"] == "2.10.0+cu129"
    assert base.tree.read(CUDA) == b"for CUDA"
    assert [d.name for d in plan.pending] == ["family"]
    base.close()


def test_libraries_are_not_part_of_the_base_identity(image: str) -> None:
    found = [
        identify_base(Ref(image), CHOSEN, PackageIndex(), platform=None, libraries=libraries)
        for libraries in ((), DISTRIBUTIONS)
    ]
    plain, whole = found
    assert plain.tree.read(CUDA) is None
    assert plain.identity.document == whole.identity.document
    assert set(whole.identity.packages) == {"vllm"}
    for base in found:
        base.close()
