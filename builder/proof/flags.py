"""Decides which flags of others a release on this machine is asked with.

A serve file and the plan of an image may be a stranger's.  A flag that names code, a file, a folder
or an address is not for the release that runs here: it would import the code, or read the file.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from builder.common.paths import package_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Why such a flag is left out.
WHY = "it names code, a file or an address"
#: A path or an address, whatever the flag; or the name of a module's class or function.
_PLACE = re.compile(r"\s*([/~]|\.{1,2}(/|$)|[\w+.-]*://)")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+(:\w+)?|[A-Za-z_]\w*:[A-Za-z_]\w*")
#: Executors that a release has itself; others are classes.
_EXECUTORS = ("--distributed-executor-backend", {"mp", "ray", "uni", "external_launcher"})


@dataclass(frozen=True, kw_only=True)
class _Known:
    names: frozenset[str]
    harmless: frozenset[str]
    keys: re.Pattern[str]
    of_others: frozenset[str]


@cache
def _known() -> _Known:
    raw = tomllib.loads(package_file("data", "variables.toml").read_text("utf-8"))["flags"]
    return _Known(
        names=frozenset(raw["names"]),
        harmless=frozenset(raw["harmless"]),
        keys=re.compile(rf"(^|[._-]){raw['keys']}$", re.IGNORECASE),
        of_others=frozenset(raw["names-of-others"]),
    )


def flag_groups(flags: Sequence[str]) -> list[tuple[str, ...]]:
    """Flags with their values."""
    groups: list[list[str]] = []
    for word in flags:
        if word.startswith("-") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return [tuple(group) for group in groups]


def names_code(flag: Sequence[str]) -> bool:
    """Whether a flag, with its values, names code, a file, a folder or an address."""
    first, equals, given = flag[0].partition("=")
    values = [*([given] if equals else []), *flag[1:]]
    head, *keys = first.replace("_", "-").removesuffix("+").split(".")
    if any(_is_key(key) for key in keys):
        return True
    executors, own = _EXECUTORS
    if _may_be_one_of(head, [executors]):
        return any(value not in own for value in values)
    if _may_be_one_of(head, _known().names) and not _known().harmless.issuperset(values):
        return True
    last = keys[-1].replace("-", "_") if keys else head.removeprefix("--").replace("-", "_")
    return any(_value_names_code(value, last) for value in values)


def _may_be_one_of(head: str, names: Iterable[str]) -> bool:
    """Whether a parser may take a flag for one of these: it also takes the beginning of a name."""
    return head.startswith("--") and any(name.startswith(head) for name in names)


def _is_key(key: str) -> bool:
    return _known().keys.search(key.replace("-", "_")) is not None


def _value_names_code(text: str, key: str) -> bool:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    return _leaf_names_code(value if isinstance(value, dict | list | str) else text, key)


def _leaf_names_code(value: object, key: str) -> bool:
    """Whether a value names code or a place; ``key`` is what it belongs to."""
    pending: list[tuple[str, object]] = [(key, value)]
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            if any(_is_key(str(one)) for one in value):
                return True
            pending += [(str(one), inner) for one, inner in value.items()]
        elif isinstance(value, list):
            pending += [(key, inner) for inner in value]
        elif isinstance(value, str) and key not in _known().of_others:
            words = value.split(",")
            if any(_PLACE.match(word) or _MODULE.fullmatch(word.strip()) for word in words):
                return True
    return False
