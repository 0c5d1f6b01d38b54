"""JSON Schemas (draft 2020-12) of every document that ``--json`` prints.

``builder/data/schemas/NAME.json`` describes one document and refers to ``definitions.json`` for
what several share.  What is published holds all it needs in itself.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from builder.errors import UsageError, did_you_mean
from builder.util.paths import package_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_SHARED = "definitions"
_REFERENCE = f"{_SHARED}.json#/$defs/"
_LOCAL = "#/$defs/"
_HEAD = ("$schema", "$id", "title")
#: What a command prints in place of its own document, with --all-platforms.
_INSTEAD = {"image": "image-index"}


def names() -> list[str]:
    """The documents that have a schema."""
    found = package_file("data", "schemas").glob("*.json")
    return sorted(path.stem for path in found if path.stem != _SHARED)


def schema(name: str) -> dict[str, Any]:
    """The schema of a document, with those shared definitions that it needs.

    Raises:
        UsageError: there is no document of that name.
    """
    known = names()
    if name not in known:
        raise UsageError(
            f"no schema {name!r}{did_you_mean(name, known)}", hint=f"schemas: {', '.join(known)}"
        )
    value = _read(name)
    if name in _INSTEAD:
        head = {key: value.pop(key) for key in _HEAD}
        other = _read(_INSTEAD[name])
        value = {**head, "anyOf": [value, {k: v for k, v in other.items() if k not in _HEAD}]}
    shared = _read(_SHARED)["$defs"]
    needed: dict[str, Any] = {}
    pending = list(_references(value))
    while pending:
        wanted = pending.pop()
        if wanted not in needed:
            needed[wanted] = shared[wanted]
            pending.extend(_references(shared[wanted]))
    bundled: dict[str, Any] = _localised(value)
    return {**bundled, "$defs": dict(sorted(needed.items()))}


def _read(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(package_file("data", "schemas", f"{name}.json").read_bytes())
    return value


def _references(value: object) -> Iterator[str]:
    """Names of the shared definitions that a part of a schema refers to."""
    if isinstance(value, dict):
        target = str(value.get("$ref", ""))
        if target.startswith((_REFERENCE, _LOCAL)):
            yield target.rpartition("/")[2]
    for part in _parts(value):
        yield from _references(part)


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _localised(value: Any) -> Any:
    """A part of a schema that refers to definitions of its own document."""
    if isinstance(value, dict):
        return {
            key: item.replace(_REFERENCE, _LOCAL) if key == "$ref" else _localised(item)
            for key, item in value.items()
        }
    return [_localised(item) for item in value] if isinstance(value, list) else value
