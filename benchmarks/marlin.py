"""vLLM's Marlin kernels, from the PTX of a released wheel, in the executor.

    python -m benchmarks.marlin 0.33.0 --work WORK [--orders] [--pack FOLDER]

Reads the modules with Marlin out of vLLM's arm64 wheel on the package index, by range, once.
``cuobjdump`` takes their PTX out, and no GPU is needed.  A GB10 runs machine code of the same
sources where the wheel has some, and this PTX where it has not (docs/kernel-defects.md).

Each launch has the parameters that vLLM's host code gives it on a GB10 (``marlin_mm`` in
``csrc/libtorch_stable/quantization/marlin/marlin.cu``, ``csrc/libtorch_stable/moe/...``), weights
that the release's own kernel has repacked, and scales as vLLM's ``marlin_utils_fp4.py`` makes
them.  The operands are such that every sum is exact.  Prints for each launch how many values differ
from the exact ones, the races, and whether the locks are zero again; with ``--orders`` how many
barriers, waits and fences of a kernel nothing notices if left out.  ``--pack FOLDER`` writes the
launches for ``benchmarks/hopper/run.py``, which runs the same PTX on a Hopper GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.cuda_host import kernels_alone
from builder.common.machinecode import find_tool
from builder.common.pypi import PackageIndex
from builder.common.wheels import RemoteWheel
from builder.ptx.api import run
from builder.ptx.block import MULTIPROCESSORS
from builder.ptx.machine import E2M1, from_bf16, to_bf16
from builder.ptx.source import module_of

if TYPE_CHECKING:
    from builder.ptx.findings import FoundRace

_MODULE = re.compile(r"vllm/_(?:moe_)?C(?:_stable_libtorch)?\.abi3\.so")
#: Shared memory that a block may ask for on SM12x (CUDA C++ Programming Guide, table of compute
#: capabilities); vLLM asks for all of it.
SHARED = 99 << 10
#: vLLM's numbers of types (``ScalarType.id`` in ``csrc/core/scalar_type.hpp``).
BF16, FE2M1, FE4M3, FE8M0, U4B8 = (
    1125899906909960, 562949953487106, 2814749767172868, 2814749767106568, 1125899907892224,
)  # fmt: skip
#: Weights, scales, and the group of values that share one, by format.
FORMATS = {"NVFP4": (FE2M1, FE4M3, 16), "MXFP4": (FE2M1, FE8M0, 32), "GPTQ": (U4B8, BF16, 128)}
#: Depth, columns and threads of a block, in the order in which vLLM tries them.
FEW, MANY = [(128, 128, 256), (64, 128, 128), (128, 64, 128)], [
    (64, 256, 256), (64, 128, 128), (128, 64, 128),
]  # fmt: skip
STAGES = 4
#: What is left out: barriers, waits for copies, and fences; an acquire that becomes weaker.
ORDERS = re.compile(
    r"bar(?:rier)?\.sync\s[^;]*;|cp\.async\.wait_(?:group|all)[^;]*;|fence\.acq_rel[^;]*;"
    r"|ld\.global\.acquire"
)
#: Reads of operands, and the wait of all copies of a slice.
_FETCH, _SLICE_ENDS = re.compile(r"ld\.shared|ldmatrix"), "cp.async.wait_group 0;"
_REGISTER = re.compile(r"%r\d+")
#: Two in a fixed order, and two at random.
SCHEDULES = ("eager", "lazy", "random:1", "random:2")
#: The kernel for weights of 4 bits; up to 0.22.1 also with a permutation of the rows.
_REPACK = re.compile(r"gptq_marlin_repack_kernelILi256ELi4E(?:Lb0E)?Lb0EEEv")


def fetch(version: str, work: Path) -> None:
    """Extract the PTX of both modules, unless that was done."""
    done = work / version
    if done.exists():
        return
    index = PackageIndex()
    name = re.compile(rf"vllm-{re.escape(version)}-.*aarch64\.whl")
    *_, file = (one for one in index.wheels("vllm") if name.fullmatch(one.filename))
    wheel, into = RemoteWheel(file, index), work / "part"
    into.mkdir(parents=True, exist_ok=True)
    for path in filter(_MODULE.fullmatch, wheel.members):
        module = into / Path(path).name
        wheel.extract(path, module)
        subprocess.run(
            [find_tool("cuobjdump"), "-xptx", "all", module.name], cwd=into, check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        module.unlink()
    into.rename(done)


def kernels_of(folder: Path, arch: int | None) -> dict[str, tuple[int, str]]:
    """PTX by kernel: the newest architecture's, or one's; with what precedes it in its module."""
    kernels: dict[str, tuple[int, str]] = {}
    for path in sorted(folder.glob("*.ptx")):
        own = int(path.name.split(".")[-2].removeprefix("sm_").rstrip("af"))
        alone = kernels_alone(path.read_text("utf-8")) if arch in (None, own) else {}
        if not any("arlin" in name for name in alone):
            continue
        for name, text in alone.items():
            if own >= kernels.get(name, (0, ""))[0]:
                kernels[name] = own, text
    return kernels


@dataclass(frozen=True)
class Tile:
    """What a kernel of Marlin is compiled for; ``rows`` of a block are 8, or 16 to 64."""

    rows: int
    depth: int
    columns: int
    threads: int

    def cache(self, group: int, *, routed: bool) -> int:
        """Bytes of shared memory that vLLM reckons with (``get_kernel_cache_size``)."""
        rows = -(-self.rows // 16) * 16
        weights = STAGES * self.depth * self.columns // 2
        sums = rows * (self.columns + 8) * 2
        scales = -(-self.depth // group) * self.columns * 2 * STAGES
        most = max(weights, sums, min(weights, sums) + self.columns * 2)
        return most + STAGES * rows * self.depth * 2 + scales + (16 * rows if routed else 0)

    def name(self, space: str, form: str) -> str:
        """The part of the mangled name with the template's arguments."""
        weights, scales, group = FORMATS[form]
        types = "".join(
            f"Ll{one}E" for one in (BF16, weights, BF16, scales if group < 64 else BF16)
        )
        sizes = (self.threads, -(-self.rows // 16), self.columns // 16, self.depth // 16)
        return (
            f"{len(space)}{space}6MarlinI{types}{''.join(f'Li{n}E' for n in sizes)}"
            f"Lb{int(self.rows == 8)}ELi{STAGES}ELi{group // 16}ELb0E"
        )


def tiles_of(rows: int, n: int, k: int, group: int, *, routed: bool) -> list[Tile]:
    """The tiles that vLLM may take, in its order."""
    every = [Tile(rows, *sizes) for sizes in (MANY if rows > 16 else FEW)]
    room = SHARED - 512
    return [
        one
        for one in every
        if not (k % one.depth or n % one.columns) and one.cache(group, routed=routed) <= room
    ]


def tile_of(m: int, n: int, k: int, group: int, processors: int) -> Tile:
    """The tile that ``marlin_mm`` takes for at most 64 rows, or for a multiple of 64."""
    rows = 8 if m <= 8 else min(-(-m // 16) * 16, 64)
    tile = tiles_of(rows, n, k, group, routed=False)[0]
    small = Tile(rows, 128, 64, 128)
    few = n // tile.columns * -(-m // rows) * 4 <= processors
    return small if few and not k % 128 else tile


@dataclass(frozen=True)
class Weights:
    """A matrix of ``n`` columns and ``k`` rows as vLLM's kernels take it, and its values."""

    packed: Any
    scales: Any
    factor: Any
    values: Any


def permuted(scales: Any) -> Any:
    """``marlin_permute_scales`` for groups; of a byte each, in the order of its dequantisation."""
    blocks = scales.reshape(-1, 8, 8).transpose(0, 2, 1)
    if scales.dtype == np.uint8:
        blocks = blocks.reshape(-1, 4)[:, [0, 2, 1, 3]]
    return np.ascontiguousarray(blocks).reshape(scales.shape)


def weights_of(
    form: str, n: int, k: int, kernels: dict[str, tuple[int, str]], seed: int, *, small: bool
) -> Weights:
    """Random weights, repacked by the release's kernel; ``small``: of few bits, with one scale."""
    draw, group = np.random.default_rng(seed), FORMATS[form][2]
    codes = draw.integers(0, 16, (n, k)).astype(np.uint32)
    shape = k // group, n
    factor = np.zeros(1, np.float32)
    if form == "NVFP4":
        if small:
            codes = draw.choice([0, 2, 4, 10, 12], (n, k)).astype(np.uint32)
        steps = 8 if small else draw.integers(8, 16, shape)
        exponents = 0 if small else draw.integers(-1, 2, shape)
        real = np.full(shape, steps / 8 * 2.0**exponents)
        # ``nvfp4_marlin_process_scales``: the largest becomes at most 448 by a power of two
        power = 2.0 ** np.floor(np.log2(448 / real.max()))
        halves = (real * power * 2**7).astype(np.float16).view(np.uint16)
        scales = permuted((halves << 1 >> 8).astype(np.uint8))
        factor[:] = 0.5 * 2.0 ** (126 - 7) / power
        values, real = E2M1[codes], real * 0.5
    elif form == "MXFP4":
        exponents = draw.integers(-2, 3, shape)
        scales, real = permuted((exponents + 127).astype(np.uint8)), 2.0**exponents
        values = E2M1[codes]
    else:
        real = draw.integers(4, 8, shape) / 4.0
        scales = permuted(to_bf16(real.astype(np.float32)).astype(np.uint16))
        values = codes.astype(np.float64) - 8
    words = (codes.reshape(n, k // 8, 8) << np.arange(0, 32, 4, dtype=np.uint32)).sum(2)
    columns = np.ascontiguousarray(words.T.astype(np.uint32))
    out = np.zeros((k // 16, n * 2), np.uint32)
    name = next(one for one in kernels if _REPACK.search(one))
    given = [columns, 0, out, k, n] if "EEEvPKjS" in name else [columns, out, k, n]
    result = run(kernels[name][1], name, MULTIPROCESSORS, 256, given, shared=SHARED)
    result.check()
    spread = np.repeat(real.T, group, 1)
    return Weights(result[out], scales, factor, values * spread)


@dataclass(frozen=True)
class Judged:
    """What a launch showed in several schedules."""

    wrong: int
    races: dict[Any, FoundRace]
    #: what did not end, or left a lock
    faults: list[str]


@dataclass(frozen=True)
class Case:
    """A launch, the arrays that it changes, and the exact result as bits of bfloat16."""

    name: str
    kernel: str
    grid: int
    threads: int
    arguments: dict[str, Any]
    exact: Any

    def judged(self, ptx: str, *schedules: str) -> Judged:
        """Run the launch with a kernel's PTX or another."""
        given = self.arguments
        result = run(ptx, self.kernel, self.grid, self.threads, given, shared=SHARED,
                     schedules=schedules)  # fmt: skip
        faults, wrong = [*result.faults], 0
        for n, one in enumerate(result.runs):
            if one.fault:
                continue
            wrong = max(wrong, int((result.after(given["C"], n) != self.exact).sum()))
            if result.after(given["locks"], n).any():
                faults.append(f"{one.schedule}: a lock is not zero again")
        return Judged(wrong, {race.key: race for race in result.races}, faults)

    def unused(self, ptx: str, races: dict[Any, FoundRace]) -> set[Any]:
        """Races and uninitialised reads of operands of a tile that does not come.

        They are read in the loop over tiles, and nothing wrote them, or what is behind the loop
        writes there.  Behind the loop the registers are overwritten with NaN: if all values stay
        right, nothing used them.
        """
        at = ptx.index(_SLICE_ENDS, ptx.rindex("mma.sync"))
        loop_ends = ptx.count("\n", 0, at)
        registers, keys = set[str](), set[Any]()
        for key, race in races.items():
            reads = [one for one in race.lines if one.line < loop_ends and _FETCH.match(one.text)]
            others = [one for one in race.lines if one.line > loop_ends]
            filled = {n for one in reads for n in _REGISTER.findall(one.text.split("[")[0])}
            whole = len(reads) + len(others) == len(race.lines)
            if filled and whole and race.memory == "shared memory":
                keys.add(key)
                registers |= filled
        spoil = "".join(f"mov.b32 {one}, 0x7fc07fc0; " for one in sorted(registers))
        spoiled = self.judged(f"{ptx[:at]}{spoil}{ptx[at:]}", "eager", "random:1")
        return set() if spoiled.wrong or spoiled.faults else keys


def rounded(values: Any) -> Any:
    """To bfloat16, once."""
    return to_bf16(np.asarray(values).astype(np.float32)).astype(np.uint16)


@dataclass(frozen=True)
class Launch:
    """A product, and how vLLM reduces it."""

    form: str
    m: int
    n: int
    k: int
    processors: int = MULTIPROCESSORS
    atomic: bool = False
    bias: bool = False
    halves: bool = False

    def __str__(self) -> str:
        """The row's name."""
        words = [word for word in ("atomic", "bias", "halves") if getattr(self, word)]
        return f"{self.form} {self.m}x{self.n}x{self.k}, {self.processors} blocks {' '.join(words)}"


def dense(launch: Launch, kernels: dict[str, tuple[int, str]]) -> Case:
    """A launch of ``marlin_gemm``."""
    form, m, n, k = launch.form, launch.m, launch.n, launch.k
    group, small = FORMATS[form][2], launch.atomic or launch.halves
    weights = weights_of(form, n, k, kernels, 1, small=small)
    draw = np.random.default_rng(2)
    a = draw.integers(-4, 5, (m, k)).astype(np.float64)
    if small:  # every part of a sum is exact in bfloat16
        a = np.where(draw.random((m, k)) < 32 / k, np.sign(a), 0.0)
        assert (np.abs(a) @ np.abs(weights.values.T)).max() <= 128
    exact = a @ weights.values.T
    assert (np.abs(a) @ np.abs(weights.values.T)).max() < 2**18  # of steps of 2^-6, in float32
    bias = draw.integers(-32, 33, n).astype(np.float64)
    if launch.bias:
        exact = from_bf16(rounded(exact)) + bias
    tile = tile_of(m, n, k, group, launch.processors)
    (kernel,) = (name for name in kernels if tile.name("marlin", form) in name)
    order = np.arange(32).reshape(4, 4, 2).transpose(1, 0, 2).reshape(32)  # scale_perm_single
    arguments: dict[str, Any] = {
        "A": rounded(a), "B": weights.packed, "C": np.full((m, n), 0x7FC0, np.uint16),
        "C_tmp": np.full((launch.processors, min(-(-m // 16) * 16, 64) * 256), np.nan, np.float32),
        "bias": rounded(bias.reshape(-1, 32)[:, order]).reshape(-1) if launch.bias else 0,
        "a_scales": 0, "scales": weights.scales, "global_scale": weights.factor, "zeros": 0,
        "m": m, "n": n, "k": k, "lda": k, "locks": np.zeros(launch.processors, np.int32),
        "has_bias": launch.bias, "atomic": launch.atomic, "fp32": not launch.halves,
        "shared": SHARED,
    }  # fmt: skip
    return case_of(launch, tile, kernel, arguments, exact)


def guarded(kernel: str, arguments: dict[str, Any], groups: int) -> dict[str, Any]:
    """Arguments of which the kernel may only write the output, its parts and the locks.

    Up to 0.22.1 there are a permutation of the rows and the number of groups besides.
    """
    if "S6_S3_PKiiiiiiPi" in kernel or "S6_S3_PKiS8_S8_S8_S6_" in kernel:
        rows = list(arguments.items())
        at = list(arguments)
        rows.insert(at.index("m"), ("groups", groups))
        rows.insert(at.index("zeros") + 1, ("permutation", 0))
        arguments = dict(rows)
    for name, one in arguments.items():
        if isinstance(one, np.ndarray):
            one.flags.writeable = name in ("C", "C_tmp", "locks")
    return arguments


@dataclass(frozen=True)
class Routed:
    """A product of tokens and experts; ``rows`` of a block, and which of the tiles."""

    form: str
    tokens: int
    n: int
    k: int
    rows: int
    tile: int = 0
    processors: int = MULTIPROCESSORS
    top_k: int = 2
    #: the second product of a layer, whose rows have a weight each
    weighted: bool = False

    def __str__(self) -> str:
        """The row's name."""
        sizes = f"{self.tokens}x{self.n}x{self.k}, {self.processors} blocks"
        return f"{self.form} experts {'down' if self.weighted else 'up'} {sizes}"


EXPERTS = 4


def case_of(
    launch: Launch | Routed, tile: Tile, kernel: str, arguments: dict[str, Any], exact: Any
) -> Case:
    """A launch with its arguments as the release's kernel takes them."""
    name = f"{launch}, tile {tile.rows}x{tile.columns}x{tile.depth}"
    given = guarded(kernel, arguments, launch.k // FORMATS[launch.form][2])
    return Case(name, kernel, launch.processors, tile.threads, given, rounded(exact))


def routed(launch: Routed, kernels: dict[str, tuple[int, str]]) -> Case:
    """A launch of ``moe_wna16_marlin_gemm``: expert 2 of 4 has no token."""
    form, n, k, rows = launch.form, launch.n, launch.k, launch.rows
    group = FORMATS[form][2]
    every = [weights_of(form, n, k, kernels, 5 + e, small=False) for e in range(EXPERTS)]
    draw = np.random.default_rng(4)
    a = draw.integers(-4, 5, (launch.tokens, k)).astype(np.float64)
    chosen = np.stack([draw.permutation([0, 1, 3])[: launch.top_k] for _ in a]).reshape(-1)
    pairs = len(chosen)
    order, owners = list[int](), list[int]()
    for expert in range(EXPERTS):
        own = np.flatnonzero(chosen == expert).tolist()
        own += [pairs] * (-len(own) % rows)
        order += own
        owners += [expert] * (len(own) // rows)
    share = draw.integers(1, 4, pairs) / 4.0
    exact = np.stack([every[e].values @ a[n // launch.top_k] for n, e in enumerate(chosen)])
    if launch.weighted:
        exact = from_bf16(rounded(exact)) * share[:, None]
    tile = tiles_of(rows, n, k, group, routed=True)[launch.tile]
    (kernel,) = (name for name in kernels if tile.name("marlin_moe_wna16", form) in name)
    room = min(n * len(order), launch.processors * 4 * rows * 256) * (2 if rows == 8 else 1)
    arguments: dict[str, Any] = {
        "A": rounded(a), "B": np.stack([one.packed for one in every]),
        "C": np.full((pairs, n), 0x7FC0, np.uint16), "C_tmp": np.full(room, np.nan, np.float32),
        "bias": 0, "a_scales": 0, "scales": np.stack([one.scales for one in every]),
        "global_scale": np.concatenate([one.factor for one in every]), "zeros": 0,
        "order": np.array(order, np.int32), "owners": np.array(owners, np.int32),
        "padded": np.array([len(order)], np.int32), "share": share.astype(np.float32),
        "top_k": launch.top_k, "weighted": launch.weighted, "m": launch.tokens, "n": n, "k": k,
        "locks": np.zeros(launch.processors * 4, np.int32), "has_bias": False, "atomic": False,
        "fp32": True,
    }  # fmt: skip
    return case_of(launch, tile, kernel, arguments, exact)


N, X, G = "NVFP4", "MXFP4", "GPTQ"
LAUNCHES: list[Launch | Routed] = [
    Launch(N, 1, 256, 1024), Launch(N, 1, 512, 1024, 5), Launch(N, 16, 256, 1280, 3),
    Launch(N, 16, 128, 448, 5), Launch(N, 16, 192, 512, 3), Launch(N, 33, 512, 512, 3, bias=True),
    Launch(N, 64, 512, 512), Launch(N, 64, 768, 512, 7), Launch(N, 192, 512, 256, 3),
    Launch(N, 16, 256, 1024, 5, halves=True), Launch(N, 1, 256, 2048, atomic=True),
    Launch(N, 16, 256, 2560, 3, atomic=True),
    Launch(X, 1, 256, 1024), Launch(X, 16, 256, 1280, 3), Launch(X, 64, 512, 1024, 7),
    Launch(G, 1, 256, 1024), Launch(G, 16, 256, 1280, 3), Launch(G, 64, 512, 1024, 7),
    Routed(N, 1, 256, 512, 8), Routed(N, 8, 256, 512, 8, 0, 5),
    Routed(N, 24, 256, 640, 16, 0, 3, weighted=True), Routed(N, 64, 256, 512, 48, 0, 5),
    Routed(X, 1, 256, 512, 8), Routed(X, 24, 256, 512, 16, 0, 7, weighted=True),
    Routed(X, 64, 256, 512, 64, 2, 5), Launch(N, 16, 512, 640, 3),
]  # fmt: skip
#: Launches whose kernels are run once more for each barrier, wait and fence that is left out.
ORDERED = {11, 20, 25}


def left_out(case: Case, ptx: str, judged: Judged) -> tuple[list[str], int, int]:
    """What nothing notices if it is left out; how many a launch reaches, and of how many."""
    found = [*ORDERS.finditer(ptx)]
    silent, reached = [], 0
    for one in found:
        before, after = ptx[: one.start()], ptx[one.end() :]
        weaker = "ld.global.relaxed" if one[0].startswith("ld") else ""
        other = case.judged(f"{before}{weaker}{after}", "eager", "random:1")
        if other.wrong or other.faults or other.races.keys() - judged.races.keys():
            reached += 1
        elif case.judged(f"{before}trap; {one[0]}{after}", "eager").faults:
            reached += 1
            silent.append(f"  line {ptx.count(chr(10), 0, one.start()) + 1}: {one[0]}")
    return silent, reached, len(found)


def pack(case: Case, ptx: str, into: Path) -> None:
    """Write a launch, whose driver compiles the PTX, for `benchmarks.hopper.run`."""
    into.mkdir(parents=True)
    (into / "kernel.cubin").write_bytes(ptx.encode() + b"\0")
    parameters, arrays = list[Any](), list[str]()
    sizes = [one.size for one in module_of(ptx).kernel(case.kernel).parameters.values()]
    for (name, value), size in zip(case.arguments.items(), sizes, strict=True):
        pointers = []
        if isinstance(value, np.ndarray):
            pointers.append({"memory": len(arrays), "offset": 0, "at": 0})
            (into / f"memory-{len(arrays)}.bin").write_bytes(value.tobytes())
            arrays.append(name)
            value = 0
        parameters.append({"hex": int(value).to_bytes(size, "little").hex(), "pointers": pointers})
    np.save(into / "exact.npy", from_bf16(case.exact).astype(np.float64))
    np.save(into / "bound.npy", np.zeros(case.exact.shape))
    (into / "executor.bin").write_bytes(case.exact.tobytes())
    document = {
        "name": case.name, "entry": case.kernel, "grid": (case.grid, 1, 1),
        "block": (case.threads, 1, 1), "shared": SHARED, "parameters": parameters,
        "memories": len(arrays), "result": {"memory": arrays.index("C"), "offset": 0},
    }  # fmt: skip
    (into / "launch.json").write_text(json.dumps(document))


def main() -> None:
    """Fetch, run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("version")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--arch", type=int, help="80 or 90; default: the newest that a kernel has")
    parser.add_argument("--only", type=int, nargs="*", help="launches by number")
    parser.add_argument("--orders", action="store_true", help="leave out barriers, one at a time")
    parser.add_argument("--pack", type=Path, help="write the launches, and do not run them")
    options = parser.parse_args()
    fetch(options.version, options.work)
    kernels = kernels_of(options.work / options.version, options.arch)
    for number, launch in enumerate(LAUNCHES):
        if options.only and number not in options.only:
            continue
        case = routed(launch, kernels) if isinstance(launch, Routed) else dense(launch, kernels)
        arch, ptx = kernels[case.kernel]
        if options.pack:
            pack(case, ptx, options.pack / f"{number:02}")
            continue
        judged = case.judged(ptx, *SCHEDULES)
        unused = case.unused(ptx, judged.races)
        shown = [race for key, race in judged.races.items() if key not in unused]
        alone = sum(len(race.lines) == 1 for race in shown)
        print(
            f"{number}: {case.name}, sm_{arch}: {judged.wrong} of {case.exact.size} values wrong, "
            f"{len(shown) - alone} races, {alone} uninitialised reads, {len(unused)} of both whose "
            f"values nothing uses, {len(judged.faults)} faults", flush=True,
        )  # fmt: skip
        print(*shown[:9], *judged.faults[:3], sep="\n", end="\n" if shown or judged.faults else "")
        if options.orders and number in ORDERED:
            silent, reached, count = left_out(case, ptx, judged)
            print(f"  of {count} barriers, waits and fences {reached} are reached, and "
                  f"{len(silent)} of these can be left out", flush=True)  # fmt: skip
            print(*silent, sep="\n")


if __name__ == "__main__":
    main()
