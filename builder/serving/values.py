"""Checks values of flags, by the types of vLLM's parser."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Literal

from builder.common.document import Part, Text
from builder.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


#: The kind of a value, if known.  A size is a whole number that may end in k, M, G, T;
#: an object is JSON with the fields of a configuration class.
Kind = Literal[
    "text", "integer", "size", "size-or-auto", "number", "json", "object", "true-or-false"
]

#: 4k is 4000, 4K is 4096 and takes no fraction (``human_readable_int`` in vLLM's argument parser).
_SIZE = re.compile(r"\d+(?:\.\d+)?[kmgt]|\d+[KMGT]")
#: Such a number in JSON, for the values of a configuration class.
_SIZE_IN_JSON = re.compile(r"(?<=[:,\[\s])\d+(?:\.\d+)?[kKmMgGtT]\b")
#: Words that ``optional_type`` reads as no value.
NONE = ("", "None")


class Key(Part, frozen=True, kw_only=True):
    """A field of a configuration class, as a key in JSON."""

    name: Text
    #: the only valid values, if the class checks them
    choices: tuple[str, ...] = ()
    #: keys of a nested configuration class
    keys: tuple[Key, ...] = ()


#: Characters of a user's word in a message.
_SHOWN = 200


def shortened(word: str) -> str:
    """A word for a message: a long one is cut."""
    return word if len(word) <= _SHOWN else f"{word[:_SHOWN]}..."


def in_json(value: str) -> Any:
    """A value as vLLM reads it in JSON: sizes are numbers, and other words are texts."""
    try:
        return json.loads(_SIZE_IN_JSON.sub("0", value))
    except (ValueError, RecursionError):
        return value


def wrong_key(keys: Sequence[Key], value: object, path: str = "") -> str:
    """Why a configuration class would refuse an object; empty if it accepts it."""
    known = {key.name: key for key in keys}
    for name, inner in value.items() if isinstance(value, dict) and keys else ():
        if name not in known:
            return f"has no key {path}{shortened(name)}{did_you_mean(name, known)}"
        if why := wrong_key(known[name].keys, inner, f"{path}{name}."):
            return why
        choices = {_folded(choice): choice for choice in known[name].choices}
        is_word = isinstance(inner, (str, int)) and not isinstance(inner, bool)
        if choices and is_word and _folded(str(inner)) not in choices:
            guess = did_you_mean(str(inner), choices.values())
            listed = ", ".join(choices.values())
            return (
                f"has no value {shortened(repr(inner))} for {path}{name}{guess} (it has {listed})"
            )
    return ""


def _folded(value: str) -> str:
    """Fold case and hyphens as some classes do; no class has two values that differ in those."""
    return value.lower().replace("-", "_")


def wrong_kind(kind: Kind, value: str, *, nullable: bool) -> str:
    """What the parser expects instead of this word; empty if it accepts the word."""
    if kind not in _KINDS or (nullable and value in NONE):
        return ""
    wanted, check = _KINDS[kind]
    try:
        check(value)
    except (ValueError, RecursionError):
        return wanted
    return ""


def _size(value: str) -> None:
    if not _SIZE.fullmatch(value.strip()):
        int(value)


def _size_or_auto(value: str) -> None:
    if value.strip().lower() != "auto":
        _size(value)


def _object(value: str) -> None:
    if not value.strip().startswith("{"):
        raise ValueError(value)
    json.loads(_SIZE_IN_JSON.sub("0", value))


_KINDS: dict[str, tuple[str, Callable[[str], object]]] = {
    "integer": ("a whole number", int),
    "size": ("a whole number, or one like 4k", _size),
    "size-or-auto": ("a whole number, one like 4k, or auto", _size_or_auto),
    "number": ("a number", float),
    "json": ("JSON", json.loads),
    "object": ("a JSON object", _object),
}
