"""``spark-build models list|show``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from builder.common.console import print_json
from builder.serving.models import Models

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from builder.common.document import Part


def list_command(folders: list[Path] | None, *, json: bool) -> None:
    """Print all models."""
    found = Models.discover(folders or ()).listed()
    if json:
        print_json(found)
        return
    for row in found.models:
        print(f"{row.name:<24}{row.id}\n  {row.summary}")


def show_command(name: str, folders: list[Path] | None, *, json: bool) -> None:
    """Print one model."""
    shown = Models.discover(folders or ()).shown(name)
    if json:
        print_json(shown)
        return
    print(f"{shown.model.name}: {shown.model.summary}")
    for field in msgspec.structs.fields(shown.model):
        value = getattr(shown.model, field.name)
        parts = value if isinstance(value, tuple) else (value,)
        for part in parts if field.name not in ("name", "summary") else ():
            if part is not None:
                print("\n".join(_lines(field.encode_name, part)))
    if shown.unknown:
        print(f"\nunknown: {', '.join(shown.unknown)}")


def _lines(name: str, part: Part) -> Iterator[str]:
    """The known values, each with its source below it."""
    known = {
        field.encode_name: value
        for field in msgspec.structs.fields(part)
        if (value := getattr(part, field.name)) not in (None, "")
    }
    source = known.pop("source")
    tables = {key: value for key, value in known.items() if isinstance(value, dict)}
    plain = {key: _text(value) for key, value in known.items() if key not in tables}
    text = ", ".join(f"{key} {value}" for key, value in plain.items())
    yield f"  {name:<24}{plain['value'] if set(known) == {'value'} else text}"
    for key, table in tables.items():
        for place, value in _entries(table):
            yield f"  {'':<24}{key} {place} {_text(value)}".rstrip()
    yield f"  {'':<24}  ({source})"


def _entries(table: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    """The values of a table; values of nested tables have dotted keys."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _entries(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _text(value: object) -> str:
    """A value as written in a model's file."""
    return str(value).lower() if isinstance(value, bool) else str(value)
