"""Whether the kernels in a linked library are real: each by itself, from its machine code."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.verify.binaries import is_trap
from builder.verify.fatbin import code_of, images

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.native.registration import Operator


@dataclass(frozen=True, kw_only=True)
class KernelProof:
    """What was found; ``kernels`` counts those by target, ``instructions`` the telling ones."""

    kernels: Mapping[str, int]
    instructions: Mapping[str, int]
    faults: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The proof in reports."""
        return {"by_target": dict(self.kernels), "instructions": dict(self.instructions)}


def prove_kernels(library: bytes, operators: Sequence[Operator]) -> KernelProof:
    """Read every kernel of a library that is for SM12x.

    Raises:
        ToolMissing: ``cuobjdump`` or ``nvdisasm`` is not here.
        BadBinary, BadCubin: the library cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="spark-build-") as scratch:
        file = Path(scratch) / "kernels.so"
        file.write_bytes(library)
        found = [image for image in images(file) if image.kind == "elf"]
        code = code_of(file, lambda _: True) if found else {}
    by_target: Counter[str] = Counter()
    for image in (image for image in found if image.kernels):
        by_target[str(image.arch)] += len(image.kernels)
    total: Counter[str] = Counter()
    faults = []
    for operator in operators:
        pattern = re.compile(operator.kernels)
        mine = {name: counts for name, counts in code.items() if pattern.search(name)}
        if not mine:
            faults.append(f"{operator.name}: the library has no kernel of it")
        for name, counts in sorted(mine.items()):
            held = {n: c for n, c in counts.items() if n.startswith(operator.holds)}
            total.update(held)
            if not held:
                faults.append(f"no {operator.holds} in {name[:120]}")
    for name, counts in sorted(code.items()):
        if any(map(is_trap, counts)):
            faults.append(f"a trap in {name[:120]}")
    return KernelProof(
        kernels=dict(sorted(by_target.items())),
        instructions=dict(total.most_common()),
        faults=tuple(faults),
    )
