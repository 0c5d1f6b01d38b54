"""vLLM's own NVFP4 kernels for SM12x, compiled from a release's sources, in the executor.

    python -m benchmarks.vllm_fp4 0.33.0 --work WORK [--cutlass FOLDER] [--orders]

Sources, flags and the headers of torch are those of the release, from the package index.  Its build
downloads CUTLASS: FOLDER is a checkout of that tag.  Without one it is the CUTLASS of a wheel of
FlashInfer.  Compiled to PTX (ten minutes of processor time, no GPU), each operator is called: the
release's own host code checks its tensors, chooses the kernel and makes the launch, which
`vllm_fp4.cpp` and `cuda_host.cpp` print in place of torch and the CUDA runtime.

Prints for each launch how many values differ from the exact ones, rounded once, and the races.  The
last launches of each list have the defects of docs/kernel-defects.md.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.cuda_host import Built, Compiler, placed
from benchmarks.cutlass_experts import (
    COLUMNS,
    ROWS,
    Step,
    badly_quantised,
    drawn,
    in_order,
    judged,
    off,
    padded,
)
from benchmarks.cutlass_gemm import (
    GROUP,
    Case,
    numbers,
    packed,
    product,
    rounded,
    show_unnoticed,
    tiled,
    ue4m3,
    unpacked,
    untiled,
)
from builder.common.pypi import PackageIndex
from builder.compile.build import command
from builder.compile.command import source_tree
from builder.compile.plans import outcome
from builder.compile.toolchain import find_compiler, make_toolchain, pinned_torch, torch_headers
from builder.ptx.block import MULTIPROCESSORS
from builder.ptx.launchfile import Array

if TYPE_CHECKING:
    from collections.abc import Iterable

    from builder.ptx.memory import GlobalMemory

#: The release's sources with NVFP4 operators for SM12x, and what they call.
SOURCES = (
    *(f"csrc/quantization/fp4/{name}.cu"
      for name in ("nvfp4_scaled_mm_sm120_kernels", "nvfp4_scaled_mm_entry", "nvfp4_quant_kernels",
                   "nvfp4_quant_entry", "nvfp4_experts_quant", "nvfp4_blockwise_moe_kernel",
                   "activation_nvfp4_quant_fusion_kernels")),
    "csrc/cuda_utils_kernels.cu",
)  # fmt: skip
#: The architecture of which a GB10 is, and the toolkit of the release's image.
ARCHITECTURE, CUDA = "12.1", "13.0"


def build(release: str, work: Path, cutlass: Path | None) -> Built:
    """Compile what was not compiled yet."""
    index = PackageIndex()
    tree = source_tree(index, release, None)
    recipe = outcome(tree, ARCHITECTURE, CUDA).recipe
    headers = torch_headers(index, pinned_torch(tree.root))
    tools = make_toolchain(index, headers, find_compiler(index, "linux/amd64"))
    first = [f"-I{cutlass / one}" for one in ("include", "tools/util/include")] if cutlass else []

    def compiler(path: str) -> Compiler:
        words = command(recipe, recipe.units[path], tools, tree.root)
        # PTX is enough: of sm_120f for a kernel that has it
        words = [one.replace("code=sm_", "code=compute_") for one in words]
        return Compiler(work, (words[0], *first, *words[1:], "-w"))

    own = compiler(SOURCES[-1])
    objects = [compiler(path).compiled("release", tree.root / path) for path in SOURCES]
    objects.append(own.compiled("host", Path(__file__).with_suffix(".cpp")))
    return own.linked("release", objects)


@dataclass(frozen=True)
class Product:
    """A call of the dense GEMM, ``cutlass_scaled_fp4_mm``."""

    m: int
    n: int
    k: int
    half: bool = False
    invariant: bool = False
    #: the byte of A's scales behind its columns
    behind: int = 0

    def __str__(self) -> str:
        """The call as a line."""
        words = [
            f"{self.m}x{self.n}x{self.k}", "float16" if self.half else "",
            "batch invariant" if self.invariant else "",
            "NaN behind the columns" if self.behind else "",
        ]  # fmt: skip
        return ", ".join(filter(None, words))

    def case(self, built: Built) -> Case:
        """The launch that the release makes of it."""
        contents, exact = product(self.m, self.n, self.k, half=self.half, behind=self.behind)
        memory = placed(contents, "D")
        m, n = (-(-size // 128) * 128 for size in (self.m, self.n))
        scales = -(-self.k // GROUP // 4) * 4
        words = tensors(
            memory,
            ("float16" if self.half else "bfloat16", self.m, self.n),
            ("uint8", self.m, self.k // 2), ("uint8", self.n, self.k // 2),
            ("float8_e4m3fn", m, scales), ("float8_e4m3fn", n, scales), ("float32", 1),
        )  # fmt: skip
        more = {"VLLM_BATCH_INVARIANT": "1"} if self.invariant else {}
        *rooms, line = built.printed(["mm", *words], MULTIPROCESSORS, **more)
        every = (*memory, *allocated(rooms))
        return Case(built.launch(str(self), line, every), exact)


@dataclass(frozen=True)
class Quantisation:
    """A call that quantises rows to NVFP4; of experts, if ``counts`` has the rows of each.

    ``fused`` is the operator that first multiplies the columns behind the middle with SiLU of
    those before it.
    """

    columns: int
    rows: int = 0
    counts: tuple[int, ...] = ()
    fused: bool = False
    half: bool = False
    #: whether scales are in the tiles that the GEMM reads
    tiles: bool = True
    #: columns of the result, more than those that are given
    wide: int = 0
    processors: int = MULTIPROCESSORS

    def __str__(self) -> str:
        """The call as a line."""
        words = [
            f"{sum(self.counts) or self.rows}x{self.columns}", "float16" if self.half else "",
            f"of {len(self.counts)} experts" if self.counts else "",
            "SiLU" if self.fused else "", "" if self.tiles else "scales by row",
            f"to {self.wide} columns" if self.wide else "",
            f"{self.processors} multiprocessors" if self.processors != MULTIPROCESSORS else "",
        ]  # fmt: skip
        return ", ".join(filter(None, words))

    @property
    def operator(self) -> str:
        """The operator's name for the program."""
        words = "experts" if self.counts else "", "silu" if self.fused else ""
        return " ".join([*filter(None, words), "quant", *([] if self.tiles else ["plain"])])

    def step(self, built: Built) -> Step:
        """The launch that the release makes of it, and its check."""
        counts = self.counts or (self.rows,)
        rows, wide = sum(counts), self.wide or self.columns
        given, values = self._input(rows)
        offsets, places = [0], [0]
        for count in counts:
            offsets.append(offsets[-1] + count)
            places.append(places[-1] + padded(count, ROWS))
        powers = 2.0 ** np.floor(np.log2(448 * 6 / np.abs(values).max()) - np.arange(len(counts)))
        columns = padded(wide // GROUP, COLUMNS) if self.tiles else wide // GROUP
        high = places[-1] if self.tiles else rows
        contents = {
            "codes": b"\xff" * (rows * wide // 2), "scales": b"\xff" * (high * columns),
            "rows": given.tobytes(), "global": powers.astype(np.float32).tobytes(),
        }  # fmt: skip
        of_scales = ("int32", high, columns // 4) if self.tiles else ("uint8", high, columns)
        shapes: list[tuple[object, ...]] = [
            ("uint8", rows, wide // 2), of_scales,
            ("float16" if self.half else "bfloat16", *given.shape), ("float32", len(counts)),
        ]  # fmt: skip
        if self.counts:
            for name, array in (("offsets", offsets), ("places", places)):
                contents[name] = np.array(array, np.int32).tobytes()
                shapes.append(("int32", len(array)))
        memory = placed(contents, "codes", "scales")
        (line,) = built.printed([self.operator, *tensors(memory, *shapes)], self.processors)
        file = built.launch(str(self), line, tuple(memory))

        def check(after: GlobalMemory) -> int:
            codes = unpacked(after.regions[0].data.reshape(rows, wide // 2))
            blocks = after.regions[1].data
            blocks = untiled(blocks, columns) if self.tiles else blocks.reshape(rows, columns)
            wrong, own = 0, self.columns // GROUP
            for first, end, place, power in zip(offsets, offsets[1:], places, powers, strict=False):
                scales = blocks[place : place + end - first]
                given = codes[first:end, : self.columns]
                wrong += badly_quantised(values[first:end], power, given, scales[:, :own])
                # the GEMM reads scales behind the columns too
                wrong += int((scales[:, own:] != 0).sum())
            if not self.counts and not self.fused:
                wrong += int(blocks[rows:].any()) + int(codes[:, self.columns :].any())
            return wrong

        return Step(str(self), file, check)

    def _input(self, rows: int) -> tuple[Any, Any]:
        """Bits of the rows that are given, and the values that are to be quantised."""
        draw = np.random.default_rng(7)
        bits = rounded(draw.normal(0, 3, (rows, self.columns)), f16=self.half)
        values = numbers(bits, f16=self.half)
        if not self.fused:
            return bits, values
        # SiLU of multiples of 32 is the number or zero in float32
        gates = rounded(32 * draw.integers(-2, 3, values.shape), f16=self.half)
        by = np.maximum(numbers(gates, f16=self.half), 0)
        product = numbers(rounded(values * by, f16=self.half), f16=self.half)
        return np.concatenate([gates, bits], 1), product


@dataclass(frozen=True)
class Experts:
    """A call of the grouped GEMM, ``cutlass_fp4_group_mm``: an expert's rows by its weights."""

    counts: tuple[int, ...]
    n: int
    k: int
    processors: int = MULTIPROCESSORS

    def __str__(self) -> str:
        """The call as a line."""
        words = [
            f"{sum(self.counts)}x{self.n}x{self.k} of {len(self.counts)} experts",
            f"{self.processors} multiprocessors" if self.processors != MULTIPROCESSORS else "",
        ]  # fmt: skip
        return ", ".join(filter(None, words))

    def steps(self, built: Built) -> tuple[list[Step], tuple[Array, ...]]:
        """The launches that the release makes of it, and the memory before the first."""
        draw, experts = np.random.default_rng(9), len(self.counts)
        rows, high = sum(self.counts), [padded(count, ROWS) for count in self.counts]
        a, b = drawn(draw, rows, self.k), drawn(draw, experts, self.n, self.k)
        alphas = 2.0 ** draw.integers(-2, 2, experts)
        first, places = (np.cumsum([0, *sizes], dtype=np.int32) for sizes in (self.counts, high))
        parts = [slice(*pair) for pair in pairwise(first.tolist())]
        exact = np.concatenate([
            alpha * a.values[part] @ weights.T
            for alpha, part, weights in zip(alphas, parts, b.values, strict=True)
        ])  # fmt: skip
        columns = self.k // GROUP
        problems = [(count, self.n, self.k) for count in self.counts]
        contents = {
            "out": np.full((rows, self.n), 0x7FC0, np.uint16).tobytes(),
            "a": packed(a.codes), "b": b"".join(map(packed, b.codes)),
            # scales of rows that no token has were never written
            "a scales": b"".join(tiled(ue4m3(a.powers[part]), behind=0xFF) for part in parts),
            "b scales": b"".join(map(tiled, ue4m3(b.powers))),
            "alphas": alphas.astype(np.float32).tobytes(),
            "problems": np.array(problems, np.int32).tobytes(),
            "offsets": first[:-1].tobytes(), "places": places[:-1].tobytes(),
        }  # fmt: skip
        memory = placed(contents, "out")
        words = tensors(
            memory, ("bfloat16", rows, self.n), ("uint8", rows, self.k // 2),
            ("uint8", experts, self.n, self.k // 2), ("float8_e4m3fn", places[-1], columns),
            ("float8_e4m3fn", experts, padded(self.n, ROWS), columns), ("float32", experts),
            ("int32", experts, 3), ("int32", experts), ("int32", experts),
        )  # fmt: skip
        lines = built.printed(["experts mm", *words], self.processors)
        every = (*memory, *allocated(lines))

        def check(after: GlobalMemory) -> int:
            return off(after.regions[0].data.view(np.uint16).reshape(exact.shape), exact)

        starts, gemm = (
            built.launch(str(self), line, every) for line in lines if "allocated" not in line
        )
        return [Step("pointers", starts, lambda _memory: 0), Step("GEMM", gemm, check)], every


def tensors(memory: Iterable[Array], *shapes: tuple[object, ...]) -> list[str]:
    """Tensors as the program reads them: the type, address and sizes of each array."""
    return [
        f"{kind}:{one.address}:{'x'.join(map(str, sizes))}"
        for one, (kind, *sizes) in zip(memory, shapes, strict=True)
    ]


def allocated(lines: Iterable[Any]) -> list[Array]:
    """Memory that an operator asked for; what nobody wrote there is NaN in every format."""
    return [
        Array(f"memory {number}", one["allocated"], b"\xff" * one["bytes"], True, "u8", ())
        for number, one in enumerate(line for line in lines if "allocated" in line)
    ]


#: Of experts, few rows are one for each thread, and many several; an expert may have none.
QUANTISATIONS = (
    Quantisation(2048, 1), Quantisation(416, 5), Quantisation(1056, 130, half=True),
    Quantisation(400, 5, wide=416), Quantisation(256, 300, processors=4),
    Quantisation(512, 24, tiles=False),
    Quantisation(2048, 1, fused=True), Quantisation(448, 130, fused=True, half=True),
    Quantisation(256, 300, fused=True, processors=4),
    Quantisation(256, counts=(3, 0, 130, 1, 7, 2)),
    Quantisation(256, counts=(1, 0, 2, 1) * 4, half=True),
    Quantisation(256, counts=(40, 0, 150, 1), processors=4),
    Quantisation(512, counts=(40, 0, 150), processors=4),
    Quantisation(256, counts=(3, 0, 130, 1, 7, 2), fused=True),
    Quantisation(256, counts=(1, 0, 2, 1) * 4, fused=True),
    Quantisation(256, counts=(40, 0, 150, 1), fused=True, half=True, processors=4),
    # the defects: columns that are padded, and blocks with an odd number of threads
    Quantisation(416, 24, fused=True), Quantisation(464, 5, fused=True, wide=480),
    Quantisation(2880, counts=(1, 0, 2, 1)), Quantisation(2880, counts=(1, 0, 2, 1), fused=True),
)  # fmt: skip
#: Up to 256 tokens vLLM takes tiles of 128x128x128; beyond that, and to be batch invariant, of
#: 256x128x128.  In two of three schedules one block takes over the work of all others.
PRODUCTS = (
    Product(1, 256, 1024), Product(24, 160, 4096), Product(200, 288, 416),
    Product(256, 512, 512), Product(256, 288, 416, half=True),
    Product(300, 288, 416), Product(512, 512, 512), Product(257, 128, 1024, half=True),
    Product(24, 160, 1024, invariant=True), Product(24, 160, 416, behind=0x7F),
)  # fmt: skip
EXPERTS = (
    Experts((1, 0, 1), 256, 256), Experts((3, 0, 130, 1), 384, 512, 3),
    Experts((40, 0, 150, 1, 7, 2), 256, 448, 3), Experts((128, 1), 512, 1024, 2),
    # the defect: columns that are not a multiple of 128
    Experts((3, 2), 192, 256),
)  # fmt: skip
#: Of these, barriers are left out: eight tiles each.
SMALL = (Product(256, 512, 512), Product(512, 512, 512))


def show(name: str, wrong: int, races: Iterable[str], faults: list[str]) -> None:
    """Print what a launch showed."""
    every = sorted(races)
    print(f"{name}: {wrong} wrong, {len(every)} races, {len(faults)} faults", flush=True)
    print(*every[:3], *faults[:3], sep="\n", end="\n" if every or faults else "")


def main() -> None:
    """Compile, run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("release", help="of vLLM")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cutlass", type=Path, help="a checkout, in place of a wheel's headers")
    parser.add_argument("--orders", action="store_true", help="leave out barriers, one at a time")
    options = parser.parse_args()
    built = build(options.release, options.work, options.cutlass)
    for call in PRODUCTS:
        case = call.case(built)
        show(f"GEMM {call}, grid {case.file.grid}", *case.judged(case.file.ptx))
    for one in QUANTISATIONS:
        step = one.step(built)
        sizes = f"grid {step.file.grid}, block {step.file.block}"
        show(f"quantise {one}, {sizes}", *step.judged(step.file.ptx))
    for group in EXPERTS:
        steps, memory = group.steps(built)
        for name, found in judged(partial(in_order, steps, memory)).items():
            show(f"experts {group}, {name}, grid {steps[-1].file.grid}", *found)
    for call in SMALL if options.orders else ():
        show_unnoticed(call.case(built), f"GEMM {call}")


if __name__ == "__main__":
    main()
