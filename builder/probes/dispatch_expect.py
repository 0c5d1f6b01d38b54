"""A plan's requests to the dispatch probe, and the check of answers against its profile.

Standard library only: the builder uses it, and so does the verifier inside an image.  An
expectation names a ``kind`` of layer and one of these:

- ``line``: a log line of vLLM contains this text,
- ``selected``: vLLM's name for the choice matches this pattern (``*`` matches anything),
- ``refused``: vLLM refuses, and its message contains this text.  This is how a profile names
  layers that its settings do not support.
"""

from __future__ import annotations

import fnmatch
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    Json = Mapping[str, Any]

MATCHERS = ("line", "selected", "refused")
#: The models that have layers of a kind.
MODELS = {
    "nvfp4-linear": "NVFP4 models",
    "nvfp4-moe": "NVFP4 MoE models",
    "fp8-linear": "models with FP8 linear layers (per tensor)",
    "fp8-block": "models with FP8 linear layers (128x128 blocks)",
    "w4a16-linear": "W4A16 models",
    "w4a16-moe": "W4A16 MoE models",
}
#: The most characters of a message or line that are shown.
_SHOWN = 400


class Expected(Protocol):
    """An expectation from any source; one of the three is not None."""

    @property
    def kind(self) -> str: ...
    @property
    def line(self) -> str | None: ...
    @property
    def selected(self) -> str | None: ...
    @property
    def refused(self) -> str | None: ...


@dataclass(frozen=True)
class Expectation:
    """An expectation of a plan."""

    kind: str
    line: str | None = None
    selected: str | None = None
    refused: str | None = None

    @classmethod
    def of(cls, plan: Json) -> list[Expectation]:
        """The expectations in a plan's JSON; unknown keys of newer versions are ignored."""
        known = ("kind", *MATCHERS)
        return [cls(**{k: e[k] for k in known if k in e}) for e in plan["expect"]]


@dataclass(frozen=True)
class Failure:
    """An error, as a probe describes it."""

    type: str
    message: str = ""

    def __str__(self) -> str:
        """Both in one line."""
        return f"{self.type}: {self.message}"


@dataclass(frozen=True)
class Answer:
    """vLLM's answer to the dispatch probe for one kind of layer."""

    kind: str = ""
    #: vLLM's name for its choice; None if it refused or could not be queried
    selected: str | None = None
    #: its log lines during the call
    lines: tuple[str, ...] = ()
    error: Failure | None = None
    #: why this release cannot be queried
    not_applicable: str | None = None
    request: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, told: Json) -> Answer:
        """Read the probe's output."""
        error = told["error"]
        return cls(
            kind=told["kind"],
            selected=told["selected"],
            lines=tuple(told["lines"]),
            error=Failure(error["type"], error["message"]) if error else None,
            not_applicable=told["not_applicable"],
            request=told["request"],
        )


def flag_value(flags: Sequence[str], name: str) -> str:
    """The value of a ``vllm serve`` flag, or ``auto``."""
    for flag, value in itertools.pairwise(flags):
        if flag == name:
            return value
    return "auto"


def backends(flags: Sequence[str], kind: str) -> dict[str, str]:
    """The backend that flags select for a kind of layer, in the probe's form."""
    setting = "moe_backend" if kind.endswith("-moe") else "linear_backend"
    return {setting: flag_value(flags, f"--{setting.replace('_', '-')}")}


def asks(expectations: Iterable[Expected], flags: Sequence[str]) -> list[dict[str, str]]:
    """One request for each expectation, with a plan's flags; its variables are the process's."""
    return [{"kind": e.kind, **backends(flags, e.kind)} for e in expectations]


def describe(expectation: Expected) -> str:
    """An expectation in words."""
    if expectation.line:
        return expectation.line
    if expectation.refused:
        return f"refused: {expectation.refused}"
    return "any kernel" if expectation.selected == "*" else f"selected: {expectation.selected}"


def found(expectation: Expected, answer: Answer) -> str | None:
    """The part of an answer that meets the expectation; None if nothing does."""
    error = answer.error
    if expectation.refused:
        holds = error and expectation.refused in error.message
        return f"refused: {headline(answer)}" if holds else None
    if error or not answer.selected:
        return None
    if expectation.line:
        return next((text for text in answer.lines if expectation.line in text), None)
    matches = fnmatch.fnmatchcase(answer.selected, expectation.selected or "")
    return headline(answer) if matches else None


def limit(expectation: Expected, seen: str) -> str:
    """The consequence of an expected refusal for users; empty for any other expectation."""
    return limit_of(expectation.kind, seen) if expectation.refused else ""


def limit_of(kind: str, seen: str) -> str:
    """The consequence of vLLM's refusal of a kind of layer for users."""
    models = MODELS.get(kind, f"models with {kind} layers")
    words = f"{models} will not start with this profile: {seen.removeprefix('refused: ')}"
    return words[0].upper() + words[1:]


def headline(answer: Answer) -> str:
    """The line or error that shows vLLM's decision."""
    if answer.not_applicable:
        return f"not applicable: {answer.not_applicable}"
    if answer.error:
        return f"{answer.error.type}: {_shown(answer.error.message)}"
    selected = str(answer.selected)
    telling = [text for text in _telling(answer) if selected.rpartition(".")[2] in text]
    return _shown(telling[-1]) if telling else f"selected {selected}; no log line says so"


def _telling(answer: Answer) -> Iterator[str]:
    return (text for text in answer.lines if text.startswith(("Using ", "Selected ")))


def _shown(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]}..."
