"""Escapes untrusted text from images, registries, packages and files for the terminal.

What would move a cursor, clear, recolour or reorder is written out: ``\\x1b``, ``\\u202e``.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO

#: Colours and weights of ECMA-48 (SGR), less what hides text; ours and those of ``--help``.
_STYLE = r"\x1b\[(?:(?:[0-4]|2[2-4]|3[0-79]|9[0-7])(?:;|(?=m)))*m"
#: C0 less tab and line feed, DEL, C1, line and paragraph separators, controls of direction, and
#: bytes of a name that is not UTF-8.
_CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
_STYLED = f"({_STYLE})|{_CONTROL}"
#: Data may be a source file or a patch: form feeds and carriage returns at the end of a line stay.
_DATA = rf"(\x0c|\r(?=\n))|{_CONTROL}"
_STYLED_DATA = rf"({_STYLE}|\x0c|\r(?=\n))|{_CONTROL}"
#: What makes typer colour its help although nobody looks.
_FORCED = ("CLICOLOR_FORCE", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS")


def plain(text: str, *, styled: bool = False) -> str:
    """Text in which nothing commands a terminal; ``styled`` lets colours and weights be."""
    return re.sub(_STYLED if styled else _CONTROL, _shown, text)


def plain_data(text: str, stream: TextIO) -> str:
    """The same for what goes to stdout, which may be a file's text."""
    if text.isascii() and text.isprintable():
        return text
    styled = any(map(os.environ.get, _FORCED)) or stream.isatty()
    return re.sub(_STYLED_DATA if styled else _DATA, _shown, text)


def below(message: str) -> str:
    """Lines after the first one are indented: text from others never starts a line.

    Nor is it taken for a command of GitHub Actions, which reads past blanks.
    """
    first, *rest = message.split("\n")
    lines = [line if line.startswith("  ") or not line else f"  {line}" for line in rest]
    return "\n".join([first, *(re.sub(r"^(\s*)(?=::|##\[)", r"\1| ", line) for line in lines)])


def _shown(match: re.Match[str]) -> str:
    if match.lastindex:
        return match[1]
    number = ord(match[0])
    if 0xDC80 <= number <= 0xDCFF:  # a byte that is not UTF-8
        number -= 0xDC00
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
