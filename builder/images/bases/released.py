"""Reads files of an image from the released wheel they come from, if that is cheaper.

The sha256 of every file is known.  A wheel on the package index whose RECORD has the same
one has the same bytes, and reading a file from it costs kilobytes instead of a whole layer.
"""

from __future__ import annotations

from functools import cached_property
from typing import IO, TYPE_CHECKING

from builder.applier.failures import ApplyError
from builder.applier.records import parse_record
from builder.applier.trees import distribution_of
from builder.common.console import console
from builder.common.wheels import RemoteWheel
from builder.errors import SparkBuildError
from builder.images.rootfs.index import is_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from builder.common.model.platform import Platform
    from builder.common.pypi import PackageIndex
    from builder.images.bases.imagetree import FileFacts
    from builder.images.rootfs.view import Rootfs


class ReleasedFiles:
    """Reads from the cache, then from released wheels, then from layers."""

    def __init__(
        self,
        view: Rootfs,
        site: str,
        files: Mapping[str, FileFacts],
        packages: Mapping[str, str],
        platform: Platform,
        index: PackageIndex,
    ) -> None:
        self._view, self._site, self._files = view, site, files
        self._packages, self._platform, self._index = packages, platform, index
        self._wheels: dict[str, RemoteWheel | None] = {}

    def read(self, path: str) -> bytes | None:
        data = self._kept(path)
        if data is None and self._owner(path) is not None:
            data = self._released([path]).get(path)
        if data is None:
            self._fetch([path])
            return self._view.read(path)
        self._view.noted(data)
        return data

    def fetch(self, paths: Iterable[str]) -> None:
        missing = [path for path in paths if self._kept(path) is None]
        found = self._released(missing)
        self._fetch([path for path in missing if path not in found])

    def _fetch(self, paths: Sequence[str]) -> None:
        """Read files from the layers, and cache others that may be needed from the same layers."""
        if any(self._kept(path) is None for path in paths):
            self._view.fetch(paths, self._texts())

    def _texts(self) -> Iterator[str]:
        """Files that should be cached and are not."""
        for path, (size, _, digest) in self._files.items():
            if is_text(path, size) and digest and self._view.content(digest) is None:
                yield f"{self._site}/{path}"

    def copy(self, path: str, out: IO[bytes]) -> bool:
        return self._view.copy(path, out)

    def _kept(self, path: str) -> bytes | None:
        digest = self._digest(path)
        return None if digest is None else self._view.content(digest)

    def _digest(self, path: str) -> str | None:
        entry = self._files.get(path.removeprefix(f"{self._site}/"))
        return None if entry is None else entry[2]

    def _released(self, paths: Iterable[str]) -> dict[str, bytes]:
        """Files that a released wheel has with the same bytes."""
        wanted: dict[str, list[str]] = {}
        for path in paths:
            owner = self._owner(path)
            if owner is not None:
                wanted.setdefault(owner, []).append(path)
        found: dict[str, bytes] = {}
        for name, of_wheel in wanted.items():
            wheel = self._wheel(name)
            same = {path: member for path in of_wheel if (member := self._member(wheel, path))}
            if wheel is None or not same:
                continue
            try:
                wheel.preload(same.values())
                found.update({path: wheel.read(member) for path, member in same.items()})
            except SparkBuildError as error:
                console.detail(f"{error}; reading the layers instead")
        return found

    def _member(self, wheel: RemoteWheel | None, path: str) -> str | None:
        name = path.removeprefix(f"{self._site}/")
        member = wheel.members.get(name) if wheel is not None else None
        return name if member is not None and member.sha256 == self._digest(path) else None

    def _owner(self, path: str) -> str | None:
        """The distribution whose RECORD has this file with these bytes."""
        return self._records.get((path.removeprefix(f"{self._site}/"), self._digest(path) or ""))

    @cached_property
    def _records(self) -> dict[tuple[str, str], str]:
        owners: dict[tuple[str, str], str] = {}
        for path, (_, _, digest) in self._files.items():
            folder, _, name = path.partition("/")
            dist = distribution_of(folder) if name == "RECORD" else None
            if dist is None or self._packages.get(dist.name) != dist.version:
                continue
            for row in parse_record((digest and self._view.content(digest)) or b""):
                owners[row.path, row.sha256 or ""] = dist.name
        return owners

    def _wheel(self, name: str) -> RemoteWheel | None:
        """The release on the package index, or None."""
        if name not in self._wheels:
            try:
                file = self._index.choose(name, self._packages[name], self._platform)
                wheel: RemoteWheel | None = RemoteWheel(file, self._index)
                assert wheel is not None
                console.detail(f"{file.filename}: {len(wheel.members)} files")
            except (SparkBuildError, ApplyError) as error:
                console.detail(f"{name} is not available from the package index: {error}")
                wheel = None
            self._wheels[name] = wheel
        return self._wheels[name]
