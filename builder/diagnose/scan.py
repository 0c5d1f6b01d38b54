"""One pass over a log: selected kernels, requested settings, and matching lines.

The log is read once, in blocks, and not stored.  In a block each pattern is tried only on the
lines that have its fixed text, and only a limited number of distinct hits per entry is stored, so
time grows with the size of the log and memory does not.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from builder.diagnose.dispatch import FORMS, Selection, selection
from builder.diagnose.entries import SKIPPED, Condition, Entry, Pattern, Regex
from builder.diagnose.failures import QUOTED, Failures
from builder.diagnose.literals import fixed_text
from builder.diagnose.reading import Reader
from builder.diagnose.settings import TRIGGERS, Setting, settings_in

if TYPE_CHECKING:
    import re
    from collections.abc import Iterable, Iterator, Mapping

    from builder.diagnose.reading import Line

_BLOCK = 1 << 18
#: Maximum number of distinct hits of one entry.
_KEPT = 16

_VLLM_VERSIONS = (
    r"Initializing a V1 LLM engine \(v(?P<version>[\w.+]+)\)",
    r"vLLM server version (?P<version>\d[\w.+]*)",
    r"vLLM API server version (?P<version>\d[\w.+]*)",
    r"█  version (?P<version>\d[\w.+]*)",
)
_TRTLLM_VERSIONS = (r"TensorRT[- ]LLM version: (?P<version>\d[\w.+]*)",)


class Hit(NamedTuple):
    """A line that an entry's pattern matched, with the pattern's named groups."""

    line: int
    groups: Mapping[str, str]
    by_setting: bool = False
    text: str = ""


@dataclass
class Scan:
    """The result of one pass over a log."""

    lines: int = 0
    #: number of attempted regular expressions, which the work is proportional to
    searches: int = 0
    versions: dict[str, int] = field(default_factory=dict)
    trtllm: dict[str, int] = field(default_factory=dict)
    selections: dict[tuple[str, str], Selection] = field(default_factory=dict)
    settings: dict[tuple[str, str], Setting] = field(default_factory=dict)
    hits: dict[str, list[Hit]] = field(default_factory=dict)
    #: number of lines of each entry
    times: dict[str, int] = field(default_factory=dict)
    #: the last joined line of each entry
    joined: dict[str, int] = field(default_factory=dict)
    failures: Failures = field(default_factory=Failures)
    #: the same for the physical lines of a log that may be wrapped
    unjoined: Failures = field(default_factory=Failures)
    #: processes pending lines of a block
    flush: Callable[[], None] = lambda: None
    #: sources of the patterns of ``with`` and ``without`` that are somewhere in the log
    present: set[str] = field(default_factory=set)

    def take(self, line: Line, *, wrapped: bool) -> None:
        """Read one line for failures."""
        self.lines = line.number
        if not line.again:
            self.failures.feed(line)
        if wrapped and line.pieces == 1:
            self.unjoined.feed(line)

    def shows(self, entry: Entry) -> bool:
        """Whether the rest of the log meets an entry's conditions."""
        required = self._holds(entry.required, every=True)
        return required and not self._holds(entry.forbidden, every=False)

    def _holds(self, condition: Condition, *, every: bool) -> bool:
        """Whether all (or any) of a condition's patterns and settings are in the log."""
        facts = [pattern.regex.pattern in self.present for pattern in condition.patterns]
        facts += [
            any(asked.holds(s.name, s.value) for s in self.settings.values())
            for asked in condition.settings
        ]
        return all(facts) if every else any(facts)


#: The effect of a matching line on the result.
_Note = Callable[[Scan, "re.Match[str]", "Line"], object]


class _Watch(NamedTuple):
    """A pattern, and the action for matching lines."""

    pattern: Pattern
    note: _Note


def scan(lines: Iterable[Line], catalog: Iterable[Entry], result: Scan | None = None) -> Scan:
    """Read a log once; a given ``result`` can be read meanwhile."""
    result = Scan() if result is None else result
    by_needle = _by_needle(tuple(catalog))
    block: list[Line] = []

    def flush() -> None:
        if block:
            _read_block(block, by_needle, result)
            block.clear()

    result.flush = flush
    size = 0
    for line in lines:
        block.append(line)
        result.take(line, wrapped=isinstance(lines, Reader) and lines.wrapped)
        size += len(line.text) + 1
        if size >= _BLOCK:
            flush()
            size = 0
    flush()
    if isinstance(lines, Reader):
        result.lines = lines.lines
        result.failures.course.passed_over(lines.passed_over())
    return result


def _read_block(block: list[Line], by_needle: Mapping[str, list[_Watch]], result: Scan) -> None:
    text = "\n".join(line.text for line in block)
    starts = [0]
    for line in block:
        starts.append(starts[-1] + len(line.text) + 1)
    for needle, watches in by_needle.items():
        if needle not in text:  # most are in no log
            continue
        for index in _lines_with(needle, text, starts):
            line = block[index]
            for watch in watches:
                result.searches += 1
                if match := watch.pattern.regex.search(line.text):
                    watch.note(result, match, line)
    seen: set[int] = set()
    for trigger in TRIGGERS:
        seen.update(_lines_with(trigger, text, starts))
    for index in sorted(seen):
        result.searches += 1
        for setting in settings_in(block[index].text, block[index].number):
            result.settings.setdefault((setting.name, setting.value), setting)


def _lines_with(needle: str, text: str, starts: list[int]) -> Iterator[int]:
    """Indices of the lines that have a text, without repetition."""
    at = text.find(needle)
    while at >= 0:
        index = bisect.bisect_right(starts, at) - 1
        yield index
        at = text.find(needle, starts[index + 1])


@lru_cache(maxsize=2)
def _by_needle(catalog: tuple[Entry, ...]) -> Mapping[str, list[_Watch]]:
    """Patterns by the text that a line must have to try them."""
    found: defaultdict[str, list[_Watch]] = defaultdict(list)
    for watch in _watches(catalog):
        found[watch.pattern.needle].append(watch)
    return dict(found)


def _watches(catalog: Iterable[Entry]) -> Iterator[_Watch]:
    for source in _VLLM_VERSIONS:
        yield _Watch(_pattern(source), _note_version)
    for source in _TRTLLM_VERSIONS:
        yield _Watch(_pattern(source), _note_trtllm_version)
    for form in FORMS:
        yield _Watch(_pattern(form.pattern), _note_selection(form.kind))
    for entry in catalog:
        for pattern in entry.patterns:
            yield _Watch(pattern, _note_hit(entry))
        for condition in (entry.required, entry.forbidden):
            for pattern in condition.patterns:
                yield _Watch(pattern, _note_present(pattern))


@cache
def _pattern(source: str) -> Pattern:
    return Pattern(Regex(source), fixed_text(source))


def _note_version(result: Scan, match: re.Match[str], line: Line) -> None:
    result.versions.setdefault(match["version"].rstrip("."), line.number)


def _note_trtllm_version(result: Scan, match: re.Match[str], line: Line) -> None:
    result.trtllm.setdefault(match["version"].rstrip("."), line.number)


def _note_selection(kind: str) -> _Note:
    def note(result: Scan, match: re.Match[str], line: Line) -> None:
        found = selection(kind, match, line.number)
        key = (found.kind, found.kernel)
        if key not in result.selections or result.selections[key].line > line.number:
            result.selections[key] = found

    return note


def _note_hit(entry: Entry) -> _Note:
    def note(result: Scan, match: re.Match[str], line: Line) -> None:
        if any(unless.search(match.string) for unless in entry.unless):
            return
        if entry.severity == "error" and SKIPPED.search(match.string):
            return
        # a part is counted with its whole line, and only once for all readings
        if not line.again if line.pieces == 1 else line.number != result.joined.get(entry.id):
            result.times[entry.id] = result.times.get(entry.id, 0) + 1
            if line.pieces > 1:
                result.joined[entry.id] = line.number
        groups = {name: value or "" for name, value in match.groupdict().items()}
        fresh = Hit(line.number, groups, text=match.string.strip()[:QUOTED])
        kept = result.hits.setdefault(entry.id, [])
        for index, hit in enumerate(kept):
            if hit.groups == groups:
                if line.number < hit.line and line.pieces == 1:
                    kept[index] = fresh
                return
        if len(kept) < _KEPT:
            kept.append(fresh)

    return note


def _note_present(pattern: Pattern) -> _Note:
    return lambda result, _match, _line: result.present.add(pattern.regex.pattern)
