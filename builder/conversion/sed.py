"""Reads ``sed -i`` commands that replace one literal text by another."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Special characters of basic regular expressions; a dot is literal (see ``Replacement``).
_SPECIAL = re.compile(r"(?<!\\)[*\[\]^$]|\\[(){}+?|<>bwWsS1-9]")
_SPECIAL_EXTENDED = re.compile(r"(?<!\\)[*\[\]^$(){}+?|]|\\[<>bwWsS1-9]")
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """A literal text and what replaces it.

    A dot in the pattern is read literally: the layer then requires exactly this text, and a
    file without it is drift.
    """

    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class SedCommand:
    """A ``sed`` command line: the replacements and the files, or why it cannot be converted."""

    replacements: tuple[Replacement, ...] = ()
    files: tuple[str, ...] = ()
    problem: str = ""


def read_sed(words: Sequence[str]) -> SedCommand:
    """Read the words of a ``sed`` command, including its name."""
    scripts: list[str] = []
    rest: list[str] = []
    in_place = extended = False
    arguments = iter(words[1:])
    for word in arguments:
        if word in ("-e", "--expression"):
            scripts.append(next(arguments, ""))
        elif word.startswith("--in-place") or re.fullmatch(r"-[nErsz]*i.*", word):
            in_place = True
            extended |= bool(re.match(r"-[nsz]*[Er]", word))
        elif word in ("-E", "-r", "--regexp-extended"):
            extended = True
        elif word.startswith("-"):
            return SedCommand(problem=f"its option {word}")
        else:
            rest.append(word)
    if not scripts and rest:
        scripts.append(rest.pop(0))
    if not in_place:
        return SedCommand(problem="it changes no file (no -i)")
    made: list[Replacement] = []
    for script in scripts:
        found = _substitution(script.strip(), extended=extended)
        if isinstance(found, str):
            return SedCommand(problem=found, files=tuple(rest))
        made.append(found)
    return SedCommand(replacements=tuple(made), files=tuple(rest))


def _substitution(script: str, *, extended: bool) -> Replacement | str:
    """The replacement of one ``s`` command, or why it is not a literal one."""
    if len(script) < 4 or script[0] != "s" or script[1].isalnum():
        return f"the sed command {script!r} is not a plain s/old/new/"
    mark = re.escape(script[1])
    match = re.fullmatch(
        rf"s{mark}((?:\\.|(?!{mark}).)*){mark}((?:\\.|(?!{mark}).)*){mark}(g?)", script
    )
    if match is None:
        return f"the sed command {script!r} is not a plain s/old/new/"
    old, new = match[1], match[2]
    if (_SPECIAL_EXTENDED if extended else _SPECIAL).search(old):
        return f"the pattern {old!r} is a regular expression"
    if re.search(r"(?<!\\)&|\\[1-9]", new):
        return f"the replacement {new!r} refers to what was matched"
    return Replacement(old=_literal(old), new=_literal(new.replace(r"\n", "\n")))


def _literal(text: str) -> str:
    return _ESCAPED.sub(r"\1", text)
