"""Errors in PTX, and faults of a running kernel."""

from __future__ import annotations

from builder.errors import SparkBuildError


class PtxError(SparkBuildError):
    """PTX that cannot be read, or holds an instruction that is not known."""

    def __init__(self, message: str, line: int = 0, hint: str = "") -> None:
        super().__init__(f"PTX line {line}: {message}" if line else message, hint=hint)
        self.line = line


class Fault(Exception):
    """A kernel did what it may not do: an address, an alignment, a warp that is not whole."""

    def __init__(self, message: str, line: int = 0, where: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.where = where
        #: the line of the kernel's own source
        self.source = ""

    def __str__(self) -> str:
        """The place first: PTX line, block and warp."""
        line = f"PTX line {self.line}" if self.line else ""
        line += f" ({self.source})" if self.source else ""
        place = ", ".join(part for part in (line, self.where) if part)
        return f"{place}: {self.message}" if place else self.message


class Deadlock(Fault):
    """No thread of the grid can go on."""
