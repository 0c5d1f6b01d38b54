"""What each vLLM release selects on SM121: asked, kept as evidence, and made into a table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder.runtime.dispatch_expect import headline

if TYPE_CHECKING:
    from collections.abc import Mapping

#: A refusal that is the sandbox's, which lacks a module (Triton) that an installation has.
_LACKING = "ModuleNotFoundError"
#: Characters of a refusal that the evidence keeps.
_KEPT = 200


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one question: a kernel, a refusal, or that it cannot be asked."""

    selected: str = ""
    line: str = ""
    refused: str = ""
    not_applicable: str = ""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Outcome:
        """From an answer of the dispatch probe."""
        if answer["not_applicable"]:
            return cls(not_applicable=str(answer["not_applicable"]))
        said = headline(answer)
        if answer["error"]:
            return cls(refused=said if len(said) <= _KEPT else f"{said[:_KEPT]}...")
        line = "" if said.startswith("selected ") else said.split(" out of ")[0]
        return cls(selected=str(answer["selected"]), line=line)

    def as_json(self) -> dict[str, str]:
        """The outcome in the evidence: what is empty is left out."""
        named = {
            "selected": self.selected,
            "line": self.line,
            "refused": self.refused,
            "not-applicable": self.not_applicable,
        }
        return {name: text for name, text in named.items() if text}

    @classmethod
    def read(cls, value: Mapping[str, str]) -> Outcome:
        """Back from the evidence."""
        return cls(**{name.replace("-", "_"): text for name, text in value.items()})

    def as_answer(self) -> dict[str, Any]:
        """As the dispatch probe would answer, to be held against an expectation."""
        error = {"type": "", "message": self.refused} if self.refused else None
        lines = [self.line] if self.line else []
        return {"selected": self.selected or None, "lines": lines, "error": error}

    @property
    def kernel(self) -> str:
        """The kernel without the words that all names of its kind share; else what happened."""
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
    """A choice as a user would write it: variables, a flag, or a model's type."""
    words = [f"{name}={value}" for name, value in request.get("env", {}).items()]
    flags = [name for name in ("linear_backend", "moe_backend") if name in request]
    words += [f"--{name.replace('_', '-')} {request[name]}" for name in flags]
    if "linear_backend_per_quant" in request:
        value = {"linear_backend_per_quant": request["linear_backend_per_quant"]}
        words.append(f"--kernel-config '{json.dumps(value)}'")
    if "model_type" in request:
        words.append(f"a model of type {request['model_type']}")
    return " ".join(words)
