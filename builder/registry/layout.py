"""An OCI image layout directory, read and written like a repository."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import threading
from typing import IO, TYPE_CHECKING, Any

from builder.errors import RemoteError, UsageError
from builder.registry.manifests import check_manifest
from builder.registry.model import MANIFEST_LIMIT, OCI_INDEX, Descriptor, RawManifest, parse_json
from builder.registry.reference import is_digest
from builder.registry.stream import verified
from builder.util.hints import ELSEWHERE, instead, os_hint
from builder.util.leftovers import making
from builder.util.locks import locked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from builder.net.failures import RequestFailed
    from builder.registry.model import ImageSource

REF_NAME = "org.opencontainers.image.ref.name"
_NOT_A_LAYOUT = "name a folder that an image was written to with --output oci:DIR"
_MARKER = b'{"imageLayoutVersion": "1.0.0"}\n'
_EMPTY_INDEX: dict[str, Any] = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}
_BLOCK = 1 << 20


class LayoutDirectory:
    """One layout.  It has no ``index.json`` until its first image is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = f"oci:{path}"
        self._lock = threading.Lock()

    # -- reading

    def references(self) -> tuple[str, ...]:
        """The names of images in its index."""
        names = (entry.annotations.get(REF_NAME, "") for entry in self._entries())
        return tuple(dict.fromkeys(name for name in names if name))

    def name_of(self, digest: str) -> str:
        """The first name of an image in the index; empty if it has none."""
        names = (e.annotations.get(REF_NAME, "") for e in self._entries() if e.digest == digest)
        return next(filter(None, names), "")

    def manifest(self, reference: str) -> RawManifest:
        """The manifest or index with this name or digest; ``""`` means the only one.

        Raises:
            UsageError: the name does not identify a single image.
            RemoteError: it does not exist, or does not match its digest.
        """
        digest = self.resolve(reference)
        with self._blob(digest) as file:
            data = file.read(MANIFEST_LIMIT + 1)
        return check_manifest(
            data, content_type="", digest=digest, where=f"{self.name}: manifest {digest}"
        )

    def resolve(self, reference: str) -> str:
        """The digest for a name, a digest, or ``""`` for the only image.

        Raises:
            UsageError: the name does not identify a single image.
            RemoteError: the index is damaged.
        """
        if is_digest(reference):
            return reference
        name = reference
        entries = self._entries()
        found = {
            entry.digest for entry in entries if not name or entry.annotations.get(REF_NAME) == name
        }
        if len(found) == 1:
            return found.pop()
        names = self.references()
        what = f"no single image {name!r}" if name else f"{len(found)} images"
        raise UsageError(
            f"{self.name} has {what}; its names: {', '.join(names[:8]) or 'none'}",
            hint=instead(
                f"{self.name}:{name}" if name else self.name,
                f"{self.name}:{names[0]}" if names else f"{self.name}@sha256:...",
            ),
        )

    def _entries(self) -> tuple[Descriptor, ...]:
        return tuple(Descriptor.parse(item, self.name) for item in self.index()["manifests"])

    def index(self) -> dict[str, Any]:
        """The parsed ``index.json``.

        Raises:
            UsageError: it does not exist, or is not an index.
        """
        path = self.path / "index.json"
        try:
            with _regular(path) as file:
                data = file.read(MANIFEST_LIMIT + 1)
            index = parse_json(data) if len(data) <= MANIFEST_LIMIT else None
        except OSError as error:
            raise UsageError(
                f"{self.path} is not an OCI layout: {path} cannot be read: {error.strerror}",
                hint=_NOT_A_LAYOUT,
            ) from None
        except ValueError:
            index = None
        if not isinstance(index, dict) or not isinstance(index.get("manifests"), list):
            raise UsageError(
                f"{self.path} is not an OCI layout: {path} has no list of manifests",
                hint=_NOT_A_LAYOUT,
            )
        return index

    def _place(self, digest: str) -> Path:
        if not is_digest(digest):
            raise RemoteError(f"{self.name}: {digest!r} is not a sha256 digest")
        return self.path / self.blob_path(digest)

    @staticmethod
    def blob_path(digest: str) -> str:
        """The path of a blob in a layout."""
        return f"blobs/sha256/{digest.removeprefix('sha256:')}"

    def _blob(self, digest: str) -> IO[bytes]:
        try:
            return _regular(self._place(digest))
        except OSError as error:
            raise RemoteError(f"{self.name}: {digest}: {error.strerror}") from None

    @contextlib.contextmanager
    def open(self, blob: Descriptor) -> Iterator[IO[bytes]]:
        """A blob as a stream; see ``stream.verified``."""

        def give_up(lost: RequestFailed) -> None:
            raise RemoteError(f"{self.name}: {blob.digest} is damaged: {lost}")

        def open_at(_offset: int) -> IO[bytes]:
            return self._blob(blob.digest)

        stream = verified(blob, self.name, open_at, lost=give_up, moved=lambda _count: None)
        try:
            yield stream
        finally:
            stream.close()

    # -- writing

    def has(self, digest: str) -> bool:
        """Whether the blob exists; it was checked when it was written."""
        try:
            return stat.S_ISREG(self._place(digest).lstat().st_mode)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise UsageError(f"{self.path} cannot be read: {error.strerror}") from None

    def gives(self, blob: Descriptor) -> bool:
        """Whether the blob exists with its expected size."""
        return self.has(blob.digest) and self._place(blob.digest).lstat().st_size == blob.size

    def put_blob(self, blob: Descriptor, content: IO[bytes]) -> None:
        """Write a blob; nothing remains if its bytes do not match its digest.

        Raises:
            RemoteError: they do not.
            UsageError: the disk does not take them.
        """
        target = self._place(blob.digest)
        with self._writing(target) as out:
            sha, size = hashlib.sha256(), 0
            while size <= blob.size and (data := content.read(_BLOCK)):
                sha.update(data)
                size += len(data)
                with self._told(target):
                    out.write(data)
            digest = f"sha256:{sha.hexdigest()}"
            if size != blob.size or digest != blob.digest:
                raise RemoteError(
                    f"{self.name}: {blob.digest} of {blob.size} bytes was expected, but the data "
                    f"is {digest} of {size} bytes or more"
                )

    def mount(self, blob: Descriptor, source: ImageSource) -> bool:  # noqa: ARG002
        """Always False: a layout has its own copy of every blob."""
        return False

    def put_manifest(self, manifest: RawManifest, reference: str) -> None:
        """Write a manifest, and unless ``reference`` is its digest, name it in the index.

        ``""`` lists it without a name.  An image that had the name loses it.

        Raises:
            UsageError: the disk does not take it.
        """
        with self._writing(self._place(manifest.digest)) as out, self._told(self.path):
            out.write(manifest.data)
        if is_digest(reference):
            return
        listed = {
            **manifest.descriptor.as_json(),
            **({"annotations": {REF_NAME: reference}} if reference else {}),
        }
        with self._lock, self.lock():
            index, _ = self.with_entry(listed)
            text = json.dumps(index, indent=1, sort_keys=True) + "\n"
            for name, data in (("oci-layout", _MARKER), ("index.json", text.encode())):
                with self._writing(self.path / name) as out, self._told(self.path):
                    out.write(data)

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """The lock for changes to the index."""
        return locked(str(self.path.resolve()))

    def with_entry(self, entry: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """The index with one more entry, and the entries that it replaces."""
        index = self.index() if (self.path / "index.json").exists() else _EMPTY_INDEX
        name, digest = _name_of(entry), entry["digest"]
        replaced = [
            old
            for old in index["manifests"]
            if _name_of(old) == name and (name or old.get("digest") == digest)
        ]
        kept = [old for old in index["manifests"] if old not in replaced]
        return {**index, "manifests": [*kept, entry]}, replaced

    @contextlib.contextmanager
    def _writing(self, target: Path) -> Iterator[IO[bytes]]:
        """A new file that replaces ``target`` at the end of the block; removed on an error."""
        with self._told(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        with making(target) as partial:
            with self._told(target):
                out = partial.open("xb")
            try:
                yield out
                with self._told(target):
                    out.close()  # which also writes what was kept back
                    partial.chmod(0o644)
                    partial.replace(target)
            finally:
                with contextlib.suppress(OSError):
                    out.close()

    @contextlib.contextmanager
    def _told(self, path: Path) -> Iterator[None]:
        """Name the file that cannot be written."""
        try:
            yield
        except OSError as error:
            raise UsageError(
                f"cannot write {path}: {error.strerror}; no partial output was left",
                hint=os_hint(error, ELSEWHERE),
            ) from None


def _regular(path: Path) -> IO[bytes]:
    """Open a regular file; a pipe would block forever, and a device has no end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(handle, "rb")


def _name_of(entry: object) -> str:
    annotations = entry.get("annotations") if isinstance(entry, dict) else None
    return str(annotations.get(REF_NAME, "")) if isinstance(annotations, dict) else ""
