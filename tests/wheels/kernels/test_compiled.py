"""What released wheels are compiled for, as the layer ``sm120-family`` judges it.

Needs ``cuobjdump`` and ``nvdisasm``, as ``test_binaries`` does.  The large modules are read once;
what was read stays in the cache.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.judging import judge
from builder.applier.layers import Layer
from builder.applier.sources import Stage
from builder.applier.states import NEEDS_REBUILD, NOT_APPLICABLE, UPSTREAM, Target
from builder.common.document import plain, read
from builder.common.forge import Forges
from builder.common.machinecode import read_module
from builder.common.plan import StageRequest
from builder.common.pypi import PackageIndex
from builder.compile.known import compile_ops
from builder.compile.sources import release_source
from builder.compile.stage import Stages, refuse_cpu_torch
from builder.errors import SparkBuildError
from builder.layers.catalog import Catalog
from builder.layers.pinned import IndexSources
from tests.forge import Repository
from tests.wheels.support import Planner

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LAYER = Catalog.discover().layer("sm120-family")
(OP,) = compile_ops(LAYER)
OLD, STABLE = "vllm/_C.abi3.so", "vllm/_C_stable_libtorch.abi3.so"
RELEASES = {
    "0.19.1": (OLD, NEEDS_REBUILD, "only for sm_120a, which SM121 does not load"),
    "0.20.1": (STABLE, NOT_APPLICABLE, "for sm_120f, and SM121 runs it"),
    "0.22.1": (STABLE, UPSTREAM, "for sm_120f, and SM121 runs it"),
}


@pytest.mark.parametrize("release", RELEASES)
def test_facts_of_a_release_match_its_module(planned: Planner, release: str) -> None:
    """Without what the layer knows, the module itself is read, and says the same."""
    module, state, reason = RELEASES[release]
    made = planned(f"pypi:vllm=={release}", "sm120-family")
    decision = made.decision("sm120-family")
    assert (decision.outcome.state, reason in decision.outcome.reason) == (state, True)
    assert decision.outcome.compiled
    assert OP.code
    code = decision.outcome.compiled.code
    assert code
    assert (code.module, code.sha256) == (module, made.base.tree.digest(module))
    found = read_module(made.base.tree, module, OP.code)
    assert (code.how, code.arch, code.guard) == (found.how, found.arch, found.guard)
    unknown = Layer.read({**LAYER.rendered, "pins": {"wheel": [], "donor": []}})
    target = made.base.identity.platform.target
    again = judge(unknown, made.base.tree, IndexSources(planned.index), target)
    assert (again.state, again.compiled) == (state, decision.outcome.compiled)


def test_a_plan_does_not_read_the_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path))
    index = PackageIndex()
    made = Planner(index, IndexSources(index))("pypi:vllm==0.19.1", "cutlass-sm12x")
    assert made.states == {
        "sm120-family": NEEDS_REBUILD,
        "flashinfer-w4a16-store-wait": "not-applicable",
        "vllm-linear-fallback": "not-applicable",
        "cutlass-env": "needed",
    }
    assert index.bytes_read < 5_000_000  # of a wheel of 235 MB


def test_every_release_has_facts() -> None:
    """A new release is read when it is planned for; ``layers pin`` makes it known."""
    known = {(pin.platform, pin.sha256) for pin in LAYER.pins.code}
    assert len(known) == len(LAYER.pins.code)
    assert {platform for platform, _ in known} == {"linux/arm64", "linux/amd64"}


needs_gpp = pytest.mark.skipif(
    shutil.which("g++") is None, reason="NOT RUN: no g++, so no stage can be planned here"
)


def beside(name: str) -> str:
    """An extension that an extension wheel may go beside, whatever it is called."""
    return "0" * 64 if name else ""


def request_of(stages: Stages, target: Target | None = None, **packages: str) -> Mapping[str, Any]:
    """What a stage of the layer comes to, for this machine's platform if not for another."""
    made = stages.stage([OP], packages, target or Target.here(), beside)
    assert isinstance(made, Stage)
    return plain(read(made.request, StageRequest))


@needs_gpp
def test_a_stage_pins_every_input(planned: Planner) -> None:
    """Nothing is compiled for it: the sources are asked what they would build."""
    request = request_of(Stages(planned.index), vllm="0.19.1+local")
    assert request == request_of(Stages(planned.index), vllm="0.19.1")
    folder = "csrc/quantization/w8a8/cutlass/c3x"
    assert [file["path"] for file in request["files"]] == [
        f"{folder}/scaled_mm.cuh",
        f"{folder}/scaled_mm_sm120_fp8_dispatch.cuh",
    ]
    first, *between = request["units"]
    assert first["path"] == f"{folder}/scaled_mm_sm120_fp8.cu"
    assert first["gencode"] == ["compute_121a,sm_121a"]
    assert f"{folder}/scaled_mm_blockwise_sm120_fp8.cu" in [unit["path"] for unit in between]
    assert request["operators"] == ["_C::cutlass_scaled_mm"]
    pinned = {pin["distribution"]: pin["version"] for pin in request["inputs"]}
    assert pinned["vllm"] == "0.19.1"
    assert pinned["torch"] == request["torch"] == "2.10.0"
    assert pinned["flashinfer-python"] == "0.6.9"
    assert all(len(pin["sha256"]) == 64 for pin in request["inputs"])


@needs_gpp
def test_a_base_between_releases_is_compiled_from_its_commit(
    planned: Planner, tmp_path: Path
) -> None:
    """The same sources, as a commit: the same files, units and operators."""
    released = release_source(planned.index, "0.19.1")
    repository = Repository(tmp_path / "vllm")
    shutil.copytree(released.root, repository.folder, dirs_exist_ok=True)
    commit = repository.commit("Sources of 0.19.1", {})
    stages = Stages(planned.index, Forges([f"vllm-project/vllm={repository.folder}"]))
    version = f"0.19.2.dev1+g{commit[:9]}"
    request = request_of(stages, vllm=version, torch="2.10.0")
    expected = request_of(Stages(planned.index), vllm="0.19.1", torch="2.10.0")
    assert request["vllm"] == "0.19.2.dev1"
    assert request["inputs"][0]["filename"].endswith(f"/vllm-project/vllm@{commit}")
    same = ("files", "units", "operators", "torch", "compilers")
    assert [request[key] for key in same] == [expected[key] for key in same]
    assert request["inputs"][1:] == expected["inputs"][1:]


@needs_gpp
def test_a_stage_pins_a_compiler_from_wheels(planned: Planner) -> None:
    """The same each time, and nothing of it is fetched for a plan; all else stays as it is."""
    wheels, again, found = (
        request_of(Stages(planned.index, nvcc=named), vllm="0.19.1")
        for named in ("wheels", "wheels", None)
    )
    assert wheels == again
    pinned = {pin["distribution"]: pin for pin in wheels["inputs"] if pin["member"] == "compiler"}
    assert pinned["nvidia-cuda-nvcc"]["version"] == wheels["compilers"]["nvcc"] == "13.0.88"
    assert pinned["nvidia-nvvm"]["version"] == "13.0.88"
    assert pinned["nvidia-cuda-runtime"]["version"] == "13.0.96"
    assert all(len(pin["sha256"]) == 64 for pin in pinned.values())
    if shutil.which("nvcc") and found["compilers"] == wheels["compilers"]:
        others = [pin for pin in wheels["inputs"] if pin["member"] != "compiler"]
        assert found == {**wheels, "inputs": others}


@needs_gpp
def test_sources_that_have_the_change_are_not_compiled(planned: Planner) -> None:
    """A base of 0.22.1 that lacks the kernels was built for other chips: it is built again."""
    with pytest.raises(SparkBuildError, match="have sm120-family already") as caught:
        Stages(planned.index).stage([OP], {"vllm": "0.22.1"}, Target.here(), beside)
    assert caught.value.code == 10
    assert "TORCH_CUDA_ARCH_LIST=12.1a" in caught.value.hint


def test_a_cpu_build_of_torch_is_refused_before_anything_is_compiled(planned: Planner) -> None:
    """torch 2.10.0 for arm64 on the package index has no CUDA; for x86-64 it has."""
    with pytest.raises(SparkBuildError, match="is a CPU build") as caught:
        refuse_cpu_torch(planned.index, "2.10.0", Target("linux/arm64", "cp312"), "0.19.1")
    assert caught.value.code == 10
    assert "--base docker://vllm/vllm-openai:v0.19.1" in caught.value.hint
    refuse_cpu_torch(planned.index, "2.10.0", Target("linux/amd64", "cp312"), "0.19.1")
