"""Level ``codegen``: compiles the kernels that the profile selects for SM121, and checks them.

The target's own FlashInfer and CuTe DSL compile them as on the device, without a GPU.
The result is checked: its architecture and its tensor-core instructions.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from builder.common.document import plain
from builder.common.machinecode import BadCubin, Disassembly, ToolMissing, disassemble, resources
from builder.common.programs import CODEGEN
from builder.common.results import Results
from builder.proof.checks import Check
from builder.proof.dispatch import lacking
from builder.proof.kernels import (
    ADVICE,
    PACKAGE,
    Kernel,
    expected_of,
    faults,
    headline,
    tile_of,
    wanted_kernels,
)
from builder.proof.replies import (
    CODEGEN_TIMEOUT,
    CodegenReply,
    CodegenRequest,
    KernelReply,
    MalformedReply,
    cached,
    machine_cause,
    of_the_files,
)
from builder.proof.sandbox import (
    NoDsl,
    WithDsl,
    ask_probe,
    lay_out,
    own_files,
    soundly,
)
from builder.proof.target import Refusal
from builder.proof.variables import for_a_process

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from builder.applier.trees import Tree
    from builder.probes.dispatch_expect import Failure
    from builder.proof.checks import Status
    from builder.proof.target import VerifyTarget
    from builder.proof.trust import TrustedSources

#: The CuTe DSL's default architecture on a GB10.
ARCH = "sm_121a"


def check_codegen(target: VerifyTarget) -> Iterator[Check]:
    """One check for each kernel behind the profile's expected lines."""
    installed = PACKAGE in target.tree.distributions()
    kernels = wanted_kernels(target.plan.expect, package=installed)
    if not kernels:
        reason = "the profile expects no b12x kernel, and this level compiles no others"
        yield _not_run("codegen", "a kernel compiled for SM121", reason)
        return
    arch = target.plan.env.get("CUTE_DSL_ARCH", ARCH)
    request = CodegenRequest(
        env={**target.plan.env},
        arch=arch,
        jobs=min(4, os.cpu_count() or 1),
        kernels=tuple(kernel.request for kernel in kernels),
    )
    try:
        reply = target.runner.compile(request)
        if isinstance(reply, Refusal):
            yield from _all_not_run(kernels, arch, str(reply))
            return
        context = Context(target=target, arch=arch, reply=reply)
        context.read_all()
        checks = [context.judge(kernel, number) for number, kernel in enumerate(kernels)]
    except (
        IndexError,
        KeyError,
        ValueError,
        MalformedReply,
    ) as error:  # the target's code wrote it
        reason = "" if isinstance(error, MalformedReply) else "the probe's answer is malformed: "
        for kernel in kernels:
            yield _check(kernel, arch, "fail", f"{reason}{error}", where=target.name)
        return
    except NoDsl as error:
        for kernel in kernels:
            yield _check(kernel, arch, "fail", str(error), where=target.name)
        return
    yield from checks


@dataclass(frozen=True, kw_only=True)
class Context:
    """A probe's reply, and other values needed to judge it."""

    target: VerifyTarget
    arch: str
    reply: CodegenReply
    #: sha256 of a cubin -> its contents, or why it cannot be read
    readings: dict[str, ReadCubin | ToolMissing | BadCubin] = field(default_factory=dict)

    def read_all(self) -> None:
        """Disassemble all cubins, two in parallel: starting ``nvdisasm`` is most of the work."""
        replies = [one for reply in self.reply.kernels for one in reply.each or (reply,)]
        cubins = {cubin.sha256: cubin.data for one in replies if (cubin := one.cubin)}
        with ThreadPoolExecutor(2) as pool:
            readings = pool.map(attempt, cubins.values())
            self.readings.update(zip(cubins, readings, strict=True))

    def judge(self, kernel: Kernel, number: int) -> Check:
        """Compare one reply with the expectation for its kernel."""
        fatal = self.reply.fatal
        reply = KernelReply(error=fatal) if fatal else self.reply.kernels[number]
        if reply.each:
            return self._every_tile(kernel, reply.each)
        return self._one(kernel, reply)

    def _one(self, kernel: Kernel, reply: KernelReply) -> Check:
        if reply.error is not None and not reply.compiled:
            return self._uncompiled(kernel, reply.error)
        if not reply.compiled:
            raise ValueError("a kernel that did not compile has no error")
        if kernel.request.kind == "mma-gate":
            seen = f"MmaMXF4NVF4Op can be built for {self.arch}"
            return self._result(kernel, "pass", seen, self._compiler())
        cubin = reply.cubin
        if cubin is None:
            raise ValueError("a kernel that compiled has no cubin")
        where = f"{self._compiler()}; cubin {cubin.sha256[:12]} ({cubin.size} bytes)"
        head = f".target {reply.target}, PTX {reply.ptx_version}"
        reading = self.readings[cubin.sha256]
        if isinstance(reading, ToolMissing):
            reason = f"it compiled, but {reading}; try: {reading.hint}"
            return self._result(kernel, "not-run", head, where, reason)
        if isinstance(reading, BadCubin):
            return self._result(kernel, "fail", f"{head}; {reading}", where)
        wrong = faults(kernel, self.arch, str(reply.target), reading.code)
        status: Status = "fail" if wrong else "pass"
        check = self._result(kernel, status, f"{head}; {reading.words}", where, "; ".join(wrong))
        return replace(check, figures=reading.code.tensor)

    def _every_tile(self, kernel: Kernel, replies: Sequence[KernelReply]) -> Check:
        """One check for the kernels of all tiles: the worst result."""
        by_tile = {tile_of(reply.request): self._one(kernel, reply) for reply in replies}
        for status in ("fail", "not-run"):
            wrong = {tile: check for tile, check in by_tile.items() if check.status == status}
            if wrong:
                return _worst(wrong, by_tile)
        by_name: dict[str, list[str]] = {}
        for tile, check in by_tile.items():
            for name, number in check.figures.items():
                by_name.setdefault(name, []).append(f"{number} in {tile}")
        spilling = [tile for tile, check in by_tile.items() if "; no spills;" not in check.seen]
        parts = [f"{name}: {', '.join(numbers)}" for name, numbers in by_name.items()]
        parts.append(f"spills in {', '.join(spilling)}" if spilling else "no spills")
        figures = {tile: sum(check.figures.values()) for tile, check in by_tile.items()}
        whole = self._result(kernel, "pass", "; ".join([*parts, "no BPT.TRAP"]), self._compiler())
        return replace(whole, figures=figures)

    def _uncompiled(self, kernel: Kernel, error: Failure) -> Check:
        seen = f"{error.type}: {headline(error.message, error.type)}"
        if absent := lacking(self.target, error, PACKAGE):
            return self._result(kernel, "not-run", "", "", f"the sandbox lacks the module {absent}")
        if cause := machine_cause(error):
            return self._result(kernel, "not-run", "", "", cause)
        advice = [words for pattern, words in ADVICE if re.search(pattern, error.message)]
        return self._result(kernel, "fail", seen, self._compiler(), "".join(advice[:1]))

    def _compiler(self) -> str:
        of = self.reply.versions
        parts = [
            f"{label} {of[name]}"
            for name, label in (
                ("flashinfer-python", "FlashInfer"),
                ("b12x", "b12x"),
                ("nvidia-cutlass-dsl", "CuTe DSL"),
            )
            if of.get(name)
        ]
        named = " + ".join(parts) or "the compiler"
        return f"{named} of {self.target.name}{cached(self.reply.kept)}"

    def _result(
        self, kernel: Kernel, status: Status, seen: str, where: str, reason: str = ""
    ) -> Check:
        check = _check(kernel, self.arch, status, seen, where=where, reason=reason)
        return check if status == "not-run" else _simulating(check, self.reply.simulated)


@dataclass(frozen=True)
class ReadCubin:
    """A cubin's contents, also as text."""

    code: Disassembly
    words: str


def _worst(wrong: Mapping[str, Check], by_tile: Mapping[str, Check]) -> Check:
    """The result for all tiles: names tiles only if they differ."""
    tile, first = next(iter(wrong.items()))
    names = f"{', '.join(wrong)}, of {', '.join(by_tile)}; {tile}: "
    seen = first.seen if len(wrong) == len(by_tile) else f"{names}{first.seen}"
    return replace(first, seen=seen, figures={})


def attempt(cubin: bytes) -> ReadCubin | ToolMissing | BadCubin:
    """The contents of a cubin, or why it cannot be read."""
    try:
        return read_cubin(cubin)
    except (ToolMissing, BadCubin) as error:
        return error


def read_cubin(cubin: bytes) -> ReadCubin:
    """Instructions and resources of a cubin."""
    code = disassemble(cubin)
    tensor = ", ".join(f"{number} x {name}" for name, number in code.tensor.items())
    used = resources(cubin)
    registers = " and ".join(str(r.registers) for r in used)
    shared = " and ".join(str(r.shared) for r in used)
    stack = max((r.stack for r in used), default=0)
    spills = (
        f"{code.spills} local loads and stores, {stack} B stack" if code.spills else "no spills"
    )
    traps = f"{code.traps} BPT.TRAP" if code.traps else "no BPT.TRAP"
    parts = [tensor or "no tensor-core instruction", f"{registers} registers"]
    parts += [f"{shared} B shared memory fixed at compile time", spills, traps]
    return ReadCubin(code, "; ".join(parts))


def _check(
    kernel: Kernel, arch: str, status: Status, seen: str, *, where: str = "", reason: str = ""
) -> Check:
    return Check(
        level="codegen",
        name=kernel.name,
        status=status,
        expected=expected_of(kernel, arch),
        seen=seen,
        where=where,
        reason=reason,
    )


def _simulating(check: Check, simulated: tuple[str, ...]) -> Check:
    return replace(check, simulated=simulated)


def _all_not_run(kernels: Sequence[Kernel], arch: str, reason: str) -> Iterator[Check]:
    for kernel in kernels:
        yield _check(kernel, arch, "not-run", "", reason=reason)


def _not_run(name: str, expected: str, reason: str) -> Check:
    return Check(
        level="codegen", name=name, status="not-run", expected=expected, seen="", reason=reason
    )


# -------------------------------------------------------------------------------- where it compiles


def compile_in_sandbox(
    request: CodegenRequest, tree: Tree, packages: Mapping[str, str], trust: TrustedSources
) -> CodegenReply:
    """Compile with the FlashInfer and CuTe DSL of a tree; if ``trust`` lacks it, isolated."""
    apart = trust.apart(tree, own_files(tree))
    variables = for_a_process(request.env, trust.sets, apart=apart is not None)
    request = replace(request, env=dict(variables.passed))
    prepared, asked = WithDsl.prepare(tree, packages), plain(request)
    inputs = [*prepared.inputs, asked]
    cached_reply = RESULTS.get(inputs, CodegenReply)
    if cached_reply and _is_kept(cached_reply):
        return cached_reply.simulating(*variables.left_out)
    full, python = {**asked, **prepared.settings}, prepared.sandbox.python

    def ask() -> CodegenReply:
        lay_out(tree)
        return ask_probe(python, full, CodegenReply, CODEGEN_TIMEOUT, CODEGEN, apart=apart)

    make_again = partial(WithDsl.prepare, tree, packages)
    reply = soundly(ask, make_again, python, prepared.folders, _is_doubtful)
    reply = reply.simulating(
        prepared.torch.what,
        "the CuTe DSL's shared libraries are this machine's build of the same wheels",
    )
    keep_result(inputs, reply)
    return reply.simulating(*variables.left_out)


#: Number of cached results; one has 0.5 MB of cubins, and each layer of each release may need one.
RESULTS = Results("codegen", (CODEGEN,), 160)


def keep_result(inputs: Sequence[object], reply: CodegenReply) -> None:
    """Cache a result that the files alone decided; others are retried."""
    if _is_kept(reply):
        RESULTS.put(inputs, reply)


def _is_kept(reply: CodegenReply) -> bool:
    return not reply.fatal and all(map(_of_the_files, reply.kernels))


def _is_doubtful(reply: CodegenReply) -> bool:
    """Whether a kernel did not compile."""
    each = [one for kernel in reply.kernels for one in kernel.each or (kernel,)]
    return bool(reply.fatal) or not all(kernel.compiled for kernel in each)


def _of_the_files(kernel: KernelReply) -> bool:
    """Whether it compiled, or was refused for a reason that is not this machine's."""
    refused = kernel.error is not None and of_the_files(kernel.error)
    return (
        kernel.compiled or refused or (bool(kernel.each) and all(map(_of_the_files, kernel.each)))
    )
