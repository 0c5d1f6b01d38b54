"""Reads the machine code of a compiled unit: target, tensor-core instructions and traps."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from builder.errors import BuildFailed
from builder.machinecode.sass import disassemble, find_tool
from builder.util.documents import Count, Part, Seconds, Text

if TYPE_CHECKING:
    from builder.compile.build import BuiltUnit


class MachineCode(Part, frozen=True, kw_only=True):
    """One cubin of an object file, or of a library."""

    target: str
    tensor: Annotated[dict[str, Count], Meta(description="tensor-core instructions by name")]
    traps: Count

    @property
    def verdict(self) -> str:
        """Whether and how a GB10 would run it."""
        if self.tensor:
            return "real code" if not self.traps else f"real code and {self.traps} traps"
        return f"every kernel is a trap ({self.traps})" if self.traps else "no tensor-core code"


class CompiledUnit(Part, frozen=True, kw_only=True):
    """A compiled unit and its machine code."""

    path: Text
    extension: Text
    object: Text
    size: Annotated[Count, Meta(description="bytes")]
    seconds: Seconds
    code: tuple[MachineCode, ...]

    @classmethod
    def of(cls, built: BuiltUnit) -> CompiledUnit:
        """Read a built unit's machine code.

        Raises:
            ToolMissing: ``cuobjdump`` or ``nvdisasm`` is not installed.
            BuildFailed: the object has no readable machine code.
        """
        return cls(
            path=built.unit.path,
            extension=built.unit.extension,
            object=str(built.object),
            size=built.object.stat().st_size,
            seconds=round(built.seconds, 1),
            code=tuple(machine_code(built.object)),
        )

    @property
    def shows_trap(self) -> bool:
        """Whether a cubin has only traps."""
        return any(code.traps and not code.tensor for code in self.code)


def machine_code(file: Path) -> list[MachineCode]:
    """Every cubin in an object file.

    Raises:
        ToolMissing: ``cuobjdump`` or ``nvdisasm`` is not installed.
        BuildFailed: the file has no readable machine code.
    """
    with tempfile.TemporaryDirectory(prefix="spark-build-") as scratch:
        done = subprocess.run(
            [str(find_tool("cuobjdump")), "-xelf", "all", str(file.resolve())],
            cwd=scratch, capture_output=True, text=True, check=False,
        )  # fmt: skip
        cubins = sorted(Path(scratch).glob("*.cubin"))
        if done.returncode or not cubins:
            message = (done.stderr or done.stdout).strip()[:300]
            raise BuildFailed(f"{file} has no machine code: {message}")
        codes = [disassemble(cubin.read_bytes()) for cubin in cubins]
    return [
        MachineCode(target=code.target, tensor=dict(code.tensor), traps=code.traps)
        for code in codes
    ]
