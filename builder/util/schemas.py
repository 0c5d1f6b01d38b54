"""JSON Schemas (draft 2020-12) of every document that ``--json`` prints.

``builder/data/schemas/NAME.json`` describes one document and refers to ``definitions.json`` for
what several share.  What is published holds all it needs in itself.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from builder.errors import UsageError, did_you_mean
from builder.util.paths import package_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

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


_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,),
    "number": (int, float), "boolean": (bool,), "null": (type(None),),
}  # fmt: skip


def schema_error(document: Mapping[str, object], definition: str) -> str:
    """What in a document of somebody else's is not as a shared definition has it; empty if nothing.

    Types, words, forms of text, and keys that must be there below the top are held against it.
    More keys than it names are fine: a newer spark-build may write them.
    """
    shared: dict[str, Any] = _read(_SHARED)["$defs"]
    forms = shared[definition]["properties"]
    said = (_misfit(document[key], forms[key], shared, key) for key in forms if key in document)
    return next(filter(None, said), "")


def _misfit(value: object, form: dict[str, Any], shared: dict[str, Any], at: str) -> str:
    parts = [*form.get("allOf", ())]
    if "$ref" in form:
        parts.append(shared[form["$ref"].rpartition("/")[2]])
    for part in parts:
        if found := _misfit(value, part, shared, at):
            return found
    for choice in (form.get("anyOf"), form.get("oneOf")):
        if choice and all(_misfit(value, part, shared, at) for part in choice):
            return f"{at} is {value!r:.60}"
    if not _fits(value, form):
        return f"{at} is {value!r:.60}"
    if isinstance(value, dict):
        missing = [key for key in form.get("required", ()) if key not in value]
        if missing:
            return f"{at} lacks {missing[0]}"
        known, rest = form.get("properties", {}), form.get("additionalProperties")
        inner = [(f"{at}.{key}", held, known.get(key, rest)) for key, held in value.items()]
    else:
        items = value if isinstance(value, list) else []
        inner = [(f"{at}[{n}]", held, form.get("items")) for n, held in enumerate(items)]
    said = (_misfit(held, part, shared, key) for key, held, part in inner if isinstance(part, dict))
    return next(filter(None, said), "")


def _fits(value: object, form: dict[str, Any]) -> bool:
    names = form.get("type", [])
    names = [names] if isinstance(names, str) else names
    if names and not any(type(value) in _TYPES[name] for name in names):
        return False
    if "enum" in form and value not in form["enum"]:
        return False
    if isinstance(value, str):
        pattern = form.get("pattern", "")
        return len(value) >= form.get("minLength", 0) and bool(re.search(pattern, value))
    return not isinstance(value, int) or bool(value >= form.get("minimum", value))
