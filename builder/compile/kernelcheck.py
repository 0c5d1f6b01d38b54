"""Checks the machine code of each kernel in a linked library: real code or a stub.

For an operator in our table it is known which instruction its kernels have; for one
found in the sources it is not.  Then a kernel is real if it writes to memory and
has no trap: a kernel for another chip does nothing or traps.  Kernels that the release
ships in that form may stay so.  A kernel that the driver compiles from PTX is only checked
to exist without a trap.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder.machinecode.fatbin import code_of, images, telling
from builder.machinecode.kernels import is_trap

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from builder.compile.registration import Operator
    from builder.machinecode.fatbin import Image

    #: Mangled names -> instructions of the release's kernels.
    Released = Callable[[frozenset[str]], Mapping[str, Mapping[str, int]]]

#: Instructions that write memory visible to other threads or the host; not ``REDUX``.
_WRITES = frozenset(
    ("ST", "STG", "RED", "REDG", "ATOM", "ATOMG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED")
)


@dataclass(frozen=True, kw_only=True)
class KernelProof:
    """The result; ``kernels`` are counts by target, ``instructions`` those that show real code."""

    kernels: Mapping[str, int]
    instructions: Mapping[str, int]
    faults: tuple[str, ...]
    #: kernels that write to memory; None if an operator's known instruction is checked
    writing: int | None = None
    #: kernels that are the same as the release's
    as_released: tuple[str, ...] = ()
    #: kernels that the driver compiles from PTX for SM121
    from_ptx: int = 0


def instructions_of(file: Path, wanted: frozenset[str]) -> dict[str, dict[str, int]]:
    """The instructions of some kernels of a library that ``prove_kernels`` compares.

    Raises:
        ToolMissing: ``cuobjdump`` or ``nvdisasm`` is not installed.
        BadBinary, BadCubin: the library cannot be read.
    """
    return code_of(file, wanted.__contains__, _kept)


def prove_kernels(
    library: bytes,
    operators: Sequence[Operator],
    objects: Sequence[Path] = (),
    released: Released | None = None,
) -> KernelProof:
    """Check every SM12x kernel of a library.

    Args:
        library: the linked library.
        operators: its operators.
        objects: its object files; it must have every kernel of these.
        released: returns the machine code of the base's kernels, if one of the library's
            does not look real; None if there is nothing to compare with.

    Raises:
        ToolMissing: ``cuobjdump`` or ``nvdisasm`` is not installed.
        BadBinary, BadCubin: the library cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="spark-build-") as scratch:
        file = Path(scratch) / "kernels.so"
        file.write_bytes(library)
        every = images(file)
        found = [image for image in every if image.kind == "elf"]
        code = code_of(file, lambda _: True, _kept) if found else {}
    by_target: Counter[str] = Counter()
    for image in (image for image in found if image.kernels):
        by_target[str(image.arch)] += len(image.kernels)
    jit = {
        name: counts
        for image in every
        if image.kind == "ptx" and image.arch.compiles_on()
        for name, counts in image.kernels.items()
        if name not in code
    }
    total: Counter[str] = Counter()
    faults = []
    proven: set[str] = set()
    for operator in (operator for operator in operators if operator.kernels):
        pattern = re.compile(operator.kernels)
        mine = {name: counts for name, counts in code.items() if pattern.search(name)}
        proven.update(mine)
        if not mine:
            faults.append(f"{operator.name}: the library has no kernel for it")
        for name, counts in sorted(mine.items()):
            held = {n: c for n, c in counts.items() if n.startswith(operator.holds)}
            total.update(held)
            if not held:
                faults.append(f"no {operator.holds} in {name[:120]}")
    unknown = not all(operator.kernels for operator in operators)
    if not unknown:
        proven = set(code)
    faults += [f"a trap in {n[:120]}" for n in sorted(proven) if any(map(is_trap, code[n]))]
    rest = {name: counts for name, counts in code.items() if name not in proven}
    for counts in rest.values():
        total.update({name: number for name, number in counts.items() if not _writes(name)})
    if unknown:
        faults += [
            f"a trap in the PTX of {n[:120]}" for n in sorted(jit) if any(map(is_trap, jit[n]))
        ]
        missing = {name for image in every for name in image.kernels} - set(code) - set(jit)
        faults += [f"{name[:120]} has no code that SM121 can load" for name in sorted(missing)]
        faults += _lost(objects, found)
    unreal = {name: reason for name, counts in rest.items() if (reason := _unreal(counts))}
    same = _as_released(unreal, released)
    faults += [f"{unreal[name]} {name[:120]}" for name in sorted(set(unreal) - set(same))]
    return KernelProof(
        kernels=dict(sorted(by_target.items())),
        instructions=dict(total.most_common()),
        faults=tuple(faults),
        writing=len(rest) - len(unreal) if unknown else None,
        as_released=same,
        from_ptx=len(jit),
    )


def _machine_code(file: Path) -> list[Image]:
    return [image for image in images(file) if image.kind == "elf"]


def _kept(counts: Mapping[str, int]) -> dict[str, int]:
    """Instructions that show real code, and those that write to memory."""
    writes = {name: number for name, number in counts.items() if _writes(name)}
    return telling(counts) | writes


def _writes(instruction: str) -> bool:
    return instruction.partition(".")[0] in _WRITES


def _unreal(counts: Mapping[str, int]) -> str:
    """Why a kernel does not look real, or ``""``."""
    if any(map(is_trap, counts)):
        return "a trap in"
    return "" if any(map(_writes, counts)) else "nothing is written to memory by"


def _as_released(unreal: Mapping[str, str], released: Released | None) -> tuple[str, ...]:
    """Kernels that do not look real but are the same in the release."""
    if not unreal or released is None:
        return ()
    theirs = released(frozenset(unreal))
    same = (name for name in theirs if _unreal(theirs[name]) == unreal.get(name))
    return tuple(sorted(same))


def _lost(objects: Sequence[Path], library: Sequence[Image]) -> list[str]:
    """Kernels of object files that a library lacks, for the same architecture."""
    there = {(image.arch, name) for image in library for name in image.kernels}
    made = {
        (image.arch, name)
        for file in objects
        for image in _machine_code(file)
        for name in image.kernels
    }
    return [f"{name[:120]} for {arch} is missing" for arch, name in sorted(made - there)]
