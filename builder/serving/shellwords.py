"""How a shell reads the words that follow it: whether the command in them runs at all.

``bash -c`` runs one word, its script; the words after it are the script's parameters.  Without
``-c`` the first word is a file with a script.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

SHELLS = frozenset(("bash", "sh", "dash", "zsh", "ash"))
#: Programs that run the words after them, and their options.
_RUNNERS = re.compile(r"(?:tini|dumb-init|catatonit|exec|env|nice|sudo|-[a-z-]*|--)")
#: Programs that are no file with a script of a shell.
_PROGRAMS = SHELLS | {"vllm", "python", "python3", "exec", "env"}
_TAKES_SCRIPT = re.compile(r"-[A-Za-z]*c[A-Za-z]*")
#: The end of a script that runs its parameters.
_PARAMETERS = re.compile(r"(?:^|[\s;&])(?:exec\s+)?\"?\$(?:@|\{@\})\"?\s*$")
#: Options whose value is a word of its own.
_VALUES = re.compile(r"[-+][a-zA-Z]*[oO]|--(?:rcfile|init-file)")


class Misread(NamedTuple):
    """A command that a shell does not run as it was meant."""

    #: the place of its first word
    at: int
    why: str
    advice: str


def misread(words: Sequence[str]) -> Misread | None:
    """Why a shell at the beginning of words does not run what follows; None: it does."""
    shell, script, at = _options(words)
    if not shell or at >= len(words) or _name(words[at]) not in _PROGRAMS:
        return None
    first = words[at]
    if script:
        if at + 1 == len(words):
            return None
        why = f"{shell} -c runs {first} alone, and ignores the words after it"
        return Misread(at, why, "one word after -c: a list with one text, or quotes around it")
    why = f"{shell} takes {first} for a script to read, and ends: it runs no program"
    return Misread(at, why, f"leave out {shell}, or -c and the whole command as one word")


def passed_on(words: Sequence[str]) -> int | None:
    """The first word of the command that a script runs by ``"$@"``; None: it runs none so."""
    shell, script, at = _options(words)
    if not shell or not script or at + 2 >= len(words) or not _PARAMETERS.search(words[at]):
        return None
    return at + 2  # behind the script and its own name


def _options(words: Sequence[str]) -> tuple[str, bool, int]:
    """The shell at the beginning, whether it takes a script as a word, and the place behind both.

    The shell is empty if there is none.
    """
    at = next((n for n, word in enumerate(words) if not _RUNNERS.fullmatch(_name(word))), 0)
    if not words or _name(words[at]) not in SHELLS:
        return "", False, 0
    shell, script = words[at], False
    at += 1
    while at < len(words) and words[at][:1] in ("-", "+") and words[at] != "--":
        script = script or _TAKES_SCRIPT.fullmatch(words[at]) is not None
        at += 2 if _VALUES.fullmatch(words[at]) else 1
    return shell, script, at


def _name(word: str) -> str:
    return word.rpartition("/")[2]
