"""The package index: which wheels a release has, pinned by file name and sha256.

The index is pip's configured one, or the default of ``pypi-simple``.  Its pages are parsed in
``pages.py``.
"""

from __future__ import annotations

import configparser
import os
import re
import sys
import time
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename
from packaging.version import InvalidVersion, Version

from builder.applier.digests import sha256_hex
from builder.applier.versions import normalize
from builder.common.console import console
from builder.common.hints import CACHE, ELSEWHERE, again, instead, os_hint
from builder.common.leftovers import making
from builder.common.model.base import NEWEST_VLLM
from builder.common.net.messages import host_of, no_answer, shown
from builder.common.paths import cache_dir
from builder.common.pypi.pages import PAGE_BYTES, WheelFile, parse_page
from builder.errors import RemoteError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from builder.common.model.platform import Platform
    from builder.common.net.session import Session

#: The first vLLM release that any profile serves.
OLDEST_VLLM = Version("0.17.0")
#: A project's normalised name (PEP 503).
_PROJECT = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
#: Seconds for which a project page is cached; wheels never change.
PAGE_TTL = 24 * 3600


def pip_index_url() -> str | None:
    """The index in pip's configuration, else uv's."""
    if not os.environ.get("PIP_INDEX_URL") and os.environ.get("UV_DEFAULT_INDEX"):
        return os.environ["UV_DEFAULT_INDEX"]
    return pip_setting("index-url")


def pip_setting(name: str) -> str | None:
    """A setting of pip: from its variable, else from its configuration files."""
    if value := os.environ.get(f"PIP_{name.upper().replace('-', '_')}"):
        return value
    home = Path.home()
    config = os.environ.get("XDG_CONFIG_HOME", str(home / ".config"))
    files = [
        Path("/etc/pip.conf"),
        home / ".pip" / "pip.conf",
        Path(config) / "pip" / "pip.conf",
        Path(sys.prefix) / "pip.conf",
    ]
    named = os.environ.get("PIP_CONFIG_FILE")
    files = [] if named == os.devnull else [*files, *([Path(named)] if named else [])]
    parser = configparser.RawConfigParser()
    parser.read(files, encoding="utf-8")
    for section in ("install", "download", "global"):
        if parser.has_option(section, name):
            return parser.get(section, name).strip()
    return None


def make_session(window: float | None = None) -> Session:
    """An HTTP session with retries; imported late, because it is slow."""
    from builder.common.net.connections import WINDOW
    from builder.common.net.retry import RetryPolicy
    from builder.common.net.session import Session

    return Session(window or WINDOW, RetryPolicy())


class PackageIndex:
    """Looks up releases, and counts bytes read."""

    def __init__(
        self,
        url: str | None = None,
        *,
        refresh: bool = False,
        sessions: Callable[[], Session] = make_session,
    ) -> None:
        self._url = url
        self._sessions = sessions
        self._refresh = refresh
        self._session: Session | None = None
        self._pages: dict[str, list[WheelFile]] = {}
        self._held: dict[str, list[WheelFile]] = {}
        self._warned: set[str] = set()
        #: the sha256 of the RECORD of wheels that were opened, by the wheel's sha256
        self.records: dict[str, str] = {}
        self.bytes_read = 0

    def hold(self, files: Iterable[WheelFile]) -> None:
        """Use these wheels (without URLs) in place of the index's for their releases."""
        for file in files:
            self._held.setdefault(file.distribution, []).append(file)

    def find(self, distribution: str, filename: str) -> WheelFile | None:
        """A wheel by its file name."""
        name = normalize(distribution)
        held = next((w for w in self._held.get(name, ()) if w.filename == filename), None)
        return held or next((w for w in self.wheels(name) if w.filename == filename), None)

    def address(self, file: WheelFile) -> str:
        """The URL of a wheel; for a held one, the index is queried now.

        Raises:
            RemoteError: the index does not have it, or has a different file with that name.
        """
        if file.url:
            return file.url
        found = next(
            (w for w in self.wheels(file.distribution) if w.filename == file.filename), None
        )
        if found is None or found.sha256 != file.sha256:
            what = "is not on" if found is None else "differs from the file on"
            raise RemoteError(
                f"{file.filename} with sha256 {file.sha256}, which is locked, {what} the package "
                "index",
                hint="spark-build lock --upgrade",
            )
        return found.url

    @property
    def session(self) -> Session:
        """The session, created on first use: ``requests`` is slow to import, and rarely needed."""
        if self._session is None:
            self._session = self._sessions()
        return self._session

    def wheels(self, project: str) -> list[WheelFile]:
        """All wheels of a project.

        Raises:
            UsageError: the index has no such project.
            RemoteError: the index does not respond.
        """
        return self._page(normalize(project), "wheel")

    def sdist(self, project: str, version: str) -> WheelFile:
        """The source archive of a release.

        Raises:
            UsageError: the index has no such project, or no source archive of that release.
            RemoteError: the index does not respond, or has no sha256.
        """
        name = normalize(project)
        wanted = _version(project, version)
        for file in _unyanked_first(self._page(name, "sdist")):
            if file.parsed_version == wanted:
                if not file.sha256:
                    raise RemoteError(f"the package index gives no sha256 for {file.filename}")
                return self._told(file)
        raise UsageError(f"{project} {version} has no source archive on the package index")

    def _page(self, name: str, kind: str) -> list[WheelFile]:
        if not _PROJECT.fullmatch(name):  # it becomes a path: /etc/x would leave the cache
            raise UsageError(f"{name[:80]!r} is not the name of a package")
        key = name if kind == "wheel" else f"{name}.{kind}"
        if key not in self._pages:
            self._pages[key] = self._cached_page(name, kind, f"{key}{self._mark}.json")
        return self._pages[key]

    @cached_property
    def _endpoint(self) -> str:
        """The configured index, or "" for the library's default."""
        return self._url or pip_index_url() or ""

    @cached_property
    def key(self) -> str:
        """A cache key that identifies the index: 12 hexadecimal digits."""
        return sha256_hex(self._endpoint.encode())[:12]

    @cached_property
    def _mark(self) -> str:
        return f".{self.key}" if self._endpoint else ""

    def _cached_page(self, name: str, kind: str, cache_name: str) -> list[WheelFile]:
        cached = cache_dir() / "index" / cache_name
        kept = None if self._refresh else _kept_page(cached)
        if kept is not None and time.time() - cached.stat().st_mtime < PAGE_TTL:
            return kept
        try:
            files = self._fetch_page(name, kind)
        except RemoteError as error:
            if kept is None:
                raise
            day = time.strftime("%Y-%m-%d", time.gmtime(cached.stat().st_mtime))
            console.warn(f"{error}\n  using the cached page of {day}")
            return kept
        write_atomically(cached, msgspec.json.encode(files))
        return files

    def _fetch_page(self, name: str, kind: str) -> list[WheelFile]:
        import requests
        from pypi_simple import ACCEPT_JSON_PREFERRED, PYPI_SIMPLE_ENDPOINT

        endpoint = self._endpoint or PYPI_SIMPLE_ENDPOINT
        console.detail(f"index: {name}")
        url = f"{endpoint.rstrip('/')}/{name}/"
        try:
            answer = self.session.small(url, {"Accept": ACCEPT_JSON_PREFERRED}, PAGE_BYTES)
            if answer.status_code == 404:
                raise UsageError(f"package {name!r} is not on the package index")
            if answer.status_code != 200:
                raise RemoteError(f"{host_of(url)}: answered {answer.status_code}")
            wheels, sdists = parse_page(
                answer.body, answer.headers.get("Content-Type", ""), answer.url
            )
        except (requests.RequestException, RemoteError) as error:
            raise RemoteError(
                f"the package index did not answer for {name!r}: {shown(endpoint)}: "
                f"{no_answer(error, endpoint)}",
                hint=again(),
            ) from error
        except ValueError as error:
            raise RemoteError(
                f"the page of {name!r} on the package index cannot be used: {shown(endpoint)}: "
                f"{error}",
                hint="pip config list",
            ) from None
        return wheels if kind == "wheel" else sdists

    def releases(self, project: str) -> list[str]:
        """Versions that have a wheel, oldest first, without those that were yanked."""
        found = {
            version
            for file in self.wheels(project)
            if file.yanked is None and (version := file.parsed_version) is not None
        }
        return [str(v) for v in sorted(found)]

    def choose(self, project: str, version: str, platform: Platform) -> WheelFile:
        """The wheel that an installer would select: best tags, then the highest build number.

        A yanked one is only used if the release has no other that fits, with a warning.

        Raises:
            UsageError: the release does not exist, or has no wheel for the platform.
        """
        wanted = _version(project, version)
        held = self._held.get(normalize(project), ())
        of_release = [w for w in held if w.parsed_version == wanted]
        of_release = of_release or [w for w in self.wheels(project) if w.parsed_version == wanted]
        if not of_release:
            releases = self.releases(project)
            place = sum(Version(r) < wanted for r in releases)
            near = releases[max(0, place - 4) : place + 4]
            raise UsageError(
                f"{project} {version} is not on the package index; the nearest releases are "
                f"{', '.join(near)}",
                hint=_with_newest(version, releases) if project == "vllm" else "",
            )
        rank = ranks(platform)
        fitting = []
        for wheel in of_release:
            _, _, build, tags = parse_wheel_filename(wheel.filename)
            scores = [rank[tag] for tag in tags if tag in rank]
            if scores:
                order = (wheel.yanked is None, max(scores), build or (), wheel.filename)
                fitting.append((order, wheel))
        if not fitting:
            raise UsageError(
                f"{project} {version} has no wheel for {platform.oci} with "
                f"{platform.python}: {', '.join(w.filename for w in of_release[:4])}",
                hint="choose another --platform or --python",
            )
        _, best = max(fitting, key=lambda pair: pair[0])
        if not best.sha256:
            raise RemoteError(f"the package index gives no sha256 for {best.filename}")
        return self._told(best)

    def _told(self, file: WheelFile) -> WheelFile:
        """The file; the first time with a warning if it was yanked."""
        if file.yanked is not None and file.filename not in self._warned:
            self._warned.add(file.filename)
            console.warn(
                f"{file.filename} was yanked from the package index: "
                f"{file.yanked or 'no reason is given'}"
            )
        return file


def _unyanked_first(files: Iterable[WheelFile]) -> list[WheelFile]:
    return sorted(files, key=lambda file: file.yanked is not None)


def _version(project: str, text: str) -> Version:
    try:
        return Version(text)
    except (InvalidVersion, ValueError):
        raise UsageError(f"{project} {text[:80]!r} is not a version") from None


def _kept_page(cached: Path) -> list[WheelFile] | None:
    try:
        return msgspec.json.decode(cached.read_bytes(), type=list[WheelFile])
    except (OSError, ValueError, RecursionError):  # none, or one of another form
        return None


@cache
def ranks(platform: Platform) -> dict[Tag, int]:
    """The wheel tags of a glibc Linux platform; the best has the highest number."""
    return {tag: -i for i, tag in enumerate(_tags(platform))}


def _tags(platform: Platform) -> Iterator[Tag]:
    version = platform.python_version
    names = list(_manylinux(platform.machine))
    yield from cpython_tags(version, platforms=names)
    yield from compatible_tags(version, platform.python, platforms=names)


def _manylinux(machine: str) -> Iterable[str]:
    for minor in range(39, 16, -1):  # glibc 2.39 (Ubuntu 24.04, the Spark's own) down to 2.17
        yield f"manylinux_2_{minor}_{machine}"
    yield f"manylinux2014_{machine}"
    if machine == "x86_64":
        yield from (f"manylinux_2_12_{machine}", f"manylinux2010_{machine}")
    yield f"linux_{machine}"


def write_atomically(path: Path, data: bytes) -> None:
    """Write a cache file atomically; a full disk is reported."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with making(path) as partial:
            partial.write_bytes(data)
            partial.replace(path)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}",
            hint=os_hint(error, CACHE if path.is_relative_to(cache_dir()) else ELSEWHERE),
        ) from error


def _with_newest(version: str, releases: list[str]) -> str:
    """The user's command with the newest release of vLLM instead of one that does not exist."""
    final = [release for release in releases if not Version(release).is_prerelease]
    newest = NEWEST_VLLM if NEWEST_VLLM in releases else max(final, key=Version, default="")
    better = instead(version, newest)
    return better if better != newest else ""


def vllm_releases(index: PackageIndex, named: str | None = None) -> list[str]:
    """The vLLM releases in a comma-separated list; by default all from 0.17.0 on."""
    listed = [word.strip() for word in (named or "").split(",") if word.strip()]
    if listed:
        return listed
    known = (Version(version) for version in index.releases("vllm"))
    return [str(v) for v in known if v >= OLDEST_VLLM and not v.is_prerelease]
