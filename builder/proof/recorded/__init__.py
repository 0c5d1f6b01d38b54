"""Record which kernels each vLLM release selects on SM121, and make a table of the records."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import Meta, field

from builder.common.document import Part, Text
from builder.probes.dispatch_expect import Answer, Failure, headline

if TYPE_CHECKING:
    from collections.abc import Mapping

#: A refusal caused by the sandbox, which lacks a module (Triton) that installations have.
_LACKING = "ModuleNotFoundError"
#: Maximum length of a refusal in the evidence.
_KEPT = 200


class Outcome(Part, frozen=True, kw_only=True):
    """The result of one query to vLLM: a kernel, a refusal, or why it cannot be queried."""

    schema_rules: ClassVar[dict[str, Any]] = {
        "oneOf": [{"required": [key]} for key in ("selected", "refused", "not-applicable")]
    }

    selected: Text = ""
    line: Annotated[Text, Meta(description="the log line that shows it")] = ""
    refused: Text = ""
    not_applicable: Text = field(default="", name="not-applicable")

    @classmethod
    def of(cls, answer: Answer) -> Outcome:
        """From a reply of the dispatch probe."""
        if answer.not_applicable:
            return cls(not_applicable=answer.not_applicable)
        summary = headline(answer)
        if answer.error:
            return cls(refused=summary if len(summary) <= _KEPT else f"{summary[:_KEPT]}...")
        line = "" if summary.startswith("selected ") else summary.split(" out of ")[0]
        return cls(selected=str(answer.selected), line=line)

    def as_answer(self) -> Answer:
        """The equivalent reply of the dispatch probe, to compare with an expectation."""
        error = Failure("", self.refused) if self.refused else None
        lines = (self.line,) if self.line else ()
        return Answer(selected=self.selected or None, lines=lines, error=error)

    @property
    def kernel(self) -> str:
        """The kernel without the common words of its kind, else the result."""
        if self.not_applicable:
            return "n/a"
        if self.refused.startswith(_LACKING):
            return "not known"
        if self.refused:
            return "refused"
        name = self.selected.rpartition(".")[2]
        for common in ("ScaledMMLinearKernel", "ScaledMMKernel", "LinearKernel"):
            name = name.removesuffix(common)
        return name


def setting(request: Mapping[str, Any]) -> str:
    """A setting in the user's notation: variables, a flag, or a model's type."""
    words = [f"{name}={value}" for name, value in request.get("env", {}).items()]
    flags = [name for name in ("linear_backend", "moe_backend") if name in request]
    words += [f"--{name.replace('_', '-')} {request[name]}" for name in flags]
    if "linear_backend_per_quant" in request:
        value = {"linear_backend_per_quant": request["linear_backend_per_quant"]}
        words.append(f"--kernel-config '{json.dumps(value)}'")
    if "model_type" in request:
        words.append(f"a model of type {request['model_type']}")
    return " ".join(words)
