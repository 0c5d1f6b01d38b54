"""The levels of verification, and their names on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from builder.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

Level = Literal[
    "static", "imports", "dispatch", "codegen", "numbers", "binaries", "device", "serve"
]
#: Levels that this version has, cheapest first.
LEVELS: tuple[Level, ...] = get_args(Level)
#: Those that run when none is named: ``codegen`` downloads a CuTe DSL and takes half a minute,
#: ``numbers`` takes minutes of processor time,
#: ``binaries`` reads tens of megabytes of extension modules, ``device`` and ``serve`` need a GPU.
DEFAULT_LEVELS: tuple[Level, ...] = ("static", "imports", "dispatch")
#: Those that can show a layer to be necessary, and run by default when that is asked for.
PROOF_LEVELS: tuple[Level, ...] = ("static", "imports", "dispatch", "codegen")


def parse_levels(
    words: Sequence[str], default: Sequence[Level] = DEFAULT_LEVELS
) -> tuple[Level, ...]:
    """``--level`` values, in order of cost.

    Raises:
        UsageError: a level is unknown.
    """
    chosen = {word for item in words for word in map(str.strip, item.split(",")) if word}
    for word in chosen:
        if word not in LEVELS:
            raise UsageError(
                f"unknown verification level {word!r}{did_you_mean(word, LEVELS)}",
                hint=f"levels: {', '.join(LEVELS)}",
            )
    return tuple(level for level in LEVELS if level in (chosen or set(default)))
