"""Fetches pinned wheels from a package index, using only the standard library."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from builder.applier.digests import sha256_hex
from builder.applier.failures import EXIT_MISSING, EXIT_REMOTE, ApplyError, say
from builder.applier.keeping import Keeper
from builder.applier.layers import WheelPin
from builder.applier.machinecode import read_code
from builder.applier.trees import DirTree, OverlayTree, Tree
from builder.applier.versions import normalize
from builder.applier.wheels import DAMAGED, FILE_BYTES, RangeFile, wheel_members

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from builder.applier.compiled import KernelCode
    from builder.applier.layers import DonorPin, InputPin
    from builder.applier.opkinds import Compile, Kernels
    from builder.applier.outcomes import Target
    from builder.applier.sources import Member, Stage, Unstaged


#: Bytes of an index page that are read; the largest that layers need has 0.4 MB.
_PAGE_BYTES = 16 << 20


def default_index() -> str:
    """The package index in pip's configuration, or pip's default."""
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        named = os.environ.get(name, "")
        if named:
            return named
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode == 0 and answer.stdout.strip():
        return answer.stdout.strip()
    try:
        from pip._internal.models.index import PyPI
    except ImportError:
        raise ApplyError(
            "no package index: pip is not installed and PIP_INDEX_URL is not set",
            EXIT_MISSING,
            "export PIP_INDEX_URL=<simple index>",
        ) from None
    return str(PyPI.simple_url)


def extra_indexes() -> list[str]:
    """Additional indexes in environment variables of pip and uv."""
    names = ("PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL")
    words = [word for name in names for word in os.environ.get(name, "").split()]
    # uv's may have a name: NAME=URL
    return [re.sub(r"^[\w.-]+=(?=\w+://)", "", word) for word in words]


def _listed(index: str, pin: InputPin) -> str | None:
    """The URL of a pinned file, if an index lists it."""
    import urllib.parse
    import urllib.request

    page = f"{index.rstrip('/')}/{normalize(pin.distribution)}/"
    accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"
    request = urllib.request.Request(page, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=60) as response:
        body = response.read(_PAGE_BYTES + 1).decode("utf-8", "replace")
        if len(body) > _PAGE_BYTES:
            raise ValueError(f"the page of {pin.distribution} has more than {_PAGE_BYTES} bytes")
        is_json = "json" in response.headers.get("Content-Type", "")
    if is_json:
        hrefs = [item["url"] for item in json.loads(body)["files"]]
    else:
        hrefs = re.findall(r"href=[\"']([^\"'#]+)", body)
    for href in hrefs:
        if href.split("?")[0].rsplit("/", 1)[-1] == pin.filename:
            return str(urllib.parse.urljoin(page, href))
    return None


@contextlib.contextmanager
def reaching(filename: str) -> Iterator[None]:
    """Convert all errors of the network or a damaged archive to one error.

    Raises:
        ApplyError: the file cannot be downloaded, or is not the expected wheel.
    """
    import http.client

    broken = (OSError, TypeError, http.client.HTTPException, *DAMAGED)
    try:
        yield
    except broken as error:
        kind = type(error).__name__
        raise ApplyError(f"cannot fetch {filename}: {kind}: {error}", EXIT_REMOTE) from error


def donor_name(pin: DonorPin) -> str:
    """The cache name of a wheel's file."""
    return f"{pin.member_sha256[:16]}-{pin.member.rsplit('/', 1)[-1]}"


class IndexSources:
    """Pinned wheels from a package index, with only the standard library (for mods)."""

    def __init__(self, index: str | None = None, keeper: Keeper | None = None) -> None:
        self._indexes = [index] if index else []
        self._keeper = keeper
        self._archives: dict[tuple[str, bool], zipfile.ZipFile] = {}

    def _url(self, pin: InputPin) -> str:
        """The URL of a pinned file; all indexes are tried, because its sha256 is known."""
        self._indexes = self._indexes or [default_index(), *extra_indexes()]
        failed: OSError | None = None
        for index in self._indexes:
            try:
                found = _listed(index, pin)
            except OSError as error:  # an index without the project answers 404
                failed = failed or error
                continue
            if found:
                return found
        if failed:
            raise failed
        raise ApplyError(f"{pin.filename} is not on the package index", EXIT_REMOTE)

    def _remote(self, pin: InputPin) -> zipfile.ZipFile:
        import urllib.request

        url = self._url(pin)

        def fetch(start: int, stop: int) -> bytes:
            request = urllib.request.Request(url, headers={"Range": f"bytes={start}-{stop - 1}"})
            with urllib.request.urlopen(request, timeout=120) as response:
                data: bytes = response.read(stop - start + 1)
            if response.status != 206 or len(data) != stop - start:
                raise ApplyError(
                    f"{pin.filename}: the index does not support range requests", EXIT_REMOTE
                )
            return data

        head = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(head, timeout=60) as response:
            size = int(response.headers["Content-Length"])
        stream = RangeFile(size, fetch)
        archive = zipfile.ZipFile(stream)
        stream.limit = FILE_BYTES
        return archive

    def _download(self, pin: InputPin) -> zipfile.ZipFile:
        import urllib.request

        assert isinstance(pin, WheelPin)  # a mod has no stage

        def fetch(stream: BinaryIO) -> None:
            say(f"downloading {pin.filename} ({pin.size / 1e6:.0f} MB)")
            with urllib.request.urlopen(self._url(pin), timeout=120) as response:
                shutil.copyfileobj(response, stream, 1 << 20)

        return zipfile.ZipFile(self._kept(pin.filename, pin.sha256, fetch))

    def _kept(self, name: str, sha256: str, fetch: Callable[[BinaryIO], None]) -> BinaryIO:
        if self._keeper is None:
            folder = Path(tempfile.mkdtemp(prefix="spark-build-"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            self._keeper = Keeper([folder])
        return self._keeper.open(name, sha256, fetch)

    def _archive(self, pin: InputPin, whole: bool) -> zipfile.ZipFile:
        """A pinned wheel: whole and checked against its sha256, or by range for one file."""
        key = (pin.filename, whole)
        if key not in self._archives:
            with reaching(pin.filename):
                self._archives[key] = self._download(pin) if whole else self._remote(pin)
        return self._archives[key]

    def donor(self, pin: DonorPin) -> bytes:
        def fetch(stream: BinaryIO) -> None:
            data = self._read(pin, pin.member, whole=False)
            if sha256_hex(data) != pin.member_sha256:
                raise ApplyError(
                    f"{pin.filename}:{pin.member}: sha256 is {sha256_hex(data)}, "
                    f"pinned is {pin.member_sha256}",
                    EXIT_REMOTE,
                )
            stream.write(data)

        with self._kept(donor_name(pin), pin.member_sha256, fetch) as stream:
            return stream.read()

    def members(self, pin: InputPin) -> list[Member]:
        return wheel_members(self._archive(pin, whole=True))

    def member(self, pin: InputPin, path: str) -> bytes:
        return self._read(pin, path, whole=True)

    def _read(self, pin: InputPin, path: str, whole: bool) -> bytes:
        with reaching(pin.filename):
            return self._archive(pin, whole).read(path)

    def code(self, tree: Tree, path: str, wanted: Kernels, digest: str) -> KernelCode:
        del digest
        while isinstance(tree, OverlayTree):
            tree = tree.base
        assert isinstance(tree, DirTree)  # a mod works on a directory
        return read_code(tree.root / path, wanted)

    def stage(
        self,
        ops: Sequence[Compile],
        packages: Mapping[str, str],
        target: Target,
        module: Callable[[str], str],
    ) -> Stage | Unstaged | None:
        # a starting container has no compiler, and no time to compile
        del ops, packages, target, module
        return None
