"""The catalogue of findings: one TOML file per finding under ``builder/data/diagnose/``.

To add a finding, add one file; its examples are its tests.  Unknown keys are errors.

``patterns`` are regular expressions, one of which must match a line; ``settings`` are
``NAME=REGEX``, one of which must have been requested.  ``when`` is the range of vLLM releases; if
the release is unknown, patterns apply and settings do not.  All of ``[with]`` must be in the log,
and none of ``[without]``.  The first ``[[fix]]`` whose range matches is printed.
"""

from __future__ import annotations

import re
import tomllib
from functools import lru_cache
from typing import TYPE_CHECKING, Any, get_args

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from builder.diagnose.entries import (
    Condition,
    Engine,
    Entry,
    Example,
    Fix,
    Pattern,
    Regex,
    RequestedSetting,
    Severity,
    Sure,
)
from builder.diagnose.literals import MINIMUM, fixed_text
from builder.errors import UsageError, did_you_mean
from builder.util.paths import package_file

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
ENGINES: tuple[Engine, ...] = get_args(Engine)
SURE: tuple[Sure, ...] = get_args(Sure)

#: key -> (type, required)
_Keys = dict[str, tuple[type, bool]]
_ENTRY: _Keys = {
    "id": (str, True),
    "severity": (str, True),
    "message": (str, True),
    "engine": (str, False),
    "when": (str, False),
    "needs-version": (bool, False),
    "times": (int, False),
    "passing": (bool, False),
    "sure": (str, False),
    "source": (str, False),
    "patterns": (list, False),
    "unless": (list, False),
    "settings": (list, False),
    "with": (dict, False),
    "without": (dict, False),
    "fix": (list, True),
    "example": (list, True),
}
_CONDITION: _Keys = {"patterns": (list, False), "settings": (list, False)}
_FIX: _Keys = {"when": (str, False), "text": (str, True)}
_EXAMPLE: _Keys = {
    "log": (str, True),
    "vllm": (str, False),
    "line": (int, False),
    "fix": (str, False),
    "found": (bool, False),
}


class _Reader:
    """Checks one file; every error names it.  ``compiles``: also check its regular expressions."""

    def __init__(self, path: Path, *, compiles: bool) -> None:
        self.path, self.compiles = path, compiles

    def fail(self, text: str) -> UsageError:
        return UsageError(f"diagnose/{self.path.name}: {text}")

    def table(self, value: object, schema: _Keys, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.fail(f"{where} is not a table")
        for key, item in value.items():
            if key not in schema:
                raise self.fail(f"{where}unknown key {key!r}{did_you_mean(key, schema)}")
            if not isinstance(item, schema[key][0]):
                raise self.fail(f"{where}{key!r} is not a {schema[key][0].__name__}")
        for key, (_, needed) in schema.items():
            if needed and key not in value:
                raise self.fail(f"{where}key {key!r} is missing")
        return value

    def regex(self, source: str) -> Regex:
        try:
            if self.compiles:
                re.compile(source)
        except re.error as error:
            raise self.fail(f"{source!r} is not a regular expression: {error}") from None
        return Regex(source)

    def pattern(self, source: str) -> Pattern:
        regex = self.regex(source)
        needle = fixed_text(source)
        if len(needle) < MINIMUM:
            raise self.fail(
                f"{source!r} has no fixed text of {MINIMUM} or more characters outside groups and "
                "choices, by which its lines could be found quickly"
            )
        return Pattern(regex, needle)

    def asked(self, source: str) -> RequestedSetting:
        name, sep, value = source.partition("=")
        if not sep:
            raise self.fail(f"setting {source!r} is not NAME=REGEX")
        return RequestedSetting(self.regex(name), self.regex(value))

    def when(self, source: str | None) -> SpecifierSet | None:
        if source is None:
            return None
        try:
            return SpecifierSet(source)
        except InvalidSpecifier:
            raise self.fail(f"{source!r} is not a PEP 440 range") from None

    def condition(self, value: object, where: str) -> Condition:
        raw = self.table(value, _CONDITION, where)
        return Condition(
            tuple(map(self.pattern, raw.get("patterns", ()))),
            tuple(map(self.asked, raw.get("settings", ()))),
        )

    def entry(self) -> Entry:
        try:
            loaded = tomllib.loads(self.path.read_text("utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise self.fail(f"not valid TOML: {error}") from None
        raw = self.table(loaded, _ENTRY, "")
        for key, known in (("severity", SEVERITIES), ("engine", ENGINES), ("sure", SURE)):
            if raw.get(key, known[0]) not in known:
                raise self.fail(f"{key} {raw[key]!r} is none of {', '.join(known)}")
        if raw["id"] != self.path.stem:
            raise self.fail(f"id {raw['id']!r} is not the file's name")
        if not raw.get("patterns") and not raw.get("settings"):
            raise self.fail("neither 'patterns' nor 'settings' is given")
        return Entry(
            id=raw["id"],
            severity=raw["severity"],
            message=_flat(raw["message"]),
            engine=raw.get("engine", "vllm"),
            when=self.when(raw.get("when")),
            needs_version=raw.get("needs-version", False),
            patterns=tuple(map(self.pattern, raw.get("patterns", ()))),
            unless=tuple(map(self.regex, raw.get("unless", ()))),
            settings=tuple(map(self.asked, raw.get("settings", ()))),
            required=self.condition(raw.get("with", {}), "with: "),
            forbidden=self.condition(raw.get("without", {}), "without: "),
            fixes=tuple(self.fixes(raw["fix"])),
            times=raw.get("times", 1),
            passing=raw.get("passing", False),
            sure=raw.get("sure", "certain"),
            source=raw.get("source", ""),
            examples=tuple(Example(**self.table(e, _EXAMPLE, "example: ")) for e in raw["example"]),
        )

    def fixes(self, values: Iterable[object]) -> Iterable[Fix]:
        for value in values:
            raw = self.table(value, _FIX, "fix: ")
            yield Fix(self.when(raw.get("when")), _flat(raw["text"]))


def _flat(text: str) -> str:
    return " ".join(text.split())


def load_entry(path: Path, *, compiles: bool = True) -> Entry:
    """Read and check one file of the catalogue; ``compiles`` is for untested files.

    Raises:
        UsageError: it is malformed; a key is unknown, missing or has the wrong type.
    """
    return _Reader(path, compiles=compiles).entry()


@lru_cache(maxsize=1)
def load_catalog() -> tuple[Entry, ...]:
    """Every entry, by name; the tests check their regular expressions."""
    folder = package_file("data", "diagnose")
    return tuple(load_entry(path, compiles=False) for path in sorted(folder.glob("*.toml")))
