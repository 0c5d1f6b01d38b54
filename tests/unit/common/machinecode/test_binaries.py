"""The level ``binaries`` without a module: what loads where, how tools are read, what is said."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.trees import Content, DirTree, OverlayTree
from builder.common import machinecode
from builder.common.machinecode import (
    Arch,
    BadBinary,
    BadCubin,
    Image,
    KernelSummary,
    Modules,
    Summary,
    ToolMissing,
    best,
    find_modules,
    find_tool,
    function_names,
    images,
    load_kernels,
    on_disk,
    parse_ptx,
    split_functions,
    tally,
    telling,
)
from builder.common.paths import cache_dir
from builder.errors import RemoteError
from builder.proof import binaries
from builder.proof.binaries import check_binaries
from builder.proof.checks import parse_levels
from builder.proof.target import VerifyTarget
from tests.unit.fakes import (
    FakeImage,
    FakeRunner,
    MemoryTree,
    dist_files,
    fake_base,
    make_plan_of,
    subject_of,
    vllm_files,
    write_tree,
)
from tests.unit.plans import planned
from tests.unit.proof.test_codegen import LISTING, cubin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from builder.applier.trees import Tree
    from builder.images.subject import OpenImage
    from builder.proof.checks import Check

# ------------------------------------------------------------------------------- what loads where


@pytest.mark.parametrize(
    ("arch", "loads", "compiles"),
    [
        ("sm_121", True, True),
        ("sm_121a", True, True),
        ("sm_121f", True, True),
        ("sm_120", True, True),
        ("sm_120f", True, True),
        ("sm_120a", False, False),
        ("sm_110f", False, False),
        ("sm_110", False, True),
        ("sm_100f", False, False),
        ("sm_90a", False, False),
        ("sm_90", False, True),
        ("sm_80", False, True),
        ("sm_130", False, False),
    ],
)
def test_what_a_gb10_loads_and_compiles(arch: str, loads: bool, compiles: bool) -> None:
    parsed = Arch.parse(arch)
    assert (parsed.loads_on(), parsed.compiles_on(), str(parsed)) == (loads, compiles, arch)


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(BadBinary, match="unknown architecture 'gfx942'"):
        Arch.parse("gfx942")


# ------------------------------------------------------------------------------------ the tools

SYMBOLS = """
Fatbin elf code:
================
arch = sm_120f
code version = [1,8]
compressed

symbols:
OBJECT        LOCAL   DEFAULT    -                                    _ZN4cuda3endE
FUNC          WEAK    DEFAULT    -                                    $__internal_0_$__cuda_div
FUNC          GLOBAL  DEFAULT    ENTRY                                _Zgemm
FUNC          LOCAL   DEFAULT    ENTRY                             U  _Zquant

Fatbin elf code:
================
arch = sm_90a

symbols:
FUNC          GLOBAL  DEFAULT    ENTRY                                _Zhopper

Fatbin ptx code:
================
arch = sm_80
"""

PTX = b"""
Fatbin elf code:
================
arch = sm_120f
compressed

Fatbin ptx code:
================
arch = sm_80
compressed

.version 8.8
.target sm_80

.visible .entry _Zgemm(
)
{
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1};
@p mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1};

cvt.rn.satfinite.e2m1x2.f32 byte0, %f2, %f1;
}

.weak .entry _Zstub(
)
{
trap;
}

Fatbin ptx code:
================
arch = sm_52
compressed

.version 8.8
"""
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_ptx_is_read_in_pieces_of_any_size(size: int) -> None:
    chunks = [PTX[at : at + size] for at in range(0, len(PTX), size)]
    first, second = parse_ptx(chunks)
    assert (first.kind, str(first.arch)) == ("ptx", "sm_80")
    assert first.kernels == {
        "_Zgemm": {MMA: 2, "cvt.rn.satfinite.e2m1x2.f32": 1},
        "_Zstub": {"trap": 1},
    }
    assert (str(second.arch), dict(second.kernels)) == ("sm_52", {})


def test_machine_code_is_listed_by_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machinecode, "_run", lambda _arguments: SYMBOLS)
    monkeypatch.setattr(machinecode, "_stream", lambda _arguments: [PTX])
    found = images(tmp_path / "m.so")
    assert [(i.kind, str(i.arch), list(i.kernels)) for i in found] == [
        ("elf", "sm_120f", ["_Zgemm", "_Zquant"]),
        ("elf", "sm_90a", ["_Zhopper"]),
        ("ptx", "sm_80", ["_Zgemm", "_Zstub"]),
        ("ptx", "sm_52", []),
    ]


def test_instructions_are_counted_by_function() -> None:
    code = split_functions(LISTING + LISTING.replace("kernel_a", "kernel_b").split(".target")[1])
    assert set(code) == {"kernel_a", "kernel_b"}
    assert code["kernel_b"].traps == 1
    assert telling(code["kernel_a"].counts) == {
        "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X": 2,
        "QMMA.16832.F32.E4M3.E4M3": 1,
        "BPT.TRAP": 1,
    }


def test_a_cubin_names_its_functions() -> None:
    assert function_names(cubin_of(("a", 1, 0, 0), ("b", 1, 0, 0))) == {"a", "b"}
    with pytest.raises(BadCubin, match="not a cubin"):
        function_names(b"\x7fELF")


# ----------------------------------------------------------------------------- how SM121 runs it


def image(kind: Any, arch: str, *kernels: str) -> Image:
    """An image with kernels of which nothing is known."""
    return Image(kind=kind, arch=Arch.parse(arch), kernels={k: {} for k in kernels})


def test_the_latest_usable_image_is_taken() -> None:
    found = [
        image("elf", "sm_120f", "a"),
        image("elf", "sm_120a", "a", "b"),
        image("elf", "sm_120", "a"),
        image("ptx", "sm_90", "b"),
        image("ptx", "sm_80", "b", "c"),
        image("ptx", "sm_90a", "d"),
    ]
    taken = {kind: best(found, kind) for kind in ("elf", "ptx")}
    assert {k: str(i.arch) for k, i in taken["elf"].items()} == {"a": "sm_120f"}
    assert {k: str(i.arch) for k, i in taken["ptx"].items()} == {"b": "sm_90", "c": "sm_80"}
    assert tally(found, "elf") == {"sm_120": [1, 1], "sm_120a": [1, 2], "sm_120f": [1, 1]}


def test_a_summary_distinguishes_native_jit_and_neither(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ptx = Image(kind="ptx", arch=Arch.parse("sm_80"), kernels={"k_ptx": {MMA: 3}, "k_both": {}})
    found = [image("elf", "sm_120f", "k_both"), image("elf", "sm_90a", "k_hopper", "k_both"), ptx]
    monkeypatch.setattr(machinecode, "images", lambda _file: found)
    monkeypatch.setattr(machinecode, "code_of", lambda _file, wanted: {"k_both": {"QMMA.X": 5}})
    made = machinecode.summarise(tmp_path / "m.so", "vllm/m.so", ["^k_", "nothing"])
    assert (made.total, made.native, made.jit) == (3, 1, 1)
    assert [dataclasses.astuple(r) for r in made.readings["^k_"]] == [
        ("k_both", "native", "sm_120f", {"QMMA.X": 5}),
        ("k_hopper", "none", "sm_90a", {}),
        ("k_ptx", "jit", "sm_80", {MMA: 3}),
    ]
    assert made.readings["nothing"] == ()


# ----------------------------------------------------------------------------- where modules are


def so_tree(*paths: str) -> MemoryTree:
    """A vLLM with these files, their content being their path."""
    files: dict[str, str | bytes] = {path: path.encode() for path in paths}
    return MemoryTree({**vllm_files(), **dist_files("vllm-extra", "1", files)})


def test_modules_are_found_in_every_folder() -> None:
    cache = "flashinfer_jit_cache/jit_cache"
    tree = so_tree(
        "vllm/_C.abi3.so",
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
        f"{cache}/fp4_quantization_120f/fp4_quantization_120f.so",
        f"{cache}/fused_moe_90/fused_moe_90.so",
        "torch/lib/libtorch.so",
    )
    assert find_modules(tree) == [
        f"{cache}/fp4_quantization_120f/fp4_quantization_120f.so",
        "vllm/_C.abi3.so",
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    ]


def test_a_module_of_any_tree_is_extracted_to_disk(tmp_path: Path) -> None:
    path = "vllm/_C.abi3.so"
    root = write_tree(tmp_path / "site", {path: b"on disk"})
    overlay = OverlayTree(DirTree(root))
    assert on_disk(overlay, path, tmp_path) == root / path
    overlay.update({path: Content.of(b"changed")})
    assert on_disk(overlay, path, tmp_path).read_bytes() == b"changed"

    class Large(MemoryTree):
        """A tree that only writes to disk."""

        def extract(self, path: str, target: Path) -> None:
            target.write_bytes(b"extracted")

    assert on_disk(Large({}), path, tmp_path).read_bytes() == b"extracted"


# --------------------------------------------------------------------------------- what is said

LINEAR = "Using CutlassNvFp4LinearKernel for NVFP4 GEMM"
EXPERTS = "Using 'VLLM_CUTLASS' NvFp4 MoE backend"
MARLIN = "Using MarlinNvFp4LinearKernel for NVFP4 GEMM"
B12X = "Using FlashInferB12xNvFp4LinearKernel for NVFP4 GEMM"
FP8, GEMM = "FP8 per-tensor GEMM (CUTLASS)", "NVFP4 GEMM (CUTLASS)"
BLOCK = "FP8 block GEMM (CUTLASS)"
GROUPED, QUANT = "NVFP4 grouped GEMM for experts (CUTLASS)", "NVFP4 quantisation of activations"
MARLINS = {"NVFP4 GEMM (Marlin)", "Marlin weight repacking"}
STABLE, OLD = "vllm/_C_stable_libtorch.abi3.so", "vllm/_C.abi3.so"
REAL = {
    FP8: {"QMMA.16832.F32.E4M3.E4M3": 64},
    GEMM: {"OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X": 96},
    GROUPED: {"OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X": 64},
    BLOCK: {"QMMA.16832.F32.E4M3.E4M3": 96},
    QUANT: {"F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C": 4},
    "NVFP4 GEMM (Marlin)": {"HMMA.16816.F32.BF16": 12},
    "Marlin weight repacking": {},
    "NVFP4 GEMM for experts (Marlin)": {"HMMA.16816.F32.BF16": 12},
}


@pytest.mark.parametrize(
    ("line", "kernels"),
    [
        (LINEAR, {FP8, GEMM, QUANT}),
        ("Using NvFp4LinearBackend.VLLM_CUTLASS for NVFP4 GEMM", {FP8, GEMM, QUANT}),
        ("Using FlashInferCutlassNvFp4LinearKernel for NVFP4 GEMM", {QUANT}),
        (EXPERTS, {GROUPED, QUANT}),
        (B12X, {QUANT}),
        ("Using 'FLASHINFER_B12X' NvFp4 MoE backend", set()),
        (MARLIN, MARLINS),
        ("Using NvFp4LinearBackend.MARLIN for NVFP4 GEMM", MARLINS),
        ("Selected CutlassFP8ScaledMMLinearKernel for ModelOptFp8LinearMethod", {FP8}),
        ("Selected CutlassFp8BlockScaledMMKernel for Fp8LinearMethod", {BLOCK}),
        ("W8A8BlockFp8LinearOp._run_cutlass", {BLOCK}),
    ],
)
def test_expected_log_lines_determine_the_kernels(line: str, kernels: set[str]) -> None:
    assert {k.name for k in load_kernels() if re.search(k.behind, line)} == kernels


Row = tuple[str, str, dict[str, int]]


class Release:
    """A vLLM whose modules hold what the test says, and what was asked of it."""

    def __init__(self, held: Mapping[str, Mapping[str, Sequence[Row]]]) -> None:
        self.held = held
        self.read: list[str] = []
        self.tree = so_tree(*held)

    def summarise(self, _file: Path, path: str, _symbols: Sequence[str]) -> Summary:
        """Stand for the reading of a module."""
        self.read.append(path)
        rows = self.held[path]
        every = [row for kernel in rows.values() for row in kernel]
        ways = [how for how, _, _ in every]
        return Summary(
            path=path,
            elf={"sm_120f": [1, len(every)]},
            ptx={},
            total=len(every),
            native=ways.count("native"),
            jit=ways.count("jit"),
            readings={
                k.symbol: tuple(
                    KernelSummary(kernel=f"_Z{n}", how=how, arch=arch, counts=counts)
                    for n, (how, arch, counts) in enumerate(rows.get(k.name, ()))
                )
                for k in load_kernels()
            },
        )

    def checks(
        self,
        *lines: str,
        kind: str = "pypi",
        image: OpenImage | None = None,
        tree: Tree | None = None,
        expect: Sequence[Mapping[str, str]] = (),
    ) -> dict[str, Check]:
        """What the level says, by check."""
        expect = [*expect, *({"kind": "any", "line": line} for line in lines)]
        base = fake_base(vllm_files())
        target = VerifyTarget(
            name="t",
            subject=subject_of(tree or self.tree, kind, image),
            plan=planned(make_plan_of(base), expect=expect),
            layers=(),
            runner=FakeRunner(),
        )
        return {check.name: check for check in check_binaries(target)}


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Release]:
    """Make a release of modules by path."""

    def make(held: Mapping[str, Mapping[str, Sequence[Row]]]) -> Release:
        made = Release(held)
        monkeypatch.setattr(machinecode, "summarise", made.summarise)
        monkeypatch.setattr(binaries, "find_tool", lambda _name: None)
        return made

    return make


def all_real(how: str = "native", arch: str = "sm_120f") -> dict[str, list[Row]]:
    """Every kernel as it should be."""
    return {name: [(how, arch, counts)] * 2 for name, counts in REAL.items()}


def test_real_code_passes_with_its_numbers(release: Callable[..., Release]) -> None:
    checks = release({STABLE: all_real()}).checks(LINEAR, EXPERTS)
    assert {name: c.status for name, c in checks.items()} == dict.fromkeys(
        [FP8, GEMM, GROUPED, QUANT, STABLE], "pass"
    )
    check = checks[FP8]
    assert check.expected == "SM121 runs every one of them; each holds QMMA"
    assert check.seen == (
        "2 kernels: 2 native (sm_120f); 128 x QMMA.16832.F32.E4M3.E4M3; no BPT.TRAP"
    )
    assert check.where == f"{STABLE} of t"
    assert check.figures == {"QMMA.16832.F32.E4M3.E4M3": 128}
    assert "16 kernels SM121 runs 16 natively" in checks[STABLE].seen


@pytest.mark.parametrize(
    ("row", "seen", "reason"),
    [
        (
            ("none", "sm_100a sm_120a", {}),
            "1 native (sm_120f), 1 not loadable (sm_100a sm_120a)",
            "needs a rebuild: SM121 loads none of sm_100a sm_120a; wheels from 0.20.0 on",
        ),
        (("native", "sm_121a", {"BPT.TRAP": 1}), "1 x BPT.TRAP", "only a trap in 1 of 2"),
        (("native", "sm_121", {}), "2 native (sm_120f, sm_121)", "nothing of the kind in 1 of 2"),
        (
            ("native", "sm_120f", {"HMMA.16816.F32": 8}),
            "no BPT.TRAP",
            "nothing of the kind in 1 of 2",
        ),
        (("jit", "sm_80", {MMA: 8}), "1 compiled by the driver", "nothing of the kind in 1 of 2"),
        (("jit", "sm_120f", {"trap": 1}), "1 x BPT.TRAP", "only a trap in 1 of 2"),
    ],
)
@pytest.mark.parametrize("kernel", [FP8, GEMM, QUANT])
def test_one_bad_kernel_flips_its_check_and_no_other(
    release: Callable[..., Release], kernel: str, row: Row, seen: str, reason: str
) -> None:
    rows = all_real()
    checks = release({STABLE: {**rows, kernel: [rows[kernel][0], row]}}).checks(LINEAR)
    assert {name for name, c in checks.items() if c.status == "fail"} == {kernel}
    assert seen in checks[kernel].seen
    assert reason in checks[kernel].reason


def test_ptx_that_the_driver_compiles_is_enough(release: Callable[..., Release]) -> None:
    rows = {name: [("jit", "sm_80", {MMA: 7})] for name in REAL}
    checks = release({OLD: rows}).checks(MARLIN)
    assert {c.status for c in checks.values()} == {"pass"}
    check = checks["NVFP4 GEMM (Marlin)"]
    assert check.seen == (
        f"1 kernel: 1 compiled by the driver from PTX (sm_80); 7 x {MMA}; no BPT.TRAP"
    )
    assert "caches the result" in check.reason


def test_a_trap_is_not_a_repacking_kernel(release: Callable[..., Release]) -> None:
    rows = {**all_real(), "Marlin weight repacking": [("native", "sm_121", {"BPT.TRAP": 1})]}
    checks = release({OLD: rows}).checks(MARLIN)
    assert [n for n, c in checks.items() if c.status == "fail"] == ["Marlin weight repacking"]


def test_a_missing_kernel_needs_a_rebuild(release: Callable[..., Release]) -> None:
    rows = {name: row for name, row in all_real().items() if name != GROUPED}
    checks = release({STABLE: rows, OLD: {}}).checks(EXPERTS)
    assert (checks[GROUPED].status, checks[GROUPED].seen) == ("fail", "none")
    assert checks[GROUPED].where == f"{STABLE}, {OLD}"
    assert checks[GROUPED].reason.startswith("needs a rebuild: this vLLM was built without it")
    assert release({}).checks(EXPERTS)[GROUPED].where == "no such module"


def test_a_required_module_for_other_chips_fails(
    release: Callable[..., Release],
) -> None:
    hopper: dict[str, list[Row]] = {
        GROUPED: [("none", "sm_90a", {})],
        QUANT: [("none", "sm_90a", {})],
    }
    checks = release({STABLE: hopper}).checks(EXPERTS)
    assert checks[STABLE].status == "fail"
    assert checks[STABLE].reason.startswith("needs a rebuild: all of its code is for other chips")


FA3 = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"


def test_modules_on_the_index_are_read_only_where_needed(release: Callable[..., Release]) -> None:
    made = release({STABLE: all_real(), OLD: {}, FA3: {FP8: [("none", "sm_90a", {})]}})
    checks = made.checks(LINEAR)
    assert made.read == [STABLE]
    assert FA3 not in checks
    assert "2 other modules were not read" in checks[STABLE].reason
    at_hand = made.checks(LINEAR, image=FakeImage(in_engine=True))
    assert made.read == [STABLE, OLD, FA3]
    assert at_hand[FA3].status == "pass"
    assert at_hand[FA3].reason == "for other chips; vLLM does not call it on SM121"
    assert at_hand[OLD].expected == "it has no kernel of the profile"


def test_the_first_module_that_has_the_kernel_counts(release: Callable[..., Release]) -> None:
    made = release({STABLE: {FP8: all_real()[FP8]}, OLD: all_real()})
    checks = made.checks(LINEAR)
    assert checks[FP8].where == f"{STABLE} of t"
    assert checks[GEMM].where == f"{OLD} of t"


def test_an_unchanged_module_is_read_only_once(
    release: Callable[..., Release],
) -> None:
    made = release({STABLE: all_real()})
    first, second = made.checks(LINEAR), made.checks(LINEAR)
    assert made.read == [STABLE]
    assert list(first.values()) == list(second.values())
    changed = MemoryTree({**made.tree.files, STABLE: b"another build"})
    made.checks(LINEAR, tree=changed)
    assert made.read == [STABLE, STABLE]


@pytest.mark.parametrize("damage", ["{", "[]", '{"elf": {}}', '{"readings": {"x": [{"y": 1}]}}'])
def test_a_damaged_summary_is_made_again(release: Callable[..., Release], damage: str) -> None:
    made = release({STABLE: all_real()})
    made.checks(LINEAR)
    (kept,) = (cache_dir() / "binaries").iterdir()
    kept.write_text(damage)
    assert {c.status for c in made.checks(LINEAR).values()} == {"pass"}
    assert made.read == [STABLE, STABLE]


@pytest.mark.parametrize("tool", ["cuobjdump", "nvdisasm"])
def test_without_the_tools_the_code_is_not_judged(
    release: Callable[..., Release], monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    def find(name: str) -> None:
        if name == tool:
            raise ToolMissing(f"{name} is not installed", hint="pip install nvidia-cuda-cuobjdump")

    made = release({STABLE: all_real()})
    monkeypatch.setattr(binaries, "find_tool", find)
    checks = made.checks(LINEAR)
    assert set(checks) == {FP8, GEMM, QUANT}
    for check in checks.values():
        assert check.status == "not-run"
        assert check.reason == f"{tool} is not installed; try: pip install nvidia-cuda-cuobjdump"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadBinary("cuobjdump cannot read it"), "fail"),
        (BadCubin("nvdisasm refuses the cubin"), "fail"),
        (RemoteError("the download broke off"), "not-run"),
    ],
)
def test_an_unreadable_module_never_passes(
    release: Callable[..., Release],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    status: str,
) -> None:
    def broken(*_: object) -> Summary:
        raise error

    made = release({STABLE: all_real()})
    monkeypatch.setattr(machinecode, "summarise", broken)
    for check in made.checks(LINEAR).values():
        assert check.status == status
        assert str(error) in check.seen + check.reason


def test_only_the_damaged_module_is_reported(
    release: Callable[..., Release], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = release({STABLE: all_real(), FA3: {}})

    def summarise(file: Path, path: str, symbols: Sequence[str]) -> Summary:
        if path == FA3:
            raise BadBinary("cuobjdump cannot read it")
        return made.summarise(file, path, symbols)

    monkeypatch.setattr(machinecode, "summarise", summarise)
    checks = made.checks(LINEAR, kind="dir")
    assert [n for n, c in checks.items() if c.status == "fail"] == [FA3]


def test_a_choice_that_logs_nothing_counts_too(release: Callable[..., Release]) -> None:
    made = release({STABLE: all_real()})
    chosen = ({"kind": "fp8-block", "selected": "W8A8BlockFp8LinearOp._run_cutlass"},)
    refused = ({"kind": "w4a16-moe", "refused": "'VLLM_CUTLASS' does not support"},)
    assert set(made.checks(expect=chosen)) == {BLOCK, STABLE}
    assert set(made.checks(expect=refused)) == {"binaries"}


def test_a_profile_without_prebuilt_kernels_is_not_run(
    release: Callable[..., Release],
) -> None:
    (check,) = release({STABLE: all_real()}).checks("Using something of FlashInfer").values()
    assert (check.status, check.name) == ("not-run", "binaries")


def test_the_level_is_selected_by_name() -> None:
    assert parse_levels(["binaries,static"]) == ("static", "binaries")
    assert "binaries" not in parse_levels([])


def test_a_tool_is_found_or_named() -> None:
    with pytest.raises(ToolMissing, match="no-such-tool is not installed"):
        find_tool("no-such-tool")


def test_patterns_choose_modules_in_their_order() -> None:
    tree = so_tree(STABLE, OLD, "vllm/_moe_C.abi3.so")
    made = Modules(tree, ["x"])
    assert made.matching(["vllm/_C_stable_libtorch.*", "vllm/_C.*"]) == [STABLE, OLD]
