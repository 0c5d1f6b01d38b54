"""Errors in PTX, and faults of a running kernel."""

from __future__ import annotations

from builder.errors import SparkBuildError


class PtxError(SparkBuildError):
    """PTX that is malformed, or has an unknown instruction."""

    def __init__(self, message: str, line: int = 0, hint: str = "") -> None:
        super().__init__(f"PTX line {line}: {message}" if line else message, hint=hint)
        self.line = line


class Fault(Exception):
    """An invalid operation of a kernel: a wrong address, alignment, or set of lanes."""

    def __init__(self, message: str, line: int = 0, where: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.where = where
        #: the line of the kernel's own source
        self.source = ""

    def __str__(self) -> str:
        """The message, with PTX line, block and warp first."""
        line = f"PTX line {self.line}" if self.line else ""
        line += f" ({self.source})" if self.source else ""
        place = ", ".join(part for part in (line, self.where) if part)
        return f"{place}: {self.message}" if place else self.message


class Deadlock(Fault):
    """No thread of the grid can continue."""
