"""Resolves an image reference (tag to digest, index to platform), and reads its layers' indexes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import IO, TYPE_CHECKING

from builder.applier.files import read_regular
from builder.common.cache import locked
from builder.common.console import console, counted, megabytes
from builder.common.files import write_atomically
from builder.common.hints import CACHE, os_hint
from builder.common.leftovers import keep_latest, making
from builder.common.paths import cache_dir
from builder.common.plan import Platform
from builder.common.reference import Ref
from builder.errors import RemoteError, UsageError
from builder.images.registry.model import (
    DOCKER_CONFIG,
    OCI_CONFIG,
    attests,
    blobs,
    check_entry,
    check_entry_platform,
    entries,
    is_index,
    parse_config,
    platform_name,
    sha256_digest,
)
from builder.images.rootfs import limits
from builder.images.rootfs.index import VERSION, LayerIndex, LayerWriter, Row, scan
from builder.images.rootfs.tar import FILE, GZIP, TAR, ZSTD, LayerTar, Unpacked

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from builder.common.console import Bar
    from builder.images.registry.copy import Locations
    from builder.images.registry.model import Descriptor, ImageConfig, ImageSource, RawManifest


# ------------------------------------------------------------------------------- indexes of layers
#
# A layer is read as a stream, and never kept as a whole.

_OCI_LAYER, _DOCKER = "application/vnd.oci.image.layer", "application/vnd.docker.image.rootfs"
#: The compression of each media type of a layer (OCI image specification, "Layer"; Docker's types
#: as containerd knows them, ``core/images/mediatypes.go``).
LAYER_FORMS = {
    **{f"{_OCI_LAYER}{kind}.v1.tar{end}": form
       for kind in ("", ".nondistributable")
       for end, form in (("", TAR), ("+gzip", GZIP), ("+zstd", ZSTD))},
    f"{_DOCKER}.diff.tar": TAR,
    f"{_DOCKER}.diff.tar.gzip": GZIP,
    f"{_DOCKER}.diff.tar.zstd": ZSTD,
    f"{_DOCKER}.foreign.diff.tar": TAR,
    f"{_DOCKER}.foreign.diff.tar.gzip": GZIP,
}  # fmt: skip
#: Size limit of indexes in the cache; the least recently used are removed first.
_CACHE_BYTES = 4 << 30
#: Layers read in parallel, and the size of a layer that takes noticeable time.
_JOBS = 3
_WORTH_SAYING = 50_000_000


@dataclass
class Meter:
    """Counts of compressed bytes and layers read."""

    packed: int = 0
    layers: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, packed: int) -> None:
        """Add to the counts; thread-safe."""
        with self._lock:
            self.packed += packed


class _Counted:
    """Counts the bytes read from a blob, and stops when the work is cancelled."""

    def __init__(
        self, stream: IO[bytes], meter: Meter, stop: threading.Event, bar: Bar | None = None
    ) -> None:
        self._stream, self._meter, self._stop, self._bar = stream, meter, stop, bar

    def read(self, size: int) -> bytes:
        if self._stop.is_set():
            raise RemoteError("reading was cancelled")
        data = self._stream.read(size)
        self._meter.add(len(data))
        if self._bar is not None:
            self._bar.advance(len(data))
        return data


class LayerCache:
    """Layer indexes, created on first use."""

    def __init__(
        self,
        source: ImageSource,
        meter: Meter | None = None,
        diff_ids: Mapping[str, str] | None = None,
    ) -> None:
        """``diff_ids`` are those of the configuration, by layer digest; they are checked."""
        self.source = source
        self._diff_ids = diff_ids or {}
        self.meter = meter or Meter()
        self._root = cache_dir() / "layers"
        self._known: dict[Path, LayerIndex] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: dict[str, Future[None]] = {}
        self._stop = threading.Event()

    def _path(self, layer: Descriptor) -> Path:
        return self._root / f"{layer.digest.removeprefix('sha256:')}.v{VERSION}.sqlite"

    def index(self, layer: Descriptor) -> LayerIndex:
        """The index of a layer, from the cache or from its stream.

        Raises:
            RemoteError: the layer cannot be read, is damaged, exceeds a limit, or does not
                match its diff_id.
            UsageError: the cache cannot be written.
        """
        path = self._path(layer)
        if layer.digest in self._ahead:
            self._ahead.pop(layer.digest).result()
        index = self._open(path)
        if index is None:
            self._make(layer)
            index = LayerIndex(path)
        try:
            self._check(layer, *index.unpacked())
        except BaseException:
            index.close()
            raise
        return index

    def _check(self, layer: Descriptor, diff_id: str, form: str) -> None:
        stated = LAYER_FORMS.get(layer.media_type, form)
        if form and form != stated:
            raise RemoteError(
                f"{self.source.name}: layer {layer.digest[:19]} is packed as {form}, but its type "
                f"is {layer.media_type}; some runtimes would not unpack it",
                hint="use another image, or rebuild this one",
            )
        of_config = self._diff_ids.get(layer.digest, "")
        if of_config and diff_id and of_config != diff_id:
            raise RemoteError(
                f"{self.source.name}: layer {layer.digest[:19]} unpacks to {diff_id}, but the "
                f"image's configuration says {of_config}; no runtime would accept it",
                hint="use another image, or rebuild this one",
            )

    def knows(self, layer: Descriptor) -> bool:
        """Whether a layer has been read before."""
        return self._path(layer).is_file()

    def read_ahead(self, layers: Iterable[Descriptor]) -> None:
        """Start to read several layers in parallel; ``index`` waits for them."""
        for layer in layers:
            if not self.knows(layer) and layer.digest not in self._ahead:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(_JOBS, thread_name_prefix="layer")
                self._ahead[layer.digest] = self._pool.submit(self._make, layer)

    def _make(self, layer: Descriptor) -> None:
        path = self._path(layer)
        with locked(f"layer {layer.digest}"):
            if not path.is_file():
                self._scan(layer, path)

    def content(self, layer: Descriptor, sha256: str) -> bytes | None:
        """The stored bytes of a file of an indexed layer; reads no layer."""
        path = self._path(layer)
        index = self._known.get(path) or self._open(path)
        if index is None:
            return None
        self._known[path] = index
        return index.content(sha256)

    def close(self) -> None:
        """Close the cache's files, and stop reading ahead."""
        self._stop.set()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for index in self._known.values():
            index.close()
        self._known.clear()

    @staticmethod
    def _open(path: Path) -> LayerIndex | None:
        if not path.is_file():
            return None
        try:
            index = LayerIndex(path)
        except sqlite3.DatabaseError:  # damaged, so it is made again
            path.unlink()
            return None
        os.utime(path)
        return index

    def _scan(self, layer: Descriptor, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            keep_latest(path.parent.glob("*.sqlite"), most_bytes=_CACHE_BYTES)
            title, is_large = f"reading layer {layer.digest[:19]}", layer.size > _WORTH_SAYING
            with making(path) as partial:
                with (
                    contextlib.closing(LayerWriter(partial)) as writer,
                    console.progress(title, layer.size, leaves_line=is_large) as bar,
                ):
                    writer.finish(*self._read(layer, writer, bar))
                partial.replace(path)
        except (sqlite3.OperationalError, OSError) as error:
            raise UsageError(
                f"cannot cache the contents of layer {layer.digest[:19]} in {path.parent}: {error}",
                hint=os_hint(error, CACHE),
            ) from error

    def _read(self, layer: Descriptor, writer: LayerWriter, bar: Bar) -> tuple[str, str]:
        """Read a whole layer; returns the digest of its tar, and how the blob is packed."""
        where = f"{self.source.name}: layer {layer.digest[:19]}"
        self.meter.layers.append(layer.digest)
        with self.source.open(layer) as blob:
            counted_blob = _Counted(blob, self.meter, self._stop, bar)
            stream = Unpacked(counted_blob, where, hashed=True)
            scan(stream, writer, where)
            return stream.finish(), stream.form

    def fetch(self, layer: Descriptor, wanted: Collection[Row]) -> None:
        """Store the bytes of some files of a layer, checked against their sha256.

        Raises:
            RemoteError: the layer cannot be read, or no longer has the files.
        """
        missing = {row.path: row for row in wanted}
        where = f"{self.source.name}: layer {layer.digest[:19]}"
        index = LayerIndex(self._path(layer))
        title = f"reading {counted(len(missing), 'file')} of layer {layer.digest[:19]}"
        console.detail(title)
        with (
            contextlib.closing(index),
            self.source.open(layer) as blob,
            console.progress(title, layer.size, leaves_line=False) as bar,
        ):
            tar = LayerTar(Unpacked(_Counted(blob, self.meter, self._stop, bar), where), where)
            for member in tar:
                row = missing.get(member.path)
                if row is None or member.kind != FILE:
                    continue
                if member.size > limits.FILE_BYTES:
                    raise RemoteError(f"{where}: {member.path} has {megabytes(member.size)}")
                data = b"".join(tar.chunks())
                if hashlib.sha256(data).hexdigest() != row.sha256:
                    continue  # a later entry replaces this one
                index.keep(row.sha256, data)
                del missing[member.path]
                if not missing:
                    return
        raise RemoteError(f"{where}: {min(missing)} has changed")

    def copy(self, layer: Descriptor, row: Row, out: IO[bytes]) -> None:
        """Stream one file of a layer to ``out``; only its sha256 is stored.

        Raises:
            RemoteError: the layer cannot be read, or no longer has the file.
        """
        where = f"{self.source.name}: layer {layer.digest[:19]}"
        console.say(f"  reading /{row.path} ({megabytes(row.size)}) out of {where}")
        title = f"reading layer {layer.digest[:19]}"
        with (
            self.source.open(layer) as blob,
            console.progress(title, layer.size, leaves_line=False) as bar,
        ):
            tar = LayerTar(Unpacked(_Counted(blob, self.meter, self._stop, bar), where), where)
            for member in tar:
                if member.path != row.path or member.kind != FILE:
                    continue
                hasher = hashlib.sha256()
                for chunk in tar.chunks():
                    hasher.update(chunk)
                    out.write(chunk)
                if hasher.hexdigest() == row.sha256:
                    return
                out.seek(0)  # a later entry replaces this one
                out.truncate()
        raise RemoteError(f"{where}: {row.path} has changed")


# ------------------------------------------------------------------------------------------ images

#: The label for the base image's name (OCI image specification, annotations).
BASE_NAME = "org.opencontainers.image.base.name"
#: Limit of nested indexes.
_NESTING = 4
#: The default platform for an index with several: a DGX Spark's.
PREFERRED = "linux/arm64"


class OtherPlatform(UsageError):
    """The image does not exist for the requested platform."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """One platform's image.  ``top`` is the manifest or index that the reference names."""

    source: ImageSource
    top: RawManifest
    manifest: RawManifest
    config: ImageConfig
    #: open connections to its registry, for reuse
    locations: Locations | None = None
    close: Callable[[], None] = lambda: None

    @property
    def layers(self) -> tuple[Descriptor, ...]:
        """Layer descriptors, bottom first."""
        return blobs(self.manifest)[1:]

    @property
    def diff_ids(self) -> dict[str, str]:
        """The diff_id of each layer, by the layer's digest."""
        ids = self.config.diff_ids or ()
        return {layer.digest: diff_id for layer, diff_id in zip(self.layers, ids, strict=True)}


def open_image(ref: Ref, platform: str | None = None) -> Image:
    """The image that ``docker://HOST/NAME:TAG``, ``HOST/NAME:TAG`` or ``oci:DIR[:NAME]`` names.

    Raises:
        RemoteError: it does not exist, or it is malformed.
        UsageError: the reference is malformed, or has no image for the platform.
    """
    from builder.images.registry.copy import Locations
    from builder.images.registry.layout import LayoutDirectory

    locations = Locations()
    location = locations.open(ref)
    if isinstance(location.image, LayoutDirectory) and not location.image.path.is_dir():
        raise UsageError(f"{location.image.path} is not an OCI layout: there is no such folder")
    try:
        image = find_image(location.image, location.reference, platform)
    except BaseException:
        locations.__exit__(None, None, None)
        raise
    close = partial(locations.__exit__, None, None, None)
    return replace(_with_base(image, locations), locations=locations, close=close)


def _with_base(image: Image, locations: Locations) -> Image:
    """A thin layout (``image --thin``) together with the registry that has the base's layers."""
    from builder.images.registry.layout import FallbackSource, LayoutDirectory

    layout = image.source
    name = image.config.labels.get(BASE_NAME)
    if not isinstance(layout, LayoutDirectory) or not name:
        return image
    if all(layout.has(layer.digest) for layer in image.layers):
        return image
    return replace(image, source=FallbackSource(layout, locations.open(Ref(name)).image))


def find_image(source: ImageSource, identifier: str, platform: str | None) -> Image:
    """Resolve a tag or digest to the image for a platform (``linux/arm64``).

    Raises:
        RemoteError: it does not exist, or it is malformed.
        UsageError: it has no image for the platform, or several without a requested platform.
    """
    top = source.manifest(identifier)
    manifest = top
    chosen: list[tuple[Descriptor, str]] = []
    for _ in range(_NESTING):
        if not is_index(manifest):
            config = read_config(source, manifest)
            for entry, where in chosen:
                check_entry_platform(entry, config, where)
            _check_platform(source, identifier, config, platform)
            return Image(source=source, top=top, manifest=manifest, config=config)
        where = f"{source.name}: index {manifest.digest}"
        entry = _choose(source, manifest, platform)
        chosen.append((entry, where))
        manifest = source.manifest(entry.digest)
        check_entry(entry, manifest, where)
    raise RemoteError(f"{source.name}: {identifier} is an index nested too deeply")


def subjects(index: RawManifest) -> list[Descriptor]:
    """The entries of an index that are images, without attestations."""
    return [entry for entry in entries(index) if not attests(entry)]


def image_entries(index: RawManifest) -> list[Descriptor]:
    """The same, for Linux only."""
    return [e for e in subjects(index) if (e.platform.get("os") or "linux").lower() == "linux"]


def _check_platform(
    source: ImageSource, identifier: str, config: ImageConfig, platform: str | None
) -> None:
    """Refuse an image for another platform than requested."""
    has = platform_name({"os": "linux", **config.platform})
    if platform is not None and has != Platform.parse(platform).oci:
        raise OtherPlatform(
            f"{source.name}: {identifier} is for {has}, not for {platform}",
            hint="omit --platform to use it as it is",
        )
    system = config.platform.get("os", "linux")
    if system != "linux":
        raise RemoteError(f"{source.name}: {identifier} is for {system[:40]!r}, not for Linux")


def platform_of(entry: Descriptor) -> str:
    """``linux/arm64``, with the variant if it is not the default."""
    return platform_name({**entry.platform, "os": "linux"})


def _choose(source: ImageSource, index: RawManifest, platform: str | None) -> Descriptor:
    from builder.common.console import console

    entries = image_entries(index)
    names = ", ".join(sorted({platform_of(entry) for entry in entries})) or "none"
    wanted = Platform.parse(platform or PREFERRED).oci
    if platform is None and len(entries) == 1 and platform_of(entries[0]).count("/") == 1:
        return entries[0]
    fitting = [entry for entry in entries if platform_of(entry) == wanted]
    if not fitting:
        variants = [e.digest for e in entries if platform_of(e).startswith(f"{wanted}/")]
        hint = "choose one with --platform" if platform is None else ""
        if variants:
            hint = f"give that image by its own digest, without --platform: {variants[0]}"
        raise OtherPlatform(f"{source.name} has no image for {wanted}; it has: {names}", hint=hint)
    nameless = [entry for entry in entries if not entry.platform.get("architecture")]
    _refuse_several(source, wanted, fitting, [e for e in nameless if _fits(source, e, wanted)])
    if platform is None:
        console.say(f"  of {names}: {wanted} (--platform chooses another)")
    return fitting[0]


def _refuse_several(
    source: ImageSource, wanted: str, named: Sequence[Descriptor], nameless: Sequence[Descriptor]
) -> None:
    """Refuse an index from which two runtimes may take two images for the same platform.

    Podman prefers ``arm64/v8`` to ``arm64``, containerd takes the first of them, and an entry
    without a platform is chosen by its configuration.

    Raises:
        RemoteError: there are several.
    """
    digests = list(dict.fromkeys(entry.digest for entry in (*named, *nameless)))
    if len(digests) > 1:
        raise RemoteError(
            f"{source.name}: the index has {len(digests)} images for {wanted}, and it depends on "
            f"the runtime which of them it takes: {', '.join(digests[:4])}",
            hint=f"give one by its own digest: {source.name}@{digests[0]}",
        )


def _fits(source: ImageSource, entry: Descriptor, wanted: str) -> bool:
    """Whether a runtime for this platform may take an entry that states none."""
    manifest = source.manifest(entry.digest)
    if is_index(manifest):
        return any(
            platform_of(part) == wanted or not part.platform.get("architecture")
            for part in image_entries(manifest)
        )
    has = read_config(source, manifest).platform
    return platform_name({"os": "linux", **has}) == wanted


def _refuse_unknown(layers: Sequence[Descriptor], where: str) -> None:
    """Refuse layers that no runtime unpacks.

    Raises:
        RemoteError: a layer has a media type that no runtime unpacks.
    """
    for layer in layers:
        if layer.media_type not in LAYER_FORMS:
            raise RemoteError(
                f"{where}: layer {layer.digest[:19]} is of type {layer.media_type[:80]!r}, which "
                "no runtime unpacks",
                hint="use another image, or rebuild this one",
            )


#: Configurations of images in registries that are kept; one has a few kilobytes.
_CONFIGS = 200


def _config_bytes(source: ImageSource, descriptor: Descriptor) -> bytes:
    """The bytes of a configuration; those of a registry are kept by their digest."""
    from builder.images.registry.layout import LayoutDirectory

    path = cache_dir() / "layers" / f"{descriptor.digest.removeprefix('sha256:')}.config"
    if not isinstance(source, LayoutDirectory):
        with contextlib.suppress(OSError):
            data = read_regular(path, descriptor.size)
            if sha256_digest(data) == descriptor.digest and len(data) == descriptor.size:
                os.utime(path)
                return data
    with source.open(descriptor) as stream:
        data = stream.read()
    if not isinstance(source, LayoutDirectory):
        write_atomically(path, data)
        keep_latest(path.parent.glob("*.config"), most=_CONFIGS)
    return data


def read_config(source: ImageSource, manifest: RawManifest) -> ImageConfig:
    """The configuration of an image, whose diff_ids are checked against its layers.

    Raises:
        RemoteError: it is malformed, or not a container image.
    """
    where = f"{source.name}: manifest {manifest.digest}"
    descriptor, *layers = blobs(manifest)
    if descriptor.media_type not in (OCI_CONFIG, DOCKER_CONFIG):
        raise RemoteError(f"{where} is not an image: its config is {descriptor.media_type[:80]!r}")
    if descriptor.size > limits.CONFIG_BYTES:
        raise RemoteError(f"{where}: a configuration of {descriptor.size} bytes")
    if len(layers) > limits.LAYERS:
        raise RemoteError(f"{where}: {len(layers)} layers")
    config = parse_config(_config_bytes(source, descriptor), where)
    _refuse_unknown(layers, where)
    ids = config.diff_ids
    if ids is None or config.document["rootfs"].get("type") != "layers":
        lack = "rootfs.type 'layers'" if ids is not None else "rootfs.diff_ids"
        raise RemoteError(f"{where}: its configuration is not that of an image: no {lack}")
    if len(ids) != len(layers):
        raise RemoteError(f"{where}: {len(layers)} layers, but {len(ids)} diff_ids")
    diff_ids: dict[str, str] = {}
    for layer, diff_id in zip(layers, ids, strict=True):
        if not layer.size:
            raise RemoteError(f"{where}: layer {layer.digest[:19]} is empty, so it is not a tar")
        if diff_ids.setdefault(layer.digest, diff_id) != diff_id:
            raise RemoteError(f"{where}: layer {layer.digest[:19]} has two diff_ids")
    return config
