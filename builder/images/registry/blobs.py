"""The blobs of a repository: which it has, downloads and uploads that resume, checked digests.

A chunk of an upload is held in memory until the registry has stored it, so any stream can be
uploaded, and a chunk can be sent again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import threading
from typing import IO, TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import urlencode, urlsplit

from builder.common.leftovers import abandoned_uploads, forget_upload, note_upload
from builder.common.retry import RETRIED, RequestFailed, resolved, retry_after
from builder.errors import RemoteError
from builder.images.registry.auth import Authenticator, scope_of
from builder.images.registry.reference import is_digest, is_repository, is_tag
from builder.images.registry.transport import answered, drain, number, origin, problem, read_block

if TYPE_CHECKING:
    from collections.abc import Callable

    import requests
    from requests import Response

    from builder.common.retry import Retries
    from builder.images.registry.auth import ScopedAuthorization
    from builder.images.registry.model import Descriptor
    from builder.images.registry.transport import Transport

# --------------------------------------------------------------------------- access to a repository


class RepositoryAccess:
    """What reading from a repository and writing to it have in common."""

    def __init__(self, host: str, path: str, transport: Transport) -> None:
        if not is_repository(path):
            raise RemoteError(f"{host}: {path[:200]!r} is not a repository name")
        self.path = path
        self.name = f"{host}/{path}"
        self.transport = transport
        self.authenticator = Authenticator(transport, host, path)
        self._lock = threading.Lock()
        self._sessions: dict[str, str] = {}
        self._absent: set[str] = set()
        #: Ask for write access first, so that one token serves, and because a registry that
        #: hides new repositories from readers would not answer otherwise.
        self.writes = False

    def url(self, tail: str) -> str:
        """The URL of a resource in this repository."""
        return f"{self.transport.root}/v2/{self.path}/{tail}"

    def manifest_url(self, reference: str) -> str:
        """The URL of a manifest by tag or digest.

        Raises:
            RemoteError: it is neither a tag nor a digest.
        """
        if not (is_digest(reference) or is_tag(reference)):
            raise RemoteError(f"{self.name}: {reference[:200]!r} is neither a tag nor a digest")
        return self.url(f"manifests/{reference}")

    @property
    def reading(self) -> ScopedAuthorization:
        """The authorization to read."""
        if self.writes:
            return self.writing
        return self.authenticator.permit(scope_of(self.path, "pull"))

    @property
    def writing(self) -> ScopedAuthorization:
        """The authorization to write, and to check what exists."""
        return self.authenticator.permit(scope_of(self.path, "pull", "push"))

    def has(self, digest: str) -> bool:
        """Whether the blob is in this repository."""
        if not is_digest(digest):
            raise RemoteError(f"{self.name}: {digest[:200]!r} is not a sha256 digest")
        response = self.transport.request(
            "HEAD",
            self.url(f"blobs/{digest}"),
            f"blob {digest}",
            expect=frozenset({200, 404}),
            permit=self.reading,
        )
        drain(response)
        there = response.status_code == 200
        with self._lock:
            (self._absent.discard if there else self._absent.add)(digest)
        return there

    def opened_session(self, digest: str, address: str) -> None:
        """Note the upload session that a refused mount opened."""
        with self._lock:
            self._sessions[digest] = address

    def waiting_session(self, digest: str) -> str | None:
        """The upload session that a refused mount opened; returned once."""
        with self._lock:
            return self._sessions.pop(digest, None)

    def found_absent(self, digest: str) -> None:
        """Note that the blob is missing."""
        with self._lock:
            self._absent.add(digest)

    def known_absent(self, digest: str) -> bool:
        """Whether the blob was found to be missing; returned once."""
        with self._lock:
            absent = digest in self._absent
            self._absent.discard(digest)
        return absent


# ---------------------------------------------------------------------------------- checked streams


#: Largest size of one read.
_BUFFER = 256 << 10


class Part(Protocol):
    """The bytes of a blob from an offset."""

    def read(self, size: int, /) -> bytes:
        """Some bytes, ``b""`` at the end; ``RequestFailed`` when the connection broke."""

    def close(self) -> None:
        """Close the response."""


class _Verified(io.RawIOBase):
    """Reads a blob once.  The last bytes are returned only if size and digest match."""

    def __init__(
        self,
        blob: Descriptor,
        where: str,
        open_at: Callable[[int], Part],
        lost: Callable[[RequestFailed], None],
        moved: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._blob, self._where = blob, where
        self._open_at, self._lost, self._moved = open_at, lost, moved
        self._part: Part | None = None
        self._sha = hashlib.sha256()
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._blob.size - self._position
        data = self._next(min(len(buffer), left)) if left else b""
        self._sha.update(data)
        self._position += len(data)
        if self._position == self._blob.size:
            self._check()
        buffer[: len(data)] = data
        return len(data)

    def _next(self, size: int) -> bytes:
        while True:
            try:
                if self._part is None:
                    self._part = self._open_at(self._position)
                data = self._part.read(size)
                if not data:
                    raise RequestFailed(
                        f"connection cut after {self._position} of {self._blob.size} bytes"
                    )
            except RequestFailed as lost:
                self._drop()
                self._lost(lost)
                continue
            self._moved(len(data))
            return data

    def _check(self) -> None:
        """At the end: check that nothing follows and that the digest matches."""
        if self._part is not None and self._more():
            raise RemoteError(f"{self._where}: {self._blob.digest} is longer than expected")
        digest = f"sha256:{self._sha.hexdigest()}"
        if digest != self._blob.digest:
            raise RemoteError(
                f"{self._where}: the data received for {self._blob.digest} is {digest}",
                hint="do not use it; it was damaged in the registry or on the way",
            )

    def _more(self) -> bool:
        try:
            return self._part is not None and bool(self._part.read(1))
        except RequestFailed:
            return False  # all of it was here before

    def _drop(self) -> None:
        if self._part is not None:
            self._part.close()
            self._part = None

    def close(self) -> None:
        self._drop()
        super().close()


def verified(
    blob: Descriptor,
    where: str,
    open_at: Callable[[int], Part],
    *,
    lost: Callable[[RequestFailed], None],
    moved: Callable[[int], None],
) -> IO[bytes]:
    """A blob as a stream that raises if its content does not match.

    ``open_at`` gives the bytes from an offset; after a broken connection it is called again with
    the offset that was reached, unless ``lost`` raises.  ``moved`` is called for every read.
     Reading raises a RemoteError when size or digest are wrong.
    """
    raw = _Verified(blob, where, open_at, lost, moved)
    return cast("IO[bytes]", io.BufferedReader(raw, _BUFFER))


# ---------------------------------------------------------------------------------------- downloads


_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-[0-9]+/([0-9]+|\*)")


class Body:
    """The body of a response, with its bytes counted."""

    def __init__(self, response: Response, transport: Transport, retries: Retries) -> None:
        self._response, self._transport, self._retries = response, transport, retries

    def read(self, size: int) -> bytes:
        """Some bytes, ``b""`` at the end; ``RequestFailed`` when the connection broke."""
        self._retries.time_left()  # a server that drips must not hold us for ever
        data = read_block(self._response, size)
        self._transport.traffic.add(received=len(data))
        return data

    def skip(self, count: int) -> None:
        """Read and discard."""
        while count:
            data = self.read(min(count, 1 << 20))
            if not data:
                raise RequestFailed("connection cut")
            count -= len(data)

    def close(self) -> None:
        """Close the response."""
        self._response.close()


def body_from(
    repository: RepositoryAccess, blob: Descriptor, offset: int, retries: Retries
) -> Body:
    """A blob from an offset; if the registry ignores ranges, the first bytes are skipped.

    Raises:
        RequestFailed: the connection broke.
        RemoteError: the registry does not have it, or has it with another size.
    """
    response = _get(repository, blob, offset, retries)
    if response.status_code == 416:
        drain(response)
        response = _get(repository, blob, 0, retries)
    body = Body(response, repository.transport, retries)
    try:
        whole = response.status_code == 200
        _check(response, repository.name, blob, 0 if whole else offset)
        if whole:
            body.skip(offset)
    except BaseException:
        body.close()
        raise
    return body


def gives(repository: RepositoryAccess, blob: Descriptor) -> bool:
    """Request the last byte; if the registry ignores ranges, read one byte of the whole."""
    last = max(blob.size - 1, 0)
    retries = repository.transport.retries(f"blob {blob.digest}", small=True)
    while True:
        response = repository.transport.request(
            "GET",
            repository.url(f"blobs/{blob.digest}"),
            f"blob {blob.digest}",
            expect=frozenset({200, 206, 404, 416}),
            headers={"Range": f"bytes={last}-{last}"},
            permit=repository.reading,
            retries=retries,
        )
        try:
            if response.status_code == 416:
                return not blob.size
            if response.status_code == 404:
                return False
            _check(response, repository.name, blob, last if response.status_code == 206 else 0)
            return not blob.size or len(read_block(response, 1)) == 1
        except RequestFailed as error:
            retries.lost(error)
        except RemoteError:  # other bytes, or another size
            return False
        finally:
            response.close()


def _get(repository: RepositoryAccess, blob: Descriptor, offset: int, retries: Retries) -> Response:
    """Request a range with both ends, because some registries reject open ranges."""
    return repository.transport.request(
        "GET",
        repository.url(f"blobs/{blob.digest}"),
        f"blob {blob.digest}",
        expect=frozenset({200, 206, 416} if offset else {200}),
        headers={"Range": f"bytes={offset}-{blob.size - 1}"} if offset else None,
        permit=repository.reading,
        retries=retries,
    )


def _check(response: Response, name: str, blob: Descriptor, offset: int) -> None:
    start, total = 0, response.headers.get("Content-Length", "")
    if response.status_code == 206:
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        start, total = (int(match[1]), match[2]) if match else (-1, "")
    if start != offset:
        raise RemoteError(f"{name}: asked for {blob.digest} from byte {offset} on, got other bytes")
    if (size := number(total)) not in (None, blob.size):
        raise RemoteError(f"{name}: {blob.digest} should have {blob.size} bytes and has {size}")


# ------------------------------------------------------------------------------------------ uploads


#: Smallest chunk: a registry that refuses a chunk gets half the size next, down to this.
#: (GHCR refuses chunks over 4 MiB; ECR refuses chunks under 5 MiB, except the last.)
SMALLEST_PIECE = 1 << 20
#: Largest minimum chunk size that a registry may ask for; more is refused, because
#: chunks are held in memory.
_LARGEST_PIECE = 64 << 20
_RANGE = re.compile(r"(?:bytes=)?0-([0-9]{1,18})")
_TOO_LARGE = (413, 416)
_STORED = (200, 201, 202, 204)
#: Statuses of a cancelled session: done, already gone, or not allowed.
_ENDED = frozenset({200, 202, 204, 400, 401, 403, 404, 405, 416, 501})
_BYTES = {"Content-Type": "application/octet-stream"}


class UploadFailed(RemoteError):
    """The registry lost the upload, and the stream cannot be read again from its start."""


class _SessionLost(Exception):
    """The registry lost the upload session."""


def start(repository: RepositoryAccess, retries: Retries) -> tuple[str, int]:
    """Open an upload session: its URL, and the smallest chunk that it accepts."""
    url = repository.url("blobs/uploads/")
    response = repository.transport.request(
        "POST",
        url,
        "start of an upload",
        expect=frozenset({202}),
        headers={"Content-Length": "0"},
        permit=repository.writing,
        retries=retries,
    )
    drain(response)
    least = number(response.headers.get("OCI-Chunk-Min-Length", "")) or 0
    return session_address(repository, url, response), least


def session_address(repository: RepositoryAccess, url: str, response: requests.Response) -> str:
    """The ``Location`` of a response, relative or absolute; https never becomes http.

    Raises:
        RemoteError: it does not exist.
    """
    location = response.headers.get("Location")
    if not location:
        raise RemoteError(f"{repository.name}: an upload was started, but its address is missing")
    target = resolved(url, location, f"{repository.name}: an upload")
    parts, here = urlsplit(target), urlsplit(url)
    if here.scheme == "https" and parts.scheme == "http":
        if parts.hostname != here.hostname:
            raise RemoteError(f"{repository.name}: an upload over plain http is refused")
        parts = parts._replace(scheme="https", netloc=here.netloc)  # a proxy in front of it
    if parts.scheme not in ("http", "https"):
        raise RemoteError(f"{repository.name}: an upload to {parts.scheme!r} is refused")
    return parts.geturl()


def upload(repository: RepositoryAccess, blob: Descriptor, content: IO[bytes]) -> None:
    """Send a blob that the repository does not have.

    Raises:
        UploadFailed: it must be sent again from the start, and ``content`` cannot seek.
        RemoteError: the registry rejects it, or its bytes do not match its digest.
    """
    retries = repository.transport.retries(f"upload of {blob.digest}")
    if blob.size <= repository.transport.piece and not content.seekable():
        content = io.BytesIO(_read(content, blob.size + 1))
    beginning = content.tell() if content.seekable() else None
    while True:
        address = repository.waiting_session(blob.digest)
        least = 0
        if address is None:
            address, least = start(repository, retries)
        note_session(repository, address)
        try:
            _Upload(repository, blob, content, address, least, retries).run()
        except _SessionLost as lost:
            forget_upload(repository.name, address)
            if beginning is None:
                raise UploadFailed(
                    f"{repository.name}: {blob.digest}: {lost}", hint="run the same command again"
                ) from None
            retries.failed(str(lost))
            content.seek(beginning)
        else:
            forget_upload(repository.name, address)
            return


def note_session(repository: RepositoryAccess, address: str) -> None:
    """Record the session for the next run, unless another host's URL may hold a credential."""
    if origin(address) == origin(repository.transport.root):
        note_upload(repository.name, address)


def end_abandoned(repository: RepositoryAccess) -> None:
    """Cancel upload sessions that earlier runs left in a repository, if it supports that."""
    for address in abandoned_uploads(repository.name):
        if origin(address) != origin(repository.transport.root):
            continue
        with contextlib.suppress(RemoteError):
            response = repository.transport.request(
                "DELETE",
                address,
                "cancelling an upload of an earlier run",
                expect=_ENDED,
                permit=repository.writing,
                settle=RETRIED,
            )
            drain(response)


class _Upload:
    """One upload session."""

    def __init__(
        self,
        repository: RepositoryAccess,
        blob: Descriptor,
        content: IO[bytes],
        address: str,
        least: int,
        retries: Retries,
    ) -> None:
        if least > _LARGEST_PIECE:
            raise RemoteError(
                f"{repository.name} requires pieces of at least {least} bytes; the largest that "
                f"we send is {_LARGEST_PIECE}"
            )
        self._repository, self._transport = repository, repository.transport
        self._blob, self._content = blob, content
        self._address, self._least, self._retries = address, least, retries
        self._sha = hashlib.sha256()
        self._stored = 0  # bytes that the registry has

    def run(self) -> None:
        """Send everything; the last chunk closes the session."""
        read = 0
        while True:
            data = _read(self._content, max(self._repository.transport.piece, self._least))
            self._sha.update(data)
            read += len(data)
            last = read >= self._blob.size or not data
            if last:
                self._check(read)
            self._send(data, last=last)
            if last:
                return

    def _check(self, read: int) -> None:
        """Check size and digest before the session is closed."""
        digest = f"sha256:{self._sha.hexdigest()}"
        more = len(self._content.read(1))
        if read == self._blob.size and not more and digest == self._blob.digest:
            return
        with contextlib.suppress(RequestFailed, RemoteError):
            header = self._permit.header() if self._permit else None
            self._transport.send("DELETE", self._address, authorization=header).close()
        raise RemoteError(
            f"{self._repository.name}: {self._blob.digest} of {self._blob.size} bytes was "
            f"expected, but the data is {digest} of {read + more} bytes or more; nothing was stored"
        )

    @property
    def _permit(self) -> ScopedAuthorization | None:
        """The authorization: credentials are sent only to the registry's host."""
        same = origin(self._address) == origin(self._transport.root)
        return self._repository.writing if same else None

    def _send(self, data: bytes, *, last: bool) -> None:
        """Send until the registry has everything; after a failure, ask how much it has."""
        begin = self._stored
        while True:
            rest = data[self._stored - begin :]
            if not rest and not last:
                return
            piece = rest[: max(self._repository.transport.piece, self._least)]
            final = last and len(piece) == len(rest)
            if self._exchange(piece, final=final):
                self._stored += len(piece)
                if final:
                    return
            elif final and self._repository.has(self._blob.digest):
                return  # only the answer was lost
            else:
                self._stored = self._ask(begin, len(data))

    def _exchange(self, piece: bytes, *, final: bool) -> bool:
        """Send a chunk once: True if stored, False if the registry must be asked."""
        headers = dict(_BYTES)
        if piece and not (final and self._stored == 0):
            headers["Content-Range"] = f"{self._stored}-{self._stored + len(piece) - 1}"
        response: requests.Response | None = None
        for challenged in (False, True):
            header = self._permit.header() if self._permit else None
            try:
                response = self._transport.send(
                    "PUT" if final else "PATCH",
                    self._final_address() if final else self._address,
                    headers=headers,
                    body=piece,
                    authorization=header,
                    retries=self._retries,
                )
            except RequestFailed as lost:
                self._retries.lost(lost)
                return False
            if response.status_code != 401 or challenged or self._permit is None:
                break
            drain(response)
            self._permit.answer(response)
        assert response is not None
        return self._judge(response, len(piece), final=final)

    def _judge(self, response: requests.Response, size: int, *, final: bool) -> bool:
        status = response.status_code
        if status in _STORED:
            drain(response)
            self._retries.moved(size)
            if final:
                self._check_answer(response)
            else:
                self._moved(response)
            return True
        if status in _TOO_LARGE and size > max(SMALLEST_PIECE, self._least):
            drain(response)
            self._repository.transport.piece = max(SMALLEST_PIECE, size // 2)
        elif status in RETRIED or status == 416:
            drain(response)
            self._retries.failed(f"answered {status}", retry_after(response))
        elif status in (400, 404):  # an unknown session, or bytes that went wrong in it
            raise _SessionLost(answered(response))
        else:
            raise problem(response, self._transport.host, f"upload of {self._blob.digest}")
        return False

    def _check_answer(self, response: requests.Response) -> None:
        named = response.headers.get("Docker-Content-Digest", "")
        if is_digest(named) and named != self._blob.digest:
            raise RemoteError(f"{self._repository.name}: sent {self._blob.digest}, stored {named}")

    def _final_address(self) -> str:
        mark = "&" if urlsplit(self._address).query else "?"
        return f"{self._address}{mark}{urlencode({'digest': self._blob.digest})}"

    def _ask(self, begin: int, size: int) -> int:
        """Ask how many bytes the registry has; those before the current chunk must be there."""
        response = self._transport.request(
            "GET",
            self._address,
            f"upload of {self._blob.digest}",
            expect=frozenset({200, 202, 204, 400, 401, 403, 404, 405, 416}),
            permit=self._permit,
            retries=self._retries,
        )
        drain(response)
        match = _RANGE.fullmatch(response.headers.get("Range", ""))
        if response.status_code not in _STORED or match is None:
            raise _SessionLost("the registry has lost the upload")
        # "0-0" is also how registries report that they have nothing
        stored = int(match[1]) + 1 if match[1] != "0" else 0
        if not begin <= stored <= begin + size:
            raise _SessionLost("the registry lost data of the upload")
        self._moved(response)
        return stored

    def _moved(self, response: requests.Response) -> None:
        """Each response may give a new session URL."""
        if response.headers.get("Location"):
            self._address = session_address(self._repository, self._address, response)


def _read(content: IO[bytes], size: int) -> bytes:
    """``size`` bytes, or all that is left."""
    blocks = []
    while size and (data := content.read(size)):
        blocks.append(data)
        size -= len(data)
    return blocks[0] if len(blocks) == 1 else b"".join(blocks)
