"""Values and their rules: errors, digests, versions, paths, and classes read from JSON."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


EXIT_USAGE, EXIT_DRIFT, EXIT_MISSING, EXIT_REMOTE, EXIT_REBUILD = 2, 4, 6, 8, 10


class ApplyError(Exception):
    """A failure with its exit code and, if known, the next command to try."""

    def __init__(self, message: str, code: int = EXIT_DRIFT, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint


#: Characters that move the cursor, clear, recolour or reorder, without tab and line feed.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_COMMAND = re.compile(r"^([^\S\n]*)(?=::)", re.MULTILINE)


def say(message: str) -> None:
    """Print a message on stderr; stdout is for data.

    Foreign text in it commands neither a terminal nor a runner of GitHub Actions.
    """
    shown = _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", message)
    shown = _COMMAND.sub(r"\1| ", shown).replace("##[", "## [")
    print(shown, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------ digests


#: The type of a field that `builder.applier.values` checks with `is_sha256`; "" is "none".
Sha256 = str
_SHA256 = re.compile(r"[0-9a-f]{64}")


def sha256_hex(data: bytes) -> str:
    """Hex sha256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


def canonical_json(value: object) -> bytes:
    """The canonical bytes of a JSON value, for digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def is_sha256(value: object) -> bool:
    """Whether it is a sha256: 64 lower-case hexadecimal digits, so also safe in a path."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


# -------------------------------------------------------------- names and versions of distributions


def normalize(name: str) -> str:
    """A distribution name in its PEP 503 form."""
    return re.sub(r"[-_.]+", "-", name).lower()


def version_matches(version: str, specifier: str) -> bool:
    """Whether a PEP 440 version is in a range; pre-releases and local versions are included.

    Raises:
        ApplyError: the version or the range is malformed, or neither ``packaging`` nor pip's copy
            of it can be imported.
    """
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        try:
            from pip._vendor.packaging.specifiers import SpecifierSet  # type: ignore[assignment]
        except ImportError:
            raise ApplyError(
                "this Python has neither 'packaging' nor pip, so versions cannot be compared",
                EXIT_MISSING,
                f"{sys.executable} -m ensurepip",
            ) from None
    try:
        return SpecifierSet(specifier).contains(version, prereleases=True)
    except ValueError as error:  # packaging's InvalidSpecifier and InvalidVersion
        raise ApplyError(
            f"version {version!r:.100} and range {specifier!r:.100}: {error!s:.200}",
            EXIT_USAGE,
        ) from None


def all_match(when: Mapping[str, str], packages: Mapping[str, str]) -> bool:
    """Whether every given package has a version in its range."""
    for name, specifier in when.items():
        version = packages.get(normalize(name))
        if version is None or not version_matches(version, specifier):
            return False
    return True


# --------------------------------------------------------------- paths that a layer names or writes


#: C0, DEL and C1 control characters, and half characters, which no file name in UTF-8 has.
_UNUSABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
#: The folder with what reverts a change, which no layer writes.
_OURS = ".spark-build"
#: Linux's limits, in bytes: of a name, and of a path, with room for the folder above.
_NAME, _PATH = 255, 3000


def path_problem(path: str) -> str:
    """Why a text is not the path of a file below site-packages, or ``""``.

    It has names separated by one ``/`` each, and no other form of the same path.
    """
    if _UNUSABLE.search(path):
        return "has a character that no file name should have"
    names = path.split("/")
    if "\\" in path:
        return "has a backslash"
    if "" in names:
        return "has an empty name: it is empty, absolute, or has two slashes or one at its end"
    if "." in names or ".." in names:
        return "has a name '.' or '..'"
    if names[0] == _OURS:
        return "is in spark-build's own folder"
    if len(path.encode()) > _PATH or any(len(name.encode()) > _NAME for name in names):
        return "is too long"
    return ""


def checked_path(path: str, where: str) -> str:
    """The path, if it can be one of a file below site-packages.

    Raises:
        ApplyError: it cannot.
    """
    problem = path_problem(path)
    if problem:
        shown = repr(path if len(path) < 100 else f"{path[:100]}...")
        raise ApplyError(f"{where}: the path {shown} {problem}", EXIT_USAGE)
    return path


# --------------------------------------------------------------------- frozen dataclasses from JSON


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
