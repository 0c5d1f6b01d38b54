"""The sanitized core runs an instruction whose register is outside of the file, without a check."""

from __future__ import annotations

from builder.ptx import native
from builder.ptx.block import Launch
from builder.ptx.grid import Grid
from builder.ptx.memory import GlobalMemory
from builder.ptx.program import Program
from builder.ptx.source import kernels_of
from tests.processes.ptx.sanitized import sanitize

TEXT = """.version 8.8
.target sm_121a
.visible .entry k() { .reg .b32 %r<3>; add.u32 %r1, %r2, 1; ret; }
"""


def main() -> None:
    """Write behind the words of a warp."""
    sanitize()
    program = Program(kernels_of(TEXT)["k"])
    program.table[0]["out"][0] = 4
    native.LaunchCore._check = lambda self, ops: None  # type: ignore[method-assign]
    launch = Launch((1, 1, 1), (32, 1, 1), 0, b"")
    Grid(program, launch, GlobalMemory([])).run()


if __name__ == "__main__":
    main()
