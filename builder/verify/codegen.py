"""Level ``codegen``: the kernels that the profile selects, compiled for SM121, and read.

The target's own FlashInfer and CuTe DSL compile them as they would on the device; no GPU is needed
for that.  What comes out is looked at: the architecture it is for, its tensor-core instructions.
"""

from __future__ import annotations

import base64
import os
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from builder.errors import SparkBuildError
from builder.runtime.spark_apply import versions
from builder.verify import Check
from builder.verify.dslmirror import NoDsl, mirror
from builder.verify.sandbox import Sandbox, ask_probe, lay_out, requirements_for
from builder.verify.sass import BadCubin, Disassembly, ToolMissing, disassemble, resources

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from builder.runtime.spark_apply import Tree
    from builder.verify import Status, VerifyTarget

#: What the CuTe DSL compiles for on a GB10 by itself.
ARCH = "sm_121a"
PROBE = "codegen_probe.py"
#: One MoE kernel of the slowest DSL takes 20 s of one core.
TIMEOUT = 600.0


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel to compile, and what its machine code must show."""

    name: str
    #: the expectation that wants it; empty for those that every b12x profile wants
    serves: str
    request: Mapping[str, Any]
    #: NVFP4 tensor-core instructions are a must
    fp4: bool = True
    known: str = ""


KERNELS = (
    Kernel(
        name="NVFP4 warp MMA",
        serves="",
        request={"kind": "mma-gate"},
        fp4=False,
    ),
    Kernel(
        name="b12x GEMM, tile 128x128",
        serves="nvfp4-linear",
        request={"kind": "dense-b12x", "tokens": 512, "tile": [128, 128]},
        known="128 of them in every release from FlashInfer 0.6.9 to 0.7.2.post1",
    ),
    Kernel(
        name="b12x GEMM, 1 token",
        serves="nvfp4-linear",
        request={"kind": "dense-b12x", "tokens": 1},
    ),
    Kernel(
        name="b12x MoE, 64 tokens",
        serves="nvfp4-moe",
        request={"kind": "moe-b12x", "tokens": 64},
    ),
    # From FlashInfer 0.6.18 on this one multiplies vectors, without tensor cores.
    Kernel(
        name="b12x MoE, 1 token",
        serves="nvfp4-moe",
        request={"kind": "moe-b12x", "tokens": 1},
        fp4=False,
    ),
)

#: What a compiler's message means for a user of the layers.
ADVICE = (
    (r"expects arch to be one of", "the layer cutlass-dsl-sm121a opens this gate"),
    (
        r"Unexpected instruction types specified for '_mma'",
        "the layer cutlass-dsl-cu13 puts the CUDA 13 build in front, which emits another form",
    ),
    (
        r"cannot import name|has no attribute|does not support backend",
        "the FlashInfer in the target lacks this kernel; the layer flashinfer-b12x brings it",
    ),
)


def wanted_kernels(expectations: Sequence[Mapping[str, str]]) -> list[Kernel]:
    """The kernels that stand behind the lines a profile expects."""
    kinds = {e["kind"] for e in expectations if "b12x" in e["line"].lower()}
    return [k for k in KERNELS if kinds and (not k.serves or k.serves in kinds)]


def expected_of(kernel: Kernel, arch: str) -> str:
    """What a kernel must show, in words."""
    if kernel.request["kind"] == "mma-gate":
        return f"the CuTe DSL admits {arch}"
    if not kernel.fp4:
        return f"compiles for {arch}; no BPT.TRAP"
    known = f" ({kernel.known})" if kernel.known else ""
    return f"compiles for {arch}; OMMA.SF instructions on E2M1 > 0{known}; no BPT.TRAP"


def check_codegen(target: VerifyTarget) -> Iterator[Check]:
    """One check for each kernel behind the lines that the profile expects."""
    kernels = wanted_kernels(target.plan["expect"])
    if not kernels:
        said = "the profile expects no b12x kernel, and no other is compiled at run time"
        yield _not_run("codegen", "a kernel compiled for SM121", said)
        return
    arch = str(target.plan["env"].get("CUTE_DSL_ARCH", ARCH))
    request = {
        "env": dict(target.plan["env"]),
        "arch": arch,
        "jobs": min(4, os.cpu_count() or 1),
        "kernels": [dict(kernel.request) for kernel in kernels],
    }
    compiler = target.compile
    if compiler is None:
        yield from _all_not_run(kernels, arch, target.cannot_ask or "nothing here can compile")
        return
    try:
        result = compiler(request)
    except NoDsl as error:
        for kernel in kernels:
            yield _check(kernel, arch, "fail", str(error), where=target.name)
        return
    except SparkBuildError as error:
        hint = f"; try: {error.hint}" if error.hint else ""
        yield from _all_not_run(kernels, arch, f"{error}{hint}")
        return
    context = Context(target=target, arch=arch, result=result)
    for number, kernel in enumerate(kernels):
        yield context.judge(kernel, number)


@dataclass(frozen=True, kw_only=True)
class Context:
    """A probe's result, and what its judging needs besides."""

    target: VerifyTarget
    arch: str
    result: Mapping[str, Any]
    simulated: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "simulated", tuple(self.result.get("simulated", ())))

    def judge(self, kernel: Kernel, number: int) -> Check:
        """Compare one reply with what its kernel must show."""
        fatal = self.result.get("fatal")
        reply = {"compiled": False, "error": fatal} if fatal else self.result["kernels"][number]
        if not reply["compiled"]:
            return self._uncompiled(kernel, reply["error"])
        if kernel.request["kind"] == "mma-gate":
            seen = f"MmaMXF4NVF4Op can be built for {self.arch}"
            return self._result(kernel, "pass", seen, self._compiler())
        cubin = next(f for f in reply["files"] if f["kind"] == "cubin")
        where = f"{self._compiler()}; cubin {cubin['sha256'][:12]} ({cubin['size']} bytes)"
        head = f".target {reply['target']}, PTX {reply['ptx_version']}"
        try:
            found = read_cubin(base64.b64decode(cubin["base64"]))
        except ToolMissing as error:
            reason = f"it compiled, but {error}; try: {error.hint}"
            return self._result(kernel, "not-run", head, where, reason)
        except BadCubin as error:
            return self._result(kernel, "fail", f"{head}; {error}", where)
        wrong = faults(kernel, self.arch, str(reply["target"]), found.code)
        status: Status = "fail" if wrong else "pass"
        return self._result(kernel, status, f"{head}; {found.words}", where, "; ".join(wrong))

    def _uncompiled(self, kernel: Kernel, error: Mapping[str, Any]) -> Check:
        seen = f"{error['type']}: {headline(str(error['message']), str(error['type']))}"
        lacking = self._lacking(error)
        if lacking:
            return self._result(
                kernel, "not-run", "", "", f"the sandbox lacks the module {lacking}"
            )
        advice = [words for pattern, words in ADVICE if re.search(pattern, str(error["message"]))]
        return self._result(kernel, "fail", seen, self._compiler(), "".join(advice[:1]))

    def _lacking(self, error: Mapping[str, Any]) -> str | None:
        """The third-party module that only a sandbox can lack: says nothing about the target."""
        from builder.verify.imports import PACKAGES

        found = re.search(r"No module named '([\w.]+)'", str(error.get("message", "")))
        if self.target.kind == "image" or error.get("type") != "ModuleNotFoundError" or not found:
            return None
        top = found[1].partition(".")[0]
        return None if top in PACKAGES or top == "cutlass" else found[1]

    def _compiler(self) -> str:
        of = self.result.get("versions", {})
        parts = [
            f"{label} {of[name]}"
            for name, label in (
                ("flashinfer-python", "FlashInfer"),
                ("nvidia-cutlass-dsl", "CuTe DSL"),
            )
            if of.get(name)
        ]
        return f"{' + '.join(parts) or 'the compiler'} of {self.target.name}"

    def _result(
        self, kernel: Kernel, status: Status, seen: str, where: str, reason: str = ""
    ) -> Check:
        made = _check(kernel, self.arch, status, seen, where=where, reason=reason)
        return made if status == "not-run" else _simulating(made, self.simulated)


def faults(kernel: Kernel, arch: str, target: str, code: Disassembly) -> list[str]:
    """What is wrong with a kernel that did compile."""
    wrong = []
    if target != arch or code.target not in ("", arch):
        wrong.append(f"it is for {code.target or target}, not for {arch}")
    if kernel.fp4 and not code.of("OMMA.SF", having="E2M1"):
        wrong.append("no FP4 tensor-core instruction in it")
    if code.traps:
        wrong.append(f"{code.traps} BPT.TRAP: it ends itself on some device")
    return wrong


@dataclass(frozen=True)
class Reading:
    """A cubin that was read, and that in words."""

    code: Disassembly
    words: str


def read_cubin(cubin: bytes) -> Reading:
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
    return Reading(code, "; ".join(parts))


def headline(message: str, kind: str) -> str:
    """The compiler's own words: the line that says what is wrong, without wrapping around it."""
    lines = [" ".join(line.split()) for line in message.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"ptxas .*error", line)]
    first = telling[0] if telling else next(iter(lines), "no message")
    shown = first.removeprefix(f"{kind}: ")
    shown = shown[shown.index("ptxas ") :] if telling and "ptxas " in shown else shown
    more = f" (and {len(telling) - 1} more of its kind)" if len(telling) > 1 else ""
    return f"{shown[:400]}{more}"


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


def sandbox_compiler(
    tree: Tree, packages: Mapping[str, str]
) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """A way to compile with the FlashInfer and CuTe DSL of any tree, in a sandbox.

    Nothing is made or downloaded before it is called.
    """

    def compile_kernels(request: Mapping[str, Any]) -> Mapping[str, Any]:
        current = {**packages, **versions(tree)}
        requirements = requirements_for(current["vllm"])
        sandbox = Sandbox(requirements)
        dsl = mirror(tree)
        sandbox.prepare()
        full = {**request, "paths": [str(dsl), str(lay_out(tree))], "pretend_triton": True}
        result = ask_probe(sandbox.python, full, TIMEOUT, PROBE)
        result.setdefault("simulated", [])[:0] = [
            f"torch {requirements.torch} (CPU build) and this machine's Python, in a sandbox",
            "the CuTe DSL's shared libraries: this machine's build of the same wheels",
        ]
        return result

    return compile_kernels


def python_compiler(python: Path) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """A way to compile with what an environment on this machine has installed."""
    return lambda request: ask_probe(python, request, TIMEOUT, PROBE)
