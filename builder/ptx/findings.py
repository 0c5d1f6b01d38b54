"""Results of runs: races with their lines and sources, faults, and wrong values."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from builder.common.console import counted
from builder.common.document import Count, Part, Text, always

#: How ``missing`` begins if it is only the order of a warp's lanes.
OF_LANES = "bar.warp.sync"
#: The kind of a store that may read shared memory after its block has ended.
UNWAITED = "bulk store that no thread waits for before its block ends"


class Line(Part, frozen=True):
    """A line of the PTX, and the line of the kernel's source, if the PTX names it."""

    line: Annotated[int, Meta(ge=1)]
    text: str
    source: Annotated[
        str,
        Meta(
            description="file and line of the kernel's own source, where the PTX has .loc; "
            "else empty"
        ),
    ] = always("")

    def by(self, agent: str) -> str:
        """As text, with the agent that ran it."""
        return f"line {self.line} ({', '.join(part for part in (agent, self.source) if part)})"


class FoundRace(Part, frozen=True):
    """A race with the text of its lines; no second line for a read of uninitialised memory."""

    kind: Text
    lines: Annotated[
        tuple[Line, ...],
        Meta(
            min_length=1,
            max_length=2,
            description="one line for an uninitialised read, else two",
        ),
    ]
    agents: Annotated[
        tuple[Text, ...],
        Meta(
            min_length=1,
            max_length=2,
            description="the agent of each line: a warp or an asynchronous copy",
        ),
    ]
    offset: Annotated[Count, Meta(description="of the first place in the memory, in bytes")]
    places: Annotated[int, Meta(ge=1)]
    memory: Annotated[Text, Meta(description="shared memory, or the array of global memory")] = (
        always("shared memory")
    )
    missing: Annotated[
        str, Meta(description="what would order the two accesses; empty if not known")
    ] = always("")

    def __str__(self) -> str:
        """One sentence."""
        lines = " and ".join(map(Line.by, self.lines, self.agents))
        where = f"{counted(self.places, 'place')} from {self.memory} offset {self.offset}"
        return (
            f"{self.kind}: {lines}, {where}{f'; missing: {self.missing}' if self.missing else ''}"
        )

    @property
    def of_lanes(self) -> bool:
        """Whether only the order of one warp's lanes is missing."""
        return self.missing.startswith(OF_LANES) or self.kind.endswith("in the same warp")

    @property
    def key(self) -> tuple[str, tuple[Line, ...], bool]:
        """The key by which a race is the same in another schedule or block."""
        return self.kind, self.lines, self.of_lanes


class Run(Part, frozen=True):
    """One launch in one schedule."""

    launch: str
    schedule: str
    values: int = 0
    wrong: int = 0
    #: the wrong values, as text
    said: str = ""
    #: the reason why it did not end
    fault: str = ""
    deadlock: bool = False
    #: races by their lines, each once
    races: tuple[FoundRace, ...] = ()
    #: whether the race detector was on
    watched: bool = False
    instructions: int = 0
    #: basic blocks that ran
    covered: tuple[int, ...] = ()


class Ran(Part, frozen=True):
    """All runs of one launch."""

    kernel: str
    #: sha256 of the PTX, without line info
    ptx: str
    #: basic blocks of the kernel
    blocks: int
    runs: tuple[Run, ...]
    #: lines of the kernel's source, and those of which no run executed an instruction
    lines: int = 0
    unreached: tuple[str, ...] = ()


class CallRuns(Part, frozen=True, kw_only=True):
    """All launches of one call, or the error if they could not be read."""

    ran: tuple[Ran, ...] = ()
    error: str = ""
