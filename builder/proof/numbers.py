"""Level ``numbers``: runs the kernels that the profile selects on the CPU.

FlashInfer's own host code launches them, and `builder.ptx` executes the PTX that its compiler wrote
for SM121: values against the exact product, and what no device reports: races, deadlocks, accesses
out of bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.probes.dispatch_expect import backends
from builder.proof.checks import Check
from builder.proof.codegen import ARCH
from builder.proof.kernels import (
    ABSENT,
    NO_LAYER,
    PACKAGE,
    UNREAD,
    error_of,
    headline,
    launch_request,
    wanted_launches,
)
from builder.proof.replies import cached, machine_cause
from builder.proof.sandbox import NoDsl
from builder.proof.target import Refusal
from builder.ptx.coverage import order
from builder.ptx.findings import UNWAITED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from builder.proof.checks import Status
    from builder.proof.kernels import Launched, Replies, Reply
    from builder.proof.target import VerifyTarget
    from builder.ptx.findings import FoundRace, Run

#: A tile may have rows that no token needs, which are multiplied all the same.
UNWRITTEN = "read of uninitialised memory"
EXPECTED = "every value within its bound in every schedule; no race, no deadlock, no bad access"
#: W4A16 layers by their kinds, and what is not run of them: by the kernel's name, why.
W4A16 = {"w4a16-linear": "W4A16 linear layers", "w4a16-moe": "W4A16 MoE layers"}
NOT_RUN = {
    "marlin": "vLLM uses Marlin, which is shipped as machine code, and this level runs the PTX "
    "of kernels in the CuTe DSL. It does not test Marlin's numbers.",
}
#: Of experts with 16-bit activations whose kernel is another's.
ROUNDED = (
    "the activations are rounded to FP4: vLLM calls FlashInfer's kernel for FP4 activations "
    "(FlashInfer's own for W4A16 needs FLASHINFER_B12X_FORCE_MOE_W4A16=1)"
)
#: What differs from the device.
SIMULATED = (
    "the GPU: the kernel's PTX is executed on a CPU, not the machine code that ptxas makes of it",
    "tensor cores: the products of one instruction are summed exactly and rounded once",
    "rcp, ex2 and other approximations: exact, rounded once",
    "schedules: eager, lazy and random copies; the timing of the device differs",
)


def check_numbers(target: VerifyTarget) -> Iterator[Check]:
    """One check for each kernel behind the lines that the profile expects."""
    yield from _run_expected(target)
    for expected in target.plan.expect:
        choice = (expected.line or expected.selected or "").lower()
        reason = next((why for part, why in NOT_RUN.items() if part in choice), "")
        if reason and expected.kind in W4A16:
            yield Check(
                level="numbers", name=W4A16[expected.kind], status="not-run", expected=EXPECTED,
                seen="", reason=reason, moot=True,
            )  # fmt: skip


def _run_expected(target: VerifyTarget) -> Iterator[Check]:
    installed = PACKAGE in target.tree.distributions()
    wanted = wanted_launches(target.plan.expect, package=installed)
    if not wanted:
        reason = "the profile expects no b12x kernel, and no other is known to this level"
        yield Check(
            level="numbers", name="numbers", status="not-run",
            expected="a kernel run without the device", seen="", reason=reason,
        )  # fmt: skip
        return
    arch = target.plan.env.get("CUTE_DSL_ARCH", ARCH)
    try:
        flags = (*target.plan.serve_flags, *target.plan.moe_serve_flags)
        settings = {**backends(flags, "nvfp4-linear"), **backends(flags, "nvfp4-moe")}
        replies = target.runner.launch(launch_request(target.plan.env, arch, wanted, settings))
    except NoDsl as error:
        yield from (_check(one, "fail", str(error), where=target.name) for one in wanted)
        return
    if isinstance(replies, Refusal):
        yield from (_check(one, "not-run", reason=str(replies)) for one in wanted)
        return
    for one, reply in zip(wanted, replies.replies, strict=True):
        yield _judged(one, reply, replies, target.name)


def _judged(one: Launched, reply: Reply, replies: Replies, target: str) -> Check:
    simulated = (*replies.simulated, *SIMULATED)
    where = _where(one, reply, replies, target)
    cause = machine_cause(error_of(reply))
    if reply.stage == ABSENT and not cause:
        note = headline(reply.error.partition(": ")[2], "")
        return _check(one, "not-run", where=where, reason=note, moot=True)
    if cause or reply.stage in (UNREAD, NO_LAYER):
        note = "vLLM's layer cannot be run on a CPU here: " if reply.stage == NO_LAYER else ""
        return _check(one, "not-run", where=where, reason=cause or f"{note}{reply.error}")
    if reply.error:
        error = error_of(reply)
        seen = f"{error.type}: {headline(error.message, error.type)}"
        return _check(one, "fail", seen, where=where, simulated=simulated)
    runs = [run for ran in reply.ran for run in ran.runs]
    if not runs or not any(run.values for run in runs if not run.fault):
        seen = "no launch gave a value" if not runs else ""
        faults = [run for run in runs if run.fault]
        seen = seen or "; ".join(_fault(run) for run in faults[:1]) or "no value was checked"
        return _check(one, "fail", seen, where=where, simulated=simulated)
    findings, figures = Findings.of(runs), figures_of(reply)
    if findings.words:
        seen = "; ".join(findings.words)
        return _check(
            one, "fail", seen, where=where, simulated=simulated, figures=figures, reply=reply
        )
    values = sum(run.values for run in runs)
    races = f"no race; {findings.unset}" if findings.unset else "no race"
    seen = (
        f"{values} values right, in {_many(len(reply.ran), 'launch', 'launches')} and "
        f"{_many(len(runs) // len(reply.ran), 'schedule')} each; {races}; {_coverage(reply)}; "
        f"{sum(run.instructions for run in runs)} warp instructions"
    )
    if one.serves == "w4a16-moe" and not any("w4a16" in ran.kernel.lower() for ran in reply.ran):
        seen = f"{seen}; {ROUNDED}"
    return _check(one, "pass", seen, where=where, simulated=simulated, figures=figures, reply=reply)


def judged(run: Run) -> tuple[FoundRace, ...]:
    """The races by which a kernel is judged: those between warps, blocks and copies.

    Those on global memory are judged as GPUs order it (`builder.ptx.races.LaunchRaces.as_gpus`).
    What is found between lanes of a warp and at the end of a block was not yet compared with
    hardware for these kernels; ``spark-build ptx`` reports it.
    """
    return tuple(race for race in run.races if not race.of_lanes and race.kind != UNWAITED)


def figures_of(reply: Reply) -> dict[str, int]:
    """A row of the page's table; races by the lines of the kernel's own source."""
    runs = [run for ran in reply.ran for run in ran.runs]
    reads = [race for run in runs for race in judged(run)]
    reads = [race for race in reads if race.kind != UNWRITTEN]
    pairs = {(race.kind, *(line.source or str(line.line) for line in race.lines)) for race in reads}
    covered = _covered(reply)
    blocks = sum(ran.blocks for ran in {(ran.ptx, ran.kernel): ran for ran in reply.ran}.values())
    return {
        "values": sum(run.values for run in runs),
        "wrong": sum(run.wrong for run in runs),
        "races": len(pairs),
        "did not end": sum(bool(run.fault) for run in runs),
        "inputs": len(reply.ran),
        "schedules": len({run.schedule for run in runs}),
        "% of code run": 100 * sum(map(len, covered.values())) // max(blocks, 1),
    }


@dataclass(frozen=True)
class Findings:
    """What is wrong in some runs of a kernel, in words."""

    words: tuple[str, ...]
    #: shared memory that is read before anything is written there, though every value is right
    unset: str = ""

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Findings:
        """The worst of the wrong values, one fault, one race of each kind; how many of each."""
        words = []
        wrong = [run for run in runs if run.wrong]
        if wrong:
            worst = max(wrong, key=lambda run: run.wrong)
            named = dict.fromkeys(run.schedule for run in wrong)
            words.append(
                f"wrong values in {_many(len(wrong), 'run')} of {len(runs)} ({', '.join(named)}); "
                f"{worst.launch}, {worst.schedule}: {worst.said}"
            )
        faults = [run for run in runs if run.fault]
        if faults:
            words.append(f"{_many(len(faults), 'run')} did not end; {_fault(faults[0])}")
        by_kind: dict[str, dict[object, FoundRace]] = {}
        for run in runs:
            for race in judged(run):
                by_kind.setdefault(race.kind, {}).setdefault(race.key, race)
        unset = by_kind.pop(UNWRITTEN, {}) if not wrong and not faults else {}
        words += [f"race, {_first(races.values())}" for races in by_kind.values()]
        read = f"{_first(unset.values())}: NaN there changed no value" if unset else ""
        return cls(tuple(words), read)


def _first(races: Iterable[FoundRace]) -> str:
    first, *more = races
    return f"{first} (and {_many(len(more), 'more')})" if more else str(first)


def _fault(run: Run) -> str:
    kind = "deadlock" if run.deadlock else "fault"
    return f"{run.launch}, {run.schedule}: {kind}: {run.fault[:600]}"


def _covered(reply: Reply) -> dict[tuple[str, str], set[int]]:
    """Basic blocks that ran, by PTX and kernel: two may be in one PTX."""
    covered: dict[tuple[str, str], set[int]] = {}
    for ran in reply.ran:
        for run in ran.runs:
            covered.setdefault((ran.ptx, ran.kernel), set()).update(run.covered)
    return covered


def _unreached(reply: Reply) -> dict[tuple[str, str], list[str]]:
    """Source lines that no launch ran, by PTX and kernel."""
    lines: dict[tuple[str, str], list[str]] = {}
    for ran in reply.ran:
        before = lines.setdefault((ran.ptx, ran.kernel), [*ran.unreached])
        now = {*ran.unreached}
        before[:] = [line for line in before if line in now]
    return lines


def _coverage(reply: Reply) -> str:
    kernels = {(ran.ptx, ran.kernel): ran for ran in reply.ran}
    unreached = _unreached(reply)
    blocks = [f"{len(seen)} of {kernels[key].blocks}" for key, seen in _covered(reply).items()]
    lines = [f"{ran.lines - len(unreached[key])} of {ran.lines}" for key, ran in kernels.items()]
    return f"{' and '.join(blocks)} basic blocks, {' and '.join(lines)} source lines ran"


def _where(one: Launched, reply: Reply, replies: Replies, target: str) -> str:
    library = (PACKAGE, PACKAGE) if one.serves == PACKAGE else ("flashinfer-python", "FlashInfer")
    labels = (library, ("nvidia-cutlass-dsl", "CuTe DSL"))
    named = [f"{label} {replies.versions[n]}" for n, label in labels if replies.versions.get(n)]
    ptx = dict.fromkeys(ran.ptx[:12] for ran in reply.ran)
    files = f"; PTX {', '.join(ptx)}" if ptx else ""
    return f"{' + '.join(named) or 'the compiler'} of {target}{cached(replies.kept)}{files}"


def _many(number: int, one: str, several: str = "") -> str:
    plural = several or (one if one == "more" else f"{one}s")
    return f"{number} {one if number == 1 else plural}"


def _check(
    one: Launched,
    status: Status,
    seen: str = "",
    *,
    where: str = "",
    reason: str = "",
    moot: bool = False,
    simulated: tuple[str, ...] = (),
    figures: Mapping[str, int] | None = None,
    reply: Reply | None = None,
) -> Check:
    lines = _unreached(reply) if reply else {}
    return Check(
        level="numbers",
        name=one.name,
        status=status,
        expected=EXPECTED,
        seen=seen,
        where=where,
        reason=reason,
        moot=moot,
        simulated=simulated,
        figures=figures or {},
        unreached=tuple(sorted({line for one in lines.values() for line in one}, key=order)),
    )
