"""What is in a compiled unit: target, tensor-core instructions and traps, from its machine code."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.errors import BuildFailed
from builder.machinecode.sass import disassemble, find_tool

if TYPE_CHECKING:
    from collections.abc import Mapping

    from builder.compile.build import BuiltUnit


@dataclass(frozen=True, kw_only=True)
class MachineCode:
    """One cubin of an object file, or of a library."""

    target: str
    tensor: Mapping[str, int]
    traps: int

    @property
    def verdict(self) -> str:
        """What a GB10 would do with it."""
        if self.tensor:
            return "real code" if not self.traps else f"real code and {self.traps} traps"
        return f"every kernel is a trap ({self.traps})" if self.traps else "no tensor-core code"

    def as_json(self) -> dict[str, Any]:
        """The cubin in the evidence."""
        return {"target": self.target, "tensor": dict(self.tensor), "traps": self.traps}


def machine_code(file: Path) -> list[MachineCode]:
    """Every cubin in an object file.

    Raises:
        ToolMissing: ``cuobjdump`` or ``nvdisasm`` is not here.
        BuildFailed: the file holds no machine code that can be read.
    """
    with tempfile.TemporaryDirectory(prefix="spark-build-") as scratch:
        done = subprocess.run(
            [str(find_tool("cuobjdump")), "-xelf", "all", str(file.resolve())],
            cwd=scratch, capture_output=True, text=True, check=False,
        )  # fmt: skip
        cubins = sorted(Path(scratch).glob("*.cubin"))
        if done.returncode or not cubins:
            said = (done.stderr or done.stdout).strip()[:300]
            raise BuildFailed(f"{file} holds no machine code: {said}")
        codes = [disassemble(cubin.read_bytes()) for cubin in cubins]
    return [MachineCode(target=code.target, tensor=code.tensor, traps=code.traps) for code in codes]


def shows_trap(codes: list[MachineCode]) -> bool:
    """Whether a cubin holds nothing but traps."""
    return any(code.traps and not code.tensor for code in codes)


def unit_json(built: BuiltUnit, codes: list[MachineCode]) -> dict[str, Any]:
    """A compiled unit in JSON; sizes in bytes, times in seconds."""
    return {
        "path": built.unit.path,
        "extension": built.unit.extension,
        "object": str(built.object),
        "size": built.object.stat().st_size,
        "seconds": round(built.seconds, 1),
        "code": [code.as_json() for code in codes],
    }
