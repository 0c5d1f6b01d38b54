"""Reads frozen dataclasses from JSON: their fields define keys and types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from builder.applier.digests import is_sha256
from builder.applier.failures import EXIT_USAGE, ApplyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: JSON types, with their names in messages.
_WORDS = {str: "a text", int: "a number", bool: "true or false", list: "a list", dict: "an object"}
_TYPES = {"str": str, "Sha256": str, "int": int, "bool": bool, "Sequence": list}


def part(read: Callable[..., Any], strict: bool = False) -> dict[str, Any]:
    """Field metadata: a class, or a function of the JSON and its position, reads this field."""
    if isinstance(read, type):
        read = partial(read_value, read, strict=strict)
    return {"read": read}


def keys_of(form: type[Any]) -> dict[str, tuple[type, bool]]:
    """The JSON keys of a class: their types, and whether they are required."""
    return {key: (_type(one), _required(one)) for key, one in _fields(form)}


def read_value(form: type[Any], raw: object, where: str, strict: bool = False) -> Any:
    """Read a value of a class; unknown keys are dropped, or refused (``strict``).

    Raises:
        ApplyError: a key is missing or has the wrong type.
    """
    if not isinstance(raw, Mapping):
        raise ApplyError(f"{where}: it is not an object", EXIT_USAGE)
    unknown = sorted(raw.keys() - keys_of(form).keys()) if strict else ()
    if unknown:
        raise ApplyError(
            f"{where}: unknown key {unknown[0]!r}: a newer spark-build wrote it",
            EXIT_USAGE,
            "install a newer spark-build",
        )
    values: dict[str, Any] = {}
    for key, one in _fields(form):
        if key in raw:
            values[one.name] = _checked(one, raw[key], f"{where}: {key!r}")
        elif _required(one):
            raise ApplyError(f"{where}: {key!r} is missing", EXIT_USAGE)
    return form(**values)


def _fields(form: type[Any]) -> Iterator[tuple[str, Field[Any]]]:
    for one in fields(form):
        yield one.metadata.get("key", one.name.replace("_", "-")), one


def _type(one: Field[Any]) -> type:
    return _TYPES.get(str(one.type).partition("[")[0].removesuffix(" | None"), dict)


def _required(one: Field[Any]) -> bool:
    return one.default is MISSING and one.default_factory is MISSING


def _checked(one: Field[Any], value: Any, where: str) -> Any:
    kind, annotation = _type(one), str(one.type)
    if value is None and annotation.endswith("| None"):
        return None
    good = isinstance(value, (list, tuple) if kind is list else Mapping if kind is dict else kind)
    if not good or (kind is int and isinstance(value, bool)):
        raise ApplyError(f"{where} is not {_WORDS[kind]}", EXIT_USAGE)
    if annotation.startswith("Sha256") and value and not is_sha256(value):
        raise ApplyError(f"{where} is not a sha256: 64 lower-case hexadecimal digits", EXIT_USAGE)
    read = one.metadata.get("read")
    if read is not None:
        items = enumerate(value, 1) if kind is list else ()
        whole = [read(item, f"{where} {number}") for number, item in items]
        return whole if kind is list else read(value, where)
    inner = value if kind is list else value.values() if "[str, str]" in annotation else ()
    if not all(isinstance(item, str) for item in inner):
        raise ApplyError(f"{where} holds what is not a text", EXIT_USAGE)
    return value
