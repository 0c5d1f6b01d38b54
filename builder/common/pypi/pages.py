"""Pages of the package index, in JSON (PEP 691) and HTML (PEP 503), parsed into checked values.

What an index says is foreign: a file name and a sha256 become paths in the cache, and a page can
have any size.  ``pypi-simple`` is not used to read pages: 1 MB of unusual HTML, or one long file
name, takes it more than a minute.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from email.message import Message
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urljoin, urlsplit

import msgspec
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)

from builder.applier.digests import is_sha256
from builder.applier.versions import normalize
from builder.common.console import console

if TYPE_CHECKING:
    from collections.abc import Iterator

    from packaging.version import Version

#: Bytes of a page that are read; the largest that spark-build needs has 0.4 MB, numpy's has 2 MB.
PAGE_BYTES = 16 << 20
#: Files on a page: numpy's has 4,400.
_MOST_FILES = 50_000
#: Bytes of a file, an exabyte.
_MOST_BYTES = 1 << 60
#: What a file name may consist of: it becomes a path.  The longest name on the index has 120.
_FILENAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{1,199}")
#: Tags of a wheel: each part of the file name may list several, and their product counts.
_MOST_TAGS = 200
_SDISTS = (".tar.gz", ".zip")


@dataclass(frozen=True, kw_only=True)
class WheelFile:
    """One wheel or source archive.

    ``sha256`` is "" if the index has none, and ``size`` is in bytes, 0 if unknown.  ``yanked`` is
    the reason for which the file was yanked, maybe "", or None.  ``record`` is the pinned sha256
    of the wheel's RECORD, "" if it is not pinned.

    Raises:
        ValueError: a value is malformed.
    """

    filename: str
    url: str
    sha256: str
    size: int = 0
    yanked: str | None = None
    record: str = ""

    def __post_init__(self) -> None:
        """Refuse what must not become a path, or cannot be a size."""
        if not is_filename(self.filename):
            raise ValueError(f"{self.filename[:80]!r} is not the file name of a wheel or archive")
        for digest in (self.sha256, self.record):
            if digest and not is_sha256(digest):
                raise ValueError(
                    f"{digest[:80]!r} is not a sha256 (64 lower-case hexadecimal digits)"
                )
        if not 0 <= self.size <= _MOST_BYTES:
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
    base = next((_attributes(m[2]).get("href", "") for m in _tags(text, "base")), "")
    for match in _tags(text, "meta"):
        values = _attributes(match[2])
        if values.get("name") == "pypi:repository-version":
            _check_version(values.get("content", ""))
    try:
        base = urljoin(url, base)
    except ValueError as error:
        raise ValueError(f"its base {base[:80]!r} is not a URL: {error}") from None
    return base, _links(text)


def _tags(text: str, name: str) -> Iterator[re.Match[str]]:
    return (match for match in _TAG.finditer(text) if match[1].lower() == name)


def _links(text: str) -> Iterator[_File]:
    for match in _tags(text, "a"):
        values = _attributes(match[2])
        href = values.get("href", "")
        fragment = dict(parse_qsl(href.partition("#")[2][:1000]))
        hashes = {"sha256": fragment["sha256"]} if "sha256" in fragment else {}
        name = html.unescape(match[3]).strip()
        yield _File(filename=name, url=href, hashes=hashes, yanked=values.get("data-yanked", False))


def _attributes(text: str) -> dict[str, str]:
    """The attributes of a tag, the first of each name; without a value it is ""."""
    found: dict[str, str] = {}
    for match in _ATTRIBUTE.finditer(text):
        found.setdefault(match[1].lower(), html.unescape(match[2] or match[3] or match[4] or ""))
    return found
