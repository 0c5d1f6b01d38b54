"""vLLM's Marlin kernels, from the PTX of a released wheel, in the executor.

    python -m benchmarks.marlin 0.33.0 --work WORK [--orders] [--pack FOLDER]

Reads the modules with Marlin out of vLLM's arm64 wheel on the package index, by range, once.
``cuobjdump`` takes their PTX out, and no GPU is needed.  A GB10 runs machine code of the same
sources where the wheel has some, and this PTX where it has not (docs/kernel-defects.md).  Of the
kernels for FP8 activations there is machine code alone: ``nvcc`` compiles those from the release's
source archive.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.cuda_host import kernels_alone
from benchmarks.cutlass_gemm import numbers, rounded
from benchmarks.mutants import Subject
from builder.common.machinecode import find_tool
from builder.common.pypi import PackageIndex
from builder.common.wheels import RemoteWheel
from builder.compile.sources import release_source
from builder.ptx.api import launch_of, run
from builder.ptx.block import MULTIPROCESSORS
from builder.ptx.machine import E2M1, from_e4m3
from builder.ptx.source import module_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.ptx.findings import FoundRace
    from builder.ptx.memory import GlobalMemory

_MODULE = re.compile(r"vllm/_(?:moe_)?C(?:_stable_libtorch)?\.abi3\.so")
#: Shared memory that a block may ask for on SM12x (CUDA C++ Programming Guide, table of compute
#: capabilities); vLLM asks for all of it.
SHARED = 99 << 10
#: vLLM's numbers of types (``ScalarType.id`` in ``csrc/core/scalar_type.hpp``).
BF16, F16, FE2M1, FE4M3, FE8M0, U4, U4B8, U8B128, S8 = (
    1125899906909960, 1125899906910725, 562949953487106, 2814749767172868, 2814749767106568,
    1125899906843648, 1125899907892224, 1125899923621888, 1125899906909952,
)  # fmt: skip


@dataclass(frozen=True)
class Format:
    """The type of weights and its bits; the type of scales, without one that of the results;
    and the group of values in a column that share one, -1 if all do.
    """

    weights: int
    bits: int
    scales: int | None
    group: int
    #: whether the groups also have a code that is zero
    zeros: bool = False
    #: whether a word has codes of neighbouring columns, as in AWQ, and not of rows
    awq: bool = False
    #: the type of activations of 8 bits, of which each row has a scale
    inputs: int | None = None

    @property
    def scaled_last(self) -> bool:
        """Whether the scale of a column multiplies the sum after it is rounded."""
        return self.group < 0 and self.bits == 4 and not self.inputs

    def groups(self, k: int) -> int:
        """The groups of a column."""
        return 1 if self.group < 0 else k // self.group


FORMATS = {
    "NVFP4": Format(FE2M1, 4, FE4M3, 16), "MXFP4": Format(FE2M1, 4, FE8M0, 32),
    "GPTQ": Format(U4B8, 4, None, 128), "AWQ": Format(U4, 4, None, 128, True, True),
    "GPTQ 8 bits": Format(U8B128, 8, None, 128), "FP8": Format(FE4M3, 8, None, -1),
    "FP8 in blocks": Format(FE4M3, 8, None, 128), "MXFP8": Format(FE4M3, 8, FE8M0, 32),
}  # fmt: skip
#: GPTQ's packing with zero points, which compressed-tensors has.
FORMATS["asymmetric"] = Format(U4, 4, None, 128, zeros=True)
FORMATS |= {f"{one} by column": replace(FORMATS[one], group=-1) for one in ("GPTQ", "AWQ")}
FORMATS["GPTQ 8 bits by column"] = replace(FORMATS["GPTQ 8 bits"], group=-1)
FORMATS["GPTQ by 32"] = replace(FORMATS["GPTQ"], group=32)
INTEGERS = ("GPTQ", "AWQ", "GPTQ by column", "AWQ by column", "GPTQ by 32", "asymmetric")
#: Activations of 8 bits (``VLLM_MARLIN_INPUT_DTYPE``).
FORMATS |= {f"{one} with INT8": replace(FORMATS[one], inputs=S8) for one in INTEGERS}
FORMATS |= {f"{one} with FP8": replace(FORMATS[one], inputs=FE4M3) for one in (*INTEGERS, "MXFP4")}
#: The order in which AWQ packs columns, and Marlin zero points (``marlin_zero_points``).
PACKED = [0, 2, 4, 6, 1, 3, 5, 7]
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
#: The kernels that repack; up to 0.22.1 also with a permutation of the rows.
_REPACK = r"{}_marlin_repack_kernelILi256ELi{}E(?:Lb0E)?Lb{}EEEv"


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


@dataclass(frozen=True)
class Kernels:
    """A release's kernels: the architecture and the PTX of each, by name."""

    version: str
    folder: Path
    texts: dict[str, tuple[int, str]]

    def find(self, pattern: str) -> str:
        """The name of the kernel that fits.

        Raises:
            ValueError: it is not the only one.
        """
        (name,) = (one for one in self.texts if re.search(pattern, one))
        return name

    def marlin(self, tile: Tile, form: Format, *, routed: bool, f16: bool) -> str:
        """The name of a kernel, which is compiled if the wheel has machine code alone."""
        space = "marlin_moe_wna16" if routed else "marlin"
        values = tile.values(form, F16 if f16 else BF16)
        name = f"{len(space)}{space}6MarlinI{mangled(values)}E"
        if form.inputs == FE4M3 and not any(name in one for one in self.texts):
            alone = kernels_alone(self.compiled(space, values))
            self.texts.update((one, (121, text)) for one, text in alone.items())
        return self.find(name)

    def compiled(self, space: str, values: tuple[int | bool, ...]) -> str:
        """A kernel's PTX for SM121, from the release's source."""
        words = [str(one).lower() for one in values]
        file = self.folder / f"{space}-{'-'.join(words)}.sm_121f.cu"
        if not file.with_suffix(".ptx").exists():
            source = release_source(PackageIndex(), self.version).root / "csrc"
            own = source / ("quantization/marlin" if space == "marlin" else f"moe/{space}")
            torch = self.folder / "torch/headeronly/util/Exception.h"
            torch.parent.mkdir(parents=True, exist_ok=True)
            torch.write_text("#define STD_TORCH_CHECK(...)\n")  # of checks that kernels do not have
            file.write_text(
                f'#include "{own}/kernel.h"\n#include "{own}/marlin_template.h"\n'
                f"template __global__ void {space}::Marlin<{', '.join(words)}>\n"
                "(MARLIN_KERNEL_PARAMS);"
            )
            subprocess.run(
                ["nvcc", "-std=c++17", "--expt-relaxed-constexpr", "-arch=compute_121f", "-w",
                 "-ptx", f"-DMARLIN_NAMESPACE_NAME={space}", f"-I{source}", f"-I{self.folder}",
                 "-o", file.with_suffix(".ptx"), file], check=True,
            )  # fmt: skip
        return file.with_suffix(".ptx").read_text("utf-8")


def mangled(values: Sequence[int | bool]) -> str:
    """Arguments of a template, of which the first four are of 64 bits, as names have them."""
    kinds = ["l"] * 4 + ["b" if isinstance(one, bool) else "i" for one in values[4:]]
    words = (f"n{-one}" if one < 0 else int(one) for one in values)
    return "".join(f"L{kind}{one}E" for kind, one in zip(kinds, words, strict=True))


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

    def cache(self, form: Format, *, routed: bool) -> int:
        """Bytes of shared memory that vLLM reckons with (``get_kernel_cache_size``)."""
        rows = -(-self.rows // 16) * 16
        inputs = STAGES * rows * self.depth * (1 if form.inputs else 2)
        weights = STAGES * self.depth * self.columns * form.bits // 8
        sums = rows * (self.columns + 8) * 2
        scales = form.groups(self.depth + form.group - 1) * self.columns * 2 * STAGES
        most = max(weights, sums, min(weights, sums) + self.columns * 2)
        more = scales // 4 if form.zeros else 0
        return most + inputs + scales + more + (16 * rows if routed else 0)

    def values(self, form: Format, results: int) -> tuple[int | bool, ...]:
        """The template's arguments: four types, sizes, and whether zero points are floats."""
        return (
            form.inputs or results, form.weights, results, form.scales or results,
            self.threads, -(-self.rows // 16), self.columns // 16, self.depth // 16,
            self.rows == 8, STAGES, -1 if form.group < 0 else form.group // 16, False,
        )  # fmt: skip


def tiles_of(rows: int, n: int, k: int, form: Format, *, routed: bool) -> list[Tile]:
    """The tiles that vLLM may take, in its order."""
    every = [Tile(rows, *sizes) for sizes in (MANY if rows > 16 else FEW)]
    room = SHARED - 512
    return [
        one
        for one in every
        if not (k % one.depth or n % one.columns) and one.cache(form, routed=routed) <= room
    ]


def tile_of(m: int, n: int, k: int, form: Format, processors: int) -> Tile:
    """The tile that ``marlin_mm`` takes for at most 64 rows, or for a multiple of 64."""
    rows = 8 if m <= 8 and not form.inputs else min(-(-m // 16) * 16, 64)
    tile = tiles_of(rows, n, k, form, routed=False)[0]
    small = Tile(rows, 128, 64, 128)
    few = n // tile.columns * -(-m // rows) * 4 <= processors
    return small if few and not k % 128 else tile


@dataclass(frozen=True)
class Weights:
    """A matrix of ``n`` columns and ``k`` rows as vLLM's kernels take it, and its values."""

    packed: Any
    scales: Any
    #: the scale of the tensor; of INT8 activations, which vLLM multiplies with those of the rows
    factor: Any
    zeros: Any
    values: Any
    #: what multiplies rounded sums, of each column
    last: Any


def permuted(scales: Any) -> Any:
    """``marlin_permute_scales`` for groups; of a byte each, in the order of its dequantisation."""
    blocks = scales.reshape(-1, 8, 8).transpose(0, 2, 1)
    if scales.dtype == np.uint8:
        blocks = blocks.reshape(-1, 4)[:, [0, 2, 1, 3]]
    return np.ascontiguousarray(blocks).reshape(scales.shape)


def permuted_alone(values: Any) -> Any:
    """The same for values of which a column has one."""
    blocks = values.reshape(-1, 4, 4, 2).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(blocks).reshape(values.shape)


def joined(codes: Any, bits: int) -> Any:
    """Codes as words, the first of the last axis in the low bits."""
    per = 32 // bits
    parts = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, per)
    return (parts << np.arange(0, 32, bits, dtype=np.uint32)).sum(-1).astype(np.uint32)


def as_awq(codes: Any) -> Any:
    """Codes of 4 bits of some rows as AWQ packs them."""
    return joined(codes.reshape(len(codes), -1, 8)[..., PACKED].reshape(codes.shape), 4)


def for_fp8(words: Any, zeros: Any, group: int, kernels: Kernels) -> Any:
    """Packed integers, as the release's own kernel prepares them for FP8 activations."""
    out = np.zeros_like(words)
    if zeros is None:
        name, grid, given = kernels.find("fp8_preprocess_kernel_without_zp"), words.size // 32, []
    else:
        k, columns = words.shape
        name, grid = kernels.find("fp8_preprocess_kernel_awq"), (k, -(-columns // 32), 1)
        given = [as_awq(zeros), columns * 8, k, group]
    result = run(kernels.texts[name][1], name, grid, 32, [words, out, *given])
    result.check()
    return result[out]


def repacked(codes: Any, zeros: Any, form: Format, kernels: Kernels) -> Any:
    """Codes of ``n`` columns and ``k`` rows, as the release's own kernel packs them."""
    n, k = codes.shape
    kind = "awq" if form.awq else "gptq"
    words = as_awq(codes.T) if form.awq else np.ascontiguousarray(joined(codes, form.bits).T)
    if form.inputs == FE4M3 and form.weights != FE2M1:  # vLLM tells it of AWQ's zero points alone
        words = for_fp8(words, zeros if form.awq else None, k // form.groups(k), kernels)
    out = np.zeros((k // 16, n * form.bits // 2), np.uint32)
    name = kernels.find(_REPACK.format(kind, form.bits, int(bool(form.inputs))))
    given = [words, 0, out, k, n] if "EEEvPKjS" in name else [words, out, k, n]
    result = run(kernels.texts[name][1], name, MULTIPROCESSORS, 256, given, shared=SHARED)
    result.check()
    return result[out]


def nvfp4(draw: Any, shape: tuple[int, int], *, small: bool, f16: bool) -> tuple[Any, Any, float]:
    """Scales, as numbers and as ``nvfp4_marlin_process_scales`` makes them, and the global one."""
    steps = 8 if small else draw.integers(8, 16, shape)
    exponents = 0 if small else draw.integers(-1, 2, shape)
    real = np.full(shape, steps / 8 * 2.0**exponents)
    # of bfloat16 activations, the largest becomes at most 448 by a power of two
    power = 1.0 if f16 else 2.0 ** np.floor(np.log2(448 / real.max()))
    halves = (real * power * 2**7).astype(np.float16).view(np.uint16)
    bias = (14 if f16 else 126) - 7
    return real * 0.5, permuted((halves << 1 >> 8).astype(np.uint8)), 0.5 * 2.0**bias / power


def codes_of(form: str, draw: Any, n: int, k: int, *, small: bool) -> Any:
    """Random codes; of FP8, those of a column have three exponents, and all columns have all."""
    if small:
        return draw.choice([0, 2, 4, 10, 12], (n, k))
    if FORMATS[form].weights != FE4M3:
        return draw.integers(0, 1 << FORMATS[form].bits, (n, k))
    exponents = np.arange(n)[:, None] % 14 + draw.integers(0, 3, (n, k))
    codes = exponents << 3 | draw.integers(0, 8, (n, k))
    return np.where(codes == 0x7F, 0, codes) | draw.integers(0, 2, (n, k)) << 7


def scales_of(
    launch: Launch | Routed, draw: Any, shape: tuple[int, int], *, small: bool
) -> tuple[Any, Any, float]:
    """Random scales: as numbers, as vLLM gives them to the kernel, and that of the tensor."""
    form, columns = FORMATS[launch.form], np.arange(launch.n)
    if form.scales == FE4M3:
        return nvfp4(draw, shape, small=small, f16=launch.f16)
    if form.weights == FE4M3:  # such that all columns have values of about the same size
        steps = 1 if form.scales else draw.integers(4, 8, shape) / 4
        real = np.full(shape, steps * 2.0 ** (7 - columns % 14))
    elif form.scales == FE8M0:
        real = 2.0 ** draw.integers(-2, 3, shape)
    elif form.bits == 8:
        real = 2.0 ** draw.integers(-3, 1, shape)
    else:
        signs = draw.choice([-1, 1], shape) if launch.signed else 1
        real = signs * draw.integers(4, 8, shape) / 4
    order = permuted_alone if form.group < 0 or form.inputs else permuted
    plain = 1.0 if form.inputs else 0.0
    if form.scales == FE8M0:  # of codes that are FP8 without its other exponent bias
        return real, order((np.log2(real) + 127 + 6 * plain).astype(np.uint8)), plain
    if form.inputs == S8 and len(real) > 1:  # ``marlin_act_int8_process_scales``
        real.flat[0] = 2.0
        return real, order((real * 2048).astype(np.int16).view(np.uint16)), 2.0 / 4096
    # ``fp8_fused_exponent_bias_into_scales``; codes for FP8 are subnormal
    bias = (8 if launch.f16 else 120) if form.weights == FE4M3 else 9 if form.inputs == FE4M3 else 0
    return real, order(rounded(real * 2.0**bias, f16=launch.f16)), plain


def weights_of(
    launch: Launch | Routed, kernels: Kernels, seed: int, *, small: bool = False
) -> Weights:
    """Random weights, repacked by the release's kernel; ``small``: of few bits, with one scale."""
    form, n, k, draw = FORMATS[launch.form], launch.n, launch.k, np.random.default_rng(seed)
    shape = form.groups(k), n
    codes = codes_of(launch.form, draw, n, k, small=small)
    real, scales, factor = scales_of(launch, draw, shape, small=small)
    zeros = draw.integers(0, 16 if form.zeros else 1, shape)
    plain = {FE2M1: E2M1[codes % 16], FE4M3: from_e4m3(codes.astype(np.uint8))}
    values = plain.get(form.weights, codes - {U4B8: 8.0, U8B128: 128.0}.get(form.weights, 0.0))
    last = real if form.scaled_last else np.ones_like(real)
    spread, offset = (np.repeat(one.T, k // shape[0], 1) for one in (real / last, zeros))
    return Weights(
        repacked(codes, zeros, form, kernels), scales, np.full(1, factor, np.float32),
        packed_zeros(permuted(zeros), form), (values - offset) * spread, last[0],
    )  # fmt: skip


def packed_zeros(zeros: Any, form: Format) -> Any:
    """``marlin_zero_points``, of zero points in their order."""
    if not form.zeros:
        return 0
    return joined(zeros, 4) if form.inputs else as_awq(zeros)


@dataclass(frozen=True)
class Rows:
    """Activations: integers and their bits; of 8 bits also the scales of rows, in two factors."""

    values: Any
    bits: Any
    powers: Any = 1.0
    odd: Any = 1

    @classmethod
    def drawn(cls, launch: Launch | Routed, m: int, draw: Any) -> Rows:
        """Random ones."""
        form, shape = FORMATS[launch.form], (m, launch.k)
        if not form.inputs:
            values = draw.integers(-4, 5, shape).astype(np.float64)
            return cls(values, rounded(values, f16=launch.f16))
        scales = 2.0 ** -draw.integers(2, 6, (m, 1)), draw.choice([1, 3], (m, 1))
        if form.inputs == S8:
            values = draw.integers(-127, 128, shape)
            return cls(values.astype(np.float64), values.astype(np.int8), *scales)
        codes = np.arange(256, dtype=np.uint8)
        whole = codes[(from_e4m3(codes) % 1 == 0) & (np.abs(from_e4m3(codes)) <= 60)]
        bits = draw.choice(whole, shape)
        return cls(from_e4m3(bits).astype(np.float64), bits, *scales)

    def scales_for(self, weights: Weights, form: Format) -> Any:
        """The scales that a kernel gets; 0 for activations of 16 bits."""
        scales = self.powers * self.odd * weights.factor
        return scales.astype(np.float32) if form.inputs else 0

    def product(self, weights: Weights, launch: Launch | Routed) -> Any:
        """With exact sums, as it is before a bias; and of which scales are left behind."""
        exact = exact_product(self.values * self.odd, weights.values) * self.powers
        if not FORMATS[launch.form].scaled_last:
            return exact
        return numbers(rounded(exact, f16=launch.f16), f16=launch.f16) * weights.last


def exact_product(rows: Any, weights: Any) -> Any:
    """A product whose sums are exact in float32, in any order, of rows of integers.

    Raises:
        ValueError: they are not.
    """
    steps = np.ones(len(weights))
    while (weights * steps[:, None] % 1).any():
        steps[(weights * steps[:, None] % 1).any(1)] *= 2
    if ((np.abs(rows) @ np.abs(weights.T)) * steps).max() >= 2**24:
        raise ValueError("sums of these operands are not exact")
    return rows @ weights.T


@dataclass(frozen=True)
class Judged:
    """What a launch showed in several schedules."""

    wrong: int
    races: dict[Any, FoundRace]
    #: what did not end, or left a lock
    faults: list[str]


@dataclass(frozen=True)
class Case:
    """A launch, the arrays that it changes, and the exact result as bits of bfloat16 or float16."""

    name: str
    kernel: str
    grid: int
    threads: int
    arguments: dict[str, Any]
    exact: Any
    f16: bool = False

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

    def subject(self, ptx: str) -> Subject:
        """For mutants: the launch with a kernel's PTX."""
        given, name = self.arguments, self.kernel
        file, arrays = launch_of(ptx, name, self.grid, self.threads, given, shared=SHARED)
        result, locks = (
            next(n for n, one in enumerate(arrays) if one is given[word]) for word in ("C", "locks")
        )

        def check(memory: GlobalMemory) -> int:
            values = memory.regions[result].data.view(np.uint16).reshape(self.exact.shape)
            return int((values != self.exact).sum()) + int(memory.regions[locks].data.any())

        return Subject(self.name, file, check)

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
    #: activations and results in float16
    f16: bool = False
    #: half of the scales negative, as AutoRound makes them
    signed: bool = False

    def __str__(self) -> str:
        """The row's name."""
        every = ("atomic", "bias", "halves", "f16", "signed")
        words = [word for word in every if getattr(self, word)]
        return f"{self.form} {self.m}x{self.n}x{self.k}, {self.processors} blocks {' '.join(words)}"


def dense(launch: Launch, kernels: Kernels) -> Case:
    """A launch of ``marlin_gemm``."""
    form, m, n, k = FORMATS[launch.form], launch.m, launch.n, launch.k
    small, types = launch.atomic or launch.halves, {"f16": launch.f16}
    weights = weights_of(launch, kernels, 1, small=small)
    draw = np.random.default_rng(2)
    rows = Rows.drawn(launch, m, draw)
    if small:  # every part of a sum is exact in bfloat16
        a = np.where(draw.random((m, k)) < 32 / k, np.sign(rows.values), 0.0)
        assert (np.abs(a) @ np.abs(weights.values.T)).max() <= 128
        rows = Rows(a, rounded(a, **types))
    exact = rows.product(weights, launch)
    bias = draw.integers(-32, 33, n).astype(np.float64)
    if launch.bias:
        exact = numbers(rounded(exact, **types), **types) + bias
    tile = tile_of(m, n, k, form, launch.processors)
    kernel = kernels.marlin(tile, form, routed=False, f16=launch.f16)
    arguments: dict[str, Any] = {
        "A": rows.bits, "B": weights.packed, "C": np.full((m, n), 0x7FC0, np.uint16),
        "C_tmp": np.full((launch.processors, min(-(-m // 16) * 16, 64) * 256), np.nan, np.float32),
        "bias": permuted_alone(rounded(bias, **types)) if launch.bias else 0,
        "a_scales": rows.scales_for(weights, form), "scales": weights.scales,
        "global_scale": weights.factor,
        "zeros": weights.zeros, "m": m, "n": n, "k": k, "lda": k,
        "locks": np.zeros(launch.processors, np.int32), "has_bias": launch.bias,
        "atomic": launch.atomic, "fp32": not launch.halves, "shared": SHARED,
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
    f16: bool = False
    signed: bool = False

    def __str__(self) -> str:
        """The row's name."""
        sizes = f"{self.tokens}x{self.n}x{self.k}, {self.processors} blocks"
        words = "".join(f" {word}" for word in ("f16", "signed") if getattr(self, word))
        return f"{self.form} experts {'down' if self.weighted else 'up'} {sizes}{words}"


EXPERTS = 4


def case_of(
    launch: Launch | Routed, tile: Tile, kernel: str, arguments: dict[str, Any], exact: Any
) -> Case:
    """A launch with its arguments as the release's kernel takes them."""
    name = f"{launch}, tile {tile.rows}x{tile.columns}x{tile.depth}"
    given = guarded(kernel, arguments, FORMATS[launch.form].groups(launch.k))
    bits = rounded(exact, f16=launch.f16)
    return Case(name, kernel, launch.processors, tile.threads, given, bits, launch.f16)


def routed(launch: Routed, kernels: Kernels) -> Case:
    """A launch of ``moe_wna16_marlin_gemm``: expert 2 of 4 has no token."""
    form, n, k, rows = FORMATS[launch.form], launch.n, launch.k, launch.rows
    every = [weights_of(launch, kernels, 5 + e) for e in range(EXPERTS)]
    draw = np.random.default_rng(4)
    given, tokens = Rows.drawn(launch, launch.tokens, draw), range(launch.tokens)
    chosen = np.stack([draw.permutation([0, 1, 3])[: launch.top_k] for _ in tokens]).reshape(-1)
    pairs = len(chosen)
    order, owners = list[int](), list[int]()
    for expert in range(EXPERTS):
        own = np.flatnonzero(chosen == expert).tolist()
        own += [pairs] * (-len(own) % rows)
        order += own
        owners += [expert] * (len(own) // rows)
    share = draw.integers(1, 4, pairs) / 4.0
    products = [given.product(one, launch) for one in every]
    exact = np.stack([products[e][pair // launch.top_k] for pair, e in enumerate(chosen)])
    if launch.weighted:
        exact = numbers(rounded(exact, f16=launch.f16), f16=launch.f16) * share[:, None]
    tile = tiles_of(rows, n, k, form, routed=True)[launch.tile]
    kernel = kernels.marlin(tile, form, routed=True, f16=launch.f16)
    room = min(n * len(order), launch.processors * 4 * rows * 256) * (2 if rows == 8 else 1)
    arguments: dict[str, Any] = {
        "A": given.bits, "B": np.stack([one.packed for one in every]),
        "C": np.full((pairs, n), 0x7FC0, np.uint16), "C_tmp": np.full(room, np.nan, np.float32),
        "bias": 0, "a_scales": given.scales_for(every[0], form),
        "scales": np.stack([one.scales for one in every]),
        "global_scale": np.concatenate([one.factor for one in every]),
        "zeros": np.stack([one.zeros for one in every]) if form.zeros else 0,
        "order": np.array(order, np.int32), "owners": np.array(owners, np.int32),
        "padded": np.array([len(order)], np.int32), "share": share.astype(np.float32),
        "top_k": launch.top_k, "weighted": launch.weighted, "m": launch.tokens, "n": n, "k": k,
        "locks": np.zeros(launch.processors * 4, np.int32), "has_bias": False, "atomic": False,
        "fp32": True,
    }  # fmt: skip
    return case_of(launch, tile, kernel, arguments, exact)


N, X, G, A, E, F, B, M, *OTHERS = FORMATS
#: Launches of each other format; the first two also of float16 results.
SHAPES: list[Launch | Routed] = [
    Launch(A, 16, 256, 640, 3), Routed(A, 24, 256, 256, 16, 0, 7, weighted=True),
    Launch(A, 1, 256, 512, 16), Launch(A, 64, 256, 256, 3, bias=True),
    Routed(A, 64, 256, 256, 48, 0, 5),
]  # fmt: skip
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
    *(replace(one, form=form) for form in (A, E, F, B, M) for one in SHAPES),
    *(replace(one, form=form, f16=True) for form in (N, G, A, E, F, B) for one in SHAPES[:2]),
    *(replace(one, form=form) for form in OTHERS for one in SHAPES),
    *(replace(one, form=form, f16=True) for form in OTHERS[:-1] for one in SHAPES[:2]),
    *(
        replace(one, form=form, signed=True)
        for form in (G, f"{G} with INT8", f"{G} with FP8") for one in SHAPES[:2]
    ),
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
    np.save(into / "exact.npy", numbers(case.exact, f16=case.f16))
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
    parser.add_argument("--mutants", type=int, default=0, help="of how many to see what is seen")
    options = parser.parse_args()
    fetch(options.version, options.work)
    folder = options.work / options.version
    kernels = Kernels(options.version, folder, kernels_of(folder, options.arch))
    for number, launch in enumerate(LAUNCHES):
        if options.only and number not in options.only:
            continue
        case = routed(launch, kernels) if isinstance(launch, Routed) else dense(launch, kernels)
        arch, ptx = kernels.texts[case.kernel]
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
        if options.mutants:
            case.subject(ptx).show(options.mutants)
        if options.orders and number in ORDERED:
            silent, reached, count = left_out(case, ptx, judged)
            print(f"  of {count} barriers, waits and fences {reached} are reached, and "
                  f"{len(silent)} of these can be left out", flush=True)  # fmt: skip
            print(*silent, sep="\n")


if __name__ == "__main__":
    main()
