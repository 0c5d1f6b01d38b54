"""Checks of a verification, and what they say about a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from msgspec import Meta

from builder.common.document import Digest, Document, Part, Text, always
from builder.common.plan import State
from builder.proof.levels import Level

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
            description="not run because there is nothing to check in this target, "
            "not because it could not run"
        ),
    ] = False
    simulated: Annotated[tuple[Text, ...], Meta(description="simulated parts")] = ()
    figures: Annotated[
        Mapping[str, int | float],
        Meta(description="numbers worth drawing, such as instruction counts by name"),
    ] = {}
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
