"""A new layer: its ops, its files and comments."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datetime
    from collections.abc import Mapping, Sequence

#: After layers that replace whole distributions (10 to 40), like those that edit vLLM.
ORDER = 50


@dataclass(frozen=True, kw_only=True)
class DraftOp:
    """One ``[[variant.op]]`` table; ``comments`` go above it."""

    keys: Mapping[str, str | int | Sequence[str] | Mapping[str, str]]
    comments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A new layer."""

    name: str
    package: str
    summary: str
    origin: str
    ops: tuple[DraftOp, ...]
    #: name in the layer's folder -> content
    files: Mapping[str, bytes] = field(default_factory=dict)
    #: changes of the source that do not affect an installed package, with the reason
    dropped: tuple[str, ...] = ()
    #: parts that could not be converted, with their position in the source
    unconverted: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    series: str = ""


def layer_text(draft: Draft, today: datetime.date) -> str:
    """The ``layer.toml`` of a draft."""
    lines = [f"# NOT CONVERTED, add it or leave it out: {text}" for text in draft.unconverted]
    lines += [
        f"summary = {toml_value(draft.summary)}",
        'description = """',
        "Why it exists, and what goes wrong without it.",
        '"""',
        f"order = {ORDER}",
    ]
    if draft.after:
        lines.append(f"after = {toml_value(draft.after)}")
    if draft.series:
        lines.append(f"series = {toml_value(draft.series)}")
    lines += [
        f"package = {toml_value(draft.package)}",
        "",
        "[provenance]",
        f"origin = {toml_value(draft.origin)}",
        'forwarded = "no"',
        'applied-upstream = "no"',
        f"last-update = {today.isoformat()}",
        "",
        "[[variant]]",
        'name = "every-release"',
        "# Every release in this range is searched for the text; narrow it to leave releases out.",
        f'when = {{ {toml_value(draft.package)} = ">=0" }}',
    ]
    lines += [f"# left out: {text}" for text in draft.dropped]
    for op in draft.ops:
        lines += ["", *(f"# {text}" for text in op.comments), "[[variant.op]]"]
        lines += [f"{key} = {toml_value(value)}" for key, value in op.keys.items()]
    return "\n".join(lines) + "\n"


def toml_value(value: str | int | Sequence[str] | Mapping[str, str]) -> str:
    """A TOML value; JSON's strings are TOML's basic strings, except for surrogate pairs."""
    if isinstance(value, (str, int)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{toml_value(k)} = {toml_value(v)}" for k, v in value.items()) + " }"
        )
    return "[" + ", ".join(toml_value(item) for item in value) + "]"
