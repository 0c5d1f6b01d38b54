"""Races as they are reported: each line with its text and its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.ptx.places import Places
    from builder.ptx.races import Race


@dataclass(frozen=True)
class Line:
    """A line of the PTX, and where the kernel's own source has it, as far as the PTX says."""

    line: int
    text: str
    #: ``kernel.py:12``, or empty
    source: str = ""

    def by(self, agent: str) -> str:
        """In words, with who ran it."""
        return f"line {self.line} ({', '.join(part for part in (agent, self.source) if part)})"


@dataclass(frozen=True)
class FoundRace:
    """A race with the text of its lines; no second line where nobody wrote what is read."""

    kind: str
    lines: tuple[Line, ...]
    #: who: ``warp 3``, ``asynchronous copy``
    agents: tuple[str, ...]
    #: of the first place in shared memory, in bytes
    offset: int
    places: int

    def __str__(self) -> str:
        """One sentence."""
        lines = " and ".join(map(Line.by, self.lines, self.agents))
        return f"{self.kind}: {lines}, {self.places} places from shared memory offset {self.offset}"

    @property
    def key(self) -> tuple[str, tuple[Line, ...]]:
        """What makes it the same race in another schedule or block."""
        return self.kind, self.lines

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> FoundRace:
        """Read what ``asdict`` gave."""
        lines = tuple(Line(**line) for line in document["lines"])
        return cls(**{**document, "lines": lines, "agents": tuple(document["agents"])})


def found_races(races: Sequence[Race], text: Sequence[str], places: Places) -> list[FoundRace]:
    """Races with the lines of their PTX, each pair once: the same two meet in many blocks."""
    found: dict[object, FoundRace] = {}
    for race in races:
        numbers = [race.line, race.other] if race.other else [race.line]
        lines = tuple(Line(n, text[n - 1].strip(), places.at(n)) for n in numbers)
        made = FoundRace(race.kind, lines, race.agents[: len(lines)], race.offset, race.words)
        found[made.key] = made
    return list(found.values())
