"""Escapes untrusted text from images, registries, packages and files for the terminal.

Characters that move the cursor, clear, recolour or reorder are escaped: ``\\x1b``, ``\\u202e``.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO

#: Colours and weights of ECMA-48 (SGR), without hidden text; used by us and by ``--help``.
_STYLE = r"\x1b\[(?:(?:[0-4]|2[2-4]|3[0-79]|9[0-7])(?:;|(?=m)))*m"
#: C0 without tab and line feed, DEL, C1, line and paragraph separators, bidirectional controls, and
#: undecodable bytes of names.
_CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
_STYLED = f"({_STYLE})|{_CONTROL}"
#: Data may be a source file or a patch: form feeds and carriage returns at line ends are kept.
_DATA = rf"(\x0c|\r(?=\n))|{_CONTROL}"
_STYLED_DATA = rf"({_STYLE}|\x0c|\r(?=\n))|{_CONTROL}"
#: GitHub's runner ignores blanks before a command.
_COMMAND = re.compile(r"^([^\S\n]*)(?=::|##\[)", re.MULTILINE)
#: Variables that make typer colour its help without a terminal.
_FORCED = ("CLICOLOR_FORCE", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS")


def plain(text: str, *, styled: bool = False) -> str:
    """Text without control sequences; ``styled`` keeps colours and weights."""
    return re.sub(_STYLED if styled else _CONTROL, _shown, text)


def plain_data(text: str, stream: TextIO) -> str:
    """The same for data on stdout, which may be a file's content."""
    if text.isascii() and text.isprintable():
        return text
    styled = any(map(os.environ.get, _FORCED)) or stream.isatty()
    return re.sub(_STYLED_DATA if styled else _DATA, _shown, text)


def below(message: str) -> str:
    """Indent all lines after the first, so that foreign text never starts a line.

    It is also not taken for a workflow command of GitHub Actions, which ignores leading blanks.
    """
    first, *rest = message.split("\n")
    lines = [line if line.startswith("  ") or not line else f"  {line}" for line in rest]
    return no_commands("\n".join([first, *lines]))


def no_commands(text: str) -> str:
    """Text in which no line is a workflow command of GitHub Actions: ``| `` is before each.

    None of spark-build's own lines is one.
    """
    return _COMMAND.sub(r"\1| ", text)


def _shown(match: re.Match[str]) -> str:
    if match.lastindex:
        return match[1]
    number = ord(match[0])
    if 0xDC80 <= number <= 0xDCFF:  # a byte that is not UTF-8
        number -= 0xDC00
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
