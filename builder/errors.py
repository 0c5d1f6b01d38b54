"""Exit codes, and the one exception for expected errors, with message and hint.

A message says what happened to which subject and shows the evidence; the hint is the next command
to try.  The command line prints both and exits with the code; nothing else catches these.
"""

from __future__ import annotations

import datetime
import re
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Exit(IntEnum):
    """Exit codes, part of the public contract (README, "Exit codes")."""

    OK = 0
    BUG = 1
    USAGE = 2
    NOTHING_TO_DO = 3
    DRIFT = 4
    VERIFY_FAILED = 5
    ENGINE = 6
    BUILD_FAILED = 7
    REMOTE = 8
    STALE = 9
    NEEDS_REBUILD = 10
    HUNG_UP = 129
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


#: What a value should be, for people who write it.
KINDS: dict[type, str] = {
    str: "a text in quotes",
    int: "a whole number",
    bool: "true or false",
    list: "a list in brackets",
    dict: "a table",
    datetime.date: "a date such as 2026-11-22",
}


class SparkBuildError(Exception):
    """A failure that the user can understand and act on.

    The applier has its own ``ApplyError`` of the same shape: it must not import this module.
    """

    def __init__(self, message: str, code: Exit = Exit.USAGE, hint: str = "") -> None:
        super().__init__(message)
        self.code = int(code)
        self.hint = hint


class UsageError(SparkBuildError):
    """Wrong input: options, names, configuration, layer files."""


class NotServed(UsageError):
    """A profile that does not support the release of a base: another profile, or another base."""


class RemoteError(SparkBuildError):
    """A package index, registry or forge did not give what was asked for."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, Exit.REMOTE, hint)


class EngineError(SparkBuildError):
    """The engine is missing, does not answer, or cannot do what the plan needs."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, Exit.ENGINE, hint)


class BuildFailed(SparkBuildError):
    """The engine ran and the image did not come out."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, Exit.BUILD_FAILED, hint)


#: How alike two words are, from 0 to 1, for one to be meant.  With 0.6, difflib's own, --fast meant
#: --host, and VLLM_FOO meant VLLM_PORT.
_ALIKE = 0.75
#: The beginning of a name says which is meant from this length on.
_BEGINNING = 4


#: Names are shorter; a longer word is compared with none, because that takes its length's square.
_LONGEST_NAME = 100


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``'; did you mean X?'`` for the nearest known word, or an empty string."""
    return "" if len(word) > _LONGEST_NAME else _nearest(word, tuple(known))


@lru_cache(1024)
def _nearest(word: str, known: tuple[str, ...]) -> str:
    import difflib

    word = _without_prefix(word)
    plain = {_without_prefix(name): name for name in known}
    names = {name: full for name, full in plain.items() if not _is_another(word, name)}
    close = difflib.get_close_matches(word, names, n=1, cutoff=_ALIKE)
    close = close or [name for name in names if sorted(name) == sorted(word)]
    if len(word) >= _BEGINNING:
        close = close or [name for name in names if name.startswith(word)]
    return f"; did you mean {names[close[0]]!r}?" if close else ""


#: Words that make two likely names opposites.
_OPPOSITES = ({"enable", "disable"}, {"min", "max"}, {"input", "output"}, {"prefill", "decode"})


def _is_another(word: str, name: str) -> bool:
    """Whether a like name is another thing: an element of another type, or an opposite.

    ``MOE_INT4`` is no misspelt ``MOE_FP16``.
    """
    if name.startswith(word):
        return False
    ours, theirs = (set(re.split(r"[^a-z0-9]+", text.lower())) for text in (word, name))
    only, other = ours - theirs, theirs - ours
    if any(one in only and (pair - {one}) & other for pair in _OPPOSITES for one in pair):
        return True
    numbered = [[part for part in side if re.search(r"\d", part)] for side in (only, other)]
    return any(
        re.sub(r"\d", "", a)[:1] != re.sub(r"\d", "", b)[:1]
        for a in numbered[0]
        for b in numbered[1]
    )


def _without_prefix(name: str) -> str:
    """A name without what all of its kind begin with, which says nothing about likeness."""
    return name.removeprefix("--").removeprefix("VLLM_")
