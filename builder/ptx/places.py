"""Maps lines of PTX to lines of the kernel's source.

Compilers write them into PTX if line info is on (``nvcc -lineinfo``, the CuTe DSL with
``CUTE_DSL_LINEINFO=1``).  PTX ISA, "Debugging Directives: .loc" and ".file".
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass

_FOUND = re.compile(
    r"//[^\n]*|/\*.*?\*/"
    r'|\.file\s+(?P<number>\d+)\s+"(?P<name>[^"\n]*)"'
    r"|\.loc\s+(?P<file>\d+)\s+(?P<line>\d+)\s+\d+"
    r"(?:\s*,\s*function_name\s+[^,\n]+,\s*inlined_at\s+(?P<outer>\d+)\s+(?P<at>\d+)\s+\d+)?"
    r"|\.(?P<begins>entry|func)\b",
    re.DOTALL,
)
_DIRECTIVE = re.compile(r"^[ \t]*\.(?:file|loc)\b[^\n]*\n", re.MULTILINE)


def without_places(text: str) -> str:
    """The PTX without line info."""
    return _DIRECTIVE.sub("", text)


@dataclass(frozen=True)
class _Place:
    """A ``.loc``: the numbers of file and line, and those of the inlining place; 0 means none."""

    file: int = 0
    line: int = 0
    outer: int = 0
    at: int = 0


class Places:
    """Source lines by lines of one PTX text."""

    def __init__(self, text: str) -> None:
        self._files: dict[int, str] = {}
        self._lines: list[int] = []
        self._places: list[_Place] = []
        line, read = 1, 0
        for found in _FOUND.finditer(text):
            line, read = line + text.count("\n", read, found.start()), found.start()
            if found["name"] is not None:
                self._files[int(found["number"])] = found["name"]
            elif found["file"] is not None:
                numbers = (int(found[name] or 0) for name in ("file", "line", "outer", "at"))
                self._begin(line, _Place(*numbers))
            elif found["begins"]:  # what the function before said does not hold here
                self._begin(line, _Place())

    def _begin(self, line: int, place: _Place) -> None:
        self._lines.append(line)
        self._places.append(place)

    def at(self, line: int) -> str:
        """``kernel.py:12`` for a line of PTX; empty without line info."""
        number = bisect_right(self._lines, line)
        place = self._places[number - 1] if number else _Place()
        source = self._named(place.file, place.line)
        outer = self._named(place.outer, place.at)
        return f"{source}, inlined at {outer}" if source and outer else source

    def _named(self, file: int, line: int) -> str:
        return f"{self._files[file]}:{line}" if line and file in self._files else ""
