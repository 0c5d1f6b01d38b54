"""vLLM's own NVFP4 kernels for SM12x, compiled from a release's sources, in the executor.

    python -m benchmarks.vllm_fp4 0.33.0 --work WORK [--cutlass FOLDER] [--orders]

Sources, flags and the headers of torch are those of the release, from the package index.  Its build
downloads CUTLASS: FOLDER is a checkout of that tag.  Without one it is the CUTLASS of a wheel of
FlashInfer.  Compiled to PTX (ten minutes of processor time, no GPU), each operator is called: the
release's own host code checks its tensors, chooses the kernel and makes the launch, which
`vllm_fp4.cpp` and `cuda_host.cpp` print in place of torch and the CUDA runtime.

Prints for each launch how many values differ from the exact ones, rounded once, and the races.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cuda_host import Built, Compiler, placed
from benchmarks.cutlass_gemm import GROUP, Case, product, show_unnoticed
from builder.common.pypi import PackageIndex
from builder.compile.build import command
from builder.compile.command import source_tree
from builder.compile.plans import outcome
from builder.compile.toolchain import find_compiler, make_toolchain, pinned_torch, torch_headers
from builder.ptx.block import MULTIPROCESSORS
from builder.ptx.launchfile import Array

if TYPE_CHECKING:
    from collections.abc import Iterable

#: The release's sources with NVFP4 operators for SM12x, and what they call.
SOURCES = (
    *(f"csrc/quantization/fp4/nvfp4_{name}.cu"
      for name in ("scaled_mm_sm120_kernels", "scaled_mm_entry")),
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

    def __str__(self) -> str:
        """The call as a line."""
        words = [
            f"{self.m}x{self.n}x{self.k}", "float16" if self.half else "",
            "batch invariant" if self.invariant else "",
        ]  # fmt: skip
        return ", ".join(filter(None, words))

    def case(self, built: Built) -> Case:
        """The launch that the release makes of it."""
        contents, exact = product(self.m, self.n, self.k, half=self.half)
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


#: Up to 256 tokens vLLM takes tiles of 128x128x128; beyond that, and to be batch invariant, of
#: 256x128x128.  In two of three schedules one block takes over the work of all others.
PRODUCTS = (
    Product(1, 256, 1024), Product(24, 160, 4096), Product(200, 288, 416),
    Product(256, 512, 512), Product(256, 288, 416, half=True),
    Product(300, 288, 416), Product(512, 512, 512), Product(257, 128, 1024, half=True),
    Product(24, 160, 1024, invariant=True),
)  # fmt: skip
#: Of these, barriers are left out: eight tiles each.
SMALL = (Product(256, 512, 512), Product(512, 512, 512))


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
        wrong, races, faults = case.judged(case.file.ptx)
        figures = f"{wrong} of {case.exact.size} values wrong, {len(races)} races"
        print(f"GEMM {call}, grid {case.file.grid}: {figures}, {len(faults)} faults", flush=True)
        print(*races[:3], *faults[:3], sep="\n", end="\n" if races or faults else "")
    for call in SMALL if options.orders else ():
        show_unnoticed(call.case(built), f"GEMM {call}")


if __name__ == "__main__":
    main()
