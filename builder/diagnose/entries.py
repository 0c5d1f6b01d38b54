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
#: The program whose logs an entry is for.
Engine = Literal["vllm", "tensorrt-llm", "sglang", "any"]
#: Seen in the code or the wheels of that release; inferred from them; only told by others.
Sure = Literal["certain", "likely", "reported"]


@cache
def _compiled(source: str) -> re.Pattern[str]:
    return re.compile(source)


@dataclass(frozen=True, slots=True)
class Regex:
    """A regular expression that is compiled when it is first tried.

    A build writes the catalogue into the image and tries none; compiling all would take it longer
    than everything else that it computes.
    """

    pattern: str

    def search(self, text: str) -> re.Match[str] | None:
        """As ``re.Pattern.search``."""
        return _compiled(self.pattern).search(text)

    def fullmatch(self, text: str) -> re.Match[str] | None:
        """As ``re.Pattern.fullmatch``."""
        return _compiled(self.pattern).fullmatch(text)


#: What a program tried and did without: no error, whatever its line quotes.
SKIPPED = Regex(r"[Ss]kipping tactic|[Ee]xception ignored in|[Rr]etrying|[Ww]ill retry")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression and the text that must be near for it to be tried."""

    regex: Regex
    needle: str


@dataclass(frozen=True, slots=True)
class RequestedSetting:
    """``NAME=REGEX``: something that was asked for."""

    name: Regex
    value: Regex

    def holds(self, name: str, value: str) -> bool:
        """Whether a setting is this one."""
        return bool(self.name.fullmatch(name) and self.value.fullmatch(value))


@dataclass(frozen=True, slots=True)
class Condition:
    """What must, or must not, be elsewhere in the log."""

    patterns: tuple[Pattern, ...] = ()
    settings: tuple[RequestedSetting, ...] = ()


@dataclass(frozen=True, slots=True)
class Fix:
    """What to do, for a range of releases."""

    when: SpecifierSet | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A log that the entry is tested with; ``found = false`` says that it must stay silent."""

    log: str
    vllm: str = ""
    line: int = 1
    fix: str = ""
    found: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """One finding that a log can show."""

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
    #: so many lines must show it: one of them alone is harmless
    times: int = 1
    #: a server that becomes ready later has passed it
    passing: bool = False
    #: how well the cause is known
    sure: Sure = "certain"
    #: where the cause or the cure was published
    source: str = ""
    examples: tuple[Example, ...] = ()

    def applies(self, version: str | None, *, by_setting: bool) -> bool:
        """Whether it holds for a release; None is one that the log does not tell."""
        if version is None:
            return not self.needs_version and not (by_setting and self.when is not None)
        return self.when is None or self.when.contains(version, prereleases=True)

    def fix_for(self, version: str | None) -> str:
        """The advice for a release, or all of it with its ranges when the release is unknown."""
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
    """First release of a range, and the first one behind it; empty where it is open."""
    low = high = ""
    for spec in when or ():
        bare = re.sub(r"(?:rc|a|\.dev)\d+$", "", spec.version)
        if spec.operator == "<":
            high = bare
        else:
            low = bare
    return low, high


def _range(low: str, high: str) -> str:
    """A range as people say it."""
    if low.endswith(".*"):
        return f"vLLM {low}"
    if low and high:
        return f"vLLM {low} up to before {high}"
    if low:
        return f"vLLM {low} and later"
    return f"vLLM before {high}" if high else "any vLLM"


def rendered(text: str, groups: Mapping[str, str]) -> str:
    """``text`` with ``{name}`` of the pattern's named groups filled in; other braces stay."""
    return re.sub(r"\{([a-z_]+)\}", lambda m: groups.get(m[1], m[0]), text)
