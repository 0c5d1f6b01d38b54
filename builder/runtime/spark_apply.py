#!/usr/bin/env python3
"""The applier: judges and applies patch layers on a tree of installed Python files.

One stdlib-only file with one job, used unchanged everywhere: by the planner on files read out of
wheels or an image, by ``spark-build apply`` on a virtual environment, and by a mod when a
container starts.  It knows nothing about images, engines or the command line of spark-build.

The vocabulary: a *layer* is a rendered ``layer.toml`` (a JSON object with every file inlined); a
*tree* is a site-packages directory, real or not; *judging* a layer on a tree gives an
:class:`Outcome` with one of the seven states and the exact new bytes, without writing anything;
*committing* writes them, all or nothing, and leaves a receipt.
"""

from __future__ import annotations

import argparse
import ast
import atexit
import base64
import contextlib
import csv
import difflib
import fnmatch
import hashlib
import io
import json
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

SCHEMA = 1
STATE_DIR = ".spark-build"
RECEIPTS = f"{STATE_DIR}/receipts"
ENV_PTH = "spark_build_env.pth"
INSTALLER = b"spark-build\n"

#: The seven layer states; every consumer handles each of them.
NEEDED = "needed"
APPLIED = "applied"
UPSTREAM = "upstream"
NOT_APPLICABLE = "not-applicable"
NEEDS_REBUILD = "needs-rebuild"
DRIFT = "drift"
AMBIGUOUS = "ambiguous"
STATES = (NEEDED, APPLIED, UPSTREAM, NOT_APPLICABLE, NEEDS_REBUILD, DRIFT, AMBIGUOUS)

EXIT_USAGE, EXIT_NOTHING, EXIT_DRIFT, EXIT_MISSING, EXIT_REMOTE, EXIT_REBUILD = 2, 3, 4, 6, 8, 10


class ApplyError(Exception):
    """A failure with the exit code it stands for and, where known, the next command to try."""

    def __init__(self, message: str, code: int = EXIT_DRIFT, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint


# ---------------------------------------------------------------------------------- small helpers


def sha256_hex(data: bytes) -> str:
    """Hex sha256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


def canonical_json(value: object) -> bytes:
    """The one byte form of a JSON value that digests are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def normalize(name: str) -> str:
    """A distribution name in its PEP 503 form."""
    return re.sub(r"[-_.]+", "-", name).lower()


def version_matches(version: str, specifier: str) -> bool:
    """Whether a PEP 440 version is in a range; pre-releases and local versions always count.

    Raises:
        ApplyError: neither ``packaging`` nor pip's copy of it can be imported.
    """
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        try:
            from pip._vendor.packaging.specifiers import SpecifierSet  # type: ignore[assignment]
        except ImportError:
            raise ApplyError(
                "this interpreter has neither 'packaging' nor pip, so versions cannot be compared",
                EXIT_MISSING,
                f"{sys.executable} -m ensurepip",
            ) from None
    return SpecifierSet(specifier).contains(version, prereleases=True)


def all_match(when: Mapping[str, str], packages: Mapping[str, str]) -> bool:
    """Whether every named package is present at a version in its range."""
    for name, specifier in when.items():
        version = packages.get(normalize(name))
        if version is None or not version_matches(version, specifier):
            return False
    return True


def first_line(text: str) -> str:
    """The first line of ``text`` that says something, for messages."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def lines_of(text: str) -> list[str]:
    """Lines with their ends, split where Python's parser splits: at line feeds alone.

    ``str.splitlines`` also splits at form feeds and at separators inside string literals.
    """
    return io.StringIO(text, newline="\n").readlines()


def nearest_place(text: str, old: str) -> str:
    """Where most lines of ``old`` stand in ``text``: the first that differs there, or ''."""
    lines = [line.strip() for line in text.splitlines()]
    wanted = [line.strip() for line in old.strip("\n").splitlines()]
    best, score = 0, 0.0
    for start in range(len(lines) - len(wanted) + 1):
        pairs = zip(lines[start:], wanted, strict=False)
        alike = sum(len(b) * _likeness(a, b) for a, b in pairs)
        if alike > score:
            best, score = start, alike
    if score < sum(map(len, wanted)) / 2:
        return ""
    for number, (found, line) in enumerate(zip(lines[best:], wanted, strict=False), best + 1):
        if found != line:
            return f"{line!r} not found; nearest is line {number}: {found}"
    return ""


def _likeness(one: str, other: str) -> float:
    """How alike two lines are, from 0 to 1."""
    return 1.0 if one == other else difflib.SequenceMatcher(None, one, other).quick_ratio()


def nearest_line(text: str, wanted: str) -> str:
    """The line of ``text`` most like ``wanted``, as ``'LINE: TEXT'``, or an empty string."""
    numbered = {line.strip(): n for n, line in reversed(list(enumerate(text.splitlines(), 1)))}
    close = difflib.get_close_matches(wanted, list(numbered), n=1, cutoff=0.5)
    return f"{numbered[close[0]]}: {close[0]}" if close else ""


# ------------------------------------------------------------------------------- content and trees


@dataclass(frozen=True)
class Content:
    """The bytes that a file will have: in memory, or a member of a pinned wheel read on demand."""

    sha256: str
    size: int
    mode: int = 0o644
    data: bytes | None = field(default=None, repr=False)
    load: Callable[[], bytes] | None = field(default=None, repr=False, compare=False)
    origin: str = ""

    @classmethod
    def of(cls, data: bytes, mode: int = 0o644) -> Content:
        """Content that is already in memory."""
        return cls(sha256=sha256_hex(data), size=len(data), mode=mode, data=data)

    def read(self) -> bytes:
        """The bytes, checked against the digest.

        Raises:
            ApplyError: the loaded bytes have another sha256.
        """
        if self.data is not None:
            return self.data
        assert self.load is not None
        data = self.load()
        if sha256_hex(data) != self.sha256:
            raise ApplyError(
                f"{self.origin}: sha256 is {sha256_hex(data)}, pinned is {self.sha256}",
                EXIT_REMOTE,
            )
        return data


#: Path below site-packages -> new content, or None for a file that goes away.
Changes = dict[str, "Content | None"]


@dataclass(frozen=True)
class Distribution:
    """An installed distribution: normalised name, version, and its ``.dist-info`` directory."""

    name: str
    version: str
    info_dir: str


class Tree(Protocol):
    """A site-packages directory, wherever its files are.  Paths are relative POSIX paths."""

    def read(self, path: str) -> bytes | None:
        """The file's bytes, or None when there is no such file."""

    def digest(self, path: str) -> str | None:
        """The file's sha256, or None; cheaper than :meth:`read` where a RECORD vouches for it."""

    def mode(self, path: str) -> int:
        """Permission bits of a file that exists."""

    def children(self, directory: str) -> list[str]:
        """Names directly below a directory ('' is the root), sorted; empty when it is absent."""

    def distributions(self) -> dict[str, Distribution]:
        """Installed distributions by normalised name."""


_INFO_NAME = re.compile(r"^(?P<name>.+?)-(?P<version>[^-]+)\.dist-info$")


def distribution_of(info_dir: str) -> Distribution | None:
    """The distribution that a ``NAME-VERSION.dist-info`` directory belongs to."""
    match = _INFO_NAME.match(info_dir)
    if not match:
        return None
    return Distribution(normalize(match["name"]), match["version"], info_dir)


def versions(tree: Tree) -> dict[str, str]:
    """Installed versions by normalised distribution name."""
    return {name: dist.version for name, dist in tree.distributions().items()}


class DirTree:
    """A real site-packages directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, path: str) -> bytes | None:
        try:
            return (self.root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def digest(self, path: str) -> str | None:
        try:
            with open(self.root / path, "rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except AttributeError:  # hashlib.file_digest is new in Python 3.11
            data = self.read(path)
            return None if data is None else sha256_hex(data)

    def mode(self, path: str) -> int:
        return stat.S_IMODE((self.root / path).stat().st_mode)

    def children(self, directory: str) -> list[str]:
        try:
            return sorted(os.listdir(self.root / directory))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def distributions(self) -> dict[str, Distribution]:
        found: dict[str, Distribution] = {}
        for name in self.children(""):
            dist = distribution_of(name)
            if dist and (self.root / name / "METADATA").is_file():
                found[dist.name] = dist
        return found


class OverlayTree:
    """A tree with changes laid over it: what the next layer is judged on."""

    def __init__(self, base: Tree) -> None:
        self.base = base
        self.changes: Changes = {}

    def update(self, changes: Mapping[str, Content | None]) -> None:
        """Lay more changes over the tree; later ones win."""
        self.changes.update(changes)

    def read(self, path: str) -> bytes | None:
        if path in self.changes:
            content = self.changes[path]
            return None if content is None else content.read()
        return self.base.read(path)

    def digest(self, path: str) -> str | None:
        if path in self.changes:
            content = self.changes[path]
            return None if content is None else content.sha256
        return self.base.digest(path)

    def mode(self, path: str) -> int:
        content = self.changes.get(path)
        return content.mode if content is not None else self.base.mode(path)

    def children(self, directory: str) -> list[str]:
        names = set(self.base.children(directory))
        prefix = f"{directory}/" if directory else ""
        touched: dict[str, bool] = {}
        for path, content in self.changes.items():
            if path.startswith(prefix):
                name = path[len(prefix) :].split("/", 1)[0]
                touched[name] = touched.get(name, False) or content is not None
        for name, alive in touched.items():
            if alive:
                names.add(name)
            elif self.changes.get(prefix + name, self) is None:
                names.discard(name)
        return sorted(names)

    def distributions(self) -> dict[str, Distribution]:
        found = dict(self.base.distributions())
        for path, content in self.changes.items():
            info_dir, _, rest = path.partition("/")
            dist = distribution_of(info_dir) if rest == "METADATA" else None
            if dist is None:
                continue
            if content is not None:
                found[dist.name] = dist
            elif found.get(dist.name) == dist:
                del found[dist.name]
        return found


@dataclass(frozen=True)
class RecordRow:
    """One row of a RECORD file; ``sha256`` is hex, or None where the row carries no hash."""

    path: str
    sha256: str | None
    size: int | None


def parse_record(data: bytes) -> list[RecordRow]:
    """Read a RECORD file (Python packaging's "Recording installed projects")."""
    rows = []
    for row in csv.reader(io.StringIO(data.decode("utf-8"))):
        if not row:
            continue
        path, digest, size = [*row, "", ""][:3]
        sha = None
        if digest.startswith("sha256="):
            raw = digest.removeprefix("sha256=")
            sha = base64.urlsafe_b64decode(raw + "=" * (-len(raw) % 4)).hex()
        rows.append(RecordRow(path, sha, int(size) if size else None))
    return rows


def record_of(tree: Tree, dist: Distribution) -> list[RecordRow]:
    """The RECORD of an installed distribution.

    Raises:
        ApplyError: there is none, so nobody can say which files the distribution owns.
    """
    data = tree.read(f"{dist.info_dir}/RECORD")
    if data is None:
        raise ApplyError(f"{dist.name} {dist.version} has no RECORD, so its files are unknown")
    return parse_record(data)


def stale_pyc(tree: Tree, path: str) -> list[str]:
    """Compiled files of a ``.py`` file.

    They go away with every change: a hash-based .pyc may be 'unchecked' (PEP 552), and then
    Python would go on running the old code.
    """
    if not path.endswith(".py"):
        return []
    directory, _, name = path.rpartition("/")
    cache = f"{directory}/__pycache__" if directory else "__pycache__"
    stem = name.removesuffix(".py") + "."
    return [f"{cache}/{n}" for n in tree.children(cache) if n.startswith(stem) and ".pyc" in n]


# --------------------------------------------------------------------------------------- receipts


def receipts_of(tree: Tree) -> list[dict[str, Any]]:
    """Receipts in the tree, in order of application.

    Raises:
        ApplyError: a receipt is not readable JSON.
    """
    found = []
    for name in tree.children(RECEIPTS):
        data = tree.read(f"{RECEIPTS}/{name}")
        if not name.endswith(".json") or data is None:
            continue
        try:
            found.append(json.loads(data))
        except ValueError as error:
            raise ApplyError(f"receipt {RECEIPTS}/{name} is damaged: {error}") from None
    return sorted(found, key=lambda receipt: (receipt["sequence"], receipt["layer"]))


def explained(path: str, start: str | None, current: str | None, receipts: Iterable[Any]) -> bool:
    """Whether receipts lead from one digest of a file to its current one, step by step."""
    digest = start
    for receipt in receipts:
        entry = receipt["files"].get(path)
        if entry is not None and entry["before"] == digest:
            digest = entry["after"]
    return digest == current


def unexplained(
    receipt: Mapping[str, Any], receipts: Iterable[Mapping[str, Any]], tree: Tree
) -> list[str]:
    """Files of a receipt that are not what it, and the receipts after it, say they are."""
    later = [r for r in receipts if r["sequence"] > receipt["sequence"]]
    return [
        path
        for path, entry in receipt["files"].items()
        if not explained(path, entry["after"], tree.digest(path), later)
    ]


# ----------------------------------------------------------------------------------------- sources


@dataclass(frozen=True)
class Member:
    """A file in a wheel, as its central directory and RECORD describe it."""

    path: str
    sha256: str
    size: int
    mode: int


class Sources(Protocol):
    """Where pinned inputs come from: the builder's cached index client, or pip in a mod."""

    def donor(self, pin: Mapping[str, Any]) -> bytes:
        """The bytes of one member of a pinned wheel, checked against ``member-sha256``."""

    def members(self, pin: Mapping[str, Any]) -> list[Member]:
        """The files of a pinned wheel in archive order."""

    def member(self, pin: Mapping[str, Any], path: str) -> bytes:
        """One file of a pinned wheel."""

    def code(
        self, tree: Tree, path: str, wanted: Mapping[str, Any], digest: str
    ) -> Mapping[str, Any]:
        """How SM121 runs some kernels of an installed extension module: ``how``, see `CODE`, and
        ``arch``, the architectures that they are compiled for.

        ``wanted`` says which: ``symbol`` is a regular expression of their mangled names.
        ``digest`` is the module's sha256.
        """

    def stage(
        self,
        ops: Sequence[Mapping[str, Any]],
        packages: Mapping[str, str],
        target: Target,
        module: Callable[[str], str],
    ) -> Stage | Unstaged | None:
        """Compiling the changes of some ops together, or None where nothing may be compiled.

        What is not compiled is said of the last op; those before it have a stage already.
        ``module`` gives the sha256 of the base's extension of a name, as ``vllm/_C``, or ''.
        """


@dataclass(frozen=True)
class Stage:
    """Changes to compile for one base: everything that goes in, and what came out.

    ``wheel`` is the pin of the wheel that holds the compiled units; None before they are compiled.
    ``sources`` is what was found of a pull request in the release's sources, ``refusal`` why
    nothing would come of it unless a later change joins it.
    """

    request: Mapping[str, Any]
    wheel: Mapping[str, Any] | None = None
    sources: Mapping[str, Any] = field(default_factory=dict)
    refusal: Unstaged | None = None


@dataclass(frozen=True)
class Unstaged:
    """Why nothing is compiled of a change: the state that this is, and what tells it.

    ``upstream`` and ``not-applicable`` leave the layer's other ops as they are.
    """

    state: str
    reason: str
    sources: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    since: str | None = None


class RangeFile(io.RawIOBase):
    """A read-only file over byte ranges, for ``zipfile`` to read a remote archive through.

    Fetched ranges are kept, so that the central directory is asked for once.
    """

    def __init__(self, size: int, fetch: Callable[[int, int], bytes], block: int = 1 << 16) -> None:
        super().__init__()
        self._size, self._fetch, self._block = size, fetch, block
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
        """Fetch [start, stop) in as few ranges as the blocks not yet held allow."""
        first, last = start // self._block, (min(stop, self._size) - 1) // self._block
        run: list[int] = []
        for number in range(first, last + 2):
            if number <= last and number not in self._blocks:
                run.append(number)
            elif run:
                begin = run[0] * self._block
                end = min((run[-1] + 1) * self._block, self._size)
                data = self._fetch(begin, end)
                for index, held in enumerate(run):
                    self._blocks[held] = data[index * self._block : (index + 1) * self._block]
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


_OWN_RECORD = re.compile(r"[^/]+\.dist-info/RECORD")


def wheel_members(archive: zipfile.ZipFile) -> list[Member]:
    """The files of a wheel, with their RECORD hashes.

    Raises:
        ApplyError: a file of the archive is missing from its RECORD, or its path leaves the tree.
    """
    names = [info for info in archive.infolist() if not info.is_dir()]
    record_name = next(
        (n.filename for n in names if _OWN_RECORD.fullmatch(n.filename)), ""
    )  # a vendored distribution may bring a RECORD of its own
    if not record_name:
        raise ApplyError("the wheel has no RECORD", EXIT_REMOTE)
    record_data = archive.read(record_name)
    hashes = {row.path: row.sha256 for row in parse_record(record_data)}
    hashes[record_name] = sha256_hex(record_data)
    members = []
    for info in names:
        path = info.filename
        if path.startswith("/") or ".." in path.split("/"):
            raise ApplyError(f"wheel member {path!r} points out of the tree", EXIT_REMOTE)
        digest = hashes.get(path)
        if digest is None:
            if path.endswith((".dist-info/RECORD.jws", ".dist-info/RECORD.p7s")):
                continue
            raise ApplyError(f"wheel member {path!r} has no hash in RECORD", EXIT_REMOTE)
        executable = (info.external_attr >> 16) & 0o111
        members.append(Member(path, digest, info.file_size, 0o755 if executable else 0o644))
    return members


def default_index() -> str:
    """The package index that pip is configured with, or pip's own default."""
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


@contextlib.contextmanager
def reaching(filename: str) -> Iterator[None]:
    """Turns whatever a network or a damaged archive can raise into one error.

    Raises:
        ApplyError: the file could not be fetched, or is not the wheel that it should be.
    """
    import http.client

    damaged = (KeyError, ValueError, zipfile.BadZipFile, zlib.error)
    broken = (OSError, http.client.HTTPException, *damaged)
    try:
        yield
    except broken as error:
        kind = type(error).__name__
        raise ApplyError(f"cannot fetch {filename}: {kind}: {error}", EXIT_REMOTE) from error


class IndexSources:
    """Pinned wheels straight from a package index, with the standard library alone (for mods)."""

    def __init__(self, index: str | None = None, cache: Path | None = None) -> None:
        self._index = index
        self._cache = cache
        self._archives: dict[tuple[str, bool], zipfile.ZipFile] = {}

    def _url(self, pin: Mapping[str, Any]) -> str:
        import urllib.parse
        import urllib.request

        if self._index is None:
            self._index = default_index()
        page = f"{self._index.rstrip('/')}/{normalize(pin['distribution'])}/"
        accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"
        request = urllib.request.Request(page, headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=60) as response:
            body = response.read().decode("utf-8", "replace")
            is_json = "json" in response.headers.get("Content-Type", "")
        if is_json:
            hrefs = [item["url"] for item in json.loads(body)["files"]]
        else:
            hrefs = re.findall(r"href=[\"']([^\"'#]+)", body)
        for href in hrefs:
            if href.split("?")[0].rsplit("/", 1)[-1] == pin["filename"]:
                return str(urllib.parse.urljoin(page, href))
        raise ApplyError(f"{pin['filename']} is not on the package index", EXIT_REMOTE)

    def _remote(self, pin: Mapping[str, Any]) -> zipfile.ZipFile:
        import urllib.request

        url = self._url(pin)

        def fetch(start: int, stop: int) -> bytes:
            request = urllib.request.Request(url, headers={"Range": f"bytes={start}-{stop - 1}"})
            with urllib.request.urlopen(request, timeout=120) as response:
                data: bytes = response.read()
            if response.status != 206 or len(data) != stop - start:
                raise ApplyError(f"{pin['filename']}: the index does not serve ranges", EXIT_REMOTE)
            return data

        head = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(head, timeout=60) as response:
            size = int(response.headers["Content-Length"])
        return zipfile.ZipFile(RangeFile(size, fetch))

    def _download(self, pin: Mapping[str, Any]) -> zipfile.ZipFile:
        import urllib.request

        if self._cache is None:
            self._cache = Path(tempfile.mkdtemp(prefix="spark-build-"))
            atexit.register(shutil.rmtree, self._cache, ignore_errors=True)
        self._cache.mkdir(parents=True, exist_ok=True)
        target = self._cache / pin["filename"]
        if not target.is_file() or DirTree(self._cache).digest(pin["filename"]) != pin["sha256"]:
            say(f"downloading {pin['filename']} ({pin['size'] / 1e6:.0f} MB)")
            partial = target.with_suffix(".part")
            with (
                urllib.request.urlopen(self._url(pin), timeout=120) as response,
                open(partial, "wb") as stream,
            ):
                shutil.copyfileobj(response, stream, 1 << 20)
            digest = DirTree(self._cache).digest(partial.name)
            if digest != pin["sha256"]:
                partial.unlink()
                raise ApplyError(
                    f"{pin['filename']}: sha256 is {digest}, pinned is {pin['sha256']}", EXIT_REMOTE
                )
            partial.replace(target)
        return zipfile.ZipFile(target)

    def _archive(self, pin: Mapping[str, Any], whole: bool) -> zipfile.ZipFile:
        """A pinned wheel: whole and checked against its sha256, or by range for one file of it."""
        key = (pin["filename"], whole)
        if key not in self._archives:
            with reaching(pin["filename"]):
                self._archives[key] = self._download(pin) if whole else self._remote(pin)
        return self._archives[key]

    def donor(self, pin: Mapping[str, Any]) -> bytes:
        data = self._read(pin, pin["member"], whole=False)
        if sha256_hex(data) != pin["member-sha256"]:
            raise ApplyError(
                f"{pin['filename']}:{pin['member']}: sha256 is {sha256_hex(data)}, "
                f"pinned is {pin['member-sha256']}",
                EXIT_REMOTE,
            )
        return data

    def members(self, pin: Mapping[str, Any]) -> list[Member]:
        return wheel_members(self._archive(pin, whole=True))

    def member(self, pin: Mapping[str, Any], path: str) -> bytes:
        return self._read(pin, path, whole=True)

    def _read(self, pin: Mapping[str, Any], path: str, whole: bool) -> bytes:
        with reaching(pin["filename"]):
            return self._archive(pin, whole).read(path)

    def code(
        self, tree: Tree, path: str, wanted: Mapping[str, Any], digest: str
    ) -> Mapping[str, Any]:
        del digest
        while isinstance(tree, OverlayTree):
            tree = tree.base
        assert isinstance(tree, DirTree)  # a mod works on a directory
        return read_code(tree.root / path, wanted)

    def stage(
        self,
        ops: Sequence[Mapping[str, Any]],
        packages: Mapping[str, str],
        target: Target,
        module: Callable[[str], str],
    ) -> Stage | Unstaged | None:
        # a container that starts has no compiler, and no time for one
        del ops, packages, target, module
        return None


# --------------------------------------------------------------------------- compiled extensions


#: How SM121 runs a kernel of an extension module.  A kernel is admitted to one chip or to a family
#: by a guard of its own; compiled where its guard does not hold, it is nothing but a trap.
RUNS, TRAP, UNLOADABLE, ABSENT, NO_CODE = "runs", "trap", "not-loadable", "absent", "no-code"
#: How the packages are called that bring a compiled change to a base.
COMPANIONS = "spark_build_companion_"
CODE = (RUNS, TRAP, UNLOADABLE, ABSENT, NO_CODE)

_CODE_IMAGE = re.compile(r"^Fatbin elf code:\n=+\narch = (sm_\d+[af]?)$", re.MULTILINE)
#: As the tools of CUDA 12 list a kernel, and those of CUDA 13.
_CODE_KERNEL = re.compile(
    r"^(?:STT_FUNC +\S+ +STO_ENTRY|FUNC +\S+ +\S+ +ENTRY) +(?:U +)?(\S+)$", re.MULTILINE
)


def read_code(file: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """How SM121 runs some kernels of a module, from the list of its machine code.

    ``cuobjdump`` makes that list; triton, which every vLLM for CUDA brings, has one.  Whether a
    kernel is a trap follows from its guard: ``guards`` in ``wanted`` says how the names of the
    architectures begin that it admits.

    Raises:
        ApplyError: there is no ``cuobjdump``, or it cannot read the file.
    """
    beside = file.parent.parent / "triton" / "backends" / "nvidia" / "bin" / "cuobjdump"
    tool = shutil.which("cuobjdump") or (str(beside) if os.access(beside, os.X_OK) else None)
    if tool is None:
        raise ApplyError(
            f"what {file} is compiled for cannot be read: there is no cuobjdump here",
            EXIT_MISSING,
            "pip install nvidia-cuda-cuobjdump",
        )
    done = subprocess.run(
        [tool, "-symbols", str(file)],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if "does not contain device code" in done.stdout + done.stderr:
        return {"how": NO_CODE, "arch": ""}
    if done.returncode:
        raise ApplyError(f"cuobjdump cannot read {file}: {done.stderr.strip()[-300:]}")
    if "FUNC" in done.stdout and not _CODE_KERNEL.search(done.stdout):
        raise ApplyError(f"what {tool} lists of {file} is in no form that is known")
    parts = _CODE_IMAGE.split(done.stdout)
    pattern = re.compile(wanted["symbol"])
    found: dict[str, set[str]] = {}
    for arch, body in zip(parts[1::2], parts[2::2], strict=True):
        for kernel in filter(pattern.search, _CODE_KERNEL.findall(body)):
            found.setdefault(kernel, set()).add(arch)
    return judged_code(found, wanted)


def judged_code(found: Mapping[str, Iterable[str]], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """How SM121 runs kernels of which these architectures are there, by kernel."""
    if not found:
        return {"how": ABSENT, "arch": ""}
    hows: set[str] = set()
    archs: set[str] = set()
    for kernel, names in found.items():
        loaded = [name for name in names if _loads_on_sm121(name)]
        archs.update(loaded or names)
        admits = [archs for guard, archs in wanted["guards"].items() if guard in kernel]
        best = max(loaded, default="")
        dead = any(not best.startswith(archs) for archs in admits)
        hows.add(UNLOADABLE if not loaded else TRAP if dead else RUNS)
    how = next(how for how in (UNLOADABLE, TRAP, RUNS) if how in hows)
    guards = sorted({guard for kernel in found for guard in wanted["guards"] if guard in kernel})
    return {"how": how, "arch": " ".join(sorted(archs)), "guard": " ".join(guards)}


def _loads_on_sm121(arch: str) -> bool:
    """CUDA's rule: code for one chip (``a``) on that alone, other code on later ones too."""
    number = arch.removeprefix("sm_")
    return number == "121a" or number in ("120", "121", "120f", "121f")


# ------------------------------------------------------------------------- text operations: before
# and after are decided by content alone; nothing here knows about versions


PRE, POST, SKIP = "pre", "post", "skip"


@dataclass
class OpResult:
    """What one operation finds: ``pre``, ``post``, ``drift``, ``ambiguous``, or ``skip``."""

    found: str
    changes: Changes = field(default_factory=dict)
    reason: str = ""
    env: dict[str, str] = field(default_factory=dict)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    since: str | None = None
    notes: tuple[str, ...] = ()
    #: what was found of compiled code, and the stage that compiles a change to it
    compiled: dict[str, Any] = field(default_factory=dict)


def _standalone(text: str, wanted: str, inside: str) -> int:
    """Occurrences of ``wanted`` that are not part of an occurrence of the longer ``inside``."""
    if wanted in inside and wanted != inside:
        text = text.replace(inside, "\0")
    return text.count(wanted)


def replace_text(text: str, old: str, new: str, count: int) -> tuple[str, str]:
    """Judge an exact replacement: ``(pre|post|drift|ambiguous, new text or reason)``.

    When both texts match, the longer one is the truth: an insertion's new text holds its old one.
    """
    pre, post = _standalone(text, old, new), _standalone(text, new, old)
    if pre and post and old in new:  # replacing would insert into the patched place again
        return AMBIGUOUS, f"{pre} places are unpatched and {post} are patched, expected {count}"
    if pre == count:
        return PRE, text.replace(old, new)
    if pre > count:
        return AMBIGUOUS, f"{first_line(old)!r} is there {pre} times, expected {count}"
    if pre == 0 and post == count:
        return POST, text
    if post > count:
        return AMBIGUOUS, f"{first_line(new)!r} is there {post} times, expected {count}"
    if pre or post:
        return DRIFT, f"{pre} of {count} places are unpatched and {post} are patched"
    place = nearest_place(text, old)
    if place:
        return DRIFT, place
    near = nearest_line(text, first_line(old))
    return DRIFT, f"{first_line(old)!r} not found" + (f"; nearest is line {near}" if near else "")


@dataclass(frozen=True)
class Hunk:
    """One hunk of a unified diff as two blocks of whole lines, and where the diff says it is."""

    start: int
    old: tuple[str, ...]
    new: tuple[str, ...]
    #: unchanged lines among them, which tie the hunk to its place
    context: int
    #: the line at which the new block starts
    new_start: int = 0

    def reversed(self) -> Hunk:
        """The hunk that takes this one back."""
        return Hunk(self.new_start, self.new, self.old, self.context, self.start)


@dataclass(frozen=True)
class FileDiff:
    """What a diff does to one file: ``old`` is None for a new file, ``new`` for a deleted one,
    and the two differ for a renamed one.  ``mode`` is 0o755 or 0o644 where the diff sets it."""

    old: str | None
    new: str | None
    hunks: tuple[Hunk, ...] = ()
    mode: int | None = None

    @property
    def path(self) -> str:
        """The file's name, after the change where it has one."""
        return self.new or self.old or ""

    def reversed(self) -> FileDiff:
        """The change that takes this one back; which mode the file had is not known."""
        return FileDiff(self.new, self.old, tuple(hunk.reversed() for hunk in self.hunks))


_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class _DiffReader:
    """Reads a unified diff, plain or as git writes it, one file after the other."""

    def __init__(self, diff: str) -> None:
        self.lines = lines_of(diff)
        self.at = 0
        self.files: list[FileDiff] = []
        self._start(None, None)

    def _start(self, old: str | None, new: str | None) -> None:
        self.old, self.new = old, new
        self.hunks: list[Hunk] = []
        self.mode: int | None = None

    def read(self) -> list[FileDiff]:
        while self.at < len(self.lines):
            line = self.lines[self.at]
            self.at += 1
            match = _HUNK.match(line)
            if match:
                self._hunk(match)
            else:
                self._header(line.rstrip("\r\n"))
        self._close()
        return self.files

    def _header(self, line: str) -> None:
        if line.startswith("diff --git "):
            self._close()
            names = line.removeprefix("diff --git ")
            half = len(names) // 2  # both names are the same, or lines below give them
            self._start(names[2:half], names[half + 3 :])
        elif line.startswith("--- "):
            if self.hunks:
                self._close()
            self.old = self._name(line, "a/")
        elif line.startswith("+++ "):
            self.new = self._name(line, "b/")
        elif line.startswith("rename from "):
            self.old = line.removeprefix("rename from ")
        elif line.startswith("rename to "):
            self.new = line.removeprefix("rename to ")
        elif line.startswith("new file mode "):
            self.old, self.mode = None, self._mode(line)
        elif line.startswith("deleted file mode "):
            self.new = None
        elif line.startswith("new mode "):
            self.mode = self._mode(line)
        elif line.startswith(("copy from ", "Binary files ", "GIT binary patch")):
            raise ApplyError(f"a diff cannot do this here: {line!r}", EXIT_USAGE)

    @staticmethod
    def _mode(line: str) -> int:
        kind, permissions = line[-6:-3], line[-3:]
        if kind != "100":  # git's word for an ordinary file
            raise ApplyError(f"a diff cannot do this here: {line!r}", EXIT_USAGE)
        return int(permissions, 8)

    @staticmethod
    def _name(line: str, prefix: str) -> str | None:
        name = line[4:].partition("\t")[0].strip().removeprefix(prefix)
        return None if name == "/dev/null" else name

    def _close(self) -> None:
        if self.hunks or self.mode is not None or self.old != self.new:
            change = FileDiff(self.old, self.new, tuple(self.hunks), self.mode)
            if any(change.path == other.path for other in self.files):
                raise ApplyError(f"the diff has two parts for {change.path}", EXIT_USAGE)
            self.files.append(change)
        self._start(None, None)

    def _hunk(self, match: re.Match[str]) -> None:
        lines, header = self.lines, self.lines[self.at - 1]
        want_old, want_new = int(match[2] or 1), int(match[4] or 1)
        old: list[str] = []
        new: list[str] = []
        context, mark = 0, ""
        while self.at < len(lines):
            full = len(old) >= want_old and len(new) >= want_new
            if full and not lines[self.at].startswith("\\"):
                break
            last, mark, rest = mark, lines[self.at][:1], lines[self.at][1:]
            self.at += 1
            if mark == "\\":  # no newline at the end of the file: of the line before
                for side in {" ": (old, new), "-": (old,), "+": (new,)}.get(last, ()):
                    side[-1] = side[-1].removesuffix("\n")
                continue
            if mark in (" ", "-"):
                old.append(rest)
            if mark in (" ", "+"):
                new.append(rest)
            context += mark == " "
            if mark not in (" ", "-", "+"):
                break
        if (len(old), len(new)) != (want_old, want_new) or not (self.old or self.new):
            raise ApplyError(f"malformed hunk {header.strip()!r}", EXIT_USAGE)
        self.hunks.append(Hunk(int(match[1]), tuple(old), tuple(new), context, int(match[3])))


def parse_diff(diff: str) -> list[FileDiff]:
    """The files of a unified diff (``a/``, ``b/`` prefixes dropped), in its order.

    Raises:
        ApplyError: the diff is malformed, changes nothing, or changes what text cannot show.
    """
    files = _DiffReader(diff).read()
    if not files:
        raise ApplyError("the diff changes no file", EXIT_USAGE)
    return files


def _block_positions(lines: list[str], block: Sequence[str]) -> list[int]:
    """Where a block of whole lines stands; looks only where its longest line does."""
    wanted = list(block)
    if not wanted:
        return list(range(len(lines) + 1))
    depth = max(range(len(wanted)), key=lambda number: len(wanted[number]))
    found: list[int] = []
    at = depth - 1
    last = len(lines) - len(wanted) + depth + 1
    while True:
        try:
            at = lines.index(wanted[depth], at + 1, max(last, 0))
        except ValueError:
            return found
        if lines[at - depth : at - depth + len(wanted)] == wanted:
            found.append(at - depth)


def _outside(
    places: Sequence[int], block: Sequence[str], others: Sequence[int], other: Sequence[str]
) -> list[int]:
    """Places of a block that do not lie inside an occurrence of the other, longer one."""
    if len(block) >= len(other):
        return list(places)
    return [
        at
        for at in places
        if not any(o <= at and at + len(block) <= o + len(other) for o in others)
    ]


@dataclass(frozen=True)
class Verdict:
    """One hunk on a text: ``pre``, ``post``, ``drift`` or ``ambiguous``; ``at`` is a 0-based line,
    ``offset`` how far from where the diff says."""

    found: str
    at: int = -1
    offset: int = 0
    reason: str = ""


def judge_hunks(text: str, hunks: Sequence[Hunk]) -> tuple[list[Verdict], str]:
    """Each hunk with fuzz 0 and a unique position, and the text with those applied that can be."""
    lines = lines_of(text)
    verdicts: list[Verdict] = []
    shift = 0
    for number, hunk in enumerate(hunks, 1):
        pre, post = _block_positions(lines, hunk.old), _block_positions(lines, hunk.new)
        pre, post = _outside(pre, hunk.old, post, hunk.new), _outside(post, hunk.new, pre, hunk.old)
        count = len(pre) + len(post)
        if count != 1:
            verdicts.append(
                Verdict(AMBIGUOUS, reason=f"hunk {number} matches {count} times")
                if count
                else Verdict(DRIFT, reason=f"hunk {number}")
            )
            continue
        offset = pre[0] + 1 - hunk.start - shift if pre and hunk.old else 0
        verdicts.append(Verdict(PRE if pre else POST, (pre or post)[0], offset))
        if pre:
            lines[pre[0] : pre[0] + len(hunk.old)] = hunk.new
            shift += len(hunk.new) - len(hunk.old)
    return verdicts, "".join(lines)


#: Pairs of lines that are compared to find the nearest place; more would take seconds.
_COMPARED = 100_000


def _not_found(text: str, hunk: Hunk) -> str:
    """What a hunk looks for, and what is nearest to it."""
    if text.count("\n") * len(hunk.old) < _COMPARED:
        place = nearest_place(text, "".join(hunk.old))
        if place:
            return place
    wanted = next((line for line in hunk.old or hunk.new if line.strip()), "").strip()
    near = nearest_line(text, wanted)
    return f"{wanted!r} not found" + (f"; nearest is line {near}" if near else "")


def apply_hunks(text: str, hunks: Sequence[Hunk]) -> tuple[str, str, list[str]]:
    """Judge all hunks of a file together: ``(found, new text or reason, offsets)``."""
    verdicts, new = judge_hunks(text, hunks)
    for hunk, verdict in zip(hunks, verdicts, strict=True):
        if verdict.found == AMBIGUOUS:
            return AMBIGUOUS, verdict.reason, []
        if verdict.found == DRIFT:
            return DRIFT, f"{verdict.reason}: {_not_found(text, hunk)}", []
    there = [str(n) for n, verdict in enumerate(verdicts, 1) if verdict.found == POST]
    if there and len(there) < len(verdicts):
        missing = [str(n) for n, verdict in enumerate(verdicts, 1) if verdict.found == PRE]
        reason = f"some hunks are already there ({', '.join(there)}) and some are not"
        return DRIFT, f"{reason} ({', '.join(missing)})", []
    offsets = [(n, verdict.offset) for n, verdict in enumerate(verdicts, 1) if verdict.offset]
    notes = [f"hunk {number} applied at offset {offset:+d}" for number, offset in offsets]
    return POST if there else PRE, new, notes


def top_level(source: str) -> dict[str, tuple[int, int]]:
    """Line spans (0-based start, end) of the top-level definitions of a module, by name."""
    spans: dict[str, tuple[int, int]] = {}
    for node in ast.parse(source).body:
        names: list[str] = []
        start = node.lineno
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = [node.name]
            start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        for name in names:
            spans[name] = (start - 1, node.end_lineno or node.lineno)
    return spans


def definition(source: str, name: str) -> str | None:
    """The source text of a top-level definition, or None."""
    span = top_level(source).get(name)
    return None if span is None else "".join(lines_of(source)[slice(*span)])


def graft_text(
    target: str, donor: str, names: Sequence[str], after: str | None, replace: bool
) -> tuple[str, str]:
    """Judge a graft of named definitions: ``(found, new text or reason)``.

    Raises:
        ApplyError: the donor lacks a name, which means that its pin is wrong.
    """
    verdicts = set()
    text = target
    for name in names:
        wanted = definition(donor, name)
        if wanted is None:
            raise ApplyError(f"the donor module does not define {name}", EXIT_USAGE)
        wanted = wanted.rstrip("\n") + "\n"
        spans = top_level(text)
        lines = lines_of(text)
        if name in spans:
            start, end = spans[name]
            present = "".join(lines[start:end]).rstrip("\n") + "\n"
            if present == wanted:
                verdicts.add(POST)
                continue
            if not replace:
                return DRIFT, f"{name} is already defined (line {start + 1}) and differs"
            lines[start:end] = [wanted]
        elif replace:
            return DRIFT, f"{name} is not defined, so it cannot be replaced"
        else:
            if after is not None and after not in spans:
                return DRIFT, f"{after}, after which {name} belongs, is not defined"
            at = spans[after][1] if after else len(lines)
            if lines and not lines[-1].endswith("\n"):
                lines[-1] += "\n"
            tail = ["\n", "\n"] if after and at < len(lines) and lines[at].strip() else []
            lines[at:at] = ["\n", "\n", wanted, *tail]
            after = name
        verdicts.add(PRE)
        text = "".join(lines)
    if len(verdicts) > 1:
        return DRIFT, "some of the definitions are already there and some are not"
    return verdicts.pop(), text


def run_hook(source: str, function: str, text: str) -> tuple[str, str]:
    """Judge a hook, a pure ``str -> str``: ``(found, new text or reason)``."""
    namespace: dict[str, Any] = {}
    try:
        exec(compile(source, "<hook>", "exec"), namespace)
        edited = namespace[function](text)
        if not isinstance(edited, str):
            return DRIFT, f"hook {function} returned {type(edited).__name__}, not str"
        if edited == text:
            return POST, text
        if namespace[function](edited) != edited:
            return DRIFT, f"hook {function} is not idempotent: a second run changes the file again"
    except Exception as error:
        return DRIFT, f"hook {function} failed: {type(error).__name__}: {error}"
    return PRE, edited


# ------------------------------------------------------------------------------------- environment


@dataclass(frozen=True)
class EnvReader:
    """The variables a module reads: name -> accepted values, or None where any value goes."""

    known: Mapping[str, tuple[str, ...] | None]


def read_envs(source: str) -> EnvReader:
    """Read vLLM's ``envs.py``: keys of ``environment_variables``, and the choices of each."""
    known: dict[str, tuple[str, ...] | None] = {}
    for node in ast.walk(ast.parse(source)):
        target: ast.expr | None = None
        if isinstance(node, ast.AnnAssign):
            target = node.target
        elif isinstance(node, ast.Assign):
            target = node.targets[0]
        else:
            continue
        is_table = isinstance(target, ast.Name) and target.id == "environment_variables"
        if not is_table or not isinstance(node.value, ast.Dict):
            continue
        for key, value in zip(node.value.keys, node.value.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                known[key.value] = _choices(value)
    return EnvReader(known)


def _choices(value: ast.expr) -> tuple[str, ...] | None:
    for call in ast.walk(value):
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        if name not in ("env_with_choices", "env_set_with_choices", "env_list_with_choices"):
            continue
        for argument in call.args:
            if isinstance(argument, (ast.List, ast.Tuple)):
                items = [e.value for e in argument.elts if isinstance(e, ast.Constant)]
                return tuple(str(item) for item in items)
    return None


# ---------------------------------------------------------------------------------- judging a layer


@dataclass(frozen=True)
class Target:
    """What pins are chosen for: an OCI platform and a CPython tag such as ``cp312``."""

    platform: str
    python: str

    @classmethod
    def here(cls) -> Target:
        """This interpreter on this machine."""
        machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), "unknown")
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        return cls(f"linux/{machine}", tag)


@dataclass
class Outcome:
    """A layer judged on a tree: its state, why, and exactly what would change."""

    layer: str
    state: str
    reason: str
    variant: str | None = None
    since: str | None = None
    changes: Changes = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    serve_flags: list[str] = field(default_factory=list)
    moe_serve_flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    #: file -> kinds of op that touched it, for the plan and the receipt
    ops: dict[str, list[str]] = field(default_factory=dict)
    #: what was found of compiled code, and the stage that compiles a change to it
    compiled: dict[str, Any] = field(default_factory=dict)

    @property
    def pending(self) -> bool:
        """Whether a change has yet to be compiled, so that its files are not known."""
        return self.state == NEEDED and "stage" in self.compiled and not self.compiled["wheel"]


Layer = Mapping[str, Any]


def layer_digest(layer: Layer) -> str:
    """The identity of a rendered layer."""
    return sha256_hex(canonical_json(layer))


def edit_file(tree: Tree, path: str, edit: Callable[[str], tuple[str, str]]) -> OpResult:
    """Judge an edit of a text file: what the edit finds, and the file as it leaves it."""
    data = tree.read(path)
    if data is None:
        return OpResult(DRIFT, reason=f"{path} is not there")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return OpResult(DRIFT, reason=f"{path} is not UTF-8 text")
    try:
        found, new = edit(text)
    except SyntaxError as error:
        return OpResult(DRIFT, reason=f"{path} is not Python: {error}")
    if found == POST:
        return OpResult(POST)
    if found != PRE:
        return OpResult(found, reason=f"{path}: {new}")
    if new == text:
        return OpResult(DRIFT, reason=f"{path}: the edit changes nothing")
    content = Content.of(new.encode("utf-8"), tree.mode(path))
    return OpResult(PRE, changes={path: content})


def create_file(tree: Tree, path: str, data: bytes, mode: int = 0o644) -> OpResult:
    """Judge a new file."""
    present = tree.read(path)
    if present == data:
        return OpResult(POST)
    if present is not None:
        return OpResult(DRIFT, reason=f"{path} is already there with other content")
    return OpResult(PRE, changes={path: Content.of(data, mode)})


def judge_diff(files: Iterable[FileDiff], tree: Tree) -> OpResult:
    """Judge a diff on a tree, all of its files together."""
    whole = OpResult(POST)
    found: dict[str, list[str]] = {}
    notes: list[str] = []
    for change in files:
        result = judge_file(change, tree)
        if result.found not in (PRE, POST):
            return result
        found.setdefault(result.found, []).append(change.path)
        whole.changes.update(result.changes)
        if result.reason:
            notes.append(result.reason)
    whole.found, whole.reason = next(iter(found)), "; ".join(notes)
    if len(found) > 1:
        there, missing = ", ".join(found[POST]), ", ".join(found[PRE])
        return OpResult(DRIFT, reason=f"{there} already patched, {missing} not")
    return whole


def judge_file(change: FileDiff, tree: Tree) -> OpResult:
    """Judge what a diff does to one file; ``reason`` tells offsets where it can be applied."""
    if change.old is None:
        text = "".join(line for hunk in change.hunks for line in hunk.new)
        return create_file(tree, change.path, text.encode("utf-8"), change.mode or 0o644)
    if change.new is None:
        return _judge_deletion(change, tree)
    if change.new != change.old:
        return _judge_rename(change, tree)
    if not change.hunks:
        return _judge_mode(change, tree)
    return _judge_hunks_of(change, tree, change.new)


def _judge_hunks_of(change: FileDiff, tree: Tree, path: str) -> OpResult:
    notes: list[str] = []

    def edit(text: str) -> tuple[str, str]:
        verdict, new, offsets = apply_hunks(text, change.hunks)
        notes.extend(f"{path}: {offset}" for offset in offsets)
        return verdict, new

    result = edit_file(tree, path, edit)
    content = result.changes.get(path)
    if content is not None and content.data is not None and change.mode is not None:
        result.changes[path] = Content.of(content.data, change.mode)
    if result.found == PRE:
        result.reason = "; ".join(notes)
    return result


def _judge_deletion(change: FileDiff, tree: Tree) -> OpResult:
    data = tree.read(change.path)
    if data is None:
        return OpResult(POST)
    text = "".join(line for hunk in change.hunks for line in hunk.old)
    if data != text.encode("utf-8"):
        return OpResult(DRIFT, reason=f"{change.path} is not the file that the diff deletes")
    return OpResult(PRE, changes={change.path: None})


def _judge_rename(change: FileDiff, tree: Tree) -> OpResult:
    old, new = change.old or "", change.new or ""
    before, after = tree.read(old), tree.read(new)
    if (before is None) == (after is None):
        both = "both are" if before is not None else "neither is"
        return OpResult(DRIFT, reason=f"{old} should become {new}, and {both} there")
    path = new if before is None else old
    result = _judge_hunks_of(change, tree, path) if change.hunks else OpResult(PRE)
    if before is None:
        if change.hunks and result.found == PRE:
            return OpResult(DRIFT, reason=f"{new} is there already, without the edits")
        return result if change.hunks else OpResult(POST)
    if result.found == POST:
        return OpResult(DRIFT, reason=f"{old} has the edits already, but is not yet {new}")
    if result.found == PRE:
        data = before if not change.hunks else (result.changes[old] or Content.of(b"")).read()
        result.changes = {old: None, new: Content.of(data, change.mode or tree.mode(old))}
    return result


def _judge_mode(change: FileDiff, tree: Tree) -> OpResult:
    path, mode = change.path, change.mode or 0o644
    data = tree.read(path)
    if data is None:
        return OpResult(DRIFT, reason=f"{path} is not there")
    if bool(tree.mode(path) & 0o111) == bool(mode & 0o111):
        return OpResult(POST)
    return OpResult(PRE, changes={path: Content.of(data, mode)})


def unpatched(files: Iterable[FileDiff], tree: Tree) -> bool:
    """Whether any hunk of a diff still finds its text from before.

    A new file that is not there says nothing: it may have been there and moved on.
    """
    for change in files:
        data = tree.read(change.old) if change.old is not None else None
        if data is None:
            continue
        if change.new is None and _judge_deletion(change, tree).found == PRE:
            return True
        verdicts, _ = judge_hunks(data.decode("utf-8", "replace"), change.hunks)
        if any(verdict.found == PRE for verdict in verdicts):
            return True
    return False


def undone(tree: Tree, diffs: Sequence[str]) -> OverlayTree:
    """The tree without those of a stack's diffs that are in it; the topmost is taken off first."""
    overlay = OverlayTree(tree)
    for diff in reversed(diffs):
        edits = (c for c in parse_diff(diff) if c.hunks or c.old != c.new)
        result = judge_diff([change.reversed() for change in edits], overlay)
        if result.found == PRE:
            overlay.update(result.changes)
    return overlay


@dataclass
class Together:
    """The ``compile`` ops of a plan, which share one stage: of two companions that register one
    operator, one would silently override the other.

    ``last`` is how many ops there are, and ``carrier`` the layer that brings what they make; they
    are not known while the ops are counted.
    """

    last: int | None = None
    carrier: str = ""
    #: layer and op, of those that are to be compiled
    ops: list[tuple[str, Layer]] = field(default_factory=list)
    #: the same of layers that a receipt says are applied: what they had compiled is there
    standing: list[tuple[str, Layer]] = field(default_factory=list)
    #: folders of what was compiled for this plan, which says nothing of the base
    made: set[str] = field(default_factory=set)

    def with_op(self, op: Layer) -> list[Layer]:
        """What goes into a stage up to an op."""
        return [*(known for _, known in (*self.standing, *self.ops)), op]

    def layers(self) -> set[str]:
        """The layers whose companions a new one takes the place of."""
        return {name for name, _ in (*self.standing, *self.ops)}

    def add(self, layer: str, op: Layer) -> bool:
        """Count an op in; whether it is the one that brings what all of them make."""
        self.ops.append((layer, op))
        return self.last is not None and len(self.ops) >= self.last


class _Judge:
    """Runs the ops of one variant over a view of the tree."""

    def __init__(
        self,
        layer: Layer,
        tree: Tree,
        sources: Sources,
        target: Target,
        env: Mapping[str, str],
        together: Together,
    ) -> None:
        self.layer, self.sources, self.target, self.base_env = layer, sources, target, env
        self.together = together
        self.view = OverlayTree(tree)
        self.packages = versions(tree)
        self.receipts = receipts_of(tree)
        #: diffs that come after the op at hand in the same stack
        self.later: list[str] = []

    # -- one method per op; each returns what it found and the changes it would make

    def op_replace(self, op: Layer) -> OpResult:
        return edit_file(
            self.view,
            op["file"],
            lambda text: replace_text(text, op["old"], op["new"], op["count"]),
        )

    def op_diff(self, op: Layer) -> OpResult:
        files = parse_diff(op["diff"])
        result = judge_diff(files, self.view)
        if result.found in (PRE, POST) or not self.later:
            return result
        # later changes of the same stack may have edited what this one made
        below = judge_diff(files, undone(self.view, self.later))
        reason = "it is there, below later changes of its series"
        return OpResult(POST, reason=reason) if below.found == POST else result

    def op_graft(self, op: Layer) -> OpResult:
        pin = self._donor_pin(op)
        donor = self.sources.donor(pin)
        if op.get("whole"):
            result = create_file(self.view, op["file"], donor)
        else:
            text = donor.decode("utf-8")
            result = edit_file(
                self.view,
                op["file"],
                lambda target: graft_text(
                    target, text, op["names"], op.get("after"), op.get("replace", False)
                ),
            )
        result.inputs = [dict(pin)]
        return result

    def op_copy(self, op: Layer) -> OpResult:
        return create_file(self.view, op["to"], base64.b64decode(op["data"]))

    def op_hook(self, op: Layer) -> OpResult:
        return edit_file(
            self.view, op["file"], lambda text: run_hook(op["source"], op["function"], text)
        )

    def op_env(self, op: Layer) -> OpResult:
        name, value = op["name"], op["value"]
        reader = op.get("reader", "vllm/envs.py")
        data = self.view.read(reader)
        if data is None:
            return OpResult(DRIFT, reason=f"{reader}, which should read {name}, is not there")
        text = data.decode("utf-8")
        if reader == "vllm/envs.py":
            try:
                envs = read_envs(text)
            except SyntaxError as error:
                return OpResult(DRIFT, reason=f"{reader} is not Python: {error}")
            if name not in envs.known:
                near = difflib.get_close_matches(name, list(envs.known), n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                return OpResult(
                    DRIFT,
                    reason=f"vllm {self.packages.get('vllm')} does not read {name} "
                    f"(not in {reader}){hint}",
                )
            choices = envs.known[name]
            if choices is not None and value not in choices:
                return OpResult(
                    DRIFT,
                    reason=f"{name}={value} is not a choice of vllm "
                    f"{self.packages.get('vllm')}: {', '.join(choices)}",
                )
        elif name not in text:
            return OpResult(DRIFT, reason=f"{reader} does not read {name}")
        found = POST if self.base_env.get(name) == value else PRE
        return OpResult(found, env={name: value})

    def op_wheel(self, op: Layer) -> OpResult:
        name = normalize(op["distribution"])
        version = op.get("version") or self.packages.get(normalize(op["version-of"]))
        if version is None:
            return OpResult(DRIFT, reason=f"{op['version-of']} is not in the base")
        return self._installed(self._wheel_pin(name, version))

    def _installed(self, pin: Mapping[str, Any]) -> OpResult:
        """A pinned wheel laid out; an installed other version of it goes away."""
        name, version = normalize(pin["distribution"]), pin["version"]
        members = self.sources.members(pin)
        installed = self.view.distributions().get(name)
        if installed and installed.version == version and self._wins(members):
            return OpResult(POST, reason=f"{name} {version} is there and its files won")
        changes: Changes = {}
        if installed:
            changes.update(self._without(installed))
        for member in members:
            changes.update(self._laid_out(pin, member))
        info_dir = next(m.path.split("/")[0] for m in members if _OWN_RECORD.fullmatch(m.path))
        changes[f"{info_dir}/INSTALLER"] = Content.of(INSTALLER)
        changes[f"{info_dir}/RECORD"] = self._record(members, info_dir)
        return OpResult(PRE, changes=self._minimal(changes), inputs=[dict(pin)])

    def op_remove(self, op: Layer) -> OpResult:
        installed = self.view.distributions().get(normalize(op["distribution"]))
        if installed is None:
            return OpResult(POST, reason=f"{op['distribution']} is not in the base")
        if "unless" in op and version_matches(installed.version, op["unless"]):
            return OpResult(POST, reason=f"{op['distribution']} {installed.version} may stay")
        return OpResult(PRE, changes=self._without(installed))

    def op_pull(self, op: Layer) -> OpResult:
        raise ApplyError(
            f"layer {self.layer['name']}: {op['pull']} was not fetched before it was judged",
            EXIT_USAGE,
            f"spark-build plan --layers {self.layer['name']}",
        )

    def op_compile(self, op: Layer) -> OpResult:
        if "change" not in op:  # of a pull request
            return self._compiled(op, op.get("reason", "this layer changes compiled code"), {})
        code = self._code(op)
        compiled: dict[str, Any] = {"code": code, "wheel": None}
        said = describe_code(code, op)
        if code["how"] == RUNS and code["module"].startswith(COMPANIONS):
            return OpResult(POST, reason=said, compiled=compiled)
        if code["how"] == RUNS and op["change"]["guard"] in code.get("guard", ""):
            since = f"vLLM {op['change']['applied-upstream']}"
            return OpResult(UPSTREAM, reason=said, since=since, compiled=compiled)
        if code["how"] in (RUNS, NO_CODE):
            return OpResult(NOT_APPLICABLE, reason=said, compiled=compiled)
        return self._compiled(op, said, {"code": code})

    def _compiled(self, op: Layer, said: str, facts: Mapping[str, Any]) -> OpResult:
        """A change to sources, compiled together with those before it, where that is allowed."""
        if "source" not in op:  # nothing that a stage takes
            return OpResult(NEEDS_REBUILD, reason=said)
        compiled: dict[str, Any] = {**facts, "wheel": None}
        ops = self.together.with_op(op)
        stage = self.sources.stage(ops, self.packages, self.target, self._extension)
        if stage is None:
            return OpResult(NEEDS_REBUILD, reason=said, compiled=compiled)
        if stage.sources:
            compiled["sources"] = dict(stage.sources)
        if isinstance(stage, Unstaged):
            return _unstaged(stage, compiled)
        if not self.together.add(self.layer["name"], op):
            compiled["with"] = self.together.carrier
            return OpResult(PRE, reason=said, compiled=compiled)
        if stage.refusal:
            return _unstaged(stage.refusal, compiled | {"sources": dict(stage.refusal.sources)})
        standing, stranger = self._companions(stage.request.get("operators", ()))
        if stranger:
            return OpResult(AMBIGUOUS, reason=stranger, compiled=compiled)
        compiled["stage"] = dict(stage.request)
        if stage.wheel is None:
            return OpResult(PRE, reason=said, compiled=compiled)
        compiled["wheel"] = {key: stage.wheel[key] for key in ("filename", "sha256")}
        result = self._installed(stage.wheel)
        self.together.made |= {path.partition("/")[0] for path in result.changes}
        for dist in standing:
            if dist.name != normalize(stage.wheel["distribution"]):
                result.changes = {**self._without(dist), **result.changes}
        result.reason, result.inputs, result.compiled = said, [], compiled
        return result

    def _companions(self, operators: Iterable[str]) -> tuple[list[Distribution], str]:
        """Companions in the tree that register any of some operators: those of layers that share
        the stage, and what is to be said of any other."""
        ours: list[Distribution] = []
        layers = {*self.together.layers(), self.layer["name"]}
        for name, dist in self.view.distributions().items():
            package = name.replace("-", "_")
            about = self.view.read(f"{package}/companion.json")
            if not package.startswith(COMPANIONS) or about is None:
                continue
            both = {row["name"] for row in json.loads(about)["operators"]} & set(operators)
            if not both:
                continue
            owners = {r["layer"] for r in self.receipts if f"{dist.info_dir}/RECORD" in r["files"]}
            if not owners & layers:
                return [], (
                    f"{package} in the base registers {', '.join(sorted(both))} already, and of "
                    "two companions one overrides the other: take it away, or start from a base "
                    "without it"
                )
            ours.append(dist)
        return ours, ""

    def _extension(self, name: str) -> str:
        """The sha256 of an extension module, such as ``vllm/_C``, or ''."""
        found = next(iter(self._modules([f"{name}.*"])), "")
        return self._module_digest(found) if found else ""

    def _code(self, op: Layer) -> dict[str, Any]:
        """The first module that holds the op's kernels, and how SM121 runs them there."""
        known = {row["sha256"]: row for row in self.layer["pins"].get("code", ())}
        seen: list[dict[str, Any]] = []
        for path in self._modules(op["code"]["modules"]):
            if path.partition("/")[0] in self.together.made:
                continue
            digest = self._module_digest(path)
            row = known.get(digest) or self.sources.code(self.view, path, op["code"], digest)
            facts = {key: row[key] for key in ("how", "arch", "guard") if row.get(key)}
            seen.append({"module": path, "sha256": digest, **facts})
            if row["how"] not in (ABSENT, NO_CODE):
                return seen[-1]
        lacks = next((one for one in seen if one["how"] == ABSENT), None)
        return lacks or {"module": "", "sha256": "", "how": NO_CODE}

    def _module_digest(self, path: str) -> str:
        """The sha256 of a large file: of a directory its own, else as a RECORD has it.

        In an image, hashing it would mean reading a layer of gigabytes; level ``static`` holds
        every file of what is built against its RECORD.
        """
        tree: Tree = self.view
        while isinstance(tree, OverlayTree):
            tree = tree.base
        if not isinstance(tree, DirTree):
            dist = self.view.distributions()[normalize(self.layer["package"])]
            rows = parse_record(self.view.read(f"{dist.info_dir}/RECORD") or b"")
            recorded = next((row.sha256 for row in rows if row.path == path), None)
            if recorded:
                return recorded
        return self.view.digest(path) or ""

    def _modules(self, patterns: Iterable[str]) -> Iterator[str]:
        for pattern in patterns:
            above, _, name = pattern.rpartition("/")
            for folder in fnmatch.filter(self.view.children(""), above):
                names = fnmatch.filter(self.view.children(folder), name)
                yield from (f"{folder}/{found}" for found in names if found.endswith(".so"))

    # -- shared by the ops

    def _donor_pin(self, op: Layer) -> Mapping[str, Any]:
        distribution, _, version = op["from"].partition("==")
        member = op.get("member", op["file"])
        for pin in self.layer["pins"]["donor"]:
            same = normalize(pin["distribution"]) == normalize(distribution)
            if same and pin["version"] == version and pin["member"] == member:
                return dict(pin)
        raise ApplyError(
            f"layer {self.layer['name']}: no pin for {member} of {op['from']}",
            EXIT_USAGE,
            f"spark-build layers pin {self.layer['name']}",
        )

    def _wheel_pin(self, name: str, version: str) -> Mapping[str, Any]:
        for pin in self.layer["pins"]["wheel"]:
            fits = (
                normalize(pin["distribution"]) == name
                and pin["version"] == version
                and pin["platform"] in ("any", self.target.platform)
                and pin["python"] in ("py3", self.target.python)
            )
            if fits:
                return dict(pin)
        raise ApplyError(
            f"layer {self.layer['name']}: no pinned wheel of {name} {version} for "
            f"{self.target.platform} and {self.target.python}",
            EXIT_USAGE,
            f"spark-build layers pin {self.layer['name']}",
        )

    def _wins(self, members: Iterable[Member]) -> bool:
        for member in members:
            if _OWN_RECORD.fullmatch(member.path):
                continue
            path = self._site_path(member.path)
            if path is None:
                continue
            if not explained(path, member.sha256, self.view.digest(path), self.receipts):
                return False
        return True

    @staticmethod
    def _site_path(path: str) -> str | None:
        """Where a wheel member lies in site-packages; None for scripts, headers and data."""
        head, _, rest = path.partition("/")
        if not head.endswith(".data"):
            return path
        scheme, _, below = rest.partition("/")
        return below if scheme in ("purelib", "platlib") else None

    def _laid_out(self, pin: Mapping[str, Any], member: Member) -> Changes:
        path = self._site_path(member.path)
        if path is None:
            return {}
        if member.size == 0:
            return {path: Content.of(b"", member.mode)}
        sources, name = self.sources, member.path
        content = Content(
            sha256=member.sha256,
            size=member.size,
            mode=member.mode,
            load=lambda: sources.member(pin, name),
            origin=f"{pin['filename']}:{name}",
        )
        return {path: content}

    def _record(self, members: Sequence[Member], info_dir: str) -> Content:
        """The wheel's RECORD as an installer leaves it: laid-out paths, plus our INSTALLER."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        own = f"{info_dir}/RECORD"
        rows = [(m.path, m.sha256, m.size) for m in members if m.path != own]
        rows.append((f"{info_dir}/INSTALLER", sha256_hex(INSTALLER), len(INSTALLER)))
        for name, digest, size in rows:
            path = self._site_path(name)
            if path is not None:
                raw = base64.urlsafe_b64encode(bytes.fromhex(digest)).rstrip(b"=").decode()
                writer.writerow([path, f"sha256={raw}", size])
        writer.writerow([f"{info_dir}/RECORD", "", ""])
        return Content.of(out.getvalue().encode())

    def _without(self, dist: Distribution) -> Changes:
        """Deletes a distribution's files, except those that another distribution also owns."""
        shared: set[str] = set()
        for other in self.view.distributions().values():
            data = self.view.read(f"{other.info_dir}/RECORD") if other != dist else None
            if data is not None:
                shared.update(row.path for row in parse_record(data))
        gone: Changes = {}
        for row in record_of(self.view, dist):
            if row.path in shared or row.path.startswith(("/", "../")):
                continue
            if self.view.digest(row.path) is not None:
                gone[row.path] = None
                gone.update(dict.fromkeys(stale_pyc(self.view, row.path)))
        return gone

    def _minimal(self, changes: Changes) -> Changes:
        """Without the files that already have exactly these bytes, and their compiled files."""
        same = {
            path
            for path, content in changes.items()
            if content is not None and content.sha256 == self.view.digest(path)
        }
        same |= {pyc for path in same for pyc in stale_pyc(self.view, path)}
        return {path: content for path, content in changes.items() if path not in same}


def _unstaged(why: Unstaged, compiled: dict[str, Any]) -> OpResult:
    found = SKIP if why.state in (UPSTREAM, NOT_APPLICABLE) else why.state
    return OpResult(found, reason=why.reason, since=why.since, notes=why.notes, compiled=compiled)


def describe_code(code: Mapping[str, Any], op: Layer) -> str:
    """What was found of some kernels, in words."""
    what, where = op["code"]["name"], code["module"]
    if code["how"] == NO_CODE:
        return "this vLLM has no compiled kernels: it is no build for CUDA"
    if code["how"] == ABSENT:
        return f"{where} was built without the {what}"
    if code["how"] == UNLOADABLE:
        return f"{where} has the {what} for {code['arch']} alone, which SM121 does not load"
    if code["how"] == TRAP:
        return f"{where} has the {what} for {code['arch']} as traps: its guard admits SM120 alone"
    return f"{where} has the {what} for {code['arch']}, and SM121 runs it"


_TEXT_OPS = ("replace", "diff", "graft", "copy", "hook")


def judge(
    layer: Layer,
    tree: Tree,
    sources: Sources,
    target: Target,
    env: Mapping[str, str] | None = None,
    later: Sequence[Layer] = (),
    together: Together | None = None,
) -> Outcome:
    """Decide a layer's state on a tree and compute its changes; nothing is written.

    Args:
        layer: the rendered layer.
        tree: the tree as the layers before this one leave it.
        sources: where pinned wheels come from.
        target: platform and interpreter that the tree is for.
        env: variables that the base already sets.
        later: the layers after this one, for a layer that belongs to a series.
        together: what is compiled with this layer; nothing, where it is None.

    Raises:
        ApplyError: a pin is missing, an input cannot be fetched or has another digest.
    """
    packages = versions(tree)
    package = normalize(layer["package"])
    name = layer["name"]
    if package not in packages:
        return Outcome(name, NOT_APPLICABLE, f"{package} is not in the base")
    together = together or Together(last=1, carrier=name)
    receipted = _judge_by_receipt(layer, tree, env or {})
    if receipted is not None:
        together.standing += [(name, op) for op in _compiled_by(layer, receipted, packages)]
        return receipted
    early = _judge_by_probe(layer, tree, packages)
    if early is not None:
        return early
    matching = [v for v in layer["variants"] if all_match(v["when"], packages)]
    if not matching:
        return _judge_no_variant(layer, packages)
    if len(matching) > 1:
        both = " and ".join(v["name"] for v in matching)
        raise ApplyError(f"layer {name}: variants {both} both match this base", EXIT_USAGE)
    judge_ops = _Judge(layer, tree, sources, target, env or {}, together)
    return _judge_variant(judge_ops, layer, matching[0], _diffs_after(layer, later, packages))


def _diffs_after(layer: Layer, later: Iterable[Layer], packages: Mapping[str, str]) -> list[str]:
    """The diffs of the layers that follow this one in its series."""
    return [
        diff
        for other in later
        if "series" in layer and other.get("series") == layer["series"]
        for variant in other["variants"]
        if all_match(variant["when"], packages)
        for diff in _diffs_of(variant["ops"], packages)
    ]


def _compiled_by(layer: Layer, outcome: Outcome, packages: Mapping[str, str]) -> list[Layer]:
    """The ops of an applied variant whose changes were compiled for it."""
    ops = (op for v in layer["variants"] if v["name"] == outcome.variant for op in v["ops"])
    mine = (op for op in ops if op["op"] == "compile" and "source" in op)
    return [op for op in mine if "if" not in op or all_match(op["if"], packages)]


def _diffs_of(ops: Iterable[Layer], packages: Mapping[str, str]) -> list[str]:
    """The diffs among some ops that count on a base with these packages."""
    mine = (op for op in ops if op["op"] == "diff")
    return [op["diff"] for op in mine if "if" not in op or all_match(op["if"], packages)]


def _judge_by_receipt(layer: Layer, tree: Tree, env: Mapping[str, str]) -> Outcome | None:
    receipts = receipts_of(tree)
    receipt = next((r for r in receipts if r["layer"] == layer["name"]), None)
    if receipt is None or receipt["layer_digest"] != layer_digest(layer):
        return None
    if unexplained(receipt, receipts, tree) or any(
        env.get(name) != value for name, value in receipt["env"].items()
    ):
        return None
    count = len(receipt["files"])
    return Outcome(
        layer["name"],
        APPLIED,
        f"receipt found, {count} file{'s' if count != 1 else ''} as it says",
        variant=receipt["variant"],
        env=dict(receipt["env"]),
        serve_flags=list(receipt["serve_flags"]),
        moe_serve_flags=list(receipt["moe_serve_flags"]),
    )


def _judge_by_probe(layer: Layer, tree: Tree, packages: Mapping[str, str]) -> Outcome | None:
    for entry in layer["upstream"]:
        if all_match(entry["when"], packages) and probe_holds(entry["probe"], tree):
            return Outcome(layer["name"], UPSTREAM, entry["reason"], since=entry["since"])
    for entry in layer["not-applicable"]:
        if all_match(entry["when"], packages):
            return Outcome(layer["name"], NOT_APPLICABLE, entry["reason"])
    return None


def _judge_no_variant(layer: Layer, packages: Mapping[str, str]) -> Outcome:
    nominated = [e for e in layer["upstream"] if all_match(e["when"], packages)]
    if nominated:
        failed = nominated[0]
        return Outcome(
            layer["name"],
            DRIFT,
            f"{failed['since']} should have this fix, but {describe_probe(failed['probe'])} "
            "does not hold",
        )
    wanted = [", ".join(f"{p} {s}" for p, s in v["when"].items()) for v in layer["variants"]]
    names = sorted({normalize(p) for v in layer["variants"] for p in v["when"]})
    have = ", ".join(f"{p} {packages.get(p, 'absent')}" for p in names)
    return Outcome(
        layer["name"], NOT_APPLICABLE, f"made for {' or '.join(wanted)}; the base has {have}"
    )


def probe_holds(probe: Iterable[Layer], tree: Tree) -> bool:
    """Whether every clause of a probe holds; text only, nothing is imported."""
    for clause in probe:
        data = tree.read(clause["file"])
        if clause.get("missing"):
            if data is not None:
                return False
            continue
        if data is None:
            return False
        text = data.decode("utf-8", "replace")
        if "contains" in clause and clause["contains"] not in text:
            return False
        if "lacks" in clause and clause["lacks"] in text:
            return False
    return True


def describe_probe(probe: Iterable[Layer]) -> str:
    """A probe in words, for messages."""
    parts = []
    for clause in probe:
        if clause.get("missing"):
            parts.append(f"{clause['file']} is absent")
        elif "contains" in clause:
            parts.append(f"{clause['file']} holds {first_line(clause['contains'])!r}")
        else:
            parts.append(f"{clause['file']} lacks {first_line(clause['lacks'])!r}")
    return " and ".join(parts)


def _judge_variant(run: _Judge, layer: Layer, variant: Layer, later: Sequence[str] = ()) -> Outcome:
    outcome = Outcome(layer["name"], NEEDED, "", variant=variant["name"])
    outcome.serve_flags = list(variant.get("serve-flags", ()))
    outcome.moe_serve_flags = list(variant.get("moe-serve-flags", ()))
    outcome.notes = list(variant.get("notes", ()))
    texts: dict[str, list[str]] = {PRE: [], POST: []}
    ensured: dict[str, list[str]] = {PRE: [], POST: []}
    skipped: list[OpResult] = []
    for number, op in enumerate(variant["ops"], 1):
        if "if" in op and not all_match(op["if"], run.packages):
            continue
        kind = op["op"]
        run.later = [*_diffs_of(variant["ops"][number:], run.packages), *later]
        label = _op_label(number, op)
        if kind == "compile" and texts[POST] and not texts[PRE]:
            outcome.notes.append(f"op {label} is taken to be there, as the text beside it is")
            continue
        result: OpResult = getattr(run, f"op_{kind}")(op)
        if result.found == SKIP:
            skipped.append(result)
            outcome.compiled = outcome.compiled or result.compiled
            continue
        if result.found not in (PRE, POST):
            outcome.state, outcome.changes = result.found, {}
            outcome.compiled, outcome.since = result.compiled, result.since
            outcome.notes += result.notes
            outcome.reason = result.reason if result.compiled else f"op {label}: {result.reason}"
            before = texts[PRE] or (kind == "diff" and unpatched(parse_diff(op["diff"]), run.view))
            return outcome if before else _unless_merged(layer, outcome, run.packages)
        (texts if kind in _TEXT_OPS else ensured)[result.found].append(label)
        outcome.env.update(result.env)
        outcome.inputs.extend(result.inputs)
        if kind == "diff" and result.reason:
            outcome.notes.append(result.reason)
        outcome.notes += result.notes
        if result.compiled:
            outcome.compiled = {**result.compiled, "reason": result.reason}
        run.view.update(result.changes)
        outcome.changes.update(result.changes)
        for path in result.changes:
            outcome.ops.setdefault(path, []).append(kind)
    if texts[PRE] and texts[POST]:
        return _half_there(outcome, texts)
    outcome.reason = _reason(outcome, variant, texts, ensured)
    if outcome.state == NOT_APPLICABLE and skipped:
        outcome.state = UPSTREAM if any(r.since for r in skipped) else NOT_APPLICABLE
        outcome.since = next((r.since for r in skipped if r.since), None)
        outcome.reason = "; ".join(r.reason for r in skipped)
    else:
        outcome.notes += [r.reason for r in skipped]
    if outcome.state == NEEDED:
        _finish_changes(run, outcome)
    return outcome


def _unless_merged(layer: Layer, outcome: Outcome, packages: Mapping[str, str]) -> Outcome:
    """A change that was merged and then edited has neither of its two texts in the tree.

    Where a layer knows from which release on its change is merged, that settles it; where any of
    its text from before is still there, this is never asked.
    """
    merged = layer.get("merged")
    open_question = outcome.state in (DRIFT, NEEDS_REBUILD)
    if not merged or not open_question or not all_match(merged["when"], packages):
        return outcome
    return Outcome(layer["name"], UPSTREAM, merged["reason"], since=merged["since"])


def _op_label(number: int, op: Layer) -> str:
    change = op.get("change", {}).get("name")
    subject = op.get("file") or op.get("to") or op.get("distribution") or op.get("name") or change
    return f"{number} ({op['op']} {subject or ''})"


def _half_there(outcome: Outcome, texts: Mapping[str, list[str]]) -> Outcome:
    outcome.state, outcome.changes = DRIFT, {}
    outcome.reason = (
        f"partly there: {', '.join(texts[POST])} already in the base, "
        f"{', '.join(texts[PRE])} not; all or nothing"
    )
    return outcome


def _reason(
    outcome: Outcome,
    variant: Layer,
    texts: Mapping[str, list[str]],
    ensured: Mapping[str, list[str]],
) -> str:
    compiled: str = outcome.compiled.pop("reason", "")
    if compiled and ensured[POST] and not (texts[PRE] or texts[POST] or ensured[PRE]):
        outcome.state, outcome.changes = APPLIED, {}
        return compiled
    if compiled and ensured[PRE]:  # the same before and after: what it makes is not known before
        stage = outcome.compiled.get("stage")
        how = f"compiled with layer {outcome.compiled.get('with')}"
        if stage:
            how = f"{stage['change']} compiled for {stage['arch']}"
        edited = sum("compile" not in kinds for kinds in outcome.ops.values())
        beside = f"; {edited} file{'s' if edited != 1 else ''} to change beside it"
        return f"{how}: {compiled}{beside if edited else ''}"
    if texts[PRE] or ensured[PRE]:
        what = len(outcome.changes)
        settings = [label for label in ensured[PRE] if "(env " in label]
        parts = [f"{what} file{'s' if what != 1 else ''} to change"] if what else []
        if settings:
            parts.append("sets " + ", ".join(f"{k}={v}" for k, v in outcome.env.items()))
        return "; ".join(parts) or "nothing but order"
    if texts[POST] or ensured[POST]:
        outcome.state, outcome.changes = APPLIED, {}
        return "the change is already there, byte for byte"
    flags = outcome.serve_flags + outcome.moe_serve_flags
    if flags:
        return "settings only: " + " ".join(flags)
    outcome.state, outcome.changes = NOT_APPLICABLE, {}
    return f"no op of variant {variant['name']} concerns this base"


def _finish_changes(run: _Judge, outcome: Outcome) -> None:
    """Parse every changed module and take its compiled files away."""
    for path, content in list(outcome.changes.items()):
        if not path.endswith(".py"):
            continue
        if content is not None and content.data is not None:
            try:
                ast.parse(content.data, path)
            except SyntaxError as error:
                outcome.state, outcome.changes = DRIFT, {}
                outcome.reason = f"{path} would no longer parse: {error}"
                return
        for stale in stale_pyc(run.view, path):
            outcome.changes[stale] = None


@dataclass(frozen=True)
class Step:
    """One layer judged in its turn; ``changes`` holds its receipt too."""

    layer: Layer
    outcome: Outcome
    receipt: Mapping[str, Any] | None
    changes: Changes


def judge_in_order(
    layers: Iterable[Layer],
    tree: Tree,
    sources: Sources,
    target: Target,
    env: Mapping[str, str],
) -> Iterator[Step]:
    """Judge each layer on the tree as the layers before it leave it; nothing is written.

    What layers compile is compiled together: the ops are counted first, and the last one's layer
    brings what all of them make.

    Raises:
        ApplyError: an input is not pinned, cannot be fetched, or has another digest.
    """
    ordered = list(layers)
    counted = Together()
    steps = list(_judged_once(ordered, tree, sources, target, env, counted))
    if counted.ops:
        known = Together(last=len(counted.ops), carrier=counted.ops[-1][0])
        steps = list(_judged_once(ordered, tree, sources, target, env, known))
    return iter(steps)


def _judged_once(
    ordered: Sequence[Layer],
    tree: Tree,
    sources: Sources,
    target: Target,
    env: Mapping[str, str],
    together: Together,
) -> Iterator[Step]:
    overlay = OverlayTree(tree)
    current = dict(env)
    setters: dict[str, str] = {}
    sequence = max((r["sequence"] for r in receipts_of(tree)), default=0)
    for number, layer in enumerate(ordered, 1):
        outcome = judge(layer, overlay, sources, target, current, ordered[number:], together)
        receipt: dict[str, Any] | None = None
        changes: Changes = {}
        if outcome.state == NEEDED:
            sequence += 1
        if outcome.pending:  # what is known of it already: a later layer may change it further
            overlay.update(outcome.changes)
        elif outcome.state == NEEDED:
            receipt = make_receipt(layer, outcome, overlay, sequence)
            changes = dict(outcome.changes)
            changes[receipt_path(layer["name"])] = Content.of(receipt_bytes(receipt))
            overlay.update(changes)
        for variable, value in outcome.env.items():
            if variable in setters and current[variable] != value:
                raise ApplyError(
                    f"layers {setters[variable]} and {layer['name']} set {variable} to "
                    f"{current[variable]} and to {value}",
                    EXIT_USAGE,
                    "choose one of them",
                )
            setters[variable] = layer["name"]
        current.update(outcome.env)
        yield Step(layer, outcome, receipt, changes)


def make_receipt(layer: Layer, outcome: Outcome, tree: Tree, sequence: int) -> dict[str, Any]:
    """The receipt of a needed layer: sha256 of every file before and after, per path."""
    files = {}
    for path in sorted(outcome.changes):
        content = outcome.changes[path]
        files[path] = {
            "before": tree.digest(path),
            "after": None if content is None else content.sha256,
            "ops": outcome.ops.get(path, []),
        }
    carrier = outcome.compiled.get("with")
    return {
        "schema": SCHEMA,
        "layer": layer["name"],
        **({"compiled_with": carrier} if carrier not in (None, layer["name"]) else {}),
        "layer_digest": layer_digest(layer),
        "variant": outcome.variant,
        "sequence": sequence,
        "env": outcome.env,
        "serve_flags": outcome.serve_flags,
        "moe_serve_flags": outcome.moe_serve_flags,
        "files": files,
    }


def receipt_bytes(receipt: Mapping[str, Any]) -> bytes:
    """A receipt as it is written: readable, sorted, with a final newline."""
    return json.dumps(receipt, indent=1, sort_keys=True).encode() + b"\n"


def receipt_path(layer: str) -> str:
    """Where a layer's receipt lies below site-packages."""
    return f"{RECEIPTS}/{layer}.json"


# ------------------------------------------------------------------------------ writing a real tree


def say(message: str) -> None:
    """Talk goes to stderr; stdout is for data."""
    print(message, file=sys.stderr, flush=True)


class Store:
    """The one place that writes a real site-packages directory.

    A change is journalled: originals are moved to ``.spark-build/backup`` and new files, staged
    beforehand, are renamed into place.  An interruption rolls back at once; a kill is rolled back
    by the next command.  Use it as a context manager: it holds the directory's lock.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = root / STATE_DIR
        self._lock: Any = None

    def __enter__(self) -> Store:
        try:
            taken = any(self._take_lock() for _ in range(100))
        except BlockingIOError:
            taken = False
        except OSError as error:
            raise ApplyError(
                f"{self.root}: cannot write ({error.strerror}: {error.filename})", EXIT_USAGE
            ) from error
        if not taken:
            raise ApplyError(
                f"{self.root}: another spark-build is writing here",
                EXIT_USAGE,
                "wait for it to end, then run the same command again",
            )
        if (self.state / "journal.json").exists():
            say(f"{self.root}: rolling back a change that was interrupted")
            self._roll_back()
        return self

    def _take_lock(self) -> bool:
        """Lock the directory; False when the lock was one that its last holder took away.

        Between making the folder, opening the file in it and locking it, another process may
        remove both (see :meth:`__exit__`); a lock on a removed file would keep nobody out.
        """
        import fcntl

        with contextlib.suppress(FileExistsError):
            self.state.mkdir()
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            lock = stack.enter_context(open(self.state / "lock", "w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(self.state / "lock")):
                stack.pop_all()
                self._lock = lock
                return True
        return False

    def __exit__(self, *exc: object) -> None:
        shutil.rmtree(self.state / "stage", ignore_errors=True)
        if not (self.state / "receipts").is_dir():
            with contextlib.suppress(OSError):
                self._clear()
                (self.state / "lock").unlink()  # last: from now on another process may be in here
                self.state.rmdir()
        self._lock.close()

    def _clear(self) -> None:
        """Empty our folder, but for the lock."""
        for name in os.listdir(self.state):
            path = self.state / name
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif name != "lock":
                path.unlink()

    # -- apply

    def commit(self, layer: Layer, outcome: Outcome) -> dict[str, Any]:
        """Write a needed layer's changes and its receipt, or nothing at all.

        Raises:
            ApplyError: the disk is full or a file cannot be written; the tree is as it was.
        """
        tree = DirTree(self.root)
        receipts = receipts_of(tree)
        number = 1 + max((r["sequence"] for r in receipts), default=0)
        receipt = make_receipt(layer, outcome, tree, number)
        previous = next((r for r in receipts if r["layer"] == layer["name"]), None)
        changes: Changes = dict(outcome.changes)
        ours = {entry.get("made") for r in receipts for entry in r["files"].values()}
        for path, entry in receipt["files"].items():
            if entry["before"] is None:
                entry["made"] = self._first_missing(path, ours)
            else:
                entry.update(self._facts(path))
        if previous is not None:
            _keep_originals(receipt, previous["files"], tree)
        changes[receipt_path(layer["name"])] = Content.of(receipt_bytes(receipt))
        merged: dict[str, str] = {}
        for earlier in [*(r for r in receipts if r is not previous), receipt]:
            merged.update(earlier["env"])
        if merged:
            changes[ENV_PTH] = Content.of(env_pth(merged))
        self._write(changes)
        return receipt

    def _first_missing(self, path: str, ours: Iterable[str | None] = ()) -> str | None:
        """The topmost part of a path that is not there, or that other layers made."""
        parts = path.split("/")
        above = ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        return next((p for p in above if p in ours or not os.path.lexists(self.root / p)), None)

    def _facts(self, path: str) -> dict[str, Any]:
        """What a file is besides its bytes, to put it back as it was."""
        target = self.root / path
        info = target.stat()
        facts = {"mode": stat.S_IMODE(info.st_mode), "mtime_ns": info.st_mtime_ns}
        return {**facts, "link": os.readlink(target)} if target.is_symlink() else facts

    def _write(self, changes: Changes) -> None:
        stage = self.state / "stage"
        shutil.rmtree(stage, ignore_errors=True)
        staged: dict[str, Path] = {}
        try:
            stage.mkdir(parents=True)
            (self.state / "backup").mkdir(exist_ok=True)
            for number, (path, content) in enumerate(sorted(changes.items())):
                if content is not None:
                    staged[path] = stage / str(number)
                    staged[path].write_bytes(content.read())
                    staged[path].chmod(content.mode)
            self._swap(changes, staged)
        except BaseException as error:
            if (self.state / "journal.json").exists():
                self._roll_back()
            shutil.rmtree(stage, ignore_errors=True)
            if isinstance(error, OSError):
                raise ApplyError(
                    f"{self.root}: cannot write ({error.strerror}: {error.filename}); "
                    "nothing was changed",
                    EXIT_USAGE,
                ) from error
            raise

    def _swap(self, changes: Changes, staged: Mapping[str, Path]) -> None:
        tree = DirTree(self.root)
        journal: list[dict[str, Any]] = []
        held = set(os.listdir(self.state / "backup"))
        for path in sorted(changes):
            digest = tree.digest(path)
            entry: dict[str, Any] = {"path": path, "backup": digest}
            if digest is None:
                entry["made"] = self._first_missing(path)
            else:
                entry.update(self._facts(path), moves=digest not in held)
                held.add(digest)
            journal.append(entry)
        self._put("journal.json", json.dumps(journal).encode())
        for entry in journal:
            target = self.root / entry["path"]
            if entry["backup"] is not None:
                kept = self.state / "backup" / entry["backup"]
                if entry["moves"] and "link" in entry:
                    shutil.copyfile(target, kept)
                elif entry["moves"]:
                    target.rename(kept)
                if entry["path"] not in staged:
                    target.unlink(missing_ok=True)
            if entry["path"] in staged:
                target.parent.mkdir(parents=True, exist_ok=True)
                staged[entry["path"]].replace(target)
        for path in changes:
            if path not in staged:
                prune((self.root / path).parent, self.root)
        (self.state / "journal.json").unlink()

    def _put(self, name: str, data: bytes) -> None:
        partial = self.state / f"{name}.part"
        with open(partial, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(self.state / name)

    def _roll_back(self) -> None:
        journal = json.loads((self.state / "journal.json").read_bytes())
        for entry in reversed(journal):
            target = self.root / entry["path"]
            if entry["backup"] is not None:
                kept = self.state / "backup" / entry["backup"]
                if kept.exists() and entry["moves"] and "link" not in entry:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    kept.replace(target)  # no copy: the disk may be full
                elif kept.exists() or "link" in entry:
                    self._restore(entry["path"], entry["backup"], entry)
            elif entry["made"] is not None:
                made = self.root / entry["made"]
                if made.is_dir():
                    shutil.rmtree(made)
                else:
                    made.unlink(missing_ok=True)
        (self.state / "journal.json").unlink()

    def _restore(self, path: str, digest: str, facts: Mapping[str, Any]) -> None:
        """Put a file from the backup in its place, with its mode and time."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".spark-build")
        partial.unlink(missing_ok=True)
        if "link" in facts:
            partial.symlink_to(facts["link"])
        else:
            shutil.copyfile(self.state / "backup" / digest, partial)
            partial.chmod(facts.get("mode", 0o644))
            if "mtime_ns" in facts:
                os.utime(partial, ns=(facts["mtime_ns"], facts["mtime_ns"]))
        partial.replace(target)

    # -- revert

    def revert(self, names: Sequence[str] | None, force: bool = False) -> list[str]:
        """Put back the exact bytes from before the named layers (all, when None).

        Returns the layers reverted, last applied first.

        Raises:
            ApplyError: a file was edited since, or a layer that stays built on one that goes.
        """
        receipts = receipts_of(DirTree(self.root))
        going = [r for r in receipts if names is None or r["layer"] in names]
        staying = [r for r in receipts if r not in going]
        self._refuse_entangled(going, staying)
        self._refuse_edited(going, receipts, force)
        self._refuse_lost(going)
        for receipt in reversed(going):
            self._put_back(receipt)
        merged: dict[str, str] = {}
        for receipt in staying:
            merged.update(receipt["env"])
        if merged:
            self._put("env.pth", env_pth(merged))
            (self.state / "env.pth").replace(self.root / ENV_PTH)
        else:
            (self.root / ENV_PTH).unlink(missing_ok=True)
        if not staying:
            self._clear()
        return [r["layer"] for r in reversed(going)]

    @staticmethod
    def _refuse_entangled(going: Sequence[Any], staying: Sequence[Any]) -> None:
        for gone in going:
            for kept in staying:
                pair = (gone, kept), (kept, gone)
                if any(one.get("compiled_with") == other["layer"] for one, other in pair):
                    raise ApplyError(
                        f"layers {gone['layer']} and {kept['layer']} are compiled into one "
                        f"companion, so {gone['layer']} cannot go alone",
                        EXIT_DRIFT,
                        f"revert {kept['layer']} too",
                    )
                both = set(gone["files"]) & set(kept["files"])
                if kept["sequence"] > gone["sequence"] and both:
                    raise ApplyError(
                        f"layer {kept['layer']} was applied on top of {gone['layer']} "
                        f"({min(both)}), so {gone['layer']} cannot go alone",
                        EXIT_DRIFT,
                        f"revert {kept['layer']} too",
                    )

    def _refuse_edited(self, going: Sequence[Any], receipts: Sequence[Any], force: bool) -> None:
        tree = DirTree(self.root)
        for receipt in going:
            edited = [] if force else unexplained(receipt, receipts, tree)
            # a revert that was interrupted has put some of them back already
            edited = [p for p in edited if tree.digest(p) != receipt["files"][p]["before"]]
            if edited:
                raise ApplyError(
                    f"{edited[0]} was changed after layer {receipt['layer']} was applied; "
                    "reverting would lose that",
                    EXIT_DRIFT,
                    "look at the file, then use --force to put the original back all the same",
                )

    def _refuse_lost(self, going: Sequence[Any]) -> None:
        tree, backup = DirTree(self.root), DirTree(self.state / "backup")
        for receipt in going:
            for path, entry in receipt["files"].items():
                before = entry["before"]
                needed = before is not None and tree.digest(path) != before
                if needed and backup.digest(before) != before:
                    raise ApplyError(
                        f"the original of {path} is lost or damaged in {backup.root}",
                        EXIT_DRIFT,
                        f"install {path.split('/')[0]} again",
                    )

    def _put_back(self, receipt: Mapping[str, Any]) -> None:
        for path, entry in receipt["files"].items():
            target = self.root / path
            if entry["before"] is None:
                target.unlink(missing_ok=True)
                made = self.root / (entry.get("made") or path)
                drop_empty(target.parent, made.parent)
                continue
            tree = DirTree(self.root)
            same_bytes = tree.digest(path) == entry["before"]
            if not same_bytes or tree.mode(path) != entry.get("mode", tree.mode(path)):
                self._restore(path, entry["before"], entry)
            for stale in stale_pyc(DirTree(self.root), path):
                if stale not in receipt["files"]:
                    (self.root / stale).unlink(missing_ok=True)
        (self.root / receipt_path(receipt["layer"])).unlink()


def _keep_originals(
    receipt: dict[str, Any], older: Mapping[str, Mapping[str, Any]], tree: Tree
) -> None:
    """What an older form of the same layer changed, and is still so, is this receipt's too.

    Files that somebody else has put in place since (a package manager, say) are theirs.
    """
    files = receipt["files"]
    for path, entry in older.items():
        now = files.get(path)
        if now is None and tree.digest(path) == entry["after"]:
            files[path] = dict(entry)
        elif now is not None and now["before"] == entry["after"]:
            files[path] = {**entry, "after": now["after"], "ops": now["ops"]}
    receipt["files"] = dict(sorted(files.items()))


def prune(directory: Path, root: Path) -> None:
    """Remove a directory and its parents up to ``root`` while they are empty.

    An empty package directory would still be importable, as a namespace package.
    """
    while directory != root:
        try:
            directory.rmdir()
        except OSError:
            return
        directory = directory.parent


def env_pth(env: Mapping[str, str]) -> bytes:
    """A ``.pth`` line that gives every Python process of this environment its defaults.

    A mod cannot export a variable into a server that starts later, and a virtual environment has
    no image ENV; this reaches both.  A variable that is set anyway wins.
    """
    pairs = repr(dict(sorted(env.items())))
    return f"import os; [os.environ.setdefault(k, v) for k, v in {pairs}.items()]\n".encode()


def final_digests(receipts: Iterable[Mapping[str, Any]]) -> dict[str, str | None]:
    """What every file of some receipts is after the last of them; None for one that is gone."""
    final: dict[str, str | None] = {}
    for receipt in receipts:
        final.update({path: entry["after"] for path, entry in receipt["files"].items()})
    return final


def leftovers(tree: Tree, final: Mapping[str, str | None]) -> list[str]:
    """What a copy of new files leaves behind: removed files, and compiled files of changed ones."""
    gone = [path for path, digest in final.items() if digest is None]
    for path in list(gone):
        folder, _, name = path.rpartition("/")
        if name == "METADATA" and distribution_of(folder):  # what an installer added goes too
            gone.extend(f"{folder}/{left}" for left in tree.children(folder))
    for path in final:
        gone.extend(stale_pyc(tree, path))
    return sorted(set(gone))


def finish(root: Path) -> list[str]:
    """Complete an image into which ready files were copied; gives the paths taken away.

    A copy cannot delete: this removes the files that receipts say are gone and compiled files of
    modules that changed, and then checks every other file of every receipt.

    Raises:
        ApplyError: a file is not what its receipt says, so the copy went wrong.
    """
    tree = DirTree(root)
    receipts = receipts_of(tree)
    if not receipts:
        raise ApplyError(f"{root} holds no receipts: nothing was copied here", EXIT_USAGE)
    final = final_digests(receipts)
    removed = []
    for path in leftovers(tree, final):
        target = root / path
        if target.is_file():
            target.unlink()
            removed.append(path)
            drop_empty(target.parent, root)
    wrong = [path for path, digest in final.items() if tree.digest(path) != digest]
    if wrong:
        raise ApplyError(f"{len(wrong)} files are not what their receipt says: {wrong[0]}")
    _restore_owners(Path(__file__).with_name("folders.json"))
    return removed


def _restore_owners(listing: Path) -> None:
    """Give folders and files that a copy made root's their mode and owner back."""
    if not listing.is_file():
        return
    for path, (mode, uid, gid) in json.loads(listing.read_bytes()).items():
        if os.path.exists(path):
            os.chown(path, uid, gid)
            os.chmod(path, mode)


def drop_empty(directory: Path, root: Path) -> None:
    """Remove a directory and its parents up to ``root`` while nothing but caches is left."""
    while directory != root:
        cache = directory / "__pycache__"
        if cache.is_dir() and not any(directory.glob("*.py")):
            shutil.rmtree(cache)
        try:
            directory.rmdir()
        except OSError:
            return
        directory = directory.parent


def apply_layers(
    root: Path,
    layers: Sequence[Layer],
    sources: Sources,
    target: Target,
    report: Callable[[Outcome], None] = lambda _outcome: None,
) -> list[Outcome]:
    """Judge all layers, refuse if one cannot go on, then commit those that are needed.

    Raises:
        ApplyError: a layer drifted, is ambiguous or needs a rebuild; nothing was written.
    """
    with Store(root) as store:
        tree = DirTree(root)
        env = {**os.environ, **env_of(tree)}
        judged = list(judge_in_order(layers, tree, sources, target, env))
        for step in judged:
            report(step.outcome)
        for step in judged:
            refuse(step.outcome)
        for step in judged:
            if step.outcome.state == NEEDED:
                store.commit(step.layer, step.outcome)
    return [step.outcome for step in judged]


def env_of(tree: Tree) -> dict[str, str]:
    """Variables that receipts in the tree say are set."""
    merged: dict[str, str] = {}
    for receipt in receipts_of(tree):
        merged.update(receipt["env"])
    return merged


def refuse(outcome: Outcome) -> None:
    """Raise for the states that stop a build, with the exit code of each.

    Raises:
        ApplyError: the state is drift, ambiguous or needs-rebuild.
    """
    if outcome.state in (DRIFT, AMBIGUOUS):
        raise ApplyError(
            f"layer {outcome.layer}: {outcome.state}: {outcome.reason}",
            EXIT_DRIFT,
            f"spark-build layers show {outcome.layer}",
        )
    if outcome.state == NEEDS_REBUILD:
        hint = "spark-build image --compile, on a machine with g++" if outcome.compiled else ""
        raise ApplyError(
            f"layer {outcome.layer}: needs a rebuild: {outcome.reason}", EXIT_REBUILD, hint
        )


# --------------------------------------------------------------------------- command line, for mods


def find_site_packages() -> Path:
    """The site-packages directory of this interpreter that holds vLLM.

    Raises:
        ApplyError: vLLM is not installed for this interpreter.
    """
    candidates = [os.environ.get("VLLM_SITE_PACKAGES", ""), *sys.path]
    for candidate in candidates:
        root = Path(candidate)
        if candidate and any(root.glob("vllm-*.dist-info/METADATA")):
            return root.resolve()
    raise ApplyError(
        f"vllm is not installed for {sys.executable}",
        EXIT_MISSING,
        "set VLLM_SITE_PACKAGES to the directory that holds it",
    )


def _main_apply(options: argparse.Namespace, bundle: Mapping[str, Any], root: Path) -> None:
    def report(outcome: Outcome) -> None:
        say(f"  {outcome.state:<15}{outcome.layer}: {outcome.reason}")
        for note in outcome.notes if outcome.state == NEEDED else []:
            say(f"  {'':<15}note: {note}")

    layers = bundle["layers"]
    sources = IndexSources(cache=Path(options.cache) if options.cache else None)
    say(f"spark-build: {bundle['name']}, {len(layers)} layers, on {root}")
    packages = versions(DirTree(root))
    if not all_match(bundle["needs"], packages):
        wanted = ", ".join(f"{name} {spec}" for name, spec in bundle["needs"].items())
        raise ApplyError(
            f"{bundle['name']} needs {wanted}, this is vllm {packages.get('vllm')}: "
            f"{bundle['needs_reason']}",
            EXIT_USAGE,
        )
    outcomes = apply_layers(root, layers, sources, Target.here(), report)
    for name, value in env_of(DirTree(root)).items():
        if os.environ.get(name, value) != value:
            say(f"warning: {name}={os.environ[name]} is set here and wins over {value}")
        say(f"  default        {name}={value}  (by {ENV_PTH}, for every Python that starts here)")
    flags = [flag for outcome in outcomes for flag in outcome.serve_flags]
    moe = [flag for outcome in outcomes for flag in outcome.moe_serve_flags]
    if flags:
        say(f"  start vLLM with: {' '.join(flags)}")
    if moe:
        say(f"  and, for MoE models whose experts it supports: {' '.join(moe)}")


def _read_bundle(path: str | None) -> dict[str, Any]:
    if path is None:
        raise ApplyError("no layers named", EXIT_USAGE, "--layers layers.json")
    try:
        bundle: dict[str, Any] = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise ApplyError(f"{path} cannot be read: {error}", EXIT_USAGE) from None
    return bundle


def main(argv: Sequence[str] | None = None) -> int:
    """``spark_apply.py apply|revert|status|finish [--layers FILE] [--root DIR]``."""
    parser = argparse.ArgumentParser(description="apply spark-build layers to site-packages")
    parser.add_argument("command", choices=("apply", "revert", "status", "finish"))
    parser.add_argument("--layers", help="bundle: JSON object with the rendered layers")
    parser.add_argument("--root", help="site-packages directory (default: where vLLM is)")
    parser.add_argument("--cache", help="directory for downloaded wheels")
    options = parser.parse_args(argv)
    try:
        root = Path(options.root) if options.root else find_site_packages()
        if options.command == "finish":
            say(f"spark-build: {len(finish(root))} files taken away, the others are as recorded")
            return 0
        bundle = _read_bundle(options.layers) if options.command != "status" else {}
        if options.command == "apply":
            _main_apply(options, bundle, root)
        elif options.command == "revert":
            with Store(root) as store:
                for name in store.revert([layer["name"] for layer in bundle["layers"]]):
                    say(f"  reverted       {name}")
        else:
            for receipt in receipts_of(DirTree(root)):
                print(f"{receipt['layer']}\t{receipt['variant']}\t{len(receipt['files'])} files")
    except ApplyError as error:
        say(f"error: {error}")
        if error.hint:
            say(f"  try: {error.hint}")
        return error.code
    except KeyboardInterrupt:
        say("interrupted; the layer in progress was rolled back")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
