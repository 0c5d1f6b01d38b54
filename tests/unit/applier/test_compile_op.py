"""Op ``compile``: the base's machine code decides, a stage is planned before it runs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.judging import judge, judge_in_order
from builder.applier.layers import Compile, InputPin
from builder.applier.machinecode import (
    ABSENT,
    NO_CODE,
    RUNS,
    TRAP,
    UNLOADABLE,
    KernelCode,
)
from builder.applier.sources import Stage
from builder.applier.states import APPLIED, NEEDED, NEEDS_REBUILD, NOT_APPLICABLE, UPSTREAM
from builder.applier.trees import DirTree, OverlayTree
from builder.applier.values import read_value, sha256_hex
from builder.common import machinecode
from builder.common.document import read
from builder.common.machinecode import KernelSummary as Reading
from builder.common.machinecode import Summary, ToolMissing, read_module
from builder.common.paths import data_dir
from builder.common.plan import BakedPlan, StageRequest, digest_of
from builder.compile.build import refuse_machine
from builder.compile.changes import rendered_change
from builder.compile.costs import cost_of_units
from builder.errors import EngineError, SparkBuildError, UsageError
from builder.layers import planner
from builder.layers.layerfile import load_layer
from builder.layers.planner import hints, refuse_plan
from builder.proof import binaries
from builder.proof.necessity import difference, prove, put_together, whole
from builder.proof.recorded import decides
from builder.proof.run import verify
from builder.proof.target import Origin, VerifyTarget
from builder.publishing.evidence import inputs_of
from tests.documents import validated
from tests.unit.fakes import (
    TARGET,
    FakeRunner,
    FakeSources,
    Files,
    MemoryTree,
    Table,
    altered,
    dist_files,
    fake_base,
    make_layer,
    make_plan_of,
    make_wheel,
    subject_of,
    vllm_files,
    write_tree,
)
from tests.unit.plans import planned as changed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from builder.applier.layers import Layer
    from builder.applier.machinecode import ModuleCode
    from builder.applier.states import Outcome

MODULE = "vllm/_C.abi3.so"
STABLE = "vllm/_C_stable_libtorch.abi3.so"
OP: Table = {
    "op": "compile",
    "source": "vllm",
    "arch": "12.1a",
    **rendered_change("sm120-family"),
}
LAYER = make_layer("family", OP)
BASE = vllm_files() | {MODULE: b"an extension"}
ONLY, FAMILY = "enable_sm120_only", "enable_sm120_family"
NOT_LOADED = KernelCode(UNLOADABLE, "sm_120a", ONLY)
KERNELS = next(op.code for op in LAYER.ops if isinstance(op, Compile) and op.code)
REQUEST: dict[str, Any] = {
    "change": "sm120-family",
    "arch": "12.1a",
    "platform": "linux/arm64",
    "vllm": "0.20.1",
    "torch": "2.11.0",
    "module": "3" * 64,
    "compilers": {"nvcc": "13.0.88", "g++": "12.2.0"},
    "operators": ["_C::cutlass_scaled_mm"],
    "files": [{"path": "csrc/a.cuh", "before": "0" * 64, "after": "1" * 64}],
    "units": [{"path": "csrc/scaled_mm_sm120_fp8.cu", "extension": "_C", "gencode": ["a,b"]}],
    "inputs": [
        {
            "distribution": "vllm",
            "version": "0.20.1",
            "filename": "vllm-0.20.1.tar.gz",
            "sha256": "2" * 64,
        }
    ],
}
PACKAGE = "spark_build_companion_sm120_family"
WHEEL = make_wheel(
    "spark-build-companion-sm120-family",
    "0.20.1+abc",
    {f"{PACKAGE}/__init__.py": "def load():\n    pass\n", f"{PACKAGE}/kernels.so": b"code"},
    executable=[f"{PACKAGE}/kernels.so"],
)
STAGE = read(REQUEST, StageRequest)
MADE = Stage(STAGE, read_value(InputPin, WHEEL.pin, "the wheel"))


def judged(files: Files, code: Mapping[str, KernelCode], stage: Stage | None = None) -> Outcome:
    return judge(LAYER, MemoryTree(files), FakeSources(WHEEL, code=code, stage=stage), TARGET)


def code_of(outcome: Outcome) -> ModuleCode:
    """What was read of a module."""
    assert outcome.compiled
    assert outcome.compiled.code
    return outcome.compiled.code


# ---------------------------------------------------------------------------------------- the state


@pytest.mark.parametrize(
    ("facts", "state", "reason"),
    [
        (NOT_LOADED, NEEDS_REBUILD, "only for sm_120a, which SM121 does not load"),
        (KernelCode(TRAP, "sm_121a", ONLY), NEEDS_REBUILD, "as traps"),
        (KernelCode(ABSENT), NEEDS_REBUILD, "was built without the FP8 per-tensor GEMM"),
        (KernelCode(RUNS, "sm_120f", ONLY), NOT_APPLICABLE, "SM121 runs it"),
        (KernelCode(RUNS, "sm_120f", FAMILY), UPSTREAM, "SM121 runs it"),
        (KernelCode(NO_CODE), NOT_APPLICABLE, "it is not a CUDA build"),
    ],
    ids=["not-loadable", "trap", "absent", "runs", "runs-with-the-change", "no-code"],
)
def test_machine_code_decides_the_state(facts: KernelCode, state: str, reason: str) -> None:
    outcome = judged(BASE, {MODULE: facts})
    assert outcome.state == state
    assert reason in outcome.reason
    assert outcome.since == ("vLLM 0.22.0" if state == UPSTREAM else None)
    assert code_of(outcome).how == facts.how
    assert not outcome.changes


def test_the_version_of_the_base_is_ignored() -> None:
    """A source build of a release whose wheel runs them, for 12.1a with CUDA 12.9, is a trap."""
    newer = vllm_files("0.21.0") | {MODULE: b"built from source"}
    trap = KernelCode(TRAP, "sm_121a", ONLY)
    assert judged(newer, {MODULE: trap}).state == NEEDS_REBUILD
    older = vllm_files("0.19.1") | {MODULE: b"built from source"}
    runs = KernelCode(RUNS, "sm_120f", ONLY)
    assert judged(older, {MODULE: runs}).state == NOT_APPLICABLE


def test_the_first_module_with_the_kernels_decides() -> None:
    both = BASE | {STABLE: b"another"}
    outcome = judged(both, {STABLE: KernelCode(ABSENT), MODULE: NOT_LOADED})
    assert code_of(outcome).module == MODULE
    runs = KernelCode(RUNS, "sm_120f", FAMILY)
    assert judged(both, {STABLE: runs, MODULE: NOT_LOADED}).state == UPSTREAM


def test_a_base_without_extensions_is_not_a_cuda_build() -> None:
    assert judged(vllm_files(), {}).state == NOT_APPLICABLE


def knowing(sha256: str) -> Layer:
    """The layer, with what a module of this digest has."""
    row = {"version": "0.20.1", "platform": "linux/arm64", "module": MODULE, "sha256": sha256}
    row |= dataclasses.asdict(NOT_LOADED)
    return altered(LAYER, pins={"wheel": [], "donor": [], "code": [row]})


def test_a_known_module_is_not_read_again() -> None:
    known = knowing(sha256_hex(BASE[MODULE]))
    sources = FakeSources(code={MODULE: KernelCode(RUNS, "sm_120f")})
    assert judge(known, MemoryTree(BASE), sources, TARGET).state == NEEDS_REBUILD
    assert sources.read == []
    other = BASE | {MODULE: b"of the same version, and something else"}
    assert judge(known, MemoryTree(other), sources, TARGET).state == NOT_APPLICABLE
    assert sources.read == [MODULE]


def test_an_installed_extension_wheel_counts_as_applied() -> None:
    files = BASE | {f"{PACKAGE}/kernels.so": b"code"}
    runs = KernelCode(RUNS, "sm_121a", FAMILY)
    outcome = judged(files, {f"{PACKAGE}/kernels.so": runs, MODULE: NOT_LOADED})
    assert outcome.state == APPLIED
    assert f"{PACKAGE}/kernels.so" in outcome.reason


# ---------------------------------------------------------------------------------------- the stage


def planned(stage: Stage | None) -> Any:
    base = fake_base(BASE)
    sources = FakeSources(WHEEL, code={MODULE: NOT_LOADED}, stage=stage)
    steps = judge_in_order([LAYER], base.tree, sources, TARGET, {})
    plan = make_plan_of(base)
    from builder.common.plan import LayerDecision

    made = tuple(
        LayerDecision(layer=s.layer, outcome=s.outcome, receipt=s.receipt, changes=s.changes)
        for s in steps
    )
    return dataclasses.replace(plan, decisions=made)


def test_a_stage_is_planned_before_it_is_run() -> None:
    before, after = planned(Stage(STAGE)), planned(MADE)
    assert [d.outcome.state for d in (*before.decisions, *after.decisions)] == [NEEDED] * 2
    assert [len(plan.pending) for plan in (before, after)] == [1, 0]
    assert before.digest == after.digest, "a plan is the same before and after its stage"
    (decision,) = before.decisions
    assert decision.receipt is None
    assert not decision.changes
    for plan in (before, after):
        value = validated("plan", plan.as_json())
        assert digest_of(value) == plan.digest
        assert value["layers"][0]["compile"]["stage"] == REQUEST
    (layer,) = before.as_json()["layers"]
    assert (layer["files"], layer["compile"]["wheel"]) == ([], None)
    (layer,) = after.as_json()["layers"]
    assert layer["compile"]["wheel"]["filename"] == WHEEL.filename
    assert layer["reason"].startswith("sm120-family compiled for 12.1a: vllm/_C.abi3.so has")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("arch", "12.0a"),
        ("compilers", {"nvcc": "13.0.89"}),
        ("torch", "2.12.0"),
        ("module", "4" * 64),
        ("files", []),
        ("units", [*REQUEST["units"], {"path": "b.cu", "extension": "_C", "gencode": []}]),
        ("inputs", [{**REQUEST["inputs"][0], "sha256": "4" * 64}]),
    ],
)
def test_inputs_of_a_stage_are_part_of_the_plan(key: str, value: Any) -> None:
    stage = read({**REQUEST, key: value}, StageRequest)
    assert planned(Stage(stage)).digest != planned(Stage(STAGE)).digest


def test_output_of_a_stage_is_installed_like_any_wheel() -> None:
    (decision,) = planned(MADE).decisions
    info = f"{PACKAGE}-0.20.1+abc.dist-info"
    assert set(decision.receipt.files) == {
        f"{PACKAGE}/__init__.py",
        f"{PACKAGE}/kernels.so",
        f"{info}/INSTALLER",
        f"{info}/METADATA",
        f"{info}/RECORD",
    }
    assert {tuple(e.ops) for e in decision.receipt.files.values()} == {("compile",)}
    assert not any(path.startswith("vllm/") for path in decision.changes)
    kernels = decision.changes[f"{PACKAGE}/kernels.so"]
    assert (kernels.mode, kernels.read()) == (0o755, b"code")


def test_a_receipt_means_applied_without_reading_modules() -> None:
    (decision,) = planned(MADE).decisions
    tree = MemoryTree(BASE).after(dataclasses.replace(decision.outcome, changes=decision.changes))
    sources = FakeSources()
    assert judge(LAYER, tree, sources, TARGET).state == APPLIED
    assert sources.read == []
    tree.files[f"{PACKAGE}/kernels.so"] = b"edited"
    sources = FakeSources(code={f"{PACKAGE}/kernels.so": NOT_LOADED, MODULE: NOT_LOADED})
    assert judge(LAYER, tree, sources, TARGET).state == NEEDS_REBUILD


def test_removing_layers_compiles_nothing() -> None:
    """Necessity puts the layers on again, out of the target itself: there is no stage to run."""
    (decision,) = planned(MADE).decisions
    patched = MemoryTree(BASE).after(
        dataclasses.replace(decision.outcome, changes=decision.changes)
    )
    base = fake_base(BASE)
    target = VerifyTarget(
        name="t",
        subject=subject_of(patched),
        plan=planned(MADE).document,
        layers=[LAYER],
        runner=FakeRunner(),
        origin=Origin(subject=base, sources=FakeSources(code={MODULE: NOT_LOADED})),
    )
    again = put_together(base, target, [LAYER], "again")
    assert difference(target, again) is None


# ----------------------------------------------------------------------------- refusing, exit codes


def test_needs_rebuild_states_the_cost_and_the_command() -> None:
    plan = planned(None)
    with pytest.raises(SparkBuildError) as caught:
        refuse_plan(plan, "spark-build image -l family --compile")
    assert caught.value.code == 10
    assert "which SM121 does not load" in str(caught.value)
    assert "GB of memory, and g++" in str(caught.value)
    assert caught.value.hint.startswith("spark-build image -l family --compile")


@pytest.mark.parametrize("where", ["on the Spark itself", ""])
def test_needs_rebuild_says_where_to_compile(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing, where this machine can compile for the base."""
    monkeypatch.setattr(planner, "where_to_compile", lambda _platform: where)
    with pytest.raises(SparkBuildError) as caught:
        refuse_plan(planned(None), "spark-build image -l family --compile")
    lines = str(caught.value).splitlines()
    assert ([line for line in lines if line.startswith("  compile ")]) == (
        [f"  compile {where}"] if where else []
    )


def test_needs_rebuild_of_a_pull_request_has_no_command() -> None:
    layer = make_layer("pull", {"op": "compile", "reason": "csrc/x.cu"})
    with pytest.raises(SparkBuildError) as caught:
        refuse_plan(make_plan_of(fake_base(BASE), layer), "spark-build image --compile")
    assert (caught.value.code, caught.value.hint) == (10, "")


@pytest.mark.parametrize(
    ("memory", "disk", "short"),
    [(64.0, 100.0, ""), (8.0, 100.0, ""), (6.0, 100.0, "9.5 GB of memory"), (64.0, 0.5, "disk")],
)
def test_a_machine_with_too_little_memory(
    memory: float, disk: float, short: str, tmp_path: Path
) -> None:
    cost = cost_of_units(["csrc/scaled_mm_sm120_fp8.cu"], memory)
    if not short:
        refuse_machine(cost, memory, disk, tmp_path)
        return
    with pytest.raises(EngineError, match=short) as caught:
        refuse_machine(cost, memory, disk, tmp_path)
    assert caught.value.code == 6
    assert caught.value.hint


def test_the_cost_of_several_units() -> None:
    cost = cost_of_units(["a/scaled_mm_sm120_fp8.cu", "b/other.cu"], 12.0)
    assert (cost.units, cost.jobs, cost.memory) == (2, 1, 9.5)
    assert str(cost).startswith("2 units, 1 at once: about 5 min, up to 10 GB of memory")


# ----------------------------------------------------------------------------------- the layer file

TEXT = """\
summary = "kernels"
order = 50
package = "vllm"

[provenance]
origin = "own"
forwarded = "no"
applied-upstream = "no"
last-update = 2026-01-02

[[variant]]
name = "only"
when = { vllm = ">=0.17.0" }

[[variant.op]]
op = "compile"
source = "vllm"
change = "sm120-family"
arch = "12.1a"
"""


def loaded(tmp_path: Path, text: str = TEXT, pins: str = "") -> Layer:
    files = {"layer.toml": text.encode()} | ({"pins.toml": pins.encode()} if pins else {})
    return load_layer(write_tree(tmp_path / "mine", files))


def test_a_compile_op_is_rendered_completely(tmp_path: Path) -> None:
    """A baked layer must say what it changes, whatever a later spark-build knows by that name."""
    (variant,) = loaded(tmp_path).rendered["variants"]
    assert variant["ops"] == [OP]
    assert {"old", "new", "files", "applied-upstream"} <= OP["change"].keys()


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ('change = "sm120-family"', 'change = "sm120-familly"', "did you mean 'sm120-family'"),
        ('arch = "12.1a"', 'arch = "sm_121a"', "is not like 12.1a"),
        ('source = "vllm"', 'source = "torch"', "only vllm's sources"),
        ('arch = "12.1a"', "", "key 'arch' is missing"),
        ('arch = "12.1a"', 'arch = "12.1a"\nunits = 1', "unknown key 'units'"),
    ],
)
def test_mistakes_in_a_compile_op(tmp_path: Path, was: str, now: str, said: str) -> None:
    with pytest.raises(UsageError, match=r"mine/layer.toml: variant 1 op 1") as caught:
        loaded(tmp_path, TEXT.replace(was, now))
    assert said in str(caught.value)


def test_mistakes_in_module_facts(tmp_path: Path) -> None:
    row = '[[code]]\nversion = "1"\nplatform = "x"\nmodule = "m"\nsha256 = "0"\nhow = "fine"\n'
    with pytest.raises(UsageError, match=r"pins.toml: code: how 'fine' is none of runs, trap"):
        loaded(tmp_path, TEXT, row)


def test_compiled_code_does_not_affect_selection() -> None:
    """What vLLM selects is asked of its Python: a compile op alone makes no record stale."""
    ours = load_layer(data_dir("patches") / "sm120-family")
    assert not decides(ours)
    assert decides(load_layer(data_dir("patches") / "cutlass-env"))
    assert decides(make_layer("flags", OP, variant={"serve-flags": ["--x"]}))


def test_no_hint_suggests_a_base_that_needs_a_rebuild() -> None:
    from builder.layers.catalog import Catalog

    selection = Catalog.discover().select(["cutlass-sm12x"])
    plan = planned(None)
    assert hints(selection, list(plan.decisions), {"vllm": "0.19.1"}) == []


def test_a_module_of_an_image_is_identified_by_its_record(tmp_path: Path) -> None:
    """Hashing it would read gigabytes; of a directory its own bytes count, whatever RECORD says."""
    files = dist_files("vllm", "0.20.1", {MODULE: "as released"})
    files[MODULE] = b"put in its place"
    known = knowing(sha256_hex(b"as released"))
    sources = FakeSources(code={MODULE: KernelCode(RUNS, "sm_120f")})
    assert judge(known, MemoryTree(files), sources, TARGET).state == NEEDS_REBUILD
    root = write_tree(tmp_path / "site", files)
    assert judge(known, DirTree(root), sources, TARGET).state == NOT_APPLICABLE


def test_without_the_tools_an_unknown_module_cannot_be_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machinecode, "find_tool", no_tool)
    tree = DirTree(write_tree(tmp_path / "site", BASE))
    with pytest.raises(EngineError, match="is unknown, and its architectures") as caught:
        read_module(tree, MODULE, KERNELS)
    assert caught.value.code == 6
    assert "pip install nvidia-cuda-cuobjdump" in caught.value.hint


def no_tool(name: str) -> Path:
    raise ToolMissing(f"{name} is not installed", hint="pip install nvidia-cuda-cuobjdump")


def fake_summary(file: Path, path: str, symbols: Sequence[str]) -> Summary:
    """Modules with one FP8 kernel: for SM121 in an extension wheel, for another chip elsewhere."""
    ours = file.read_bytes() == b"code"
    one = Reading(
        kernel="k",
        how="native" if ours else "none",
        arch="sm_121a" if ours else "sm_120a",
        counts={"QMMA.16832.F32.E4M3.E4M3": 8} if ours else {},
    )
    fp8 = {symbol: (one,) if symbol == KERNELS.symbol else () for symbol in symbols}
    counted = {"total": 1, "native": int(ours), "jit": 0, "elf": {one.arch: [1, 1]}, "ptx": {}}
    return Summary(path=path, readings=fp8, **counted)  # type: ignore[arg-type]


def test_machine_code_proves_that_the_layer_is_necessary(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path))
    monkeypatch.setattr(machinecode, "summarise", fake_summary)
    monkeypatch.setattr(binaries, "find_tool", lambda _: tmp_path)
    plan = planned(MADE)
    (decision,) = plan.decisions
    patched = OverlayTree(MemoryTree(BASE))
    patched.update(decision.changes)
    line = "Selected CutlassFP8ScaledMMLinearKernel for ModelOptFp8LinearMethod"
    sources = FakeSources(code={MODULE: NOT_LOADED})
    target = VerifyTarget(
        name="oci:out",
        subject=subject_of(patched),
        plan=changed(plan, expect=[{"kind": "fp8-linear", "line": line}]),
        layers=[LAYER],
        runner=FakeRunner(),
        origin=Origin(subject=fake_base(BASE), sources=sources),
    )
    with whole(target) as (full, apart):
        (verdict,) = prove(full, apart, verify(full, ["static", "binaries"]))
        assert verdict.necessary is True
        assert verdict.level == "binaries"
        assert "1 not loadable (sm_120a)" in verdict.seen
        (verdict,) = prove(full, apart, verify(full, ["static"]))
        assert verdict.necessary == "unknown", "no other level can tell"


def test_a_bill_of_materials_lists_the_inputs_of_a_stage() -> None:
    plan = read(planned(MADE).as_json(), BakedPlan)
    assert [item.filename for item in inputs_of(plan)] == ["vllm-0.20.1.tar.gz"]
