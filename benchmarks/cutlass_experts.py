"""FlashInfer's CUTLASS experts for SM12x, compiled from the wheel's sources, in the executor.

    python -m benchmarks.cutlass_experts FLASHINFER --work WORK [--include FOLDER]
        [--tile 128x128x64] [--mx] [--half]

As `cutlass_gemm`, but all of ``CutlassMoeFCRunner::runMoe``, which vLLM calls by default on SM12x:
routing sort, expansion of rows with their scales, the grouped GEMM's pointers and strides, gate and
up, activation with quantisation, down, and the sum of a token's experts.  The launches are those of
FlashInfer's host code, in its order and on its workspace, which `cuda_host.cpp` prints.  A tile is
named as FlashInfer does, with its depth in bytes.  It takes ten minutes to compile.

Each launch is judged by what it read: by exact values, rounded once, or, where the kernel rounds
sums of many terms, by the values around them.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.cuda_host import Built, Compiler, add_options, placed
from benchmarks.cutlass_gemm import (
    CODES,
    GROUP,
    SCALES,
    numbers,
    packed,
    rounded,
    show_unnoticed,
    tiled,
    ue4m3,
    unpacked,
    untiled,
)
from benchmarks.mutants import Subject
from builder.ptx.block import MULTIPROCESSORS
from builder.ptx.launchfile import Array, LaunchFile
from builder.ptx.machine import E2M1, UE4M3, from_e4m3
from builder.ptx.runs import program_of, run_once, schedules_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from builder.ptx.memory import GlobalMemory

#: What ``gen_cutlass_fused_moe_sm120_module`` adds to the flags of all modules.
FLAGS = (
    "-DCOMPILE_BLACKWELL_TMA_GEMMS", "-DCOMPILE_BLACKWELL_SM120_TMA_GROUPED_GEMMS", "-DENABLE_FP8",
    "-DUSING_OSS_CUTLASS_MOE_GEMM",
)  # fmt: skip
_INTERNAL = "csrc/nv_internal/tensorrt_llm"
INCLUDES = (
    f"{_INTERNAL}/cutlass_extensions/include", f"{_INTERNAL}/kernels/cutlass_kernels/include",
    f"{_INTERNAL}/kernels/cutlass_kernels",
)  # fmt: skip
#: FlashInfer's sources that the host code needs beside the headers.
SOURCES = (
    *(f"csrc/nv_internal/cpp/common/{name}.cpp"
      for name in ("tllmException", "logger", "stringUtils", "envUtils")),
    f"{_INTERNAL}/kernels/cutlass_kernels/cutlass_heuristic.cpp",
    f"{_INTERNAL}/kernels/cutlass_kernels/moe_gemm/moe_gemm_tma_warp_specialized_input.cu",
)  # fmt: skip
#: Scales of operands whose results half can hold.
SMALL_SCALES = np.arange(-1, 1)
#: The error of a float32 sum, by the sum of its terms' sizes: more than 16 roundings of them.
SUMS = 2.0**-20
#: FlashInfer's numbers of activations (``ActivationType``).
ACTIVATIONS = {"swiglu": 3, "relu2": 6}
#: Bytes of E4M3 with the values of E2M1.
E4M3_OF_E2M1 = np.array([
    0, 0x30, 0x38, 0x3C, 0x40, 0x44, 0x48, 0x4C, 0x80, 0xB0, 0xB8, 0xBC, 0xC0, 0xC4, 0xC8, 0xCC,
], np.uint8)  # fmt: skip
#: Rows and columns that scales are padded to.
ROWS, COLUMNS = 128, 4


@dataclass(frozen=True)
class Types:
    """What a build computes with: NVFP4, or MXFP4 for weights and MXFP8 for activations; and
    bfloat16 or half for results.
    """

    mx: bool = False
    half: bool = False

    def __str__(self) -> str:
        """For the names of folders."""
        return f"{'-mx' if self.mx else ''}{'-half' if self.half else ''}"

    @property
    def group(self) -> int:
        """Values that have one scale."""
        return 32 if self.mx else GROUP

    def flags(self) -> list[str]:
        """Of the compiler."""
        return [*(["-DMX"] if self.mx else []), *(["-DHALF"] if self.half else [])]

    def scales(self, powers: Any) -> Any:
        """Powers of two as bytes: UE8M0 or UE4M3."""
        return powers + 127 if self.mx else ue4m3(powers)

    def sizes(self, scales: Any) -> Any:
        """Such bytes as numbers."""
        return 2.0 ** (scales.astype(np.float64) - 127) if self.mx else UE4M3[scales]

    def rows(self, codes: Any) -> bytes:
        """Activations, drawn as codes of E2M1, as the call gets them: E4M3, or two a byte."""
        return E4M3_OF_E2M1[codes].tobytes() if self.mx else packed(codes)

    def numbers(self, codes: Any) -> Any:
        """Codes of activations as numbers."""
        return from_e4m3(codes).astype(np.float64) if self.mx else E2M1[codes]

    def bits(self, values: Any) -> Any:
        """Numbers as results, rounded once."""
        return rounded(values, f16=self.half)

    def results(self, bits: Any) -> Any:
        """Bits of results as numbers."""
        return numbers(bits, f16=self.half)


def build(compiler: Compiler, flashinfer: Path, tile: str, types: Types) -> Built:
    """Compile for a tile what was not compiled yet."""
    own, data = Path(__file__).with_suffix(".cu"), flashinfer / "data"
    m, n, depth = map(int, tile.split("x"))
    k = depth * (1 if types.mx else 2)
    more, name = types.flags(), f"{tile}{types}"
    sizes = (f"-DTILE_M={m}", f"-DTILE_N={n}", f"-DTILE_K={k}", "-DPART=3")
    objects = [
        compiler.compiled(name, own, *sizes, *more),
        *(compiler.compiled(f"part-{n}{types}", own, f"-DPART={n}", *more) for n in (2, 1, 0)),
        *(compiler.compiled("host", data / one) for one in SOURCES),
    ]
    return compiler.linked(name, objects)


# ------------------------------------------------------------------------------------- operands


@dataclass(frozen=True)
class Setup:
    """What is called: sizes, which experts each token has, and how."""

    tokens: int
    hidden: int
    inter: int
    experts: int
    top_k: int
    packed: bool = True
    swapped: bool = False
    finalize: bool = False
    activation: str = "swiglu"
    processors: int = MULTIPROCESSORS
    types: Types = Types()

    def __str__(self) -> str:
        """The setup as a line."""
        words = [
            f"{self.tokens} tokens", f"{self.top_k} of {self.experts} experts",
            f"{self.hidden}x{self.inter}", self.activation,
            "" if self.packed else "bf16 input", "swapped" if self.swapped else "",
            "fused sum" if self.finalize else "",
            f"{self.processors} multiprocessors" if self.processors != MULTIPROCESSORS else "",
        ]  # fmt: skip
        return ", ".join(filter(None, words))

    @property
    def wide(self) -> int:
        """Columns of the first GEMM."""
        return self.inter * (2 if self.activation == "swiglu" else 1)


@dataclass(frozen=True)
class Quantised:
    """Rows of codes with the powers of two of their blocks."""

    codes: Any
    powers: Any

    @property
    def values(self) -> Any:
        """As numbers."""
        group = self.codes.shape[-1] // self.powers.shape[-1]
        return E2M1[self.codes] * np.repeat(2.0**self.powers, group, -1)


def drawn(draw: Any, *shape: int, scales: Any = SCALES, group: int = GROUP) -> Quantised:
    """Random rows."""
    return Quantised(
        draw.choice(CODES, shape), draw.choice(scales, (*shape[:-1], shape[-1] // group))
    )


class Operands:
    """The memory of a call, and its values."""

    def __init__(self, setup: Setup) -> None:
        draw, self.setup = np.random.default_rng(5), setup
        # what half holds is smaller
        half, group = setup.types.half, setup.types.group
        scales = SMALL_SCALES if half else SCALES
        self.x = drawn(draw, setup.tokens, setup.hidden, scales=scales, group=group)
        self.w1 = drawn(draw, setup.experts, setup.wide, setup.hidden, scales=scales, group=group)
        # gates are multiples of 32, for which silu(x) is x or 0 in float32
        if setup.activation == "swiglu":
            self.w1.powers[:, setup.inter :] += 10 if half else 6
            self.w1.powers[:, : setup.inter] -= 4 if half else 0
        self.w2 = drawn(draw, setup.experts, setup.hidden, setup.inter, scales=scales, group=group)
        self.alpha1 = 2.0 ** (draw.integers(6, 8, setup.experts) - (9 if half else 0))
        self.alpha2 = 2.0 ** -(draw.integers(1, 3, setup.experts) + (6 if half else 0))
        if setup.types.mx:
            # FlashInfer takes a scale for each expert here, but does not use it; vLLM gives 1
            self.w1.powers[:] += np.log2(self.alpha1).astype(int)[:, None, None]
            self.w2.powers[:] += np.log2(self.alpha2).astype(int)[:, None, None]
            self.alpha1, self.alpha2 = np.ones_like(self.alpha1), np.ones_like(self.alpha2)
        self.ids = self._chosen(draw)
        self.weights = draw.choice([0.25, 0.5, 0.75, 1.0], self.ids.shape).astype(np.float32)
        self.global1, self.global2 = 2.0, self._largest_scale()

    def _largest_scale(self) -> float:
        """The power of two with which the activations' scales still fit into E4M3."""
        largest = 1.0
        for token, experts in zip(self.x.values, self.ids, strict=True):
            for expert in experts:
                result = 2 * self.alpha1[expert] * self.w1.values[expert] @ token
                largest = max(largest, np.abs(activation(result[None], self.setup)).max())
        return float(2.0 ** np.floor(np.log2(448 * 6 / largest)))

    def _chosen(self, draw: Any) -> Any:
        """Experts: 0 is everybody's first, the last but one has one token, and the last none."""
        setup = self.setup
        ids = np.zeros((setup.tokens, setup.top_k), np.int32)
        for row in ids:
            row[1:] = draw.permutation(np.arange(1, setup.experts - 2))[: setup.top_k - 1]
        ids[-1, -1] = setup.experts - 2
        return ids

    @cached_property
    def contents(self) -> dict[str, bytes]:
        """The arrays that the call gets, in the order of the program's addresses."""
        setup, one, types = self.setup, np.float32, self.setup.types
        given = types.rows(self.x.codes)
        if not setup.packed:
            given = types.bits(self.x.values).tobytes()
        return {
            "out": np.full((setup.tokens, setup.hidden), 0x7FC0, np.uint16).tobytes(),
            "x": given, "x scales": tiled(types.scales(self.x.powers)),
            "chosen": self.ids.tobytes(), "weights": self.weights.tobytes(),
            "w1": b"".join(map(packed, self.w1.codes)), "w2": b"".join(map(packed, self.w2.codes)),
            "a1 scale": one(self.global1).tobytes(),
            "w1 scales": b"".join(map(tiled, types.scales(self.w1.powers))),
            "alpha1": self.alpha1.astype(one).tobytes(), "a2 scale": one(self.global2).tobytes(),
            "w2 scales": b"".join(map(tiled, types.scales(self.w2.powers))),
            "alpha2": self.alpha2.astype(one).tobytes(),
        }  # fmt: skip


# ------------------------------------------------------------------------------------- launches


@dataclass(frozen=True)
class Call:
    """The launches of a call, in order, and its memory."""

    operands: Operands
    launches: tuple[LaunchFile, ...]
    memory: tuple[Array, ...]


def call_of(built: Built, setup: Setup) -> Call:
    """What FlashInfer's host code launches."""
    operands = Operands(setup)
    memory = placed(operands.contents, "out")
    places = 1 << 32, 1 << 36
    words = [
        "packed" if setup.packed else "bf16", setup.tokens, setup.hidden, setup.inter,
        setup.experts, setup.top_k, built.program.parent.name.partition("-")[0],
        "swapped" if setup.swapped else "plain", "finalize" if setup.finalize else "apart",
        ACTIVATIONS[setup.activation], *(one.address for one in memory), *places,
    ]  # fmt: skip
    room, *lines = built.printed(words, setup.processors)
    # what is not written has no value: all ones are NaN in every format
    sizes = {"workspace": room["workspace"], "rows": setup.tokens * setup.top_k * 4}
    for (name, size), place in zip(sizes.items(), places, strict=True):
        memory.append(Array(name, place, b"\xff" * size, True, "u8", (size,)))
    every = tuple(memory)
    launches = tuple(built.launch(str(setup), line, every) for line in lines)
    return Call(operands, launches, every)


#: Launches by a part of their kernel's name.
NAMES = {
    "ExpertMaps": "routing sort", "expandInput": "expansion", "Strides": "pointers and strides",
    "LinearCombination": "GEMM", "Scatter": "GEMM and sum", "Activation": "activation",
    "finalize": "sum of experts",
}  # fmt: skip
SETUPS = (
    Setup(1, 256, 256, 6, 2), Setup(5, 320, 192, 6, 2, packed=False, processors=4),
    Setup(24, 256, 256, 6, 2, finalize=True, processors=4),
    Setup(64, 320, 192, 8, 4, activation="relu2", processors=4),
    Setup(160, 256, 192, 6, 2, processors=3),
    Setup(1, 256, 256, 6, 2, swapped=True, processors=4),
    Setup(24, 320, 192, 6, 2, packed=False, swapped=True, processors=3),
    Setup(64, 320, 192, 8, 4, swapped=True, finalize=True, activation="relu2", processors=4),
    Setup(160, 256, 192, 6, 2, swapped=True, processors=4),
)  # fmt: skip
#: MXFP4 takes multiples of 128.
MX_SETUPS = (
    Setup(1, 256, 256, 6, 2), Setup(24, 256, 384, 6, 2, finalize=True, processors=4),
    Setup(64, 384, 128, 8, 4, activation="relu2", processors=4),
    Setup(160, 256, 256, 6, 2, processors=3),
    Setup(1, 256, 256, 6, 2, swapped=True, processors=4),
    Setup(64, 384, 128, 8, 4, swapped=True, finalize=True, activation="relu2", processors=4),
    Setup(160, 256, 256, 6, 2, swapped=True, processors=4),
)  # fmt: skip
#: Of these, barriers are left out: each block has more tiles than the scheduler's eight places.
SMALL = (
    Setup(40, 512, 256, 6, 2, processors=2),
    Setup(40, 512, 256, 6, 2, swapped=True, finalize=True, processors=2),
)


# --------------------------------------------------------------------------------------- checks


def padded(size: int, unit: int) -> int:
    """A size as a multiple of a unit."""
    return -(-size // unit) * unit


def off(bits: Any, exact: Any, error: Any = 0.0, types: Types = Types()) -> int:
    """How many results are not a number within the error, rounded."""
    low, high = (types.results(types.bits(exact + sign * error)) for sign in (-1, 1))
    numbers = types.results(bits)
    return int((~((numbers >= low) & (numbers <= high))).sum())


@dataclass(frozen=True)
class Checks:
    """What each launch should leave, by what it read."""

    operands: Operands
    launches: tuple[LaunchFile, ...]

    @property
    def _types(self) -> Types:
        return self.operands.setup.types

    def of(self, number: int) -> Any:
        """The check of a launch: a function from the memory after it to the wrong values."""
        kernel = self.launches[number].kernel
        gemms = [n for n, one in enumerate(self.launches) if "device_kernel" in one.kernel]
        for part, check in (
            ("ExpertMaps", self.sorted), ("expandInput", self.expanded),
            ("Activation", self.activated), ("finalize", self.summed),
        ):  # fmt: skip
            if part in kernel:
                return check
        if number in gemms:
            return (self.up, self.down)[gemms.index(number)]
        return lambda _memory: 0

    def _pointer(self, part: str, place: int) -> int:
        (launch,) = (one for one in self.launches if part in one.kernel)
        return int.from_bytes(launch.parameters[place], "little")

    def _read(self, memory: GlobalMemory, at: int, kind: Any, *shape: int) -> Any:
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        region = memory.find(at, at + size)
        return region.data[at - region.address :][:size].view(kind).reshape(shape)

    def rows(self, memory: GlobalMemory) -> tuple[Any, Any, Any]:
        """By row of the sorted ones: its place among token and choice, token and expert."""
        ids = self.operands.ids
        count = ids.size
        places = self._read(memory, self._pointer("ExpertMaps", 1), np.int32, count)
        tokens, choices = places % len(ids), places // len(ids) % ids.shape[1]
        return places, tokens, ids[tokens, choices]

    def sorted(self, memory: GlobalMemory) -> int:
        """Rows are sorted by expert, each once, and both maps and the counts agree."""
        ids, setup = self.operands.ids, self.operands.setup
        places, _, experts = self.rows(memory)
        back = self._read(memory, self._pointer("ExpertMaps", 2), np.int32, ids.size)
        first = self._read(memory, self._pointer("ExpertMaps", 3), np.int64, setup.experts + 1)
        counts = np.bincount(ids.reshape(-1), minlength=setup.experts)
        wrong = int((np.sort(places) != np.arange(ids.size)).sum())
        wrong += int((np.diff(experts) < 0).sum())
        wrong += int((back[places % ids.size] != np.arange(ids.size)).sum())
        return wrong + int((first != np.concatenate([[0], counts.cumsum()])).sum())

    def _quantised(self, memory: GlobalMemory, codes: int, scales: int, width: int) -> Any:
        """Codes of sorted rows, and the bytes of their scales."""
        _, _, experts = self.rows(memory)
        types = self._types
        pairs = self._read(memory, codes, np.uint8, len(experts), width // (1 if types.mx else 2))
        columns = padded(width // types.group, COLUMNS)
        blocks = np.empty((len(experts), columns), np.uint8)
        first = 0
        for expert in range(self.operands.setup.experts):
            mine = experts == expert
            high = padded(int(mine.sum()), ROWS)
            start = padded(first + expert * (ROWS - 1), ROWS) * columns
            if high:
                tiles = self._read(memory, scales + start, np.uint8, high * columns)
                blocks[mine] = untiled(tiles, columns)[: int(mine.sum())]
            first += int(mine.sum())
        every = pairs if types.mx else unpacked(pairs)
        return every, blocks[:, : width // types.group]

    def _input(self, memory: GlobalMemory) -> Any:
        codes, scales = (self._pointer("expandInput", place) for place in (1, 12))
        return self._quantised(memory, codes, scales, self.operands.setup.hidden)

    def _hidden(self, memory: GlobalMemory) -> Any:
        codes, scales = (self._pointer("Activation", place) for place in (0, 11))
        return self._quantised(memory, codes, scales, self.operands.setup.inter)

    def expanded(self, memory: GlobalMemory) -> int:
        """Each row is its token's: as it was, or quantised."""
        _, tokens, _ = self.rows(memory)
        codes, scales = self._input(memory)
        x, types = self.operands.x, self._types
        if not self.operands.setup.packed:
            return badly_quantised(x.values[tokens], self.operands.global1, codes, scales)
        given = E4M3_OF_E2M1[x.codes] if types.mx else x.codes
        wrong = int((scales != types.scales(x.powers[tokens])).sum())
        return wrong + int((codes != given[tokens]).sum())

    def _product(self, given: Any, weights: Quantised, alpha: Any, experts: Any) -> tuple[Any, Any]:
        """Exact products of sorted rows, and the sum of their terms' sizes."""
        types = self._types
        scales = np.repeat(types.sizes(given[1]), types.group, 1)
        values = types.numbers(given[0]) * scales
        every = [weights.values[expert].T for expert in experts]
        exact = [alpha[e] * row @ one for e, row, one in zip(experts, values, every, strict=True)]
        size = [
            alpha[e] * np.abs(row) @ np.abs(one)
            for e, row, one in zip(experts, values, every, strict=True)
        ]
        return np.array(exact), np.array(size)

    def up(self, memory: GlobalMemory) -> int:
        """The first GEMM; of packed rows, its sums are exact."""
        one, setup = self.operands, self.operands.setup
        _, _, experts = self.rows(memory)
        exact, size = self._product(self._input(memory), one.w1, one.alpha1, experts)
        result = self._read(memory, self._pointer("Activation", 1), np.uint16, *exact.shape)
        return off(result, exact, 0 if setup.packed else size * SUMS, self._types)

    def activated(self, memory: GlobalMemory) -> int:
        """The activation of what the first GEMM left, rounded to bfloat16 and quantised."""
        one, setup = self.operands, self.operands.setup
        shape = one.ids.size, setup.wide
        bits = self._read(memory, self._pointer("Activation", 1), np.uint16, *shape)
        result = activation(self._types.results(bits), setup)
        if self._types.mx:
            return badly_scaled(result, *self._hidden(memory))
        return badly_quantised(result, one.global2, *self._hidden(memory))

    def down(self, memory: GlobalMemory) -> int:
        """The second GEMM; or its weighted sum over the experts of each token."""
        one, setup = self.operands, self.operands.setup
        places, tokens, experts = self.rows(memory)
        exact, size = self._product(self._hidden(memory), one.w2, one.alpha2, experts)
        if not setup.finalize:
            result = self._read(memory, self._pointer("finalize", 0), np.uint16, *exact.shape)
            return off(result, exact, size * SUMS, self._types)
        share = one.weights[tokens, places // setup.tokens][:, None]
        total, room = (np.zeros((setup.tokens, setup.hidden)) for _ in range(2))
        np.add.at(total, tokens, exact * share)
        np.add.at(room, tokens, size * share * SUMS + np.abs(exact) * share * setup.top_k / 2**8)
        return off(self._out(memory), total, room, self._types)

    def _out(self, memory: GlobalMemory) -> Any:
        setup = self.operands.setup
        return memory.regions[0].data.view(np.uint16).reshape(setup.tokens, setup.hidden)

    def summed(self, memory: GlobalMemory) -> int:
        """The weighted sum of what the second GEMM left."""
        one, setup = self.operands, self.operands.setup
        places, tokens, _ = self.rows(memory)
        shape = one.ids.size, setup.hidden
        bits = self._read(memory, self._pointer("finalize", 0), np.uint16, *shape)
        terms = self._types.results(bits) * one.weights[tokens, places // setup.tokens][:, None]
        total, size = (np.zeros((setup.tokens, setup.hidden)) for _ in range(2))
        np.add.at(total, tokens, terms)
        np.add.at(size, tokens, np.abs(terms))
        return off(self._out(memory), total, size * SUMS, self._types)


def activation(values: Any, setup: Setup) -> Any:
    """Of the first GEMM's columns: up and gate, or up alone; rounded."""
    if setup.activation == "relu2":
        result = np.maximum(values, 0) ** 2
    else:
        gate = values[:, setup.inter :]
        result = values[:, : setup.inter] * gate / (1 + np.exp(-np.clip(gate, -500, 500)))
    return setup.types.results(setup.types.bits(result))


def badly_scaled(values: Any, codes: Any, blocks: Any) -> int:
    """How many scales are not the power of two above a block's largest value by E4M3's, and how
    many codes not the nearest; MXFP8.
    """
    group = values.shape[1] // blocks.shape[1]
    largest = np.abs(values).reshape(len(values), -1, group).max(-1)
    with np.errstate(divide="ignore"):
        power = np.log2(largest / 448)
    exact = blocks.astype(int) - 127
    wrong = (exact < np.ceil(power - 1e-5)) | (exact > np.ceil(power + 1e-5))
    reduced = values / np.repeat(2.0**exact, group, 1)
    known = np.concatenate([-UE4M3[:127], UE4M3[:127]])
    nearest = np.stack([np.abs(row[:, None] - known).min(-1) for row in reduced])
    far = np.abs(reduced - from_e4m3(codes)) > nearest + 1e-5 * np.abs(reduced)
    return int((wrong & (largest > 0)).sum()) + int(far.sum())


def badly_quantised(values: Any, scale: float, codes: Any, blocks: Any) -> int:
    """How many scales are not the nearest to a sixth of a block's largest value, and how many
    codes not the nearest to a value by its scale; NVFP4 with a scale for the tensor.
    """
    grouped = np.abs(values).reshape(len(values), values.shape[1] // GROUP, GROUP)
    wanted = scale * grouped.max(-1) / 6
    known = UE4M3[:127]
    near = np.abs(wanted[..., None] - known).min(-1)
    scales = UE4M3[blocks]
    wrong = ~(np.abs(wanted - scales) <= near + 1e-5 * wanted)
    with np.errstate(divide="ignore", invalid="ignore"):
        by = np.repeat(scales / scale, GROUP, 1)
        reduced = np.where(by == 0, 0, values / by)
    reduced = np.clip(reduced, -6, 6)
    nearest = np.abs(reduced[..., None] - E2M1).min(-1)
    far = (np.abs(reduced - E2M1[codes]) > nearest + 1e-5 * np.abs(reduced)) & (by != 0)
    return int(wrong.sum()) + int(far.sum())


@dataclass(frozen=True)
class Step:
    """A launch on the memory that the launches before it left."""

    name: str
    file: LaunchFile
    check: Any

    def judged(self, ptx: str, *schedules: str) -> tuple[int, list[str], list[str]]:
        """Wrong values, races and faults, with the launch's PTX or another."""
        wrong, races, faults = 0, set[str](), []
        for schedule in schedules_of(schedules):
            one = self.run(schedule, ptx)
            wrong = max(wrong, one[0])
            races |= set(one[1])
            faults += [f"{schedule}: {fault}" for fault in one[2]]
        return wrong, sorted(races), faults

    def run(self, schedule: Any, ptx: str) -> tuple[int, list[str], list[str], GlobalMemory]:
        """Wrong values, races and the fault of a schedule, and the memory after it."""
        file = replace(self.file, ptx=ptx)
        if not file.kernel:
            memory = file.fresh_memory()
            address, value, size = (int.from_bytes(one, "little") for one in file.parameters)
            region = memory.find(address, address + size, write=True)
            region.data[address - region.address :][:size] = value
            return 0, [], [], memory
        single = run_once(file, program_of(file, Path(self.name)), schedule, watch=True)
        faults = [single.run.fault] if single.run.fault else []
        wrong = 0 if faults else self.check(single.memory)
        return wrong, [str(race) for race in single.run.races], faults, single.memory


#: A launch as it was run, and its wrong values, races and faults.
Ran = tuple[Step, int, list[str], list[str]]


def steps(call: Call, schedule: str) -> Iterator[Ran]:
    """Run the launches of a call one after the other."""
    checks, every = Checks(call.operands, call.launches), list[Step]()
    for number, launch in enumerate(call.launches):
        name = next((word for part, word in NAMES.items() if part in launch.kernel), "fill")
        if "GEMM" in name:
            name = f"{'second' if 'activation' in [one.name for one in every] else 'first'} {name}"
        every.append(Step(name, launch, checks.of(number)))
    return in_order(every, call.memory, schedule)


def in_order(every: Iterable[Step], memory: tuple[Array, ...], schedule: str) -> Iterator[Ran]:
    """Run launches one after the other, each on the memory that the one before left."""
    (order,) = schedules_of((schedule,))
    for one in every:
        step = replace(one, file=replace(one.file, memory=memory))
        wrong, races, faults, left = step.run(order, step.file.ptx)
        yield step, wrong, races, faults
        if faults:
            return
        memory = tuple(
            replace(array, data=region.data.tobytes())
            for array, region in zip(memory, left.regions, strict=True)
        )


def main() -> None:
    """Compile, run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_options(parser)
    parser.add_argument("--tile", default="128x128x128", help="FlashInfer takes this one untuned")
    parser.add_argument("--mx", action="store_true", help="weights in MXFP4, activations in MXFP8")
    parser.add_argument("--half", action="store_true", help="results in half, not in bfloat16")
    options = parser.parse_args()
    compiler = Compiler.of_flashinfer(options, FLAGS, INCLUDES)
    types = Types(options.mx, options.half)
    built = build(compiler, options.flashinfer, options.tile, types)
    for one in MX_SETUPS if types.mx else SETUPS:
        setup = replace(one, types=types)
        call = call_of(built, setup)
        print(f"{options.tile} {setup}", flush=True)
        for name, found in judged(partial(steps, call)).items():
            wrong, races, faults = found
            print(f"  {name}: {wrong} wrong, {len(races)} races, {len(faults)} faults", flush=True)
            print(*sorted(races)[:3], *faults[:3], sep="\n", end="\n" if races or faults else "")
    small = [replace(setup, types=types) for setup in SMALL]
    for setup in small if options.orders else ():
        for step, *_ in steps(call_of(built, setup), "eager"):
            if step.name.startswith("second"):
                show_unnoticed(step, f"{options.tile} {setup}, {step.name}")
    for setup in small if options.mutants else ():
        for step, *_ in steps(call_of(built, setup), "eager"):
            if "GEMM" in step.name or "activation" in step.name:
                name = f"{options.tile} {setup}, {step.name}"
                Subject(name, step.file, step.check).show(options.mutants)


def judged(run: Callable[[str], Iterator[Ran]]) -> dict[str, tuple[int, set[str], list[str]]]:
    """By launch: wrong values, races and faults of all schedules."""
    all_: dict[str, tuple[int, set[str], list[str]]] = {}
    for schedule in ("eager", "lazy", "random:1"):
        for step, wrong, races, faults in run(schedule):
            before = all_.get(step.name, (0, set(), []))
            own = [f"{schedule}: {fault}" for fault in faults]
            all_[step.name] = max(before[0], wrong), before[1] | {*races}, before[2] + own
    return all_


if __name__ == "__main__":
    main()
