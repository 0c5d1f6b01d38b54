"""Pinned inputs of layers: the interface of sources, and the source of a mod.

A mod uses only the standard library: it reads wheels of a package index, whole or by byte ranges,
and keeps them in its folder or in a cache that containers share.
"""

from __future__ import annotations

import atexit
import contextlib
import csv
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol

from builder.applier.files import open_regular
from builder.applier.layers import WheelPin
from builder.applier.machinecode import read_code
from builder.applier.receipts import OWN_RECORD, RecordRow, is_inside, parse_record
from builder.applier.trees import DirTree, OverlayTree, Tree
from builder.applier.values import (
    EXIT_MISSING,
    EXIT_REMOTE,
    ApplyError,
    is_sha256,
    normalize,
    say,
    sha256_hex,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from builder.applier.layers import Compile, DonorPin, InputPin, Kernels
    from builder.applier.machinecode import KernelCode, StageRequest
    from builder.applier.states import Target
    from builder.applier.trees import Tree


class Member(NamedTuple):
    """A file in a wheel, from its central directory and RECORD."""

    path: str
    sha256: str
    size: int
    mode: int


class Sources(Protocol):
    """The source of pinned inputs: the builder's cached index client, or that of a mod."""

    def donor(self, pin: DonorPin) -> bytes:
        """The bytes of one member of a pinned wheel, checked against ``member-sha256``."""

    def members(self, pin: InputPin) -> list[Member]:
        """The files of a pinned wheel in archive order."""

    def member(self, pin: InputPin, path: str) -> bytes:
        """One file of a pinned wheel."""

    def code(self, tree: Tree, path: str, wanted: Kernels, digest: str) -> KernelCode:
        """How SM121 runs some kernels of an installed extension module with that sha256."""

    def stage(
        self,
        ops: Sequence[Compile],
        packages: Mapping[str, str],
        target: Target,
        module: Callable[[str], str],
    ) -> Stage | Unstaged | None:
        """The stage for the changes of some ops, or None if compiling is not allowed.

        ``Unstaged`` is about the last op; earlier ones already have a stage.
        ``module`` returns the sha256 of the base's extension, such as ``vllm/_C``, or ''.
        """


@dataclass(frozen=True)
class Stage:
    """Changes to compile for one base: the inputs, and the result.

    ``wheel`` is the pin of the wheel that holds the compiled units; None before they are compiled.
    ``sources`` is the state of a pull request in the release's sources, ``refusal`` why
    it has no effect without a later change.
    """

    request: StageRequest
    wheel: InputPin | None = None
    sources: object = None
    refusal: Unstaged | None = None


@dataclass(frozen=True)
class Unstaged:
    """Why a change is not compiled: the layer's state, and the evidence.

    ``upstream`` and ``not-applicable`` do not affect the layer's other ops.
    """

    state: str
    reason: str
    sources: object
    notes: tuple[str, ...] = ()
    since: str | None = None


# ------------------------------------------------------------------------------ where they are kept


#: The folder that spark-vllm-docker mounts into every container (its ``launch-cluster.sh``).
_VLLM_CACHE = Path("/root/.cache/vllm")
#: The folder of a vendored mod with its pinned inputs.
VENDORED = "wheels"
_BLOCK = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def cache_folders(env: Mapping[str, str], vllm_cache: Path = _VLLM_CACHE) -> list[Path]:
    """Cache folders for a mod's downloads, best first.

    sparkrun names the container's side of its runtime cache to the hooks of a launch, mods among
    them (``sparkrun/orchestration/hooks.py``), and nothing if it is off.
    """
    folders = [Path(env["SPARK_BUILD_CACHE"])] if env.get("SPARK_BUILD_CACHE") else []
    if env.get("SPARKRUN_RUNTIME_CACHE_DIR"):
        folders.append(Path(env["SPARKRUN_RUNTIME_CACHE_DIR"], "spark-build"))
    with contextlib.suppress(OSError):  # below a /root that only root may look into
        if vllm_cache.is_dir():
            folders.append(vllm_cache / "spark-build")
    folders.append(Path(env.get("TMPDIR") or "/tmp", "spark-build-wheels"))  # noqa: S108
    return folders


class Keeper:
    """Files by name and sha256, read from a folder or downloaded.

    A file is hashed and read through the same open file, so it cannot change in between.
    """

    def __init__(self, folders: Sequence[Path], vendored: Path | None = None) -> None:
        self._folders, self._vendored = folders, vendored

    def open(self, name: str, sha256: str, fetch: Callable[[BinaryIO], None]) -> BinaryIO:
        """Open a file with that sha256; ``fetch`` downloads it if it is missing.

        Raises:
            ApplyError: the download has another sha256, or no folder is writable.
        """
        for folder in ([self._vendored] if self._vendored else []) + list(self._folders):
            cached = _checked(folder / name, sha256, aloud=True)
            if cached is not None:
                return cached
        refused = []
        for folder in self._folders:
            try:
                with _locked(folder, name):
                    # another container may have downloaded it while this one waited
                    cached = _checked(folder / name, sha256)
                    return cached if cached is not None else _fetched(folder, name, sha256, fetch)
            except _NotWritableError as error:
                refused.append(f"{folder}: {error}")
        raise ApplyError(
            f"{name} cannot be kept anywhere: {'; '.join(refused)}",
            EXIT_MISSING,
            "set SPARK_BUILD_CACHE to a folder that can be written to",
        )


class _NotWritableError(Exception):
    """A folder is not writable."""


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _NotWritableError(error.strerror or str(error)) from error


def _checked(path: Path, sha256: str, *, aloud: bool = False) -> BinaryIO | None:
    """The file, if it exists with that sha256."""
    try:
        stream = open_regular(path)
    except OSError:
        return None
    digest = hashlib.sha256()
    try:
        while block := stream.read(_BLOCK):
            digest.update(block)
        stream.seek(0)
    except OSError as error:
        stream.close()
        say(f"warning: {path} cannot be read: {error.strerror}")
        return None
    if digest.hexdigest() == sha256:
        return stream
    stream.close()
    if aloud:
        say(f"warning: {path} is damaged (sha256 {digest.hexdigest()}, pinned is {sha256})")
    return None


def _make(folder: Path) -> None:
    """Make a folder and those above it, each for whom the one around it belongs to.

    Mods run as root in containers whose caches are a user's: it is the user who clears them out.
    """
    if folder.is_dir():
        return
    _make(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():  # else another container was first
            raise
        return
    owner = folder.parent.stat()
    with contextlib.suppress(OSError):  # not root, or a file system without owners
        os.chown(folder, owner.st_uid, owner.st_gid, follow_symlinks=False)


@contextlib.contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    """Lock a download, so that one process downloads a file; without locks each does."""
    with _writing():
        _make(folder)
    lock: int | None = None
    with contextlib.suppress(OSError):
        lock = os.open(folder / f"{name}.lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if lock is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for {name}, which another container is downloading")
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:  # a file system without locks
                unlocked, lock = lock, None
                os.close(unlocked)
        if lock is not None:
            for partial in folder.glob(f"{name}.*.part"):  # of a container that was killed
                with contextlib.suppress(OSError):
                    partial.unlink()
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _fetched(folder: Path, name: str, sha256: str, fetch: Callable[[BinaryIO], None]) -> BinaryIO:
    """Download a file into a folder; the name never has a partial file."""
    with _writing():
        number, text = tempfile.mkstemp(prefix=f"{name}.", suffix=".part", dir=folder)
    partial = Path(text)
    try:
        with os.fdopen(number, "wb") as stream:
            try:
                fetch(stream)
                stream.flush()
            except OSError as error:
                if error.errno in _FULL:
                    raise _NotWritableError(error.strerror) from error
                raise
        file = _checked(partial, sha256)
        if file is None:
            raise ApplyError(
                f"{name}: what was downloaded has another sha256 than the pinned {sha256}",
                EXIT_REMOTE,
                "check the package index, which may have another file of that name",
            )
        with _writing():
            owner = folder.stat()
            with contextlib.suppress(OSError):
                os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            partial.chmod(0o644)  # the next container may run as another user
            partial.replace(folder / name)
        return file
    finally:
        partial.unlink(missing_ok=True)


# ----------------------------------------------------------------------------------- reading wheels


#: Bytes of a RECORD, and of its lines; the largest on the index that layers use has 2 MB.
_RECORD_BYTES, _RECORD_LINES = 32 << 20, 400_000
#: Bytes of the list of an archive's files, or of one file of it, that are read at once.
LIST_BYTES, FILE_BYTES = 16 << 20, 512 << 20
#: A file of more than this many bytes must not shrink to less than a hundredth.
_LARGE, _MOST_RATIO = 16 << 20, 100
#: What a damaged or hostile archive makes ``zipfile`` raise.
DAMAGED = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, LookupError, RuntimeError,
    csv.Error, ArithmeticError,
)  # fmt: skip
#: Bytes of a name that Linux's file systems take.
_NAME_BYTES = 255
_STORED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_SIGNATURES = (".dist-info/RECORD.jws", ".dist-info/RECORD.p7s")


def wheel_members(archive: zipfile.ZipFile) -> list[Member]:
    """The files of a wheel, with their RECORD hashes.

    Raises:
        ApplyError: archive and RECORD do not list the same files, a path leaves the tree, or a
            file is encrypted, or larger than its packed bytes explain.
    """
    # an empty name has no last letter, which ``is_dir`` takes
    names = [info for info in archive.infolist() if not info.filename.endswith("/")]
    records = {n.filename for n in names if OWN_RECORD.fullmatch(n.filename)}
    if not records:  # a vendored distribution may bring a RECORD of its own
        raise ApplyError("the wheel has no RECORD", EXIT_REMOTE)
    if len(records) > 1:
        several = ", ".join(sorted(records)[:3])
        raise ApplyError(f"the wheel has several RECORDs: {several}", EXIT_REMOTE)
    (record_name,) = records
    try:
        data = _record(archive, record_name)
        rows = {row.path: row for row in parse_record(data)}
    except DAMAGED as error:
        raise ApplyError(f"the wheel's RECORD is damaged: {error}", EXIT_REMOTE) from None
    rows[record_name] = RecordRow(record_name, sha256_hex(data), len(data))
    members = [
        _member(info, rows.pop(info.filename, None))
        for info in {info.filename: info for info in names}.values()
        if not info.filename.endswith(_SIGNATURES)
    ]
    missing = [p for p, row in rows.items() if row.sha256 and not p.endswith(_SIGNATURES)]
    if missing:
        raise ApplyError(f"the wheel has no {missing[0]!r}, which its RECORD lists", EXIT_REMOTE)
    _refuse_files_as_folders([member.path for member in members])
    return members


def _record(archive: zipfile.ZipFile, name: str) -> bytes:
    info = archive.getinfo(name)
    _refuse_odd(info)
    if info.file_size > _RECORD_BYTES:
        raise ValueError(f"it has {info.file_size} bytes")
    data = archive.read(name)
    if data.count(b"\n") > _RECORD_LINES:
        raise ValueError(f"it has more than {_RECORD_LINES} lines")
    return data


def _member(info: zipfile.ZipInfo, row: RecordRow | None) -> Member:
    path = info.filename
    if path.startswith("/") or ".." in path.split("/"):
        raise ApplyError(f"wheel member {path!r} points outside of the tree", EXIT_REMOTE)
    if not is_inside(path) or max(map(len, path.encode().split(b"/"))) > _NAME_BYTES:
        raise ApplyError(f"wheel member {path!r} is not a path", EXIT_REMOTE)
    if row is None or not is_sha256(row.sha256):
        raise ApplyError(f"wheel member {path!r} has no hash in RECORD", EXIT_REMOTE)
    if row.size is not None and row.size != info.file_size:
        raise ApplyError(
            f"wheel member {path!r} has {info.file_size} bytes, RECORD says {row.size}", EXIT_REMOTE
        )
    _refuse_odd(info)
    executable = (info.external_attr >> 16) & 0o111
    return Member(path, row.sha256 or "", info.file_size, 0o755 if executable else 0o644)


def _refuse_odd(info: zipfile.ZipInfo) -> None:
    """Refuse what no installer unpacks, and what only grows."""
    path, size, packed = info.filename, info.file_size, info.compress_size
    if info.flag_bits & 1 or info.compress_type not in _STORED:
        raise ApplyError(f"wheel member {path!r} is encrypted, or packed unusually", EXIT_REMOTE)
    if (info.external_attr >> 16) & 0o170000 == 0o120000:
        raise ApplyError(f"wheel member {path!r} is a link", EXIT_REMOTE)
    stored = info.compress_type == zipfile.ZIP_STORED
    grows = size > _LARGE and size > packed * _MOST_RATIO
    padded = packed > size + size // 100 + 1000  # deflate adds five bytes to 64 kB
    if (stored and size != packed) or grows or padded:
        raise ApplyError(
            f"wheel member {path!r} has {size} bytes out of {packed} packed ones", EXIT_REMOTE
        )
    if info.header_offset < 0:
        raise ApplyError(f"wheel member {path!r} begins before the archive", EXIT_REMOTE)


def _refuse_files_as_folders(paths: list[str]) -> None:
    files = set(paths)
    folders = {path.rpartition("/")[0] for path in paths}
    for folder in folders:
        while folder:
            if folder in files:
                raise ApplyError(f"wheel member {folder!r} is also a folder", EXIT_REMOTE)
            folder = folder.rpartition("/")[0]


class RangeFile(io.RawIOBase):
    """A read-only file over byte ranges, for ``zipfile`` to read a remote archive through.

    Fetched ranges are kept, so that the central directory is asked for once.
    """

    def __init__(self, size: int, fetch: Callable[[int, int], bytes], block: int = 1 << 16) -> None:
        super().__init__()
        self._size, self._fetch, self._block = size, fetch, block
        #: bytes that one read may ask for: those of a list of files, later those of a file
        self.limit = LIST_BYTES
        self._position = 0
        self._blocks: dict[int, bytes] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def prefetch(self, start: int, stop: int) -> None:
        """Fetch [start, stop) in as few ranges as the blocks not yet held allow.

        Raises:
            BadZipFile: it is more than one read may ask for.
        """
        if stop - start > self.limit:
            raise zipfile.BadZipFile(f"{stop - start} bytes are too many for one read")
        first, last = start // self._block, (min(stop, self._size) - 1) // self._block
        run: list[int] = []
        for number in range(first, last + 2):
            if number <= last and number not in self._blocks:
                run.append(number)
            elif run:
                begin = run[0] * self._block
                end = min((run[-1] + 1) * self._block, self._size)
                data = self._fetch(begin, end)
                for index, block in enumerate(run):
                    self._blocks[block] = data[index * self._block : (index + 1) * self._block]
                run = []

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size < 0 else min(self._position + size, self._size)
        if stop <= self._position:
            return b""
        self.prefetch(self._position, stop)
        first, last = self._position // self._block, (stop - 1) // self._block
        data = b"".join(self._blocks[number] for number in range(first, last + 1))
        begin = self._position - first * self._block
        data = data[begin : begin + stop - self._position]
        self._position = stop
        return data


# -------------------------------------------------------------------------------- the package index


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

    wrong = (TypeError, AttributeError, RecursionError)  # of a page that is no page of an index
    broken = (OSError, http.client.HTTPException, *wrong, *DAMAGED)
    try:
        yield
    except broken as error:
        kind = type(error).__name__
        raise ApplyError(f"cannot fetch {filename}: {kind}: {error}", EXIT_REMOTE) from error


def donor_name(pin: DonorPin) -> str:
    """The cache name of a wheel's file."""
    return f"{pin.member_sha256[:16]}-{pin.member.rsplit('/', 1)[-1]}"


class PipSources:
    """Pinned wheels from the index in pip's configuration, with the standard library alone."""

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
                url = _listed(index, pin)
            except OSError as error:  # an index without the project answers 404
                failed = failed or error
                continue
            if url:
                return url
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
