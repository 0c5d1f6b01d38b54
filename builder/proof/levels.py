"""The levels of verification: what each one proves, and its name on the command line.

Each level is in the module with its name; ``run.py`` has the function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from builder.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The names, as in JSON documents.
Level = Literal[
    "static", "imports", "dispatch", "model", "codegen", "numbers", "binaries", "device", "serve"
]


@dataclass(frozen=True, kw_only=True)
class LevelKind:
    """The description of a level, and when it runs."""

    name: Level
    #: what it checks, for the heading of its checks
    about: str
    #: what is unknown if it did not run
    unknown: str
    #: what is proven if all its checks passed, besides the selected kernels
    known: str = ""
    #: whether it needs the hardware
    on_gb10: bool = False
    #: whether it runs by default
    by_default: bool = False
    #: whether it can prove a layer necessary, and runs by default for that
    proves_need: bool = False
    #: whether its figures form a table, with a row for each check
    one_table: bool = False


#: Every level by its name, cheapest first.  Not by default: ``model`` downloads what whole models
#: import and takes half a minute, ``codegen`` downloads a CuTe DSL and takes as long, ``numbers``
#: takes minutes of processor time, ``binaries`` reads tens of megabytes of extension modules,
#: ``device`` and ``serve`` need a GPU.
LEVELS: dict[str, LevelKind] = {
    kind.name: kind
    for kind in (
        LevelKind(
            name="static",
            about="The files: receipts, settings, syntax, and every file against its RECORD.",
            unknown="whether the files are as planned",
            by_default=True,
            proves_need=True,
        ),
        LevelKind(
            name="imports",
            about="Every name that a patched module imports exists, and calls match the "
            "definitions.",
            unknown="whether the imports of patched modules exist",
            by_default=True,
            proves_need=True,
        ),
        LevelKind(
            name="dispatch",
            about="vLLM's own selector, told that the device is SM121. The log lines are vLLM's.",
            unknown="which kernels vLLM selects",
            by_default=True,
            proves_need=True,
        ),
        LevelKind(
            name="model",
            about="Whole models, built by vLLM's own code from their configuration, without "
            "weights, told that the device is SM121.",
            unknown="whether whole models start, and with which kernels",
            known="whole models start, and their layers get these kernels",
        ),
        LevelKind(
            name="codegen",
            about="The selected kernels, compiled for SM121 without a GPU, and their machine code.",
            unknown="whether the kernels compile for SM121",
            known="the kernels compile for SM121",
            proves_need=True,
        ),
        LevelKind(
            name="numbers",
            about="The selected kernels, run on a CPU without a GPU. Each value is compared with "
            "the exact one, in several orders in which a GPU may do the work. A race is two "
            "accesses whose order nothing guarantees: the values may be wrong in some runs.",
            unknown="whether the kernels' numbers are right",
            known="the kernels give the right numbers when their PTX is run on a CPU",
            one_table=True,
        ),
        LevelKind(
            name="binaries",
            about="The prebuilt machine code of the release: does SM121 run it?",
            unknown="whether SM121 runs the prebuilt machine code",
            known="SM121 runs the prebuilt machine code",
        ),
        LevelKind(
            name="device",
            about="On the GB10 itself: each kernel against a reference.",
            unknown="whether the kernels run on a GB10",
            known="the kernels give the right numbers",
            on_gb10=True,
        ),
        LevelKind(
            name="serve",
            about="On a GPU: vllm serve of a small generated model, its log and its answer.",
            unknown="whether vllm serve works on a GB10",
            known="vllm serve answers",
            on_gb10=True,
        ),
    )
}
DEFAULT_LEVELS: tuple[Level, ...] = tuple(k.name for k in LEVELS.values() if k.by_default)
PROOF_LEVELS: tuple[Level, ...] = tuple(k.name for k in LEVELS.values() if k.proves_need)


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
    return tuple(kind.name for kind in LEVELS.values() if kind.name in (chosen or set(default)))
