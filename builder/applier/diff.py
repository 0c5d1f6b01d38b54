"""Unified diffs: reads them, and applies their hunks to a text.

Only the content decides whether a hunk is already applied.
"""

from __future__ import annotations

import difflib
import io
import re
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.applier.states import AMBIGUOUS, DRIFT, POST, PRE
from builder.applier.values import EXIT_USAGE, ApplyError, checked_path

if TYPE_CHECKING:
    from collections.abc import Sequence


#: Characters of a line that a message shows.
_SHOWN = 300


def first_line(text: str) -> str:
    """The first non-empty line of ``text``, for messages."""
    return next((shown(line.strip()) for line in text.splitlines() if line.strip()), "")


def shown(line: str) -> str:
    """A line for a message: a long one is cut."""
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."


def lines_of(text: str) -> list[str]:
    """Lines with their ends, split like Python's parser: only at line feeds.

    ``str.splitlines`` also splits at form feeds and at separators inside string literals.
    """
    return io.StringIO(text, newline="\n").readlines()


#: Limits to find the nearest place or line, for a message; more would take seconds: compared pairs
#: of lines, lines of a text, and characters of a line.
_PAIRS, _LINES, _LONG = 100_000, 50_000, 1000
#: What parsing foreign text as Python raises: of zero bytes, and of deep nesting too.
NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)


def nearest_place(text: str, old: str) -> str:
    """The first differing line at the place in ``text`` with most lines of ``old``, or ''.

    Also ``''`` if the texts are long.
    """
    lines = [line.strip() for line in text.splitlines()]
    wanted = [line.strip() for line in old.strip("\n").splitlines()]
    if len(lines) * len(wanted) >= _PAIRS or max(map(len, (*wanted, *lines)), default=0) > _LONG:
        return ""
    best, score = 0, 0.0
    for start in range(len(lines) - len(wanted) + 1):
        pairs = zip(lines[start:], wanted, strict=False)
        alike = sum(len(b) * _likeness(a, b) for a, b in pairs)
        if alike > score:
            best, score = start, alike
    if score < sum(map(len, wanted)) / 2:
        return ""
    for number, (there, line) in enumerate(zip(lines[best:], wanted, strict=False), best + 1):
        if there != line:
            return f"{shown(line)!r} not found; nearest is line {number}: {shown(there)}"
    return ""


def _likeness(one: str, other: str) -> float:
    """The similarity of two lines, from 0 to 1."""
    return 1.0 if one == other else difflib.SequenceMatcher(None, one, other).quick_ratio()


def nearest_line(text: str, wanted: str) -> str:
    """The line of ``text`` most similar to ``wanted``, as ``'LINE: TEXT'``, or ''.

    Also ``''`` if the text or the line is long; long lines of the text are left out.
    """
    lines = text.splitlines()
    if len(lines) > _LINES or len(wanted) > _LONG:
        return ""
    short = [(n, line.strip()) for n, line in enumerate(lines, 1) if len(line) <= _LONG]
    numbered = {line: n for n, line in reversed(short)}
    close = difflib.get_close_matches(wanted, list(numbered), n=1, cutoff=0.5)
    return f"{numbered[close[0]]}: {shown(close[0])}" if close else ""


# ------------------------------------------------------------------------------------ reading diffs


@dataclass(frozen=True)
class Hunk:
    """One hunk of a unified diff as two blocks of whole lines, and its stated position."""

    start: int
    old: tuple[str, ...]
    new: tuple[str, ...]
    #: unchanged lines among them, which locate the hunk
    context: int
    #: the line at which the new block starts
    new_start: int = 0

    def reversed(self) -> Hunk:
        """The reverse hunk."""
        return Hunk(self.new_start, self.new, self.old, self.context, self.start)


@dataclass(frozen=True)
class FileDiff:
    """The changes of one file in a diff: ``old`` is None for a new file, ``new`` for a deleted one,
    and they differ for a renamed one.  ``mode`` is 0o755 or 0o644 if the diff sets it."""

    old: str | None
    new: str | None
    hunks: tuple[Hunk, ...] = ()
    mode: int | None = None

    @property
    def path(self) -> str:
        """The file's name after the change, or before if it was deleted."""
        return self.new or self.old or ""

    def reversed(self) -> FileDiff:
        """The reverse change; the file's original mode is unknown."""
        return FileDiff(self.new, self.old, tuple(hunk.reversed() for hunk in self.hunks))


_HUNK = re.compile(r"@@ -([0-9]{1,9})(?:,([0-9]{1,9}))? \+([0-9]{1,9})(?:,([0-9]{1,9}))? @@")
#: 100 is git's word for an ordinary file.
_FILE_MODE = re.compile(" 100([0-7]{3})$")


class _DiffReader:
    """Reads a unified diff, plain or as git writes it, one file after the other."""

    def __init__(self, diff: str) -> None:
        self.lines = lines_of(diff)
        self.at = 0
        self.files: list[FileDiff] = []
        self.paths: set[str] = set()
        self._start(None, None)

    def _start(self, old: str | None, new: str | None) -> None:
        self.old, self.new = old, new
        self.hunks: list[Hunk] = []
        self.mode: int | None = None

    def read(self) -> list[FileDiff]:
        while self.at < len(self.lines):
            line = self.lines[self.at]
            self.at += 1
            match = _HUNK.match(line)
            if match:
                self._hunk(match)
            elif line.startswith(("@@ -", "@@@ -")):
                raise ApplyError(f"malformed hunk {line.strip()[:80]!r}", EXIT_USAGE)
            else:
                self._header(line.rstrip("\r\n"))
        self._close()
        return self.files

    def _header(self, line: str) -> None:
        if line.startswith("diff --git "):
            self._close()
            names = line.removeprefix("diff --git ")
            half = len(names) // 2  # both names are the same, or lines below give them
            self._start(names[2:half], names[half + 3 :])
        elif line.startswith("--- "):
            if self.hunks:
                self._close()
            self.old = self._name(line, "a/")
        elif line.startswith("+++ "):
            self.new = self._name(line, "b/")
        elif line.startswith("rename from "):
            self.old = line.removeprefix("rename from ")
        elif line.startswith("rename to "):
            self.new = line.removeprefix("rename to ")
        elif line.startswith("new file mode "):
            self.old, self.mode = None, self._mode(line)
        elif line.startswith("deleted file mode "):
            self.new = None
        elif line.startswith("new mode "):
            self.mode = self._mode(line)
        elif line.startswith(("copy from ", "Binary files ", "GIT binary patch")):
            raise ApplyError(f"a diff cannot do this here: {line!r}", EXIT_USAGE)

    @staticmethod
    def _mode(line: str) -> int:
        match = _FILE_MODE.search(line)
        if match is None:
            raise ApplyError(f"a diff cannot do this here: {line[:200]!r}", EXIT_USAGE)
        return 0o755 if int(match[1], 8) & 0o111 else 0o644

    @staticmethod
    def _name(line: str, prefix: str) -> str | None:
        name = line[4:].partition("\t")[0].strip().removeprefix(prefix)
        return None if name == "/dev/null" else name

    def _close(self) -> None:
        if self.hunks or self.mode is not None or self.old != self.new:
            change = FileDiff(self.old, self.new, tuple(self.hunks), self.mode)
            for path in (self.old, self.new):
                if path is not None:
                    checked_path(path, "the diff")
            if change.path in self.paths:
                raise ApplyError(f"the diff has two parts for {change.path}", EXIT_USAGE)
            self.paths.add(change.path)
            self.files.append(change)
        self._start(None, None)

    def _hunk(self, match: re.Match[str]) -> None:
        lines, header = self.lines, self.lines[self.at - 1]
        want_old, want_new = int(match[2] or 1), int(match[4] or 1)
        old: list[str] = []
        new: list[str] = []
        context, mark = 0, ""
        while self.at < len(lines):
            full = len(old) >= want_old and len(new) >= want_new
            if full and not lines[self.at].startswith("\\"):
                break
            last, mark, rest = mark, lines[self.at][:1], lines[self.at][1:]
            self.at += 1
            if mark == "\\":  # no newline at the end of the file: of the line before
                for side in {" ": (old, new), "-": (old,), "+": (new,)}.get(last, ()):
                    side[-1] = side[-1].removesuffix("\n")
                continue
            if mark in (" ", "-"):
                old.append(rest)
            if mark in (" ", "+"):
                new.append(rest)
            context += mark == " "
            if mark not in (" ", "-", "+"):
                break
        if (len(old), len(new)) != (want_old, want_new) or not (self.old or self.new):
            raise ApplyError(f"malformed hunk {header.strip()!r}", EXIT_USAGE)
        self.hunks.append(Hunk(int(match[1]), tuple(old), tuple(new), context, int(match[3])))


def parse_diff(diff: str) -> list[FileDiff]:
    """The files of a unified diff (without ``a/`` and ``b/`` prefixes), in order.

    Raises:
        ApplyError: the diff is malformed, changes nothing, or changes something other than text.
    """
    files = _DiffReader(diff).read()
    if not files:
        raise ApplyError("the diff changes no file", EXIT_USAGE)
    return files


# ----------------------------------------------------------------------------------- applying hunks


#: Limit of lines that are compared to find the hunks of one file: about 3 s.
_SEARCHED = 100_000_000


class _Lines:
    """The lines of a text, with a search for blocks of lines."""

    def __init__(self, text: str) -> None:
        self.lines = lines_of(text)
        self._counts = Counter(self.lines)
        self._left = _SEARCHED

    def positions(self, block: Sequence[str], expected: int) -> list[int]:
        """The positions of a block of whole lines; looks at the expected one first.

        Raises:
            ApplyError: the file and its diff are too large to search.
        """
        wanted = list(block)
        if not wanted:
            return list(range(len(self.lines) + 1))
        depth = min(range(len(wanted)), key=lambda number: self._counts[wanted[number]])
        count = self._counts[wanted[depth]]
        if count == 0:
            return []
        if count == 1 and expected >= 0 and self._is_at(wanted, expected):
            return [expected]
        self._left -= len(self.lines) + 20 * count * len(wanted)  # a candidate costs 20 lines
        if self._left < 0:
            raise ApplyError("the diff has too many hunks for a file of this length", EXIT_USAGE)
        return self._search(wanted, depth)

    def _search(self, wanted: list[str], depth: int) -> list[int]:
        places: list[int] = []
        at = depth - 1
        last = len(self.lines) - len(wanted) + depth + 1
        while True:
            try:
                at = self.lines.index(wanted[depth], at + 1, max(last, 0))
            except ValueError:
                return places
            if self._is_at(wanted, at - depth):
                places.append(at - depth)

    def _is_at(self, wanted: list[str], at: int) -> bool:
        return self.lines[at : at + len(wanted)] == wanted

    def replace(self, at: int, old: Sequence[str], new: Sequence[str]) -> None:
        """Put one block in the place of another."""
        self._counts.subtract(old)
        self._counts.update(new)
        self.lines[at : at + len(old)] = new


def _outside(
    places: Sequence[int], block: Sequence[str], others: Sequence[int], other: Sequence[str]
) -> list[int]:
    """Positions of a block that are not inside an occurrence of the other, longer one.

    ``others`` is sorted.
    """
    if len(block) >= len(other):
        return list(places)
    reach = len(other) - len(block)

    def inside(at: int) -> bool:
        first = bisect_left(others, at - reach)
        return first < len(others) and others[first] <= at

    return [at for at in places if not inside(at)]


@dataclass(frozen=True)
class Verdict:
    """One hunk on a text: ``pre``, ``post``, ``drift`` or ``ambiguous``; ``at`` is a 0-based line,
    ``offset`` the distance from the stated position."""

    form: str
    at: int = -1
    offset: int = 0
    reason: str = ""


def judge_hunks(text: str, hunks: Sequence[Hunk]) -> tuple[list[Verdict], str]:
    """Judge each hunk with fuzz 0 and a unique position; also returns the resulting text.

    Raises:
        ApplyError: the file and its hunks are too large to search.
    """
    lines = _Lines(text)
    last = 0
    verdicts: list[Verdict] = []
    shift = 0
    for number, hunk in enumerate(hunks, 1):
        expected = hunk.start - 1 + shift + last
        pre, post = lines.positions(hunk.old, expected), lines.positions(hunk.new, expected)
        pre, post = _outside(pre, hunk.old, post, hunk.new), _outside(post, hunk.new, pre, hunk.old)
        count = len(pre) + len(post)
        if count != 1:
            verdicts.append(
                Verdict(AMBIGUOUS, reason=f"hunk {number} matches {count} times")
                if count
                else Verdict(DRIFT, reason=f"hunk {number}")
            )
            continue
        offset = pre[0] + 1 - hunk.start - shift if pre and hunk.old else 0
        verdicts.append(Verdict(PRE if pre else POST, (pre or post)[0], offset))
        if pre:
            last = offset
            lines.replace(pre[0], hunk.old, hunk.new)
            shift += len(hunk.new) - len(hunk.old)
    return verdicts, "".join(lines.lines)


def _not_found(text: str, hunk: Hunk) -> str:
    """The text that a hunk expects, and the nearest one."""
    place = nearest_place(text, "".join(hunk.old))
    if place:
        return place
    wanted = next((line for line in hunk.old or hunk.new if line.strip()), "").strip()
    near = nearest_line(text, wanted)
    return f"{shown(wanted)!r} not found" + (f"; nearest is line {near}" if near else "")


def apply_hunks(text: str, hunks: Sequence[Hunk]) -> tuple[str, str, list[str]]:
    """Judge all hunks of a file together: ``(found, new text or reason, offsets)``."""
    verdicts, new = judge_hunks(text, hunks)
    for hunk, verdict in zip(hunks, verdicts, strict=True):
        if verdict.form == AMBIGUOUS:
            return AMBIGUOUS, verdict.reason, []
        if verdict.form == DRIFT:
            return DRIFT, f"{verdict.reason}: {_not_found(text, hunk)}", []
    there = [str(n) for n, verdict in enumerate(verdicts, 1) if verdict.form == POST]
    if there and len(there) < len(verdicts):
        missing = [str(n) for n, verdict in enumerate(verdicts, 1) if verdict.form == PRE]
        reason = f"some hunks are already applied ({', '.join(there)}) and some are not"
        return DRIFT, f"{reason} ({', '.join(missing)})", []
    offsets = [(n, verdict.offset) for n, verdict in enumerate(verdicts, 1) if verdict.offset]
    notes = [f"hunk {number} applied at offset {offset:+d}" for number, offset in offsets]
    return POST if there else PRE, new, notes
