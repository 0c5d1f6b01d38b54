"""A base of released wheels: ``pypi:vllm==0.20.1,flashinfer-python==0.6.9``."""

from __future__ import annotations

import email.parser
import re
from typing import TYPE_CHECKING

from packaging.markers import InvalidMarker, UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from builder.applier.values import canonical_json, normalize, sha256_hex
from builder.common.document import plain
from builder.common.hints import instead
from builder.common.plan import BaseIdentity, PinnedWheel, Platform
from builder.common.reference import NEWEST_VLLM
from builder.common.wheels import RemoteWheel, WheelTree
from builder.errors import RemoteError, UsageError
from builder.images.subject import Subject

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from email.message import Message

    from builder.common.pypi import PackageIndex
    from builder.images.subject import BaseRequest

#: The name at the start of a requirement (PEP 508); parsing a whole one takes 0.1 ms.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: Characters of a requirement; vLLM's longest has 90.
_LONGEST = 10_000
#: Requirements of a wheel on distributions that layers look at, and releases with different extras
#: that one base asks for.  vLLM has 5 of the first, and a base 10 of the second.
_MOST_REQUIRED, _MOST_ADDED = 500, 100
#: Site-packages of the official vLLM images; for another path, an overlay needs
#: --site-packages.
DEFAULT_SITE_PACKAGES = "/usr/local/lib/python{major}.{minor}/dist-packages"


def parse_named(text: str) -> dict[str, tuple[str, frozenset[str]]]:
    """``name==version`` pairs: version and extras by normalised name.

    Raises:
        UsageError: an item is not an exact version.
    """
    named: dict[str, tuple[str, frozenset[str]]] = {}
    better = instead(f"pypi:{text}", f"pypi:vllm=={NEWEST_VLLM}")
    for item in filter(None, (part.strip() for part in text.split(","))):
        wrong = UsageError(f"pypi: {item!r} is not NAME==VERSION", hint=better)
        try:
            requirement = Requirement(item)
            (spec,) = requirement.specifier
            Version(spec.version)
        except (InvalidRequirement, InvalidVersion, ValueError):
            raise wrong from None
        if spec.operator != "==":
            raise wrong
        named[normalize(requirement.name)] = (spec.version, frozenset(requirement.extras))
    if "vllm" not in named:
        raise UsageError("pypi: needs vllm==VERSION", hint=better)
    return named


def requirements_of(metadata: bytes, names: Collection[str] | None = None) -> Iterator[Requirement]:
    """Requirements in a distribution's METADATA, ignoring markers; ``names`` limits them.

    Raises:
        UsageError: one is malformed.
    """
    text = metadata.decode("utf-8", "replace")
    return parsed_requirements(email.parser.Parser().parsestr(text, headersonly=True), names)


def parsed_requirements(
    headers: Message, names: Collection[str] | None = None
) -> Iterator[Requirement]:
    """The same, from parsed METADATA.

    Raises:
        UsageError: one is malformed.
    """
    for line in map(str, headers.get_all("Requires-Dist", [])):
        name = _NAME.match(line.strip())
        if name is not None and names is not None and normalize(name[0]) not in names:
            continue
        if len(line) > _LONGEST:
            raise UsageError(f"its metadata has a requirement of {len(line)} characters")
        try:
            yield Requirement(line)
        except (InvalidRequirement, ValueError, RecursionError):
            raise UsageError(f"its metadata has a malformed requirement: {line[:200]!r}") from None


class _Resolver:
    """Follows Requires-Dist from vLLM through the tracked distributions; no dependency solve."""

    def __init__(self, request: BaseRequest, platform: Platform, text: str) -> None:
        self.named = parse_named(text)
        self.index: PackageIndex = request.index
        self.platform, self.pins = platform, request.pins
        self.tracked = {*request.tracked, *self.named}
        self.chosen: dict[str, RemoteWheel] = {}
        self.order: list[str] = []
        self._added: set[tuple[str, frozenset[str]]] = set()
        self.exact: dict[str, str] = {}
        self._env = {
            "python_version": ".".join(map(str, platform.python_version)),
            "python_full_version": ".".join(map(str, platform.python_version)) + ".0",
            "platform_machine": platform.machine,
            "platform_system": "Linux",
            "sys_platform": "linux",
            "os_name": "posix",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
        }

    def add(self, name: str, version: str, extras: frozenset[str]) -> None:
        """Add a release, then its requirements; dependencies come first, as with pip."""
        if (name, extras) in self._added:  # also a package that requires itself with extras
            return
        self._added.add((name, extras))
        if len(self._added) > _MOST_ADDED:
            raise RemoteError(
                f"pypi: {name} and what it requires have more than {_MOST_ADDED} sets of extras"
            )
        if name not in self.chosen:
            file = self.index.choose(name, version, self.platform)
            self.chosen[name] = RemoteWheel(file, self.index)
        wanted = [
            (requirement, normalize(requirement.name))
            for requirement in self._requirements(self.chosen[name], extras)
        ]
        for requirement, dependency in wanted:  # what is nearer to vLLM pins for what is deeper
            for spec in requirement.specifier:
                if spec.operator == "==" and "*" not in spec.version:
                    self.exact.setdefault(dependency, spec.version)
        for requirement, dependency in wanted:
            chosen, named_extras = self._version(requirement, dependency)
            if dependency not in self.chosen or requirement.extras:
                self.add(dependency, chosen, named_extras | frozenset(requirement.extras))
        if name not in self.order:
            self.order.append(name)

    def _requirements(self, wheel: RemoteWheel, extras: frozenset[str]) -> Iterator[Requirement]:
        metadata = wheel.metadata()  # a full disk is no failure of the wheel
        try:
            requirements = parsed_requirements(metadata, self.tracked)
            for number, requirement in enumerate(requirements):
                if number >= _MOST_REQUIRED:
                    raise UsageError(f"it has more than {_MOST_REQUIRED} requirements")
                marker = requirement.marker
                if marker is None or any(
                    marker.evaluate({**self._env, "extra": extra}) for extra in ("", *extras)
                ):
                    yield requirement
        except (UsageError, InvalidMarker, UndefinedComparison, UndefinedEnvironmentName) as error:
            raise RemoteError(f"{wheel.file.filename}: {error}") from None

    def _version(self, requirement: Requirement, name: str) -> tuple[str, frozenset[str]]:
        if name in self.named:
            return self.named[name]
        if name in self.chosen:
            return self.chosen[name].file.version, frozenset()
        if name in self.exact:
            return self.exact[name], frozenset()
        pinned = self.pins.get(name)
        if pinned and requirement.specifier.contains(pinned, prereleases=True):
            return pinned, frozenset()
        fitting = [v for v in self.index.releases(name) if requirement.specifier.contains(v)]
        if not fitting:
            raise UsageError(f"no release of {name} satisfies {requirement}")
        return fitting[-1], frozenset()

    def wheels(self) -> list[RemoteWheel]:
        """All wheels in installation order."""
        for name, (version, extras) in self.named.items():
            self.add(name, version, extras)
        return [self.chosen[name] for name in self.order]


def released_wheels(request: BaseRequest, text: str) -> list[RemoteWheel]:
    """The wheels of a base, in installation order.

    Raises:
        UsageError: the reference is malformed, or a release does not exist for the platform.
        RemoteError: the package index does not respond.
    """
    return _Resolver(request, _platform(request), text).wheels()


def _platform(request: BaseRequest) -> Platform:
    return Platform.parse(request.platform or "linux/arm64", request.python or "3.12")


def identify_pypi(request: BaseRequest, text: str) -> Subject:
    """Identify a base of released wheels by reading a few kilobytes.

    Raises:
        UsageError: the reference is malformed, or a release does not exist for the platform.
        RemoteError: the package index does not respond.
    """
    platform = _platform(request)
    wheels = released_wheels(request, text)
    pinned = tuple(PinnedWheel(filename=w.file.filename, sha256=w.file.sha256) for w in wheels)
    versions = {w.file.distribution: w.file.version for w in wheels}
    major, minor = platform.python_version
    default = DEFAULT_SITE_PACKAGES.format(major=major, minor=minor)
    identity = BaseIdentity(
        kind="pypi",
        ref=f"pypi:{text}",
        digest=f"sha256:{sha256_hex(canonical_json([plain(wheel) for wheel in pinned]))}",
        platform=platform,
        site_packages=(request.site_packages or default).rstrip("/"),
        packages=versions,
        wheels=pinned,
    )
    return Subject(identity, WheelTree(wheels))
