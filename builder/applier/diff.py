"""Parses unified diffs, plain or in git's format."""

from __future__ import annotations

import re
from dataclasses import dataclass

from builder.applier.failures import EXIT_USAGE, ApplyError
from builder.applier.targets import checked_path
from builder.applier.text import lines_of


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
