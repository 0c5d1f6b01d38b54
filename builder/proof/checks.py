"""The levels of verification, their checks, and what these say about a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from msgspec import Meta

from builder.common.document import Digest, Document, Part, Text, always
from builder.common.plan import State
from builder.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


# --------------------------------------------------------------------------------- kinds of layers

#: Kinds of layers in the order of the table's columns, and what people call them.
KINDS = {
    "nvfp4-linear": "NVFP4 linear",
    "nvfp4-moe": "NVFP4 MoE",
    "fp8-linear": "FP8 linear, per tensor",
    "fp8-block": "FP8 linear, 128x128 blocks",
    "w4a16-linear": "W4A16 NVFP4 linear",
    "w4a16-moe": "W4A16 NVFP4 MoE",
}


# ------------------------------------------------------------------------------------------ checks

Status = Literal["pass", "fail", "not-run"]


def _status_rule(given: dict[str, Any], status: Status) -> dict[str, Any]:
    return {"if": given, "then": {"properties": {"status": {"const": status}}}}


class Check(Part, frozen=True, kw_only=True):
    """One check and its evidence."""

    schema_rules: ClassVar[dict[str, Any]] = {
        "allOf": [
            _status_rule({"required": ["moot"]}, "not-run"),
            _status_rule({"required": ["refusal"]}, "pass"),
            {"properties": {"moot": {"const": True}}},
            {
                "if": {"properties": {"status": {"const": "not-run"}}},
                "then": {"properties": {"reason": {"minLength": 1}}},
            },
        ]
    }

    level: Level
    name: Annotated[Text, Meta(description="unique within its level")]
    status: Annotated[Status, Meta(description="a check that could not run is never a pass")]
    expected: str
    seen: str
    where: Annotated[str, Meta(description="a file, a log, a compiler")] = always("")
    reason: str = always("")
    moot: Annotated[
        bool,
        Meta(
            description="not run because this target has, or shows, nothing to check, "
            "not because it could not run"
        ),
    ] = False
    simulated: Annotated[tuple[Text, ...], Meta(description="simulated parts")] = ()
    figures: Annotated[
        Mapping[str, int | float],
        Meta(description="numbers worth drawing, such as instruction counts by name"),
    ] = {}
    unreached: Annotated[
        tuple[Text, ...],
        Meta(
            description="of level numbers: source lines of the kernels that no launch of the "
            "check ran; what is wrong there is not seen"
        ),
    ] = ()
    refusal: Annotated[
        Text,
        Meta(
            description="of a pass that is vLLM's refusal, as expected: which models will not start"
        ),
    ] = ""
    unrecorded: Annotated[
        tuple[Text, ...],
        Meta(
            min_length=1,
            description="of startup hooks: files that no RECORD and no receipt speaks of, "
            "below site-packages or absolute; a folder ends with /",
        ),
    ] = ()

    @property
    def idle(self) -> bool:
        """Whether it had nothing to check; ``dispatch`` always needs an expected line."""
        return self.moot and self.level != "dispatch"


class Necessity(Part, frozen=True, kw_only=True):
    """Whether a layer is necessary, and the check that fails without it."""

    schema_rules: ClassVar[dict[str, Any]] = {
        "if": {"properties": {"necessary": {"const": True}}},
        "then": {"properties": {key: {"minLength": 1} for key in ("check", "level", "seen")}},
        "else": {
            "properties": {
                "check": {"const": ""},
                "level": {"const": ""},
                "reason": {"minLength": 1},
            }
        },
    }

    layer: Text
    state: Annotated[State, Meta(description="the layer's state in the plan")]
    necessary: Annotated[
        bool | Literal["unknown"],
        Meta(description="unknown: a level that could show it did not run"),
    ]
    check: Annotated[
        str,
        Meta(description="the check that fails without the layer; empty unless it is necessary"),
    ] = always("")
    level: Level | Literal[""] = always("")
    expected: str = always("")
    seen: str = always("")
    where: str = always("")
    reason: str
    also: Annotated[
        tuple[Text, ...], Meta(description="other checks of that level that fail without it")
    ] = always(())

    @classmethod
    def by(cls, layer: str, state: State, failed: Check, also: Sequence[Check] = ()) -> Necessity:
        """The result for a layer without which checks fail."""
        return cls(
            layer=layer,
            state=state,
            necessary=True,
            check=failed.name,
            level=failed.level,
            expected=failed.expected,
            seen=failed.seen,
            where=failed.where,
            reason=failed.reason,
            also=tuple(check.name for check in also),
        )


class VerifierDocument(Document, frozen=True, kw_only=True):
    """What the verifier in an image found there."""

    plan_digest: Digest
    passed: Annotated[
        bool,
        Meta(description="no check failed, at least one passed, and every named level ran"),
    ]
    checks: tuple[Check, ...]


class Listener(Protocol):
    """Is called during a verification."""

    def __call__(self, check: Check) -> None:
        """A new check of the current level."""

    def end(self) -> None:
        """The end of a level."""


def few(names: Collection[object]) -> str:
    """Up to three of some names."""
    return ", ".join(map(str, list(names)[:3])) + (", ..." if len(names) > 3 else "")


# ------------------------------------------------------------------------------------------- levels


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
