"""Compiled code of a base: how SM121 runs its kernels, and what a compile stage makes of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from builder.applier.values import EXIT_MISSING, ApplyError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from builder.applier.layers import InputPin, Kernels


@dataclass(frozen=True)
class KernelCode:
    """How SM121 runs some kernels, their architectures, and the guards in their names."""

    how: str
    arch: str = ""
    guard: str = ""


@dataclass(frozen=True)
class ModuleCode:
    """An extension module of a base, and how SM121 runs some of its kernels: `CODE`."""

    module: str
    sha256: str
    how: str
    #: their architectures, and the guards in their names
    arch: str | None = None
    guard: str | None = None


class StageRequest(Protocol):
    """The inputs of a stage, as far as the applier reads them."""

    @property
    def change(self) -> str:
        """What is changed, by name."""

    @property
    def arch(self) -> str:
        """What it is compiled for."""

    @property
    def operators(self) -> Sequence[str]:
        """The torch operators that are registered anew."""


@dataclass(frozen=True)
class Compiled:
    """The state of compiled code, and the stage that compiles a change to it."""

    code: ModuleCode | None = None
    stage: StageRequest | None = None
    #: what the stage made; None before it has run
    wheel: InputPin | None = None
    #: the layer that installs the result of this layer's change
    carrier: str | None = None
    #: the state of a pull request in the release's sources
    sources: object = None


# --------------------------------------------------------------------------- how SM121 runs kernels


#: How SM121 runs a kernel of an extension module.  A kernel is admitted to one chip or to a family
#: by its guard; compiled for other architectures, it is only a trap.
RUNS, TRAP, UNLOADABLE, ABSENT, NO_CODE = "runs", "trap", "not-loadable", "absent", "no-code"
#: Name prefix of extension wheels.
EXTENSION_WHEELS = "spark_build_companion_"
CODE = (RUNS, TRAP, UNLOADABLE, ABSENT, NO_CODE)
_CODE_IMAGE = re.compile(r"^Fatbin elf code:\n=+\narch = (sm_\d+[af]?)$", re.MULTILINE)
#: As the tools of CUDA 12 list a kernel, and those of CUDA 13.
_CODE_KERNEL = re.compile(
    r"^(?:STT_FUNC +\S+ +STO_ENTRY|FUNC +\S+ +\S+ +ENTRY) +(?:U +)?(\S+)$", re.MULTILINE
)


def read_code(file: Path, wanted: Kernels) -> KernelCode:
    """How SM121 runs some kernels of a module, from the list of its machine code.

    ``cuobjdump`` makes that list; triton, which every vLLM for CUDA brings, has one.  Whether a
    kernel is a trap follows from its guard: ``guards`` in ``wanted`` says how the names of the
    architectures begin that it admits.

    Raises:
        ApplyError: there is no ``cuobjdump``, or it cannot read the file.
    """
    beside = file.parent.parent / "triton" / "backends" / "nvidia" / "bin" / "cuobjdump"
    tool = shutil.which("cuobjdump") or (str(beside) if os.access(beside, os.X_OK) else None)
    if tool is None:
        raise ApplyError(
            f"cannot read the architectures of {file}: cuobjdump is not installed",
            EXIT_MISSING,
            "pip install nvidia-cuda-cuobjdump",
        )
    done = subprocess.run(
        [tool, "-symbols", str(file)],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if "does not contain device code" in done.stdout + done.stderr:
        return KernelCode(NO_CODE)
    if done.returncode:
        raise ApplyError(f"cuobjdump cannot read {file}: {done.stderr.strip()[-300:]}")
    if "FUNC" in done.stdout and not _CODE_KERNEL.search(done.stdout):
        raise ApplyError(f"{tool} printed an unknown format for {file}")
    parts = _CODE_IMAGE.split(done.stdout)
    pattern = re.compile(wanted.symbol)
    architectures: dict[str, set[str]] = {}
    for arch, body in zip(parts[1::2], parts[2::2], strict=True):
        for kernel in filter(pattern.search, _CODE_KERNEL.findall(body)):
            architectures.setdefault(kernel, set()).add(arch)
    return judged_code(architectures, wanted)


def judged_code(architectures: Mapping[str, Iterable[str]], wanted: Kernels) -> KernelCode:
    """How SM121 runs kernels of which these architectures are there, by kernel."""
    if not architectures:
        return KernelCode(ABSENT)
    hows: set[str] = set()
    archs: set[str] = set()
    for kernel, names in architectures.items():
        loaded = [name for name in names if _loads_on_sm121(name)]
        archs.update(loaded or names)
        admits = [archs for guard, archs in wanted.guards.items() if guard in kernel]
        best = max(loaded, default="")
        dead = any(not best.startswith(archs) for archs in admits)
        hows.add(UNLOADABLE if not loaded else TRAP if dead else RUNS)
    how = next(how for how in (UNLOADABLE, TRAP, RUNS) if how in hows)
    guards = sorted(
        {guard for kernel in architectures for guard in wanted.guards if guard in kernel}
    )
    return KernelCode(how, " ".join(sorted(archs)), " ".join(guards))


def _loads_on_sm121(arch: str) -> bool:
    """CUDA's rule: code for one chip (``a``) on that alone, other code on later ones too."""
    number = arch.removeprefix("sm_")
    return number == "121a" or number in ("120", "121", "120f", "121f")


def describe_code(code: ModuleCode, what: str) -> str:
    """What was found of some kernels, in words."""
    where = code.module
    if code.how == NO_CODE:
        return "this vLLM has no compiled kernels: it is not a CUDA build"
    if code.how == ABSENT:
        return f"{where} was built without the {what}"
    if code.how == UNLOADABLE:
        return f"{where} has the {what} only for {code.arch}, which SM121 does not load"
    if code.how == TRAP:
        return f"{where} has the {what} for {code.arch} only as traps: the guard admits only SM120"
    return f"{where} has the {what} for {code.arch}, and SM121 runs it"
