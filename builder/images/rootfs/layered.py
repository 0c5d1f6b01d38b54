"""An image that is open without a Docker Engine: its files are read from its layers."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.errors import UsageError
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import blobs
from builder.images.rootfs.image import LayerCache
from builder.images.rootfs.tar import DIR, FILE
from builder.images.rootfs.view import Rootfs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from builder.images.rootfs.image import Image
    from builder.images.rootfs.view import Entry

#: Folders of spark-build's files (``engines/metadata.py``), whose links identification looks up.
_KNOWN = ("/usr/local/bin", "/usr/share")


@dataclass(frozen=True)
class InLayers:
    """An open image in a registry or a layout: its files are read from its layers."""

    image: Image
    view: Rootfs

    in_engine = False
    brought = ()

    @property
    def in_layers(self) -> InLayers:
        return self

    @property
    def runs_as(self) -> str:
        source = self.image.source
        return source.name_of(self.image.top.digest) if isinstance(source, LayoutDirectory) else ""

    @property
    def labels(self) -> Mapping[str, str]:
        return self.image.config.labels

    @property
    def env(self) -> Mapping[str, str]:
        return self.image.config.env

    @property
    def digests(self) -> tuple[str, ...]:
        """Those of its manifest and configuration."""
        return (self.image.manifest.digest, blobs(self.image.manifest)[0].digest)

    def read(self, path: str) -> bytes | None:
        return self.view.read(path)

    def has(self, path: str) -> bool:
        """Reads no layer."""
        return self.view.stat(path) is not None

    def above(self, count: int | None = None) -> Rootfs:
        """The files of the uppermost layers alone: by default, of those above a locked base."""
        count = self.view.above if count is None else count
        layers = self.image.layers
        cache = LayerCache(self.image.source, diff_ids=self.image.diff_ids)
        return Rootfs(layers[len(layers) - (count or 0) :], cache)

    @contextlib.contextmanager
    def _entry(self, path: str) -> Iterator[tuple[Rootfs, str, Entry | None]]:
        """Where a path is.  Of an image on a locked base, only the layers above it are read."""
        view, folder = self.view, path.rpartition("/")[0]
        locked = view.above is not None
        with contextlib.closing(self.above()) if locked else contextlib.nullcontext(view) as files:
            known = folder if not locked or folder not in _KNOWN else view.realpath(folder)
            real = f"{known or folder}/{path.rpartition('/')[2]}"
            yield files, real, files.stat(real)

    def digest(self, path: str) -> str | None:
        """Reads no layer."""
        with self._entry(path) as (_, _, entry):
            return None if entry is None or entry.kind == DIR else entry.row.sha256

    def files_at(self, path: str) -> dict[str, bytes]:
        with self._entry(path) as (files, real, entry):
            if entry is None:
                return {}
            if entry.kind != DIR:
                return {path: files.read(real) or b""}
            real = files.realpath(real) or real
            below = {f"{path}/{name}": f"{real}/{name}" for name, one in files.below(real).items()
                     if one.kind != DIR}  # fmt: skip
            files.fetch(below.values())
            return {name: files.read(place) or b"" for name, place in below.items()}

    def all_files(self, name: str) -> dict[str, bytes]:
        """See `OpenImage`.

        Raises:
            UsageError: it has something other than files and folders, which no overlay has.
            RemoteError: a layer is malformed.
        """
        entries = {f"/{path}": entry.kind for path, entry in self.view.below("/").items()}
        odd = next((path for path, kind in entries.items() if kind not in (FILE, DIR)), None)
        if odd is not None:
            raise UsageError(
                f"{name} is not an overlay of spark-build: {odd} is a {entries[odd]}, and overlays "
                "have only files and folders",
                hint="build it again with spark-build image",
            )
        paths = [path for path, kind in entries.items() if kind == FILE]
        self.view.fetch(paths)
        return {path: self.view.read(path) or b"" for path in paths}

    def close(self) -> None:
        self.view.close()
        self.image.close()
