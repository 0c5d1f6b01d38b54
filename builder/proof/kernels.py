"""The kernels that level ``codegen`` compiles for a profile, and the expected machine code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.proof.replies import KernelRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.common.documents.plan import ExpectedChoice
    from builder.common.machinecode import Disassembly

#: Stands for a kernel of each tile that FlashInfer's tuner may choose.
EVERY_TILE = "dense-b12x-tiles"
#: Kernels of the package ``b12x``, which vLLM can use from 0.28.0 on where it is installed.
PACKAGE = "b12x"


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel to compile, and what its machine code must show."""

    name: str
    #: the expectation that wants it; empty for those that every b12x profile wants
    serves: str
    request: KernelRequest
    #: NVFP4 tensor-core instructions are a must
    fp4: bool = True
    known: str = ""


KERNELS = (
    Kernel(
        name="NVFP4 warp MMA",
        serves="",
        request=KernelRequest(kind="mma-gate"),
        fp4=False,
    ),
    Kernel(
        name="b12x GEMM, tile 128x128",
        serves="nvfp4-linear",
        request=KernelRequest(kind="dense-b12x", tokens=512, tile=(128, 128)),
        known="128 of them in every release from FlashInfer 0.6.9 to 0.7.2.post1",
    ),
    Kernel(
        name="b12x GEMM, 1 token",
        serves="nvfp4-linear",
        request=KernelRequest(kind="dense-b12x", tokens=1),
    ),
    Kernel(
        name="b12x GEMM, every tile",
        serves="nvfp4-linear",
        request=KernelRequest(kind=EVERY_TILE),
    ),
    Kernel(
        name="b12x MoE, 64 tokens",
        serves="nvfp4-moe",
        request=KernelRequest(kind="moe-b12x", tokens=64),
    ),
    # From FlashInfer 0.6.18 on this one multiplies vectors, without tensor cores.
    Kernel(
        name="b12x MoE, 1 token",
        serves="nvfp4-moe",
        request=KernelRequest(kind="moe-b12x", tokens=1),
        fp4=False,
    ),
    Kernel(
        name="GEMM of the package b12x, 512 tokens",
        serves=PACKAGE,
        request=KernelRequest(kind="dense-b12x-package", tokens=512),
    ),
    Kernel(
        name="GEMM of the package b12x, 1 token",
        serves=PACKAGE,
        request=KernelRequest(kind="dense-b12x-package", tokens=1),
    ),
)

#: What a compiler's message means for a user of the layers.
ADVICE = (
    (r"expects arch to be one of", "the layer cutlass-dsl-sm121a opens this gate"),
    (
        r"Unexpected instruction types specified for '_mma'",
        "the layer cutlass-dsl-cu13 puts the CUDA 13 build first, which emits another form",
    ),
    (
        r"cannot import name|has no attribute|does not support backend",
        "the FlashInfer in the target lacks this kernel; the layer flashinfer-b12x adds it",
    ),
)


def wanted_kernels(
    expectations: Sequence[ExpectedChoice], *, package: bool = False
) -> list[Kernel]:
    """The kernels of the lines that a profile expects.

    Those of the package ``b12x`` are for where it is installed, as one more choice of vLLM's.
    """
    kinds = {e.kind for e in expectations if "b12x" in (e.line or "").lower()}
    served = {"", *kinds, *([PACKAGE] if package else [])}
    return [k for k in KERNELS if kinds and k.serves in served]


def expected_of(kernel: Kernel, arch: str) -> str:
    """What a kernel must show, in words."""
    if kernel.request.kind == "mma-gate":
        return f"the CuTe DSL admits {arch}"
    if kernel.request.kind == EVERY_TILE:
        words = f"every tile that FlashInfer may choose compiles for {arch}"
        return f"{words}; OMMA.SF instructions on E2M1 > 0 in each; no BPT.TRAP"
    if not kernel.fp4:
        return f"compiles for {arch}; no BPT.TRAP"
    known = f" ({kernel.known})" if kernel.known else ""
    return f"compiles for {arch}; OMMA.SF instructions on E2M1 > 0{known}; no BPT.TRAP"


def faults(kernel: Kernel, arch: str, target: str, code: Disassembly) -> list[str]:
    """What is wrong with a kernel that did compile."""
    wrong = []
    if target != arch or code.target not in ("", arch):
        wrong.append(f"it is for {code.target or target}, not for {arch}")
    if kernel.fp4 and not code.of("OMMA.SF", having="E2M1"):
        wrong.append("no FP4 tensor-core instruction in it")
    if code.traps:
        wrong.append(f"{code.traps} BPT.TRAP: the kernel aborts on some devices")
    return wrong


def tile_of(request: KernelRequest | None) -> str:
    """The tile of one of the kernels of every tile: ``64x32 swapped``."""
    if request is None or request.tile is None:
        raise ValueError("a kernel of one tile does not name it")
    rows, columns = request.tile
    return f"{rows}x{columns}{' swapped' if request.swap_ab else ''}"


def headline(message: str, kind: str) -> str:
    """The compiler's own words: the line that says what is wrong, without wrapping around it."""
    lines = [" ".join(line.split()) for line in message.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"ptxas .*error", line)]
    first = telling[0] if telling else next(iter(lines), "no message")
    shown = first.removeprefix(f"{kind}: ")
    shown = shown[shown.index("ptxas ") :] if telling and "ptxas " in shown else shown
    more = f" (and {len(telling) - 1} more of its kind)" if len(telling) > 1 else ""
    return f"{shown[:400]}{more}"
