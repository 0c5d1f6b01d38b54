"""Copies an image between registries and layouts: only missing blobs, the tag last.

Blobs first, in parallel: mounted where the target can take them from a neighbouring repository,
skipped where it has them, streamed otherwise.  What a registry only says that it has is asked for,
beside the other requests and before any manifest.  Then the manifests, by digest, children before
their index; then the tag.  A failed copy leaves the tag unchanged.
"""

from __future__ import annotations

import contextlib
import io
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self, cast

from builder.common.console import Bar, console
from builder.common.hints import instead
from builder.common.net import CONNECTIONS
from builder.common.shutdown import end_waits
from builder.errors import RemoteError, UsageError
from builder.images.registry.client import Registry, Repository, UploadFailed
from builder.images.registry.layout import FallbackSource, LayoutDirectory
from builder.images.registry.model import blobs, entries, is_index, restrict
from builder.images.registry.reference import (
    Options,
    Traffic,
    is_digest,
    parse_reference,
    refuse_wrong_kind,
)
from builder.images.registry.transport import NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from builder.common.reference import Ref
    from builder.images.registry.model import Descriptor, ImageSource, ImageTarget, RawManifest


# ------------------------------------------------------------------------------ docker:// and oci:


@dataclass(frozen=True, kw_only=True)
class Location:
    """A repository or layout, and the tag, name or digest in it."""

    image: Repository | LayoutDirectory
    reference: str


class Locations:
    """Opens locations, sharing connections per registry, and counts all bytes."""

    def __init__(
        self, options: Options | None = None, check: Callable[[str], None] = lambda _host: None
    ) -> None:
        """``check`` is asked before a host is used for the first time, and raises to refuse it."""
        self._options = options or Options.from_environment()
        self._check = check
        self._registries: dict[str, Registry] = {}
        self.traffic = Traffic()

    def open(self, ref: Ref) -> Location:
        """The location that a user names; sends no request.

        Raises:
            UsageError: it is not a place.
        """
        if ref.in_layout:
            path, name = layout_place(ref)
            return Location(image=LayoutDirectory(path), reference=name)
        refuse_wrong_kind(ref)
        reference = parse_reference(ref.text)
        return Location(
            image=self.registry(reference.host).repository(reference.repository),
            reference=reference.identifier,
        )

    def registry(self, host: str) -> Registry:
        """A registry by the host name used in references."""
        if host not in self._registries:
            self._check(host)
            self._registries[host] = Registry(host, self._options, self.traffic)
        return self._registries[host]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for registry in self._registries.values():
            registry.close()


def layout_place(ref: Ref) -> tuple[Path, str]:
    """The layout's folder and the name or digest in it that ``oci:DIR[:NAME|@DIGEST]`` means.

    A directory that exists is meant as a whole, whatever colons it has.

    Raises:
        UsageError: the reference names no directory.
    """
    text, path, reference = ref.text, ref.place, ""
    if not Path(path).is_dir():
        before, mark, digest = path.rpartition("@")
        if mark and is_digest(digest):
            path, reference = before, digest
        else:
            ends = [at for at, letter in enumerate(path) if letter == ":"]
            end = next((at for at in ends if Path(path[:at]).is_dir()), None)
            if end is None and not (mark and "/" not in digest):
                end = path.find(":") if ":" in path else len(path)
            if end is None or "@" in path[end:]:
                raise UsageError(f"{text!r}: a sha256 digest must follow '@'")
            path, reference = path[:end], path[end + 1 :]
    if not path:
        raise UsageError(f"{text!r} names no directory", hint=instead(text, "oci:DIR"))
    return Path(path), reference


# ------------------------------------------------------------------------------------------ copies

# -------------------------------------------------------------------------------- which blobs exist


def missing_blobs(source: ImageSource, blobs: Iterable[Descriptor]) -> list[Descriptor]:
    """Blobs that cannot be read; several are checked in parallel.

    Nondistributable layers are not expected.

    Raises:
        RemoteError: the registry does not answer.
    """
    asked = [blob for blob in blobs if not blob.foreign]
    with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="ask") as pool:
        there = list(pool.map(source.gives, asked))
    return [blob for blob, present in zip(asked, there, strict=True) if not present]


def refuse_missing(source: ImageSource, blobs: Iterable[Descriptor], hint: str) -> None:
    """Raise an error that names the missing blobs.

    Raises:
        RemoteError: a blob cannot be read.
    """
    if gone := missing_blobs(source, blobs):
        rows = "".join(f"\n  {blob.digest} ({blob.size} bytes)" for blob in gone)
        raise RemoteError(f"{source.name} lacks blobs that its manifest lists:{rows}", hint=hint)


# ----------------------------------------------------------------------------------------- the copy


#: Blobs that are streamed at once.  Each holds one chunk of an upload in memory.
_STREAMS = 3
#: Bytes up to which a blob is sent to a registry that does not say in one request whether it has
#: it: at 10 Mbit/s as long as two more requests on a slow line, 0.2 s.  The files of spark-build
#: in an image have 140 kB.
_LITTLE = 256 << 10
#: Restarts of a blob whose upload the registry lost.
_BEGINNINGS = 5
#: Limits: manifests in one image, nested indexes included, and their depth.
_MANIFEST_LIMIT = 1000
_DEPTH_LIMIT = 4


@dataclass(frozen=True, kw_only=True)
class Copied:
    """The result of a copy: numbers of blobs, and the bytes that were streamed."""

    manifest: RawManifest
    present: int = 0
    mounted: int = 0
    streamed: int = 0
    streamed_bytes: int = 0


def copy_image(
    source: ImageSource,
    reference: str,
    target: ImageTarget,
    target_reference: str,
    *,
    platforms: Sequence[str] = (),
    jobs: int = CONNECTIONS,
    tagged: Future[str | None] | None = None,
) -> Copied:
    """Copy a manifest, or an index and what it lists.

    ``jobs`` blobs are asked for, mounted or sent at once; of large ones, three are sent.
    ``platforms`` (``linux/arm64``, ...) keeps those entries of an index and drops the others, which
    gives the index a new digest; none keeps all.  ``target_reference`` is a tag; in a layout also
    ``""``, for an image without a name.  ``tagged`` is what :func:`ask_tag` was told of it.

    Raises:
        UsageError: the platform does not exist, or the layout cannot be written.
        RemoteError: reading or writing failed, or the image is malformed.
    """
    root = restrict(source, source.manifest(reference), platforms)
    if is_digest(target_reference) and target_reference != root.digest:
        raise UsageError(f"{root.digest} cannot be copied to {target.name}@{target_reference}")
    manifests = _manifests(source, root)
    same = False
    if isinstance(target, Repository):
        target.writes = True
        digest = tagged.result() if tagged else target.digest_of(target_reference)
        same = digest == root.digest
    work = _Work(source, target, _all_blobs(manifests), tagged=same, jobs=jobs)
    try:
        work.run()
    except NotFound:
        missing = [blob for blob in work.blobs if not target.has(blob.digest)]
        refuse_missing(source, missing, "push the complete image again, or name another --base")
        raise
    for manifest in manifests:
        if not (same and isinstance(target, Repository) and target.digest_of(manifest.digest)):
            target.put_manifest(manifest, manifest.digest)
    if target_reference != root.digest and not same:
        target.put_manifest(root, target_reference)
    return work.result(root)


def ask_tag(target: Location) -> Future[str | None]:
    """Ask for the digest of a tag while the image that it shall name is still being written.

    The connection and the right to write are there then, too.  Errors are those of
    :meth:`~builder.images.registry.client.Repository.digest_of`, when the answer is needed.
    """
    answer: Future[str | None] = Future()

    def ask() -> None:
        assert isinstance(target.image, Repository)
        try:
            target.image.writes = True
            answer.set_result(target.image.digest_of(target.reference))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="tag", daemon=True).start()
    return answer


def _manifests(source: ImageSource, root: RawManifest) -> list[RawManifest]:
    """The manifest or index and all below it, children first; each is fetched once."""
    manifests: dict[str, RawManifest] = {}

    def visit(manifest: RawManifest, depth: int) -> None:
        if depth > _DEPTH_LIMIT:
            raise RemoteError(f"{source.name}: {root.digest}: indexes are nested too deeply")
        if is_index(manifest):
            for entry in entries(manifest):
                if entry.digest in manifests:
                    continue
                if len(manifests) >= _MANIFEST_LIMIT:
                    raise RemoteError(
                        f"{source.name}: {root.digest} has more than {_MANIFEST_LIMIT} manifests"
                    )
                visit(_listed(source, entry), depth + 1)
        manifests[manifest.digest] = manifest

    visit(root, 0)
    return list(manifests.values())


def _listed(source: ImageSource, entry: Descriptor) -> RawManifest:
    """A listed manifest, checked against the index's entry."""
    manifest = source.manifest(entry.digest)
    if len(manifest.data) != entry.size or entry.media_type not in ("", manifest.media_type):
        raise RemoteError(
            f"{source.name}: {entry.digest} is listed as {entry.size} bytes of "
            f"{entry.media_type[:100]} and is {len(manifest.data)} of {manifest.media_type}"
        )
    return manifest


def _all_blobs(manifests: Sequence[RawManifest]) -> list[Descriptor]:
    """Every blob once, largest first, without nondistributable layers."""
    by_digest: dict[str, Descriptor] = {}
    for manifest in manifests:
        if is_index(manifest):
            continue
        for blob in blobs(manifest):
            known = by_digest.setdefault(blob.digest, blob)
            if known.size != blob.size:
                raise RemoteError(
                    f"{blob.digest} is listed with {known.size} bytes and with {blob.size} bytes"
                )
    stored = (blob for blob in by_digest.values() if not blob.foreign)
    return sorted(stored, key=lambda blob: (-blob.size, blob.digest))


class _Work:
    """The transfer of blobs in several threads, which all stop when one fails."""

    def __init__(
        self,
        source: ImageSource,
        target: ImageTarget,
        blobs_: Sequence[Descriptor],
        *,
        tagged: bool,
        jobs: int,
    ) -> None:
        """``tagged``: the target has this image; ``jobs``: blobs at once."""
        self._source, self._target, self.blobs = source, target, blobs_
        self._tagged = tagged
        self._jobs = jobs
        self._streams = threading.BoundedSemaphore(_STREAMS)
        self._mounts = True  # until the registry refuses one
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._done: dict[str, int] = {"present": 0, "mounted": 0, "streamed": 0}
        self._streamed_bytes = 0
        self._bar = Bar("", None, "bytes")

    def run(self) -> None:
        """Transfer all blobs, or raise the first failure."""
        title, total = f"copying to {self._target.name}", sum(blob.size for blob in self.blobs)
        with console.progress(title, total, leaves_line=False) as self._bar:
            self._run()

    def _run(self) -> None:
        with ThreadPoolExecutor(self._jobs, thread_name_prefix="copy") as pool:
            # what is sent takes more requests one after the other than what is mounted
            ordered = sorted(self.blobs, key=self._is_mountable)
            futures = [pool.submit(self._transfer_or_stop, blob) for blob in ordered]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
                if self._failure:
                    raise self._failure
            except BaseException as error:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                if not isinstance(error, Exception):  # interrupted: end the threads
                    end_waits()
                raise

    def result(self, root: RawManifest) -> Copied:
        """What was done."""
        return Copied(manifest=root, streamed_bytes=self._streamed_bytes, **self._done)

    def _transfer_or_stop(self, blob: Descriptor) -> None:
        if self._stop.is_set():
            raise _Stopped
        try:
            self._transfer(blob)
        except BaseException as error:
            with self._lock:  # the other threads then fail with _Stopped, which says nothing
                self._failure = self._failure or error
            self._stop.set()
            raise

    def _transfer(self, blob: Descriptor) -> None:
        how = self._claim(blob)
        if how and self._target.gives(blob):
            self._count(how, blob.size)
            return
        with contextlib.nullcontext() if blob.size <= _LITTLE else self._streams:
            self.moved(0)
            self._stream(blob)
        if how and not self._target.gives(blob):
            raise RemoteError(
                f"{self._target.name}: the registry claims to have {blob.digest}, but does not "
                f"return its {blob.size} bytes, even after a second upload",
                hint="its storage is damaged: delete that blob there, then run the same command "
                "again",
            )
        self._count("streamed", 0)

    def _is_mountable(self, blob: Descriptor) -> bool:
        target, source = self._target, origin(self._source, blob)
        return (
            isinstance(target, Repository)
            and target.is_beside(source)
            and source.path != target.path
        )

    def _claim(self, blob: Descriptor) -> str:
        """How the target says that it has a blob (``present``, ``mounted``), or ``""``."""
        target, source = self._target, origin(self._source, blob)
        if self._tagged:
            return "present"
        if not isinstance(target, Repository):
            return "present" if target.has(blob.digest) else ""
        if isinstance(source, Repository) and self._is_mountable(blob):
            return self._mount(blob, target, source)
        there = target.finds(blob) if blob.size <= _LITTLE else target.has(blob.digest)
        return "present" if there else ""

    def _mount(self, blob: Descriptor, target: Repository, source: Repository) -> str:
        """Mount first and ask second; after the first refusal the other way round."""
        first = self._mounts
        if first and target.mount(blob, source):
            return "mounted"
        self._mounts = False
        if target.has(blob.digest):
            target.end_session(blob)
            return "present"
        return "mounted" if not first and target.mount(blob, source) else ""

    def _stream(self, blob: Descriptor) -> None:
        for beginning in range(1, _BEGINNINGS + 1):
            with self._source.open(blob) as stream:
                watched = cast("IO[bytes]", _Watched(stream, self))
                try:
                    self._target.put_blob(blob, watched)
                except UploadFailed:
                    if beginning == _BEGINNINGS:
                        raise
                    self.moved(-cast("_Watched", watched).count)
                else:
                    return

    def _count(self, how: str, size: int) -> None:
        with self._lock:
            self._done[how] += 1
        self._bar.advance(size)

    def moved(self, size: int) -> None:
        """Count transferred bytes of a blob."""
        if self._stop.is_set():
            raise _Stopped
        with self._lock:
            self._streamed_bytes += size
        self._bar.advance(size)


def origin(source: ImageSource, blob: Descriptor) -> ImageSource:
    """Where a blob comes from."""
    return source.origin(blob) if isinstance(source, FallbackSource) else source


class _Stopped(Exception):
    """Another transfer has failed."""


class _Watched(io.BufferedIOBase):
    """A stream that reports the bytes read."""

    def __init__(self, stream: IO[bytes], work: _Work) -> None:
        super().__init__()
        self._stream, self._work = stream, work
        self.count = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        data = self._stream.read(-1 if size is None else size)
        self.count += len(data)
        self._work.moved(len(data))
        return data
