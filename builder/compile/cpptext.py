"""C++ and CUDA source with comments, strings and inactive branches blanked.

Comments, the contents of strings, directives, and branches that a build's
definitions exclude become blanks.  Positions do not change, so a position found
here is valid in the file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: Matches comments, raw strings, strings, and character literals (not the separators between
#: the digits of a number).
_HIDDEN = re.compile(
    r"//(?:\\\r?\n|[^\n])*"
    r"|/\*.*?(?:\*/|\Z)"
    r'|\bR"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<![\w'])'(?:\\.|[^'\\\n])+'",
    re.DOTALL,
)
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(\w+)((?:\\\r?\n|[^\n])*)", re.MULTILINE)
_TOKEN = re.compile(r"\w+|&&|\|\||[<>=!]=|[!<>()]|\S")
_NUMBER = re.compile(r"(0[xX][0-9a-fA-F]+|\d+)[uUlL]*")
_WORD = re.compile(r"[A-Za-z_]\w*")
_HEADER = re.compile(r'"[^"\n]+"|<[^>\n]+>')

Span = tuple[int, int]


@dataclass(frozen=True)
class Macros:
    """A build's definitions: name -> value, and names that it defines for other targets."""

    values: Mapping[str, str] = field(default_factory=dict)
    #: certainly not defined: the release's build files define them only for other targets
    absent: frozenset[str] = frozenset()

    def value(self, name: str) -> int | None:
        """The value of a name in a condition; None if unknown."""
        if name in self.values:
            found = _NUMBER.fullmatch(self.values[name] or "1")
            return int(found[1], 0) if found else None
        return 0 if name in self.absent else None

    def has(self, name: str) -> bool | None:
        """Whether a name is defined; None if unknown."""
        return True if name in self.values else False if name in self.absent else None


@dataclass(frozen=True)
class Text:
    """One file: ``code`` is its text with blanks, ``strings`` keeps what is in strings.

    ``macros`` are the identifiers in the bodies of its macros;
    ``includes`` are its includes, with quotes or brackets.
    """

    code: str
    strings: str
    macros: frozenset[str]
    includes: tuple[str, ...]


def read(raw: str, defined: Macros) -> Text:
    """Blank everything that the compiler would not read.

    If a condition depends on an unknown value (a version, an architecture), every branch
    is kept.
    """
    without = _HIDDEN.sub(lambda m: _blank(m[0]), raw)
    with_strings = _HIDDEN.sub(lambda m: m[0] if m[0][0] == '"' else _blank(m[0]), raw)
    # comments in directives are already removed, and strings do not matter
    keep, macros, included = _kept(without, defined)
    includes = (found[0] for a, b in included if (found := _HEADER.search(raw, a, b)))
    code: list[str] = []
    strings: list[str] = []
    last = 0
    for start, end in keep:
        for out, text in ((code, without), (strings, with_strings)):
            out += [_blank(text[last:start]), text[start:end]]
        last = end
    code.append(_blank(without[last:]))
    strings.append(_blank(with_strings[last:]))
    return Text("".join(code), "".join(strings), frozenset(macros), tuple(includes))


def _blank(text: str) -> str:
    """Blanks of the same length, with line ends and a string's quotes."""
    blanks = re.sub(r"[^\n]", " ", text)
    return f'"{blanks[1:-1]}"' if len(text) > 1 and text[0] == '"' else blanks


def _kept(text: str, defined: Macros) -> tuple[list[Span], set[str], list[Span]]:
    """Spans between directives, identifiers in macros, spans of includes."""
    spans: list[Span] = []
    included: list[Span] = []
    macros: set[str] = set()
    #: for each open condition: whether this branch is kept, and whether an earlier one was
    #: certainly taken
    stack: list[tuple[bool | None, bool]] = []
    place = 0
    for found in _DIRECTIVE.finditer(text):
        alive = all(state is not False for state, _ in stack)
        if alive:
            spans.append((place, found.start()))
        place = found.end()
        word, rest = found[1], found[2].replace("\\\n", " ").replace("\\\r\n", " ")
        if word in ("if", "ifdef", "ifndef"):
            stack.append(_opened(word, rest, defined))
        elif word in ("elif", "else") and stack:
            _, before = stack.pop()
            state: bool | None = False if before else True if word == "else" else None
            if word == "elif" and not before:
                state = holds(rest, defined)
            stack.append((state, before or state is True))
        elif word == "endif" and stack:
            stack.pop()
        elif word == "define" and alive:
            macros.update(_WORD.findall(rest)[1:])
        elif word == "include" and alive:
            included.append(found.span(2))
    if all(state is not False for state, _ in stack):
        spans.append((place, len(text)))
    return spans, macros, included


def _opened(word: str, rest: str, defined: Macros) -> tuple[bool | None, bool]:
    if word == "if":
        state = holds(rest, defined)
    else:
        name = _WORD.search(rest)
        has = defined.has(name[0]) if name else None
        state = has if word == "ifdef" or has is None else not has
    return state, state is True


def holds(condition: str, defined: Macros) -> bool | None:
    """Whether the condition of an ``#if`` is true; None if unknown."""
    words = _TOKEN.findall(condition)
    try:
        value = _Condition(words, defined).either()
    except (IndexError, ValueError):
        return None
    return None if value is None else bool(value)


class _Condition:
    """Evaluates one condition; None means unknown."""

    def __init__(self, words: list[str], defined: Macros) -> None:
        self._words = [*words, ""]
        self._at = 0
        self._defined = defined

    def _take(self, *wanted: str) -> str:
        word = self._words[self._at]
        if wanted and word not in wanted:
            return ""
        self._at += 1
        return word

    def either(self) -> int | None:
        value = self._both()
        while self._take("||"):
            other = self._both()
            sure = bool(value) or bool(other)
            value = 1 if sure else None if None in (value, other) else 0
        return value

    def _both(self) -> int | None:
        value = self._compared()
        while self._take("&&"):
            other = self._compared()
            value = 0 if 0 in (value, other) else None if None in (value, other) else 1
        return value

    def _compared(self) -> int | None:
        value = self._single()
        sign = self._take("==", "!=", "<", ">", "<=", ">=")
        if not sign:
            if self._words[self._at] not in ("", "&&", "||", ")"):
                raise ValueError("arithmetic and the like")
            return value
        other = self._single()
        if value is None or other is None:
            return None
        compare = {"==": value == other, "!=": value != other, "<": value < other}
        compare |= {">": value > other, "<=": value <= other, ">=": value >= other}
        return int(compare[sign])

    def _single(self) -> int | None:
        if self._take("!"):
            value = self._single()
            return None if value is None else int(not value)
        if self._take("("):
            value = self.either()
            if not self._take(")"):
                raise ValueError("an open bracket")
            return value
        word = self._take()
        if word == "defined":
            bracket = self._take("(")
            has = self._defined.has(self._take())
            if bracket:
                self._take(")")
            return None if has is None else int(has)
        number = _NUMBER.fullmatch(word)
        if number:
            return int(number[1], 0)
        if not _WORD.fullmatch(word) or self._words[self._at] == "(":
            raise ValueError("a call")
        return self._defined.value(word)


def bracketed(code: str, start: int) -> int:
    """The position after the bracket that closes the one at ``start``, or the text's end."""
    depth = 0
    for found in re.compile(r"[()\[\]{}]").finditer(code, start):
        depth += 1 if found[0] in "([{" else -1
        if depth == 0:
            return found.end()
    return len(code)


def arguments(code: str, start: int, end: int) -> Iterator[Span]:
    """The spans between top-level commas of a bracketed text."""
    depth, last = 0, start
    for place in range(start, end):
        letter = code[place]
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth == 0:
            yield last, place
            last = place + 1
    if code[last:end].strip():
        yield last, end
