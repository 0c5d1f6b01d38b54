"""The kernels that level ``numbers`` runs for a profile, and how their launches are recorded.

The target's own FlashInfer and CuTe DSL compile and launch the kernels, in a sandbox; what was to
run on the device is written into files, and `builder.ptx` runs it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder import settings
from builder.applier.trees import versions
from builder.common.document import Part
from builder.common.paths import package_file
from builder.common.programs import LAUNCH
from builder.errors import UsageError
from builder.proof.dslmirror import mirror, texts_of
from builder.proof.installer import SandboxUnavailable
from builder.proof.launched import LAYER, MOE_LAYER, OF_PACKAGE, Launched
from builder.proof.recordings import keep, restore
from builder.proof.replies import LaunchReply, RecordedKernel
from builder.proof.results import Results
from builder.proof.sandbox import Sandbox, ask_probe, lay_out, python_files, requirements_for
from builder.proof.torchfolder import torch_folder, wanted_torch
from builder.proof.trust import TrustedSources
from builder.ptx.findings import Ran

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from builder.applier.trees import Tree
    from builder.common.documents.plan import ExpectedChoice
    from builder.common.programs import Program
    from builder.ptx.findings import CallRuns

TIMEOUT = 600.0
#: The stage of an error that is the executor's: it does not know an instruction.
UNREAD = "read"
#: The stage of the error where vLLM's own layer cannot be run here.
NO_LAYER = "layer"
#: The stage of an error that says that a release has no such kernel.
ABSENT = "absent"
#: Errors that the same files give every time.
FINAL = (NO_LAYER, ABSENT)


def _tile(rows: int, columns: int) -> Launched:
    """A GEMM of four tiles, those at the edge not full; one of one tile that is deep; a short one.

    With 9 K tiles of 128 each of the pipeline's 3 or 4 stages is used again more than once; a
    single K tile has code of its own.
    """
    m, n = rows + rows // 2 + 8, 2 * columns
    return Launched(
        name=f"b12x GEMM, tile {rows}x{columns}",
        serves="nvfp4-linear",
        request={
            "kind": "dense-b12x",
            "tile": [rows, columns],
            "shapes": [[m, n, 512], [rows, columns, 1152], [rows - 24, columns, 128]],
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
    # with 1 SM its block takes 4 tiles
    Launched(
        name="b12x GEMM, several tiles a block",
        serves="nvfp4-linear",
        request={
            "kind": "dense-b12x",
            "tile": [64, 128],
            "shapes": [[104, 256, 512], [104, 256, 384]],
            "sms": 1,
        },
    ),
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
        request={"kind": "moe-b12x", "tokens": [1]},
    ),
    Launched(
        name="b12x MoE, 24 tokens",
        serves="nvfp4-moe",
        # with a hidden size of 256 each stage of a pipeline would be used once
        request={"kind": "moe-b12x", "tokens": [24], "experts": 4, "hidden": 512, "sms": 4},
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
    # FlashInfer takes this kernel from 320 or 512 tokens on
    Launched(
        name="b12x MoE, many tokens",
        serves="nvfp4-moe",
        request={
            "kind": "moe-b12x",
            "tokens": [24],
            "experts": 4,
            "hidden": 256,
            "many": True,
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
    found = [
        one
        for one in LAUNCHED
        if any(kind == one.serves and one.line in line for kind, line in lines)
    ]
    chosen = any("b12x" in line for _, line in lines)
    return [*found, *(OF_PACKAGE if chosen and package else ())]


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
    executor = sorted(path.name for path in package_file("ptx", "runs.py").parent.glob("*.py"))
    return (LAUNCH, *(("ptx", name) for name in executor))


def results() -> Results:
    """What is kept of runs; one has 40 kB."""
    return Results("numbers", _programs(), 400)


def sandbox_launcher(
    tree: Tree, packages: Mapping[str, str], trust: TrustedSources | None = None
) -> Callable[[Mapping[str, Any]], Replies]:
    """A way to launch with the FlashInfer and CuTe DSL of any tree, in a sandbox.

    Nothing is made or downloaded before it is called.  Files that ``trust`` does not know are not
    run: isolated code has no folder that launches could be written to.
    """

    def launch(request: Mapping[str, Any]) -> Replies:
        current = {**packages, **versions(tree)}
        apart = (trust or TrustedSources()).apart(tree, [*python_files(tree), *texts_of(tree)])
        if apart is not None:
            raise SandboxUnavailable(
                f"it writes its launches to this machine, which isolated code cannot do "
                f"({apart.because})",
                hint="run the same command with --trust-image",
            )
        sandbox = Sandbox(requirements_for(current["vllm"]))
        dsl, rest = mirror(tree), lay_out(tree)
        sandbox.prepare()
        torch = torch_folder(wanted_torch(tree, current))
        # these four are named by their contents
        inputs = [sandbox.root.name, torch.folder.name, dsl.name, rest.name, request]
        kept = None if settings.KEEP_LAUNCHES.value else results().get(inputs, Replies)
        if kept is not None:
            return kept
        with _folder() as folder:
            paths = [str(dsl), str(rest), str(torch.folder)]
            full = {**request, "paths": paths, "pretend_triton": True, "folder": folder}
            recorded = restore(inputs, Path(folder))
            if recorded is None:
                recorded = ask_probe(sandbox.python, full, LaunchReply, TIMEOUT, LAUNCH)
                if not recorded.fatal and all(map(_final, recorded.kernels)):
                    keep(inputs, Path(folder), recorded)
            replies = _run_all(recorded, int(request["jobs"]), torch.what)
        if all(not one.error or one.stage in FINAL for one in replies.replies):
            results().put(inputs, replies)
        return replies

    return launch


def _final(kernel: RecordedKernel) -> bool:
    """Whether the same files give the same launches, or the same error."""
    return kernel.error is None or kernel.error.stage in FINAL


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
