"""``spark-build models list|show``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from builder.serving.models import Models
from builder.util.console import print_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from builder.util.documents import Part


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
    """What is known, and below it who says so."""
    known = {
        field.encode_name: value
        for field in msgspec.structs.fields(part)
        if (value := getattr(part, field.name)) not in (None, "")
    }
    source = known.pop("source")
    if set(known) == {"value"}:
        text = str(known["value"])
    else:
        text = ", ".join(f"{key} {value}" for key, value in known.items())
    yield f"  {name:<24}{text}"
    yield f"  {'':<24}  ({source})"
