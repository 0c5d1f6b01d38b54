"""The catalogue: what a log can show, one TOML file each in ``builder/data/diagnose/``.

To add an entry, add one file; its examples are its tests.  Unknown keys are errors.

``patterns`` are regular expressions, one of which must match a line; ``settings`` are
``NAME=REGEX``, one of which must have been requested.  ``when`` is the range of vLLM releases; if
the release is unknown, patterns apply and settings do not.  All of ``[with]`` must be in the log,
and none of ``[without]``.  The first ``[[fix]]`` whose range matches is printed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from builder.common.document import load_toml
from builder.common.paths import package_file
from builder.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


#: Minimum length; shorter texts are too common in logs.
MINIMUM = 5

_CLASS_ESCAPES = "dDwWsSbBAZ"


def fixed_text(pattern: str) -> str:
    """The longest text that every match of ``pattern`` contains; empty if there is none.

    It is conservative: groups, classes and anything optional count as unknown text, and a
    choice at the top level has no text that all its branches share.
    """
    best, run, index = "", "", 0
    while index < len(pattern):
        char = pattern[index]
        if char == "|":
            return ""
        if char == "\\":
            char, index = pattern[index + 1 : index + 2], index + 1
            literal = char not in _CLASS_ESCAPES and not char.isdigit()
        else:
            literal = char not in ".^$*+?{}[]()"
        if literal:
            quantifier = pattern[index + 1 : index + 2]
            if quantifier and quantifier in "*?{":
                best, run = max(best, run, key=len), ""
            else:
                run += char
        else:
            best, run = max(best, run, key=len), ""
            index = _past(pattern, index)
            continue
        if pattern[index + 1 : index + 2] == "+":
            best, run = max(best, run, key=len), ""
        index += 1
    return max(best, run, key=len)


def _past(pattern: str, index: int) -> int:
    """The index after the construct that starts at ``index``."""
    char = pattern[index]
    if char == "[":
        end = pattern.index("]", index + (3 if pattern[index + 1] == "^" else 2))
        return end + 1
    if char == "{":
        return pattern.index("}", index) + 1
    if char != "(":
        return index + 1
    depth = 0
    while index < len(pattern):
        char = pattern[index]
        if char == "\\":
            index += 2
            continue
        if char == "[":
            index = _past(pattern, index)
            continue
        depth += {"(": 1, ")": -1}.get(char, 0)
        index += 1
        if depth == 0:
            break
    return index


Severity = Literal["error", "warning", "info"]
#: The program of an entry.
Engine = Literal["vllm", "tensorrt-llm", "sglang", "any"]
#: Where an entry comes from: seen in code or wheels, inferred from them, or reported by others.
Sure = Literal["certain", "likely", "reported"]


#: No match begins inside a word: ``ld: `` is not in "build: ".  A capital letter may begin one.
_WHOLE = "(?<![a-z0-9](?=[a-z]))"


def whole_words(source: str, flags: int = 0) -> re.Pattern[str]:
    """A regular expression whose matches do not begin inside a word."""
    return re.compile(f"{_WHOLE}(?:{source})", flags)


@cache
def _compiled(source: str) -> re.Pattern[str]:
    return whole_words(source)


@dataclass(frozen=True, slots=True)
class Regex:
    """A regular expression that is compiled on first use.

    A build only writes the catalogue into the image; compiling all expressions would take longer
    than the rest of the plan.
    """

    pattern: str

    def search(self, text: str) -> re.Match[str] | None:
        """As ``re.Pattern.search``."""
        return _compiled(self.pattern).search(text)

    def fullmatch(self, text: str) -> re.Match[str] | None:
        """As ``re.Pattern.fullmatch``."""
        return _compiled(self.pattern).fullmatch(text)


#: Sentences of a page about failures: no line of a log begins so.
PROSE = Regex(
    r"^\|.*\|\s*$|^\s*(?:#|//|/\*|raise |throw |print\(|log\w*\.\w+\(|printf\(|std::c)"
    r"|^(?:[-*#>] ?)?(?:See|Note|You|To|This|Make sure|Try)\b.{0,80}[`\"]"
    r"|^(?:[-*#>] ?)?(?:If|When) "
)
#: Attempts that a program can do without: not errors, whatever the line quotes.
SKIPPED = Regex(r"[Ss]kipping tactic|[Ee]xception ignored in|[Rr]etrying|[Ww]ill retry")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression, and the text that must be present to try it."""

    regex: Regex
    needle: str


@dataclass(frozen=True, slots=True)
class RequestedSetting:
    """``NAME=REGEX``: a requested setting."""

    name: Regex
    value: Regex

    def holds(self, name: str, value: str) -> bool:
        """Whether a setting matches."""
        return bool(self.name.fullmatch(name) and self.value.fullmatch(value))


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on the rest of the log."""

    patterns: tuple[Pattern, ...] = ()
    settings: tuple[RequestedSetting, ...] = ()


@dataclass(frozen=True, slots=True)
class Fix:
    """The fix for a range of releases."""

    when: SpecifierSet | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A log that tests the entry; ``found = false`` means that it must not match."""

    log: str
    vllm: str = ""
    line: int = 1
    fix: str = ""
    found: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """One possible finding in a log."""

    id: str
    severity: Severity
    message: str
    engine: Engine
    when: SpecifierSet | None
    needs_version: bool
    patterns: tuple[Pattern, ...]
    unless: tuple[Regex, ...]
    settings: tuple[RequestedSetting, ...]
    required: Condition
    forbidden: Condition
    fixes: tuple[Fix, ...] = ()
    #: number of lines that must match; fewer are harmless
    times: int = 1
    #: not a failure if the server becomes ready later
    passing: bool = False
    #: confidence in the cause
    sure: Sure = "certain"
    #: where the cause or fix was published
    source: str = ""
    examples: tuple[Example, ...] = ()

    def applies(self, version: str | None, *, by_setting: bool) -> bool:
        """Whether it applies to a release; None means unknown."""
        if version is None:
            return not self.needs_version and not (by_setting and self.when is not None)
        return self.when is None or self.when.contains(version, prereleases=True)

    def fix_for(self, version: str | None) -> str:
        """The fix for a release, or all fixes with their ranges if the release is unknown."""
        if version is not None:
            for fix in self.fixes:
                if fix.when is None or fix.when.contains(version, prereleases=True):
                    return fix.text
            return ""
        if len(self.fixes) == 1:
            return self.fixes[0].text
        low, last = _bounds(self.when)
        parts = []
        for fix in self.fixes:
            own, high = _bounds(fix.when)
            parts.append(f"{_range(own or low, high or last)}: {fix.text}")
            low = high or low
        return "; ".join(parts)


def _bounds(when: SpecifierSet | None) -> tuple[str, str]:
    """First release of a range, and the first one after it; empty if open."""
    low = high = ""
    for spec in when or ():
        bare = re.sub(r"(?:rc|a|\.dev)\d+$", "", spec.version)
        if spec.operator == "<":
            high = bare
        else:
            low = bare
    return low, high


def _range(low: str, high: str) -> str:
    """A range as text."""
    if low.endswith(".*"):
        return f"vLLM {low}"
    if low and high:
        return f"vLLM {low} up to before {high}"
    if low:
        return f"vLLM {low} and later"
    return f"vLLM before {high}" if high else "any vLLM"


def rendered(text: str, groups: Mapping[str, str]) -> str:
    """``text`` with the pattern's named groups in place of ``{name}``; other braces are kept."""
    return re.sub(r"\{([a-z_]+)\}", lambda m: groups.get(m[1], m[0]), text)


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
            loaded = load_toml(self.path)
        except (OSError, ValueError) as error:
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
def load_entries() -> tuple[Entry, ...]:
    """Every entry, by name; the tests check their regular expressions."""
    folder = package_file("data", "diagnose")
    return tuple(load_entry(path, compiles=False) for path in sorted(folder.glob("*.toml")))
