"""The normal form of a diff: the same change always has the same bytes.

What stays: for each file its names, whether it is new, deleted, renamed, binary, a link or a
submodule, mode changes, and its hunks.  What goes: mail headers and trailers, ``index`` and
``similarity`` lines, file times, the section heading behind ``@@``, and the data of binary
patches.  Files are sorted by name; every header line ends with one line feed, as does a line of
content, which keeps a carriage return of its own (a file with CRLF is changed with CRLF).  A diff
that was itself turned into CRLF on its way is turned back.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace

from builder.applier.values import path_problem
from builder.errors import UsageError

#: Size limits of a diff, in bytes and lines, and of one line.  Memory is some 200 bytes a line, and
#: several times the bytes.
MAX_DIFF, MAX_LINES, MAX_LINE = 64 << 20, 1_000_000, 16 << 20
#: Modes as git writes them: an ordinary file, a link, a submodule.
_LINK, _SUBMODULE = "120000", "160000"
#: How the mode of an ordinary file begins.
_FILE = "100"
_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
#: How a hunk begins, and one of a merge, which has two old sides.
_HUNKS = (b"@@ -", b"@@@ -")
_MODE = re.compile(rb" ([0-7]{6})\s*$")
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)")
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f"}


@dataclass(frozen=True, kw_only=True)
class Section:
    """A diff of one file.  ``old`` is None for a new file, ``new`` for a deleted one."""

    old: str | None
    new: str | None
    old_mode: str = ""
    new_mode: str = ""
    copied: bool = False
    binary: bool = False
    #: normalised lines from the first ``@@`` on
    hunks: tuple[bytes, ...] = ()

    @property
    def path(self) -> str:
        """The file's name after the change, or before if it was deleted."""
        return self.new or self.old or ""

    @property
    def special(self) -> str:
        """Why the applier cannot apply it; ``""`` for text."""
        if kind := _special_mode(self.old_mode, self.new_mode):
            return kind
        if self.binary:
            return "a binary file, which a diff does not contain"
        if self.copied:
            return "a copy of another file"
        try:
            b"".join(self.hunks).decode("utf-8")
        except UnicodeDecodeError:
            return "not UTF-8 text"
        return "a file whose name is not UTF-8" if "\\" in self.path else ""

    def moved(self, old: str | None, new: str | None) -> Section:
        """The same change for another path."""
        return replace(self, old=old, new=new)

    def render(self) -> bytes:
        """The section in normal form."""
        old, new = self.old or self.path, self.new or self.path
        lines = [f"diff --git a/{old} b/{new}"]
        if self.old is None:
            lines.append(f"new file mode {self.new_mode}")
        elif self.new is None:
            lines.append(f"deleted file mode {self.old_mode}")
        elif self.old_mode != self.new_mode or self.new_mode in (_LINK, _SUBMODULE):
            lines += [f"old mode {self.old_mode}", f"new mode {self.new_mode}"]
        if self.old and self.new and (self.old != self.new):
            word = "copy" if self.copied else "rename"
            lines += [f"{word} from {self.old}", f"{word} to {self.new}"]
        if self.binary:
            lines.append("Binary files differ")
        elif self.hunks:
            lines.append("--- /dev/null" if self.old is None else f"--- a/{self.old}")
            lines.append("+++ /dev/null" if self.new is None else f"+++ b/{self.new}")
        return "".join(f"{line}\n" for line in lines).encode() + b"".join(self.hunks)


def _special_mode(*modes: str) -> str:
    """What a file is that is not an ordinary one; ``""`` for an ordinary file."""
    if _SUBMODULE in modes:
        return "a submodule"
    if _LINK in modes:
        return "a symbolic link"
    odd = [mode for mode in modes if mode and not mode.startswith(_FILE)]
    return f"a file with mode {odd[0]}" if odd else ""


def read_sections(data: bytes) -> list[Section]:
    """The files of a diff, sorted by name.

    Raises:
        UsageError: it is malformed or too large, changes one file twice, or is not a diff.
    """
    lines_in = data.count(b"\n")
    if len(data) > MAX_DIFF or lines_in > MAX_LINES:
        raise UsageError(
            f"the diff has {len(data) >> 20} MiB and {lines_in} lines; the limits are "
            f"{MAX_DIFF >> 20} MiB and {MAX_LINES} lines"
        )
    refuse_long_line(data)
    lines = _lines(data)
    starts = [number for number, line in enumerate(lines) if line.startswith(b"diff --git ")]
    if data.strip() and (not starts or any(line.startswith(_HUNKS) for line in lines[: starts[0]])):
        raise UsageError("the forge's answer is not a git diff")
    sections = [
        _Reader(lines[start:stop]).section()
        for start, stop in itertools.pairwise([*starts, len(lines)])
    ]
    sections.sort(key=lambda section: (section.path, section.old or ""))
    for one, other in itertools.pairwise(sections):
        if one.path == other.path:
            raise UsageError(
                f"the diff changes {one.path} twice; it is a patch series, not one diff"
            )
    return sections


def refuse_long_line(data: bytes) -> None:
    """Refuse a diff with a line that no text has; it would be copied many times.

    Raises:
        UsageError: there is one.
    """
    begin = 0
    while len(data) - begin > MAX_LINE:
        end = data.rfind(b"\n", begin, begin + MAX_LINE + 1)
        if end < 0:
            number = data.count(b"\n", 0, begin) + 1
            raise UsageError(f"line {number} of the diff has more than {MAX_LINE >> 20} MiB")
        begin = end + 1


def render(sections: list[Section]) -> bytes:
    """The normal form of a whole diff."""
    return b"".join(section.render() for section in sections)


def normalise(data: bytes) -> bytes:
    """The normal form of a diff; idempotent.

    Raises:
        UsageError: it is malformed, changes one file twice, or is not a diff.
    """
    return render(read_sections(data))


def _lines(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    heads = [line for line in lines if line.startswith((b"diff --git ", b"@@ -"))]
    if heads and all(line.endswith(b"\r") for line in heads):  # the whole diff came as CRLF
        lines = [line.removesuffix(b"\r") for line in lines]
    return lines


class _Reader:
    """Reads one section: header lines, then hunks by their counts."""

    def __init__(self, lines: list[bytes]) -> None:
        self.lines = lines
        self.where = lines[0].decode("utf-8", "replace")
        self.old, self.new = _names(lines[0])
        self.modes = ["", ""]
        self.flags: set[str] = set()
        self.hunks: list[bytes] = []

    def section(self) -> Section:
        at = 1
        while at < len(self.lines):
            line = self.lines[at]
            if line.startswith(_HUNKS):
                at = self._hunk(at)
                continue
            if self.hunks or "binary" in self.flags:
                break  # a mail's trailer, or data that is not kept
            self._header(line)
            at += 1
        new, gone = "new" in self.flags, "gone" in self.flags
        named = (new or self.old) and (gone or self.new) and not (new and gone)
        if not named or _left_over(self.lines[at:]):
            raise UsageError(f"malformed diff: {self.where[:200]!r} cannot be read to its end")
        return Section(
            old=None if new else self.old,
            new=None if gone else self.new,
            old_mode=self.modes[0],
            new_mode=self.modes[1],
            copied="copied" in self.flags,
            binary="binary" in self.flags,
            hunks=tuple(self.hunks),
        )

    def _header(self, line: bytes) -> None:  # noqa: C901 - one branch for each kind of line
        word, _, rest = line.partition(b" ")
        text = rest.decode("ascii", "replace").strip()
        if line.startswith((b"index ", b"similarity ", b"dissimilarity ")):
            mode = text.partition(" ")[2]
            if mode in (_SUBMODULE, _LINK):
                self.modes = [mode, mode]
        elif line.startswith(b"new file mode "):
            self.flags.add("new")
            self.modes[1] = self._mode(line)
        elif line.startswith(b"deleted file mode "):
            self.flags.add("gone")
            self.modes[0] = self._mode(line)
        elif line.startswith(b"old mode "):
            self.modes[0] = self._mode(line)
        elif line.startswith(b"new mode "):
            self.modes[1] = self._mode(line)
        elif line.startswith((b"rename from ", b"copy from ")):
            self.old = _path(line.split(b" ", 2)[2])
            self.flags.add("copied" if word == b"copy" else "renamed")
        elif line.startswith((b"rename to ", b"copy to ")):
            self.new = _path(line.split(b" ", 2)[2])
        elif line.startswith(b"--- "):
            self.old = self._side(rest, b"a/", self.old)
        elif line.startswith(b"+++ "):
            self.new = self._side(rest, b"b/", self.new)
        elif line.startswith((b"Binary files ", b"GIT binary patch")):
            self.flags.add("binary")

    @staticmethod
    def _mode(line: bytes) -> str:
        match = _MODE.search(line)
        if match is None:
            raise UsageError(f"malformed diff: {line[:80]!r} has no mode")
        return match[1].decode()

    @staticmethod
    def _side(text: bytes, prefix: bytes, present: str | None) -> str | None:
        name = text.rstrip(b"\t") if text.startswith(b'"') else text.split(b"\t", 1)[0]
        return present if name == b"/dev/null" else _path(name, prefix)

    def _hunk(self, at: int) -> int:
        """Read one hunk; returns the number of the line after it."""
        match = _HUNK.match(self.lines[at])
        if match is None:
            raise UsageError(f"malformed diff: {self.where[:200]!r} has a hunk without a place")
        want = [int(match[2] or 1), int(match[4] or 1)]
        self.hunks.append(b"@@ -%s,%d +%s,%d @@\n" % (match[1], want[0], match[3], want[1]))
        at += 1
        while at < len(self.lines):
            line = self.lines[at] or b" "  # mailers strip the blank of an empty context line
            mark = line[:1]
            if mark != b"\\" and want == [0, 0]:
                break
            if mark not in b" -+\\":
                break
            want[0] -= mark in b" -"
            want[1] -= mark in b" +"
            self.hunks.append(b"\\ No newline at end of file\n" if mark == b"\\" else line + b"\n")
            at += 1
        if want != [0, 0]:
            raise UsageError(f"malformed diff: a hunk of {self.where!r} has the wrong length")
        return at


def _left_over(lines: list[bytes]) -> bool:
    """Whether lines after a file's last hunk belong to the diff: they are no mail's trailer."""
    more = bool(lines) and lines[0][:1] in (b"+", b"-", b" ") and not lines[0].startswith(b"--")
    return more or any(line.startswith(_HUNKS) for line in lines)


def _names(line: bytes) -> tuple[str | None, str | None]:
    """Both names of a ``diff --git`` line, if they are equal or quoted."""
    rest = line.removeprefix(b"diff --git ").strip()
    if rest.startswith(b'"') or rest.endswith(b'"'):
        quoted = re.findall(rb'"(?:[^"\\]|\\.)*"|\S+', rest)
        if len(quoted) == 2:
            return _path(quoted[0], b"a/"), _path(quoted[1], b"b/")
    half = len(rest) // 2
    old, new = rest[:half], rest[half + 1 :]
    same = old.removeprefix(b"a/") == new.removeprefix(b"b/")
    return (_path(old, b"a/"), _path(new, b"b/")) if same else (None, None)


def _path(name: bytes, prefix: bytes = b"") -> str:
    """A file name, unquoted as git quotes, without its ``a/`` or ``b/``."""
    if name.startswith(b'"') and name.endswith(b'"') and len(name) > 1:

        def letter(match: re.Match[bytes]) -> bytes:
            code = match[1]
            return bytes([int(code, 8) & 255]) if len(code) == 3 else _LETTERS.get(code, code)

        name = _ESCAPE.sub(letter, name[1:-1])
    path = name.removeprefix(prefix).decode("utf-8", "backslashreplace")
    # a name that is not UTF-8 has backslashes now, and is refused if it is installed
    problem = path_problem(path.replace("\\", "_"))
    if problem or '"' in path or path != path.strip():
        problem = problem or "has a quote, or a space at an end"
        raise UsageError(
            f"the diff names a file {path[:100]!r}, which is not a path in a repository: {problem}"
        )
    return path
