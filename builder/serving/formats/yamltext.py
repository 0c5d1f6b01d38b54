"""YAML that any reader takes, in the order in which it is given.

Texts are quoted as in JSON, which YAML contains, so no word is taken for a number or for true.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

Value: TypeAlias = "str | int | float | bool | Mapping[str, Value] | Sequence[Value] | None"


def yaml_text(value: Mapping[str, Value]) -> str:
    """A document."""
    return "".join(f"{line}\n" for line in _lines(value, ""))


def _lines(value: Value, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _entry(f"{indent}{_key(key)}:", inner, f"{indent}  ")
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            nested = list(_lines(inner, f"{indent}  "))
            if isinstance(inner, Mapping) and inner:
                yield f"{indent}- {nested[0].strip()}"
                yield from nested[1:]
            else:
                yield from _entry(f"{indent}-", inner, f"{indent}  ")


def _entry(head: str, value: Value, indent: str) -> Iterator[str]:
    if isinstance(value, Block):
        yield f"{head} |"
        yield from (f"{indent}{line}" for line in value.splitlines())
    elif isinstance(value, (Mapping, list, tuple)) and value:
        yield head
        yield from _lines(value, indent)
    else:
        yield f"{head} {json.dumps(value, ensure_ascii=False)}"


def _key(key: str) -> str:
    plain = key.replace("_", "").replace("-", "").replace(".", "").replace("/", "")
    return key if plain.isalnum() and not plain.isdigit() else json.dumps(key)


class Block(str):
    """A text of several lines, written as it is."""

    __slots__ = ()
