"""The kernels that levels ``codegen`` and ``numbers`` run for a profile, and their launches."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from builder import settings
from builder.common.document import Part, plain, read
from builder.common.files import write_atomically
from builder.common.paths import package_file
from builder.common.programs import LAUNCH
from builder.common.results import Results
from builder.errors import UsageError
from builder.probes.dispatch_expect import Failure
from builder.proof.isolation import SandboxUnavailable
from builder.proof.replies import KernelRequest, LaunchReply, RecordedKernel, machine_cause
from builder.proof.sandbox import WithDsl, ask_probe, lay_out, own_files, soundly
from builder.proof.variables import for_a_process
from builder.ptx.findings import Ran

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from builder.applier.trees import Tree
    from builder.common.machinecode import Disassembly
    from builder.common.plan import ExpectedChoice
    from builder.common.programs import Program
    from builder.proof.trust import TrustedSources
    from builder.ptx.findings import CallRuns


# ------------------------------------------------------------------- machine code that is expected

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


# ----------------------------------------------------------------------- kernels that are launched

#: vLLM's own layers in front of a kernel.
LAYER, MOE_LAYER = "vllm-linear", "vllm-moe"


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A kernel whose numbers are to be checked: the calls that launch it."""

    name: str
    #: the kind of layer that it serves
    serves: str
    request: Mapping[str, Any]
    #: what the line that a profile expects has in it, in small letters
    line: str = "b12x"


def _of_package(name: str, kind: str, **request: Any) -> Launched:
    return Launched(name=f"package b12x, {name}", serves=PACKAGE, request={"kind": kind, **request})


#: The settings with which vLLM takes the kernels of the package ``b12x``.
PACKAGE_CHOSEN = {"linear_backend": PACKAGE, "moe_backend": PACKAGE}
#: Kernels of the package ``b12x``, which has a tile for each range of rows and columns.
OF_PACKAGE = (
    _of_package(
        "NVFP4 GEMM",
        "package-dense",
        # tiles of 64x64, 128x128 and, swapped, 32x64
        shapes=[[104, 200, 512], [136, 128, 1152], [1, 128, 4096]],
    ),
    _of_package("NVFP4 GEMM, tile 128x64", "package-dense", shapes=[[104, 264, 384]], sms=8),
    _of_package("NVFP4 GEMM, 1 token", "package-dense", shapes=[[1, 136, 128], [1, 1160, 384]]),
    _of_package(
        "NVFP4 GEMM, several tiles a block",
        "package-dense",
        shapes=[[200, 256, 512], [200, 256, 384]],
        sms=2,
    ),
    _of_package(
        "NVFP4 GEMM, special values", "package-dense", shapes=[[64, 64, 256]], inputs="degenerate"
    ),
    _of_package("vLLM's NVFP4 linear layer", LAYER, shapes=[[64, 200, 384]], **PACKAGE_CHOSEN),
    _of_package(
        "W4A16 GEMM",
        "package-dense-a16",
        # 16 rows, 32, 64, none of them full
        shapes=[[9, 200, 640], [24, 136, 320], [40, 200, 320]],
    ),
    _of_package(
        "W4A16 GEMM, several tiles a block",
        "package-dense-a16",
        shapes=[[9, 384, 256], [40, 384, 320]],
        sms=1,
    ),
    _of_package(
        "W4A16 GEMM, special values",
        "package-dense-a16",
        shapes=[[16, 64, 256]],
        inputs="degenerate",
    ),
    _of_package(
        "vLLM's W4A16 linear layer",
        LAYER,
        layer="w4a16-linear",
        shapes=[[9, 200, 384]],
        **PACKAGE_CHOSEN,
    ),
    _of_package(
        "vLLM's NVFP4 experts",
        MOE_LAYER,
        tokens=[1, 24],
        experts=4,
        hidden=512,
        intermediate=128,
        **PACKAGE_CHOSEN,
    ),
    _of_package(
        "vLLM's W4A16 experts",
        MOE_LAYER,
        layer="w4a16-moe",
        finer=True,
        tokens=[1, 24],
        experts=4,
        hidden=256,
        intermediate=128,
        **PACKAGE_CHOSEN,
    ),
)


# --------------------------------------------------------------------------------- cached launches
#
# Their kernels need not be compiled again where only `builder.ptx` has changed, or where somebody
# asks for the files.

#: Those of one release take 5 MB.
RECORDINGS = Results("launches", (LAUNCH,), 20, suffix=".zip")
_REPLY = "reply.json"


def restore(inputs: Sequence[object], folder: Path) -> LaunchReply | None:
    """Write the cached launches for the same inputs into a folder; None where there are none."""
    file = RECORDINGS.file(inputs)
    try:
        with zipfile.ZipFile(file) as archive:
            reply = read(json.loads(archive.read(_REPLY)), LaunchReply)
            archive.extractall(folder, [n for n in archive.namelist() if n != _REPLY])
        os.utime(file)
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None
    return _moved(reply, lambda name: str(folder / name))


def keep(inputs: Sequence[object], folder: Path, reply: LaunchReply) -> None:
    """Cache the launches in a folder; the oldest ones are removed."""
    relative = _moved(reply, lambda path: Path(path).relative_to(folder).as_posix())
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_REPLY, json.dumps(plain(relative)))
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(folder).as_posix())
    write_atomically(RECORDINGS.file(inputs), packed.getvalue())
    RECORDINGS.remove_oldest()


def _moved(reply: LaunchReply, move: Callable[[str], str]) -> LaunchReply:
    """The reply with another name for each folder."""
    kernels = tuple(
        replace(
            kernel,
            launches=tuple(
                replace(call, folders=tuple(map(move, call.folders))) for call in kernel.launches
            ),
        )
        for kernel in reply.kernels
    )
    return replace(reply, kernels=kernels)


# ---------------------------------------------------------------------------------------- launches
#
# The target's own FlashInfer and CuTe DSL compile and launch the kernels, in a sandbox; what was to
# run on the device is written into files, and `builder.ptx` runs it.

#: The default of ``SPARK_BUILD_LAUNCH_SECONDS``: processor time to compile and launch all kernels,
#: which takes some two minutes.
SECONDS = 600
#: The stage of an error that is the executor's: it does not know an instruction.
UNREAD = "read"
#: The stage of the error where vLLM's own layer cannot be run here.
NO_LAYER = "layer"
#: The stage of an error that says that a release has no such kernel.
ABSENT = "absent"
#: Errors that the same files give every time.
FINAL = (NO_LAYER, ABSENT)


def _tile(rows: int, columns: int) -> Launched:
    """A GEMM of two tiles, one not full; one of one tile that is deep; a short one.

    With 9 K tiles of 128 each of the pipeline's 3 or 4 stages is used again more than once; a
    single K tile has code of its own.
    """
    return Launched(
        name=f"b12x GEMM, tile {rows}x{columns}",
        serves="nvfp4-linear",
        request={
            "kind": "dense-b12x",
            "tile": [rows, columns],
            "shapes": [
                [rows - 24, 2 * columns, 256],
                [rows, columns, 1152],
                [rows - 24, columns, 128],
            ],
        },
    )


def _tiles_of_a_block(rows: int, columns: int, name: str, *depths: int) -> Launched:
    """Four tiles, those at the edge not full, for one block: there is 1 SM.

    Odd and even numbers of K tiles: the kernel has code of its own for an odd rest, and an arrival
    there at the wrong stage shows only where the stage is used again.
    """
    m, n = rows + rows // 2 + 8, 2 * columns
    return Launched(
        name=f"b12x GEMM, several {name} a block",
        serves="nvfp4-linear",
        request={
            "kind": "dense-b12x",
            "tile": [rows, columns],
            "shapes": [[m, n, depth] for depth in depths],
            "sms": 1,
        },
    )


#: In order of their cost.
LAUNCHED = (
    _tile(128, 128),
    _tile(64, 128),
    _tile(128, 64),
    _tile(64, 64),
    Launched(
        name="b12x GEMM, 1 token",
        serves="nvfp4-linear",
        request={"kind": "dense-b12x", "shapes": [[1, 128, 128], [1, 128, 384], [1, 128, 1280]]},
    ),
    Launched(
        name="b12x GEMM, special values",
        serves="nvfp4-linear",
        request={
            "kind": "dense-b12x",
            "tile": [64, 64],
            "shapes": [[64, 64, 256]],
            "inputs": "degenerate",
        },
    ),
    # no multiple of what vLLM pads to, nor of a tile
    Launched(
        name="vLLM's NVFP4 linear layer",
        serves="nvfp4-linear",
        request={"kind": LAYER, "shapes": [[64, 200, 320]]},
    ),
    _tiles_of_a_block(64, 128, "tiles", 512, 384),
    _tiles_of_a_block(128, 128, "tiles of 128x128", 384, 256),
    _tiles_of_a_block(128, 64, "tiles of 128x64", 384, 256),
    _tiles_of_a_block(64, 64, "tiles of 64x64", 384, 256),
    # without tensor cores
    Launched(
        name="W4A16 GEMM, 1 token",
        serves="w4a16-linear",
        line="w4a16linear",
        request={"kind": "dense-w4a16", "shapes": [[1, 256, 512]], "sms": 2},
    ),
    # each tile that FlashInfer takes before it has measured: 16 rows and 9 K tiles, 32 rows and 5
    # short ones, 64 rows
    Launched(
        name="W4A16 GEMM",
        serves="w4a16-linear",
        line="w4a16linear",
        request={
            "kind": "dense-w4a16",
            "shapes": [[9, 128, 1152], [24, 128, 320], [40, 128, 256]],
            "sms": 2,
        },
    ),
    Launched(
        name="W4A16 GEMM, several tiles a block",
        serves="w4a16-linear",
        line="w4a16linear",
        request={"kind": "dense-w4a16", "shapes": [[1, 256, 256], [40, 192, 256]], "sms": 2},
    ),
    # the depth of an output tile in 4 parts and in 8
    Launched(
        name="W4A16 GEMM, split depth",
        serves="w4a16-linear",
        line="w4a16linear",
        request={"kind": "dense-w4a16", "shapes": [[9, 128, 512], [16, 64, 1024]], "sms": 8},
    ),
    Launched(
        name="W4A16 GEMM, special values",
        serves="w4a16-linear",
        line="w4a16linear",
        request={
            "kind": "dense-w4a16",
            "shapes": [[16, 64, 256]],
            "inputs": "degenerate",
            "sms": 2,
        },
    ),
    Launched(
        name="vLLM's NVFP4 experts",
        serves="nvfp4-moe",
        request={
            "kind": MOE_LAYER,
            "tokens": [1],
            "experts": 4,
            "hidden": 256,
            "intermediate": 128,
        },
    ),
    # of weights alone in FP4
    Launched(
        name="vLLM's W4A16 experts",
        serves="w4a16-moe",
        request={
            "kind": MOE_LAYER,
            "layer": "w4a16-moe",
            "tokens": [1],
            "experts": 4,
            "hidden": 256,
            "intermediate": 128,
        },
    ),
    Launched(
        name="b12x MoE, 1 token",
        serves="nvfp4-moe",
        # two blocks with two experts each, and each stage of a pipeline used twice for each
        request={
            "kind": "moe-b12x",
            "tokens": [1],
            "experts": 5,
            "top_k": 4,
            "hidden": 1024,
            "sms": 2,
        },
    ),
    Launched(
        name="b12x MoE, 64 tokens",
        serves="nvfp4-moe",
        # with a hidden size of 256 each stage of a pipeline would be used once
        request={"kind": "moe-b12x", "tokens": [64], "experts": 3, "hidden": 512, "sms": 4},
    ),
    # the kernel without tensor cores, for experts at most 512 wide; with 8 SMs each block takes two
    # parts of the result
    Launched(
        name="b12x MoE, 1 token, narrow experts",
        serves="nvfp4-moe",
        request={"kind": "moe-b12x", "tokens": [1], "experts": 4, "narrow": True, "sms": 8},
    ),
    Launched(
        name="b12x MoE, 2 tokens, narrow experts",
        serves="nvfp4-moe",
        request={
            "kind": "moe-b12x",
            "tokens": [2],
            "experts": 4,
            "hidden": 128,
            "narrow": True,
            "sms": 4,
        },
    ),
    # FlashInfer takes this kernel from 320 or 512 tokens on.  Each stage of a pipeline is used
    # again, and both blocks count pairs of token and expert, as one has fewer threads than pairs
    Launched(
        name="b12x MoE, many tokens",
        serves="nvfp4-moe",
        request={
            "kind": "moe-b12x",
            "tokens": [88],
            "experts": 4,
            "hidden": 512,
            "many": True,
            "sms": 2,
        },
    ),
    # FlashInfer takes this kernel for 96 and more rows of an expert.  Both experts get all tokens,
    # a full tile of 128 rows, for which the second product has code of its own, and a rest;
    # it adds up two slices before it stores
    Launched(
        name="b12x MoE, prefill",
        serves="nvfp4-moe",
        request={
            "kind": "moe-b12x",
            "tokens": [136],
            "experts": 2,
            "hidden": 256,
            "intermediate": 256,
            "many": True,
            "prefill": True,
            "sms": 2,
        },
    ),
)


def wanted_launches(
    expectations: Sequence[ExpectedChoice], *, package: bool = False
) -> list[Launched]:
    """The kernels of the lines that a profile expects.

    Those of the package ``b12x`` are for where it is installed, as one more choice of vLLM's.
    """
    lines = [(expected.kind, (expected.line or "").lower()) for expected in expectations]
    launches = [
        one
        for one in LAUNCHED
        if any(kind == one.serves and one.line in line for kind, line in lines)
    ]
    chosen = any("b12x" in line for _, line in lines)
    return [*launches, *(OF_PACKAGE if chosen and package else ())]


class Reply(Part, frozen=True, kw_only=True):
    """What came of one kernel: its launches run, or why there are none."""

    error: str
    stage: str
    ran: tuple[Ran, ...]


class Replies(Part, frozen=True, kw_only=True):
    """What came of all of them, in the order of the request."""

    replies: tuple[Reply, ...]
    versions: Mapping[str, str | None]
    simulated: tuple[str, ...]
    kept: bool = False


def _programs() -> tuple[Program | tuple[str, str], ...]:
    """Everything in spark-build that a result depends on."""
    files = sorted(package_file("ptx", "runs.py").parent.iterdir())
    return (LAUNCH, *(("ptx", one.name) for one in files if one.suffix in (".py", ".c")))


def results() -> Results:
    """What is kept of runs; one has 40 kB."""
    return Results("numbers", _programs(), 400)


def launch_in_sandbox(
    request: Mapping[str, Any], tree: Tree, packages: Mapping[str, str], trust: TrustedSources
) -> Replies:
    """Launch with the FlashInfer and CuTe DSL of a tree.

    Raises:
        SandboxUnavailable: ``trust`` does not know a file: isolated code has no folder to write
            launches to.
    """
    apart = trust.apart(tree, own_files(tree))
    if apart is not None:
        raise SandboxUnavailable(
            f"it writes its launches to this machine, which isolated code cannot do "
            f"({apart.because})",
            hint="run the same command with --trust-image",
        )
    variables = for_a_process(request["env"], trust.sets, apart=False)
    request = {**request, "env": dict(variables.passed)}
    seconds = launch_seconds()
    prepared = WithDsl.prepare(tree, packages)
    inputs = [*prepared.inputs, request]
    cached_replies = None if settings.KEEP_LAUNCHES.value else results().get(inputs, Replies)
    if cached_replies is not None and all(map(_is_kept, cached_replies.replies)):
        return _with(cached_replies, variables.left_out)
    with _folder() as folder:
        recorded = restore(inputs, Path(folder))
        if recorded is None or not all(map(_final, recorded.kernels)):
            full = {**request, **prepared.settings, "folder": folder}
            python = prepared.sandbox.python

            def ask() -> LaunchReply:
                lay_out(tree)
                _empty(Path(folder))
                return _asked(python, full, seconds)

            make_again = partial(WithDsl.prepare, tree, packages)
            recorded = soundly(ask, make_again, python, prepared.folders, _is_doubtful)
            if not recorded.fatal and all(map(_final, recorded.kernels)):
                keep(inputs, Path(folder), recorded)
        replies = _run_all(recorded, int(request["jobs"]), prepared.torch.what)
    if all(map(_is_kept, replies.replies)):
        results().put(inputs, replies)
    return _with(replies, variables.left_out)


def launch_seconds() -> float:
    """Seconds of processor time for all launches of a release.

    Raises:
        UsageError: the variable is no number of seconds.
    """
    text = settings.LAUNCH_SECONDS.value.strip() or str(SECONDS)
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        name = settings.LAUNCH_SECONDS.name
        raise UsageError(f"{name}={text!r} is not a number of seconds", hint=f"{name}={SECONDS}")
    return float(text)


def _asked(python: Path, request: Mapping[str, Any], seconds: float) -> LaunchReply:
    try:
        return ask_probe(python, request, LaunchReply, seconds, LAUNCH, busy=True)
    except SandboxUnavailable as error:
        if "of processor time" not in str(error):
            raise
        longer = f"export {settings.LAUNCH_SECONDS.name}={4 * seconds:.0f}"
        raise SandboxUnavailable(str(error), hint=longer) from None


def _with(replies: Replies, left_out: Sequence[str]) -> Replies:
    return replace(replies, simulated=(*left_out, *replies.simulated))


def _empty(folder: Path) -> None:
    """Remove what an earlier question wrote."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_doubtful(reply: LaunchReply) -> bool:
    return bool(reply.fatal) or any(kernel.error for kernel in reply.kernels)


def _final(kernel: RecordedKernel) -> bool:
    """Whether the same files give the same launches, or the same error."""
    error = kernel.error
    return error is None or (error.stage in FINAL and not machine_cause(error))


def _is_kept(reply: Reply) -> bool:
    """The same of the result."""
    return not reply.error or (reply.stage in FINAL and not machine_cause(error_of(reply)))


def error_of(reply: Reply) -> Failure:
    """The error of a reply, as its type and message."""
    kind, _, message = reply.error.partition(": ")
    return Failure(kind, message)


@contextmanager
def _folder() -> Iterator[str]:
    """Where launches are written: a directory that goes away, or the one to keep them in.

    Raises:
        UsageError: the directory to keep them in is in use, or cannot be made.
    """
    wanted = settings.KEEP_LAUNCHES.value
    if not wanted:
        with tempfile.TemporaryDirectory(prefix="spark-build-launches-") as folder:
            yield folder
        return
    path, name = Path(wanted).absolute(), settings.KEEP_LAUNCHES.name
    try:
        path.mkdir(parents=True, exist_ok=True)
        used = any(path.iterdir())
    except OSError as error:
        raise UsageError(
            f"{name}: {path} cannot be created: {error.strerror}", hint=f"export {name}=DIR"
        ) from None
    if used:
        raise UsageError(f"{name}: {path} is not empty", hint=f"export {name}=DIR")
    yield str(path)


def _run_all(recorded: LaunchReply, jobs: int, torch: str) -> Replies:
    """Run every launch that a probe recorded, some at a time."""
    from builder.ptx.runs import run_calls

    kernels = recorded.kernels
    if recorded.fatal:
        kernels = (RecordedKernel(error=recorded.fatal),) * max(len(kernels), 1)
    calls = [call for kernel in kernels for call in kernel.launches]
    ran = dict(zip(calls, run_calls([call.folders for call in calls], jobs), strict=True))
    return Replies(
        replies=tuple(
            _reply(kernel, [ran[call] for call in kernel.launches]) for kernel in kernels
        ),
        versions=recorded.versions,
        simulated=(torch, *recorded.simulated),
    )


def _reply(kernel: RecordedKernel, calls: Sequence[CallRuns]) -> Reply:
    """The reply to one kernel: what the probe said, or else what the executor could not read."""
    if kernel.error:
        return Reply(error=str(kernel.error), stage=kernel.error.stage, ran=())
    if unread := next((call.error for call in calls if call.error), ""):
        return Reply(error=unread, stage=UNREAD, ran=())
    return Reply(error="", stage="", ran=tuple(one for call in calls for one in call.ran))


def launch_request(
    env: Mapping[str, str],
    arch: str,
    wanted: Sequence[Launched],
    settings: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What the probe is asked; ``settings`` are those of vLLM's that select its kernels."""
    layers = [one.request["kind"] in (LAYER, MOE_LAYER) for one in wanted]
    chosen = [(settings or {}) if layer else {} for layer in layers]
    return {
        "env": dict(env),
        "arch": arch,
        "jobs": min(4, os.cpu_count() or 1),
        "kernels": [{**s, **one.request} for one, s in zip(wanted, chosen, strict=True)],
    }
