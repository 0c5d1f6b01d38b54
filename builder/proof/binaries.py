"""Level ``binaries``: whether SM121 runs the machine code that a release ships prebuilt.

The kernels behind a profile's expected log lines must run there, natively or compiled by the
driver from PTX, and must be real: a kernel for another chip compiles to a trap.  The
architecture only decides whether code loads; its instructions are checked too.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from builder.common.machinecode import (
    BadBinary,
    BadCubin,
    Modules,
    ToolMissing,
    find_tool,
    is_trap,
    load_kernels,
)
from builder.errors import SparkBuildError
from builder.proof.checks import Check

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from builder.common.machinecode import Kernel, KernelSummary, Summary
    from builder.proof.checks import Status
    from builder.proof.target import VerifyTarget


def check_binaries(target: VerifyTarget) -> Iterator[Check]:
    """One check for each kernel behind the profile's expected lines, and for each module read."""
    lines = [word for e in target.plan.expect for word in (e.line, e.selected)]
    every = load_kernels()
    kernels = [k for k in every if any(re.search(k.behind, line) for line in lines if line)]
    if not kernels:
        reason = "the profile expects no kernel that vLLM ships prebuilt"
        yield _check("binaries", "code that SM121 runs", "not-run", reason=reason)
        return
    try:
        for tool in ("cuobjdump", "nvdisasm"):
            find_tool(tool)
        modules = Modules(target.tree, [kernel.symbol for kernel in every])
        holding = [(kernel, _holder(kernel, modules)) for kernel in kernels]
        checks = [_judge(kernel, holder, modules, target.name) for kernel, holder in holding]
    except (BadBinary, BadCubin) as error:
        for kernel in kernels:
            yield _check(kernel.name, kernel.expected, "fail", seen=str(error), where=target.name)
        return
    except SparkBuildError as error:
        hint = f"; try: {error.hint}" if error.hint else ""
        for kernel in kernels:
            yield _check(kernel.name, kernel.expected, "not-run", reason=f"{error}{hint}")
        return
    yield from checks
    holders = {holder.path for _, holder in holding if holder is not None}
    yield from _modules(target, modules, holders)


def _holder(kernel: Kernel, modules: Modules) -> Summary | None:
    """The first module that has the kernel."""
    for path in modules.matching(kernel.modules):
        summary = modules.summary(path)
        if summary.readings[kernel.symbol]:
            return summary
    return None


def _judge(kernel: Kernel, holder: Summary | None, modules: Modules, name: str) -> Check:
    """Compare a module's kernel with the expectation."""
    if holder is None:
        looked = ", ".join(modules.matching(kernel.modules)) or "no such module"
        reason = f"needs a rebuild: this vLLM was built without it; {kernel.cure}"
        return _check(
            kernel.name, kernel.expected, "fail", seen="none", where=looked, reason=reason
        )
    readings = holder.readings[kernel.symbol]
    lost = [r for r in readings if r.how == "none"]
    hollow = [r for r in readings if r.how != "none" and not kernel.is_real(r)]
    reason = ""
    if lost:
        reason = f"needs a rebuild: SM121 loads none of {' '.join(_archs(lost))}; {kernel.cure}"
    elif hollow:
        traps = sum(any(map(is_trap, r.counts)) for r in hollow)
        what = f"only a trap in {traps}" if traps else f"nothing of the kind in {len(hollow)}"
        reason = f"needs a rebuild: {what} of {len(readings)}; {kernel.cure}"
    counts = _counts(kernel, readings)
    return _check(
        kernel.name,
        kernel.expected,
        "fail" if reason else "pass",
        seen="; ".join([f"{_count(readings)}: {_ways(readings)}", *_in_words(counts, readings)]),
        where=f"{holder.path} of {name}",
        reason=reason or _jit_note(readings),
        figures=counts,
    )


def _ways(readings: Sequence[KernelSummary]) -> str:
    words = {"native": "native", "jit": "compiled by the driver from PTX", "none": "not loadable"}
    of = {how: [r for r in readings if r.how == how] for how in words}
    return ", ".join(
        f"{len(of[how])} {meaning} ({', '.join(_archs(of[how]))})"
        for how, meaning in words.items()
        if of[how]
    )


def _count(readings: Sequence[KernelSummary]) -> str:
    return f"{len(readings)} kernel{'s' if len(readings) != 1 else ''}"


def _archs(readings: Sequence[KernelSummary]) -> list[str]:
    return sorted({reading.arch for reading in readings})


def _counts(kernel: Kernel, readings: Sequence[KernelSummary]) -> dict[str, int]:
    """The relevant instructions over all of a kernel's instances, most frequent first."""
    total: Counter[str] = Counter()
    for reading in readings:
        for name, number in reading.counts.items():
            if is_trap(name):
                total["BPT.TRAP"] += number
            elif kernel.tells(name, reading.how):
                total[name] += number
    return dict(total.most_common())


def _in_words(counts: Mapping[str, int], readings: Sequence[KernelSummary]) -> list[str]:
    if all(reading.how == "none" for reading in readings):
        return []
    instructions = ", ".join(f"{number} x {name}" for name, number in counts.items())
    return (
        [instructions]
        if "BPT.TRAP" in counts
        else [instructions, "no BPT.TRAP"]
        if instructions
        else ["no BPT.TRAP"]
    )


def _jit_note(readings: Sequence[KernelSummary]) -> str:
    if all(reading.how != "jit" for reading in readings):
        return ""
    return "the driver compiles it at first load, and caches the result"


# ------------------------------------------------------------------------------------- the modules


def _modules(target: VerifyTarget, modules: Modules, holders: set[str]) -> Iterator[Check]:
    """The contents of each module; of those on the index only if they were read anyway."""
    chosen = (
        modules.paths
        if target.subject.is_here
        else [path for path in modules.paths if path in modules.read]
    )
    unread = len(modules.paths) - len(chosen)
    for path in chosen:
        try:
            yield _module(target, modules.summary(path), needed=path in holders, unread=unread)
        except (BadBinary, BadCubin) as error:
            expected = "device code that can be listed"
            yield _check(path, expected, "fail", seen=str(error), where=target.name)
        except ToolMissing as error:
            expected = "device code that can be listed"
            yield _check(path, expected, "not-run", reason=f"{error}; try: {error.hint}")


def _module(target: VerifyTarget, summary: Summary, *, needed: bool, unread: int) -> Check:
    runs = summary.native + summary.jit
    expected = "SM121 runs kernels of it" if needed else "it has no kernel of the profile"
    notes = []
    if needed and not runs:
        notes.append("needs a rebuild: all of its code is for other chips")
    elif not needed and summary.total and not runs:
        notes.append("for other chips; vLLM does not call it on SM121")
    if needed and unread:
        note = f"{unread} other modules were not read: they have no kernel of the profile"
        notes.append(f"{note} (checked on an image or a directory)")
    return _check(
        summary.path,
        expected,
        "fail" if needed and not runs else "pass",
        seen=describe(summary),
        where=target.name,
        reason="; ".join(notes),
        figures=summary.ways,
    )


def describe(summary: Summary) -> str:
    """A module as text: its contents, and how much of it SM121 runs."""
    if not summary.elf and not summary.ptx:
        return "no device code"
    ways = ", ".join(f"{number} {how}" for how, number in summary.ways.items())
    return (
        f"machine code for {_listed(summary.elf)}; PTX for {_listed(summary.ptx)}; of "
        f"{summary.total} kernels SM121 runs {ways}"
    )


def _listed(images: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{arch} x{number}" for arch, (number, _) in images.items()) or "nothing"


def _check(
    name: str,
    expected: str,
    status: Status,
    *,
    seen: str = "",
    where: str = "",
    reason: str = "",
    figures: Mapping[str, int] | None = None,
) -> Check:
    return Check(
        level="binaries",
        name=name,
        status=status,
        expected=expected,
        seen=seen,
        where=where,
        reason=reason,
        figures=figures or {},
    )
