"""Whether a word is what a flag takes, as the types of vLLM's parser decide."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.serving.hints import Kind

#: 4k is 4000, 4K is 4096 and takes no fraction (``human_readable_int`` in vLLM's argument parser).
_SIZE = re.compile(r"\d+(?:\.\d+)?[kmgt]|\d+[KMGT]")
#: Such a number in JSON, where the values are those of a configuration class.
_SIZE_IN_JSON = re.compile(r"(?<=[:,\[\s])\d+(?:\.\d+)?[kKmMgGtT]\b")
#: What ``optional_type`` takes as no value.
NONE = ("", "None")


def wrong_kind(kind: Kind, value: str, *, nullable: bool) -> str:
    """What the parser wants in place of this word; empty where it takes the word."""
    if kind not in _KINDS or (nullable and value in NONE):
        return ""
    wanted, check = _KINDS[kind]
    try:
        check(value)
    except ValueError:
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
