"""The package index: which wheels a release has, pinned by file name and sha256.

The index is pip's configured one, or the default of ``pypi-simple``.
"""

from __future__ import annotations

import configparser
import contextlib
import hashlib
import html
import os
import re
import sys
import time
from dataclasses import dataclass
from email.message import Message
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urljoin, urlsplit

import msgspec
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from builder.applier.files import DOCUMENT, open_regular, read_regular
from builder.applier.values import is_sha256, normalize, sha256_hex
from builder.common.cache import locked
from builder.common.console import console
from builder.common.diskspace import Need, check_room
from builder.common.files import write_atomically
from builder.common.hints import CACHE, again, instead, os_hint
from builder.common.paths import cache_dir
from builder.common.reference import NEWEST_VLLM
from builder.common.retry import host_of, shown
from builder.errors import BuildFailed, RemoteError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from builder.common.net import Session
    from builder.common.plan import Platform


# ------------------------------------------------------------------------------------------- pages
#
# What an index says is foreign: a file name and a sha256 become paths in the cache, and a page can
# have any size.  ``pypi-simple`` is not used to read pages: 1 MB of unusual HTML, or one long file
# name, takes it more than a minute.

#: Bytes of a page that are read; the largest that spark-build needs has 0.4 MB, numpy's has 2 MB.
PAGE_BYTES = 16 << 20
#: Files on a page: numpy's has 4,400.
_MOST_FILES = 50_000
#: Bytes of a wheel in a folder; the largest on the index has 1.5 GB.
_WHEEL_BYTES = 16 << 30
#: Bytes of a file, an exabyte.
_LARGEST_SIZE = 1 << 60
#: What a file name may consist of: it becomes a path.  The longest name on the index has 120.
_FILENAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{1,199}")
#: Tags of a wheel: each part of the file name may list several, and their product counts.
_MOST_TAGS = 200
_SDISTS = (".tar.gz", ".zip")
#: The day at the start of an upload time (PEP 700).
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?=T)")


@dataclass(frozen=True, kw_only=True)
class WheelFile:
    """One wheel or source archive.

    ``sha256`` is "" if the index has none, and ``size`` is in bytes, 0 if unknown.  ``yanked`` is
    the reason for which the file was yanked, maybe "", or None.  ``record`` is the pinned sha256
    of the wheel's RECORD, "" if it is not pinned.  ``uploaded`` is the day of the upload, "" if the
    index does not say, and None if it was not asked.

    Raises:
        ValueError: a value is malformed.
    """

    filename: str
    url: str
    sha256: str
    size: int = 0
    yanked: str | None = None
    record: str = ""
    uploaded: str | None = None

    def __post_init__(self) -> None:
        """Refuse what must not become a path, or cannot be a size."""
        if not is_filename(self.filename):
            raise ValueError(f"{self.filename[:80]!r} is not the file name of a wheel or archive")
        for digest in (self.sha256, self.record):
            if digest and not is_sha256(digest):
                raise ValueError(
                    f"{digest[:80]!r} is not a sha256 (64 lower-case hexadecimal digits)"
                )
        if not 0 <= self.size <= _LARGEST_SIZE:
            raise ValueError(f"{self.size} is not a number of bytes")

    @property
    def distribution(self) -> str:
        """Normalised distribution name."""
        return normalize(parse_wheel_filename(self.filename)[0])

    @property
    def release(self) -> str:
        """Name and version, in the file name's form."""
        name = "-".join(self.filename.split("-")[:2])
        return name.removesuffix(".tar.gz")

    @property
    def version(self) -> str:
        """PEP 440 version."""
        return str(parse_wheel_filename(self.filename)[1])

    @property
    def parsed_version(self) -> Version | None:
        """The version of a wheel or source archive, or None if its file name has none."""
        try:
            if self.filename.endswith(".whl"):
                return parse_wheel_filename(self.filename)[1]
            return parse_sdist_filename(self.filename)[1]
        except (InvalidWheelFilename, InvalidSdistFilename):
            return None


@dataclass(frozen=True, kw_only=True)
class Release:
    """One release of a project on an index.

    ``uploaded`` is the day of its first wheel, "" if the index does not say.  ``yanked`` is the
    reason for which all its wheels were yanked, maybe "", or None.  ``builds`` is 1, or more if it
    was built again under the same version.
    """

    version: str
    uploaded: str
    yanked: str | None
    builds: int

    @classmethod
    def of(cls, version: Version, files: Sequence[WheelFile]) -> Release:
        """The release that has these wheels."""
        builds = {parse_wheel_filename(file.filename)[2] for file in files}
        gone = all(file.yanked is not None for file in files)
        return cls(
            version=str(version),
            uploaded=min(file.uploaded or "" for file in files),
            yanked=next((f.yanked for f in files if f.yanked), "") if gone else None,
            builds=len(builds),
        )


def is_filename(name: str) -> bool:
    """Whether it can be the name of a wheel or source archive: short, and no path."""
    if not _FILENAME.fullmatch(name):
        return False
    tags = 1
    for part in name.removesuffix(".whl").split("-")[-3:] if name.endswith(".whl") else ():
        tags *= part.count(".") + 1
    return tags <= _MOST_TAGS


class _File(msgspec.Struct):
    filename: str
    url: str
    hashes: dict[str, str]
    size: int | None = None
    yanked: bool | str | None = False
    uploaded: str | None = msgspec.field(name="upload-time", default=None)


class _Meta(msgspec.Struct):
    version: str = msgspec.field(name="api-version", default="1.0")


class _Page(msgspec.Struct):
    files: list[_File]
    meta: _Meta


def parse_page(data: bytes, content_type: str, url: str) -> tuple[list[WheelFile], list[WheelFile]]:
    """The wheels and the source archives on a project's page; ``url`` is that of the page.

    Files with a name that is not that of a wheel or source archive are left out.

    Raises:
        ValueError: it is not such a page, or it has a malformed sha256, size or URL.
    """
    header = Message()
    header["Content-Type"] = content_type or "text/html"
    kind = header.get_content_type()
    if kind == "application/vnd.pypi.simple.v1+json":
        base, rows = url, iter(_of_json(data))
    elif kind in ("application/vnd.pypi.simple.v1+html", "text/html"):
        base, rows = _of_html(data, str(header.get_content_charset("utf-8")), url)
    else:
        raise ValueError(f"its content type is {content_type[:80]!r}, not that of an index page")
    wheels: list[WheelFile] = []
    sdists: list[WheelFile] = []
    left_out = 0
    for count, row in enumerate(rows):
        if count >= _MOST_FILES:
            raise ValueError(f"it lists more than {_MOST_FILES} files")
        is_wheel = row.filename.endswith(".whl")
        if not is_wheel and not row.filename.endswith(_SDISTS):
            continue
        if not is_filename(row.filename):
            left_out += 1
            continue
        (wheels if is_wheel else sdists).append(_checked(row, base, url))
    if left_out:
        console.detail(f"index: {left_out} files with an invalid name are left out")
    return wheels, sdists


def _checked(row: _File, base: str, page: str) -> WheelFile:
    try:
        address = urljoin(base, row.url)
        parts = urlsplit(address)
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"{row.filename}: {row.url[:80]!r} is not a URL: {error}") from None
    if parts.scheme not in ("https", "http") or not parts.hostname:
        raise ValueError(f"{row.filename}: {row.url[:80]!r} is not a URL of HTTP")
    if parts.scheme == "http" and urlsplit(page).scheme == "https":
        raise ValueError(
            f"{row.filename}: the page came over https, but the file's URL is plain http"
        )
    yanked = row.yanked
    try:
        return WheelFile(
            filename=row.filename,
            url=parts._replace(fragment="").geturl(),
            sha256=row.hashes.get("sha256", ""),
            size=row.size or 0,
            yanked=yanked if isinstance(yanked, str) else "" if yanked else None,
            uploaded=day[0] if (day := _DAY.match(row.uploaded or "")) else "",
        )
    except ValueError as error:
        raise ValueError(f"{row.filename}: {error}") from None


def _of_json(data: bytes) -> list[_File]:
    try:
        page = msgspec.json.decode(data, type=_Page)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    _check_version(page.meta.version)
    return page.files


def _check_version(version: str) -> None:
    if not re.fullmatch(r"1\.[0-9]{1,9}", version):
        raise ValueError(f"it has version {version[:40]!r} of the index protocol, known is 1")


# In both, no part can match at the start of another tag, so that the time is linear.
_TAG = re.compile(
    r"<(a|base|meta)\s((?:[^\"'<>]|\"[^\"<]{0,4096}\"|'[^'<]{0,4096}'){0,8192}+)>([^<]{0,1000})",
    re.IGNORECASE,
)
_ATTRIBUTE = re.compile(
    r"([a-z][a-z0-9-]*+)(?:\s*+=\s*+(?:\"([^\"]*+)\"|'([^']*+)'|([^\s\"'<>]++)))?+", re.IGNORECASE
)


def _of_html(data: bytes, charset: str, url: str) -> tuple[str, Iterator[_File]]:
    """The base of relative URLs, and the links."""
    try:
        text = data.decode(charset, "replace")
    except LookupError:
        raise ValueError(f"its character set {charset[:40]!r} is unknown") from None
    base = next((_attributes(m[2]).get("href", "") for m in _html_tags(text, "base")), "")
    for match in _html_tags(text, "meta"):
        values = _attributes(match[2])
        if values.get("name") == "pypi:repository-version":
            _check_version(values.get("content", ""))
    try:
        base = urljoin(url, base)
    except ValueError as error:
        raise ValueError(f"its base {base[:80]!r} is not a URL: {error}") from None
    return base, _links(text)


def _html_tags(text: str, name: str) -> Iterator[re.Match[str]]:
    return (match for match in _TAG.finditer(text) if match[1].lower() == name)


def _links(text: str) -> Iterator[_File]:
    for match in _html_tags(text, "a"):
        values = _attributes(match[2])
        href = values.get("href", "")
        fragment = dict(parse_qsl(href.partition("#")[2][:1000]))
        hashes = {"sha256": fragment["sha256"]} if "sha256" in fragment else {}
        name = html.unescape(match[3]).strip()
        yield _File(filename=name, url=href, hashes=hashes, yanked=values.get("data-yanked", False))


def _attributes(text: str) -> dict[str, str]:
    """The attributes of a tag, the first of each name; without a value it is ""."""
    attributes: dict[str, str] = {}
    for match in _ATTRIBUTE.finditer(text):
        attributes.setdefault(
            match[1].lower(), html.unescape(match[2] or match[3] or match[4] or "")
        )
    return attributes


# --------------------------------------------------------------------------------------- the index

#: The first vLLM release that any profile serves.
OLDEST_VLLM = Version("0.17.0")
#: A project's normalised name (PEP 503).
_PROJECT = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
#: Seconds for which a project page is cached; wheels never change.
PAGE_TTL = 24 * 3600
#: Seconds by which clocks of one file system may differ.
_CLOCK_STEP = 60.0


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
    for file in files:
        with contextlib.suppress(OSError):
            parser.read_string(read_regular(file, DOCUMENT).decode(), str(file))
    for section in ("install", "download", "global"):
        if parser.has_option(section, name):
            return parser.get(section, name).strip()
    return None


def make_session(window: float | None = None) -> Session:
    """An HTTP session with retries; imported late, because it is slow."""
    from builder.common.net import WINDOW, Session
    from builder.common.retry import RetryPolicy

    return Session(window or WINDOW, RetryPolicy())


class NotOnIndex(UsageError):
    """An index has no such project."""


class PackageIndex:
    """Looks up releases, and counts bytes read."""

    def __init__(
        self,
        url: str | None = None,
        *,
        refresh: bool = False,
        sessions: Callable[[], Session] = make_session,
        rest: PackageIndex | None = None,
    ) -> None:
        """``rest`` has the projects that this index lacks."""
        self._url, self._rest = url, rest
        self._sessions = sessions
        self._refresh = refresh
        self._session: Session | None = None
        self._pages: dict[str, list[WheelFile]] = {}
        self._preferred: dict[str, list[WheelFile]] = {}
        self._warned: set[str] = set()
        #: projects that the rest has
        self._others: set[str] = set()
        #: whether the index did not answer, so that no other page waits for it
        self._silent = False
        #: whole wheels on this machine, by sha256
        self.local: dict[str, Path] = {}
        #: the sha256 of the RECORD of wheels that were opened, by the wheel's sha256
        self.records: dict[str, str] = {}
        self.bytes_read = 0

    def hold(self, files: Iterable[WheelFile]) -> None:
        """Use these wheels (without URLs) in place of the index's for their releases."""
        for file in files:
            self._preferred.setdefault(file.distribution, []).append(file)

    def hold_folder(self, folder: Path) -> list[WheelFile]:
        """Use the wheels of a directory in place of the index's; returns them.

        Raises:
            UsageError: it has no wheel, or one cannot be read.
        """
        wheels = []
        for path in sorted(folder.glob("*.whl")):
            try:
                parse_wheel_filename(path.name)
                with open_regular(path, _WHEEL_BYTES) as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
                size = path.stat().st_size
                wheels.append(WheelFile(filename=path.name, url="", sha256=digest, size=size))
            except (OSError, ValueError) as error:
                raise UsageError(f"{path} cannot be used as a wheel: {error}") from None
            self.local[digest] = path
        if not wheels:
            raise UsageError(f"{folder} contains no wheel (NAME-VERSION-...whl)")
        self.hold(wheels)
        return wheels

    def find(self, distribution: str, filename: str) -> WheelFile | None:
        """A wheel by its file name."""
        name = normalize(distribution)
        local = next((w for w in self._preferred.get(name, ()) if w.filename == filename), None)
        return local or next((w for w in self.wheels(name) if w.filename == filename), None)

    def address(self, file: WheelFile) -> str:
        """The URL of a wheel; for a held one, the index is queried now.

        Raises:
            RemoteError: the index does not have it, or has a different file with that name.
        """
        if file.url:
            return file.url
        listed = next(
            (w for w in self.wheels(file.distribution) if w.filename == file.filename), None
        )
        if listed is None or listed.sha256 != file.sha256:
            what = "is not on" if listed is None else "differs from the file on"
            raise RemoteError(
                f"{file.filename} with sha256 {file.sha256}, which is locked, {what} the package "
                "index",
                hint="spark-build lock --upgrade",
            )
        return listed.url

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
            self._pages[key] = self._page_here_or_in_rest(name, kind, f"{key}{self._mark}.json")
        return self._pages[key]

    def _page_here_or_in_rest(self, name: str, kind: str, cache_name: str) -> list[WheelFile]:
        if self._rest is None:
            return self._cached_page(name, kind, cache_name)
        try:
            return self._cached_page(name, kind, cache_name)
        except NotOnIndex:
            self._others.add(name)
            return self._rest._page(name, kind)

    def key_of(self, distribution: str) -> str:
        """The key of the index that has the files of a project."""
        other = self._rest is not None and normalize(distribution) in self._others
        return self._rest.key if other and self._rest else self.key

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
        page = None if self._refresh else _stored_page(cached)
        if page is not None and (self._silent or _is_fresh(page, cached)):
            return page
        try:
            files = self._fetch_page(name, kind)
        except RemoteError as error:
            if page is None:
                raise
            day = time.strftime("%Y-%m-%d", time.gmtime(cached.stat().st_mtime))
            console.warn(f"{error}\n  using the cached page of {day}")
            return page
        write_atomically(cached, msgspec.json.encode(files))
        return files

    def _fetch_page(self, name: str, kind: str) -> list[WheelFile]:
        import requests
        from pypi_simple import ACCEPT_JSON_PREFERRED, PYPI_SIMPLE_ENDPOINT

        from builder.common.net import no_answer

        endpoint = self._endpoint or PYPI_SIMPLE_ENDPOINT
        console.detail(f"index: {name}")
        url = f"{endpoint.rstrip('/')}/{name}/"
        try:
            answer = self.session.small(url, {"Accept": ACCEPT_JSON_PREFERRED}, PAGE_BYTES)
            if answer.status_code == 404:
                raise NotOnIndex(f"package {name!r} is not on the package index")
            if answer.status_code != 200:
                raise RemoteError(f"{host_of(url)}: answered {answer.status_code}")
            wheels, sdists = parse_page(
                answer.body, answer.headers.get("Content-Type", ""), answer.url
            )
        except (requests.RequestException, RemoteError) as error:
            self._silent = True
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
        versions = {
            version
            for file in self.wheels(project)
            if file.yanked is None and (version := file.parsed_version) is not None
        }
        return [str(v) for v in sorted(versions)]

    def history(self, project: str) -> list[Release]:
        """All releases that have a wheel, oldest first, also those that were yanked."""
        by_version: dict[Version, list[WheelFile]] = {}
        for file in self.wheels(project):
            if (version := file.parsed_version) is not None:
                by_version.setdefault(version, []).append(file)
        return [Release.of(version, by_version[version]) for version in sorted(by_version)]

    def page_digest(self, project: str) -> str:
        """A digest of what the index says about the wheels of a project."""
        local = self._preferred.get(normalize(project))
        return sha256_hex(msgspec.json.encode(local or self.wheels(project)))

    def choose(self, project: str, version: str, platform: Platform) -> WheelFile:
        """The wheel that an installer would select: best tags, then the highest build number.

        A yanked one is only used if the release has no other that fits, with a warning.

        Raises:
            UsageError: the release does not exist, or has no wheel for the platform.
        """
        wanted = _version(project, version)
        local = self._preferred.get(normalize(project), ())
        of_release = [w for w in local if w.parsed_version == wanted]
        of_release = of_release or [
            w
            for w in self.wheels(project)
            if _named_version(w.filename) == wanted and w.parsed_version == wanted
        ]
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


def _is_fresh(files: Sequence[WheelFile], cached: Path) -> bool:
    """Whether a cached page is young, and has upload times: earlier versions did not keep them.

    A page with a time to come is from before the clock was set back, and its age is unknown.
    """
    asked = all(file.uploaded is not None for file in files)
    return asked and -_CLOCK_STEP < time.time() - cached.stat().st_mtime < PAGE_TTL


def _unyanked_first(files: Iterable[WheelFile]) -> list[WheelFile]:
    return sorted(files, key=lambda file: file.yanked is not None)


def _named_version(filename: str) -> Version | None:
    """The version in a wheel's file name, of which nothing else is checked."""
    return _parsed("".join(filename.split("-")[1:2]))


@cache
def _parsed(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _version(project: str, text: str) -> Version:
    try:
        return Version(text)
    except (InvalidVersion, ValueError):
        raise UsageError(f"{project} {text[:80]!r} is not a version") from None


def _stored_page(cached: Path) -> list[WheelFile] | None:
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


def _with_newest(version: str, releases: list[str]) -> str:
    """The user's command with the newest release of vLLM instead of one that does not exist."""
    final = [release for release in releases if not Version(release).is_prerelease]
    newest = NEWEST_VLLM if NEWEST_VLLM in releases else max(final, key=Version, default="")
    better = instead(version, newest)
    return better if better != newest else ""


def vllm_releases(index: PackageIndex, named: str | None = None, *, pre: bool = False) -> list[str]:
    """The vLLM releases in a comma-separated list; by default all from 0.17.0 on.

    ``pre``: also pre-releases and nightlies.
    """
    listed = [word.strip() for word in (named or "").split(",") if word.strip()]
    if listed:
        return listed
    known = (Version(version) for version in index.releases("vllm"))
    return [str(v) for v in known if v >= OLDEST_VLLM and (pre or not v.is_prerelease)]


# ------------------------------------------------------------------------------ complete downloads

#: Bytes of a file whose size the index does not give; the largest wheels have 2 GB.
_LARGEST_DOWNLOAD = 8 << 30


def downloaded(file: WheelFile) -> Path | None:
    """The whole wheel, if an earlier run has downloaded and checked it."""
    target = _place(file)
    return target if target.is_file() else None


def _place(file: WheelFile) -> Path:
    return cache_dir() / "wheels" / file.sha256 / file.filename


def download(file: WheelFile, index: PackageIndex) -> Path:
    """Download a whole wheel into the cache, resuming a partial one.

    Raises:
        RemoteError: the download fails, or its digest does not match.
    """
    import requests

    from builder.common.net import no_answer

    target = _place(file)
    with locked(file.filename):
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_file():
            return target
        partial = target.with_suffix(".part")
        have = partial.stat().st_size if partial.exists() else 0
        if have >= file.size:  # whole, or not of this file: there is nothing after it to ask for
            have = 0
        _check_room(file, have)
        url = index.address(file)
        try:
            _stream(url, file, index, partial, have)
        except (requests.RequestException, RemoteError) as error:
            raise RemoteError(
                f"{file.filename}: the download broke off: {no_answer(error, url)}; the next run "
                "resumes it",
                hint=again(),
            ) from error
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UsageError(
                f"{file.filename}: cannot write to {target.parent}: {error.strerror}",
                hint=os_hint(error, CACHE),
            ) from error
        with partial.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != file.sha256:
            partial.unlink()
            raise RemoteError(f"{file.filename}: sha256 is {digest}, pinned is {file.sha256}")
        partial.replace(target)
    return target


def _stream(url: str, file: WheelFile, index: PackageIndex, partial: Path, have: int) -> None:
    from builder.common.net import blocks

    headers = {"Range": f"bytes={have}-"} if have else {}
    with (
        console.progress(f"downloading {file.release}", file.size or None) as bar,
        index.session.get(url, headers=headers, stream=True) as answer,
    ):
        answer.raise_for_status()
        resumed = answer.status_code == 206
        bar.advance(have if resumed else 0)
        length = answer.headers.get("Content-Length", "")
        size = file.size or (
            int(length) if re.fullmatch(r"[0-9]{1,18}", length) else _LARGEST_DOWNLOAD
        )
        most = max(0, size - have) if resumed and file.size else size
        with partial.open("ab" if resumed else "wb") as out:
            for chunk in blocks(answer, most):
                out.write(chunk)
                index.bytes_read += len(chunk)
                bar.advance(len(chunk))


def _check_room(file: WheelFile, have: int) -> None:
    try:
        check_room([Need.cache(max(0, file.size - have), file.filename)])
    except BuildFailed as error:  # what is fetched is an input: nothing is being built yet
        raise UsageError(str(error), hint=error.hint) from None
