"""``spark-build models list|show|add``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from builder.common.console import print_json
from builder.common.hints import again
from builder.errors import UsageError
from builder.serving.modelfile import model_of, model_text
from builder.serving.models import Models, ModelShown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from builder.common.document import Part


def add_command(folder: Path, model_id: str, models: Path, *, dry_run: bool, json: bool) -> None:
    """Write the file of a model, or print it.

    Raises:
        UsageError: the checkpoint cannot be read, or there is such a file.
    """
    name = Models({}).model_or_generic(model_id).name
    text = model_text(folder, model_id)
    file = models / f"{name}.toml"
    if dry_run:
        _print_added(file, text, json=json)
        return
    try:
        models.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise UsageError(
            f"{file} exists, perhaps with what people measured", hint=again("--dry-run")
        ) from None
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    if json:
        _print_added(file, text, json=True)
    else:
        print(file)


def _print_added(file: Path, text: str, *, json: bool) -> None:
    if json:
        model = model_of(text, file.stem)
        print_json(ModelShown(file=str(file), model=model, unknown=tuple(model.unknown())))
    else:
        print(text, end="")


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
