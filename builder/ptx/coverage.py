"""What the runs of a kernel have looked at: its basic blocks, and the lines of its source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from builder.common.document import Count, Part, Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from builder.ptx.program import Program


class Coverage(Part, frozen=True, kw_only=True):
    """How much of a kernel ran, in all its runs together."""

    blocks: Annotated[Count, Meta(description="basic blocks of the kernel")]
    blocks_ran: Count
    lines: Annotated[
        Count,
        Meta(
            description="lines of the kernel's source that have instructions; lines of the PTX, "
            "if it has no .loc"
        ),
    ]
    lines_ran: Annotated[Count, Meta(description="lines of which an instruction ran")]
    unreached: Annotated[tuple[Text, ...], Meta(description="lines of which none ran")]

    def __str__(self) -> str:
        """Both shares."""
        blocks = f"{self.blocks_ran} of {self.blocks} basic blocks"
        return f"{blocks} and {self.lines_ran} of {self.lines} lines ran"


def coverage_of(program: Program, covered: Iterable[int]) -> Coverage:
    """The coverage by basic blocks that ran, which are named by their first instruction."""
    blocks, code = {*covered}, program.kernel.code
    names = [program.kernel.places.written(one.line) for one in code]
    if not any(names):
        names = [f"line {one.line}" for one in code]
    ran: dict[str, bool] = {}
    for block in program.blocks.values():
        for line in filter(None, names[block.start : block.end]):
            ran[line] = ran.get(line, False) or block.start in blocks
    unreached = sorted((line for line, seen in ran.items() if not seen), key=order)
    return Coverage(
        blocks=len(program.blocks),
        blocks_ran=len(blocks & program.blocks.keys()),
        lines=len(ran),
        lines_ran=len(ran) - len(unreached),
        unreached=tuple(unreached),
    )


def spans(lines: Sequence[str]) -> Iterator[str]:
    """Lines that follow each other as one: ``kernel.py:12-14``."""
    first, last = "", ""
    for line in [*lines, ""]:
        if first and order(line) == _after(last):
            last = line
            continue
        if first:
            yield first if first == last else f"{first}-{order(last)[1]}"
        first = last = line


def order(line: str) -> tuple[str, int]:
    """File and number of a line, by which lines are sorted; those of the PTX are ``line 12``."""
    mark = max(line.rfind(":"), line.rfind(" "))
    return line[: mark + 1], int(line[mark + 1 :] or 0)


def _after(line: str) -> tuple[str, int]:
    file, number = order(line)
    return file, number + 1
