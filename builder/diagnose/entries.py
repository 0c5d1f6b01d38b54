"""An entry of the catalogue: patterns, releases, message and fixes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from packaging.specifiers import SpecifierSet


Severity = Literal["error", "warning", "info"]
#: The program of an entry.
Engine = Literal["vllm", "tensorrt-llm", "sglang", "any"]
#: Where an entry comes from: seen in code or wheels, inferred from them, or reported by others.
Sure = Literal["certain", "likely", "reported"]


@cache
def _compiled(source: str) -> re.Pattern[str]:
    return re.compile(source)


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
