"""A registry and its repositories (OCI distribution specification).

::

    registry = Registry(reference.host)
    repository = registry.repository(reference.repository)
    manifest = repository.manifest(reference.identifier)
    with repository.open(descriptor) as stream: ...

Referrers come from the registry's API, or else from the tag ``sha256-<hex>``, an index that clients
maintain (specification 1.1, "referrers tag schema").

Registries need not support conditional requests, so a tag that is set is also read: right before
each attempt of the request that writes it, and after it.  On a registry that supports
``If-None-Match`` and ``If-Match`` (RFC 9110, 13.1) no other client's tag is overwritten; on others,
an overwritten client is told.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import threading
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard, cast
from urllib.parse import urlencode, urlsplit

from builder.common.leftovers import abandoned_uploads, forget_upload, note_upload
from builder.common.retry import RETRIED, RequestFailed, Retries, resolved, retry_after
from builder.errors import RemoteError
from builder.images.registry.model import (
    INDEX_TYPES,
    MANIFEST_LIMIT,
    MANIFEST_TYPES,
    OCI_INDEX,
    Descriptor,
    RawManifest,
    check_manifest,
    entries,
    is_index,
    parse_json,
)
from builder.images.registry.reference import (
    Options,
    Reference,
    Traffic,
    is_digest,
    is_repository,
    is_tag,
)
from builder.images.registry.transport import (
    AccessDenied,
    Authenticator,
    Transport,
    answered,
    drain,
    number,
    origin,
    place,
    problem,
    read_block,
    scope_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import requests
    from requests import Response

    from builder.images.registry.model import ImageSource
    from builder.images.registry.transport import ScopedAuthorization


# ------------------------------------------------------------------------------------------- blobs
#
# A chunk of an upload is held in memory until the registry has stored it, so any stream can be
# uploaded, and a chunk can be sent again.

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
        self._sessions: dict[str, UploadSession] = {}
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

    def opened_session(self, digest: str, session: UploadSession) -> None:
        """Note the upload session that a refused mount opened."""
        with self._lock:
            self._sessions[digest] = session

    def waiting_session(self, digest: str) -> UploadSession | None:
        """The upload session that a refused mount opened; returned once."""
        with self._lock:
            return self._sessions.pop(digest, None)

    def note_absent(self, digest: str) -> None:
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


class UploadSession(NamedTuple):
    """An upload session: its URL, and the smallest chunk in bytes that it accepts."""

    address: str
    least: int


def start(repository: RepositoryAccess, retries: Retries) -> UploadSession:
    """Open an upload session."""
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
    return _session(repository, url, response)


def _session(repository: RepositoryAccess, url: str, response: requests.Response) -> UploadSession:
    """The session that a response to ``url`` has opened; recorded for the next run."""
    least = number(response.headers.get("OCI-Chunk-Min-Length", "")) or 0
    session = UploadSession(session_address(repository, url, response), least)
    note_session(repository, session.address)
    return session


def session_address(repository: RepositoryAccess, url: str, response: requests.Response) -> str:
    """The ``Location`` of a response, relative or absolute; https never becomes http.

    Raises:
        RemoteError: the response has no ``Location``.
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
        waiting = repository.waiting_session(blob.digest)
        address, least = waiting or start(repository, retries)
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
        _cancel(repository, address, "cancelling an upload of an earlier run")


def _cancel(repository: RepositoryAccess, address: str, subject: str) -> None:
    """Cancel an upload session of this registry, if it supports that."""
    if origin(address) != origin(repository.transport.root):
        return
    with contextlib.suppress(RemoteError):
        response = repository.transport.request(
            "DELETE", address, subject, expect=_ENDED, permit=repository.writing, settle=RETRIED
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


# ------------------------------------------------------------------------------------ repositories

#: Statuses of a registry that failed for a reason other than permissions or a missing name.
_FAILS = frozenset({500, 502, 503, 504})
ACCEPT = {"Accept": ", ".join((*INDEX_TYPES, *MANIFEST_TYPES))}
#: Statuses of registries without deletion: GHCR and Docker Hub only delete through their own APIs.
_NO_DELETE = frozenset({403, 405, 501})
#: Tags per page, and the most pages read; a larger repository is an error.
_PAGE = 1000
_PAGE_LIMIT = 200


class Registry:
    """One registry: its connections and byte counts."""

    def __init__(
        self, host: str, options: Options | None = None, traffic: Traffic | None = None
    ) -> None:
        """``host`` is as in references; ``docker.io`` means Docker Hub's API."""
        self.host = host
        api_host = Reference(host=host, repository="").api_host
        options = options or Options.from_environment()
        self.transport = Transport(api_host, options, traffic)

    @property
    def traffic(self) -> Traffic:
        """The bytes sent and received so far."""
        return self.transport.traffic

    def repository(self, name: str) -> Repository:
        """A repository on this registry; sends no request."""
        return Repository(self, name)

    def close(self) -> None:
        """Close the connections."""
        self.transport.close()


class Repository(RepositoryAccess):
    """One repository, to read from and to write to."""

    def __init__(self, registry: Registry, path: str) -> None:
        super().__init__(registry.host, path, registry.transport)
        self.registry = registry
        #: Repositories whose blobs could not be mounted, so they are uploaded.
        self._no_mounts: set[str] = set()
        self._tidied = False

    # -- reading

    def manifest(self, reference: str) -> RawManifest:
        """The manifest or index of a tag or digest; a digest is checked.

        Raises:
            RemoteError: it does not exist, is too large, of another type, or its bytes do not match
                its digest.
        """
        subject = f"manifest {self.path}{separator(reference)}{reference}"
        response, data = self.transport.fetch(
            self.manifest_url(reference),
            subject,
            limit=MANIFEST_LIMIT,
            headers=ACCEPT,
            permit=self.reading,
        )
        return check_manifest(
            data,
            content_type=response.headers.get("Content-Type", ""),
            digest=reference if is_digest(reference) else _named_digest(response),
            where=f"{self.transport.host}: {subject}",
        )

    def digest_of(self, reference: str) -> str | None:
        """The digest that a tag points to, or None when there is no such tag.

        Raises:
            RemoteError: the registry does not answer.
        """
        response = self.transport.request(
            "HEAD",
            self.manifest_url(reference),
            f"manifest {self.path}:{reference}",
            expect=frozenset({200, 404}),
            headers=ACCEPT,
            permit=self.reading,
        )
        drain(response)
        if response.status_code == 404:
            return None
        return _named_digest(response) or self.manifest(reference).digest

    def stored_digest(self, tag: str) -> str | None:
        """The digest of the manifest that who pulls a tag gets, or None when there is no such tag.

        Its bytes are read: a cache or proxy may answer HEAD with what it does not give.

        Raises:
            RemoteError: the registry does not answer, or gives no manifest.
        """
        return None if self.digest_of(tag) is None else self.manifest(tag).digest

    def gives(self, blob: Descriptor) -> bool:
        """Whether the last byte of a blob can be read at its expected offset.

        ``has`` trusts the registry; some report blobs that their storage has lost.
        """
        there = gives(self, blob)
        if not there:
            self.note_absent(blob.digest)
        return there

    @contextlib.contextmanager
    def open(self, blob: Descriptor) -> Iterator[IO[bytes]]:
        """A blob as a stream, in constant memory; see :func:`verified`."""
        retries = self.transport.retries(f"blob {blob.digest}")
        stream = verified(
            blob,
            self.name,
            lambda offset: body_from(self, blob, offset, retries),
            lost=retries.lost,
            moved=retries.moved,
        )
        try:
            yield stream
        finally:
            stream.close()

    # -- writing

    def mount(self, blob: Descriptor, source: ImageSource) -> bool:
        """Mount a blob from another repository of this registry, if the registry supports it.

        A registry without mounts opens an upload session instead, which ``put_blob`` then uses.
        After repeated failures the other blobs are uploaded without asking.

        Raises:
            RemoteError: the registry does not answer.
        """
        if not self.is_beside(source):
            return False
        return self.has(blob.digest) if source.path == self.path else self._mount(blob, source.path)

    def is_beside(self, source: ImageSource) -> TypeGuard[Repository]:
        """Whether a source is a repository of this registry."""
        return isinstance(source, Repository) and source.registry.host == self.registry.host

    def finds(self, blob: Descriptor) -> bool:
        """Whether the registry says that it has a blob; if not, its upload has begun.

        One request, a mount from the repository itself.  A registry that mounts nothing says no
        to every blob, so this is for blobs that cost little to send again.
        """
        return self._mount(blob, self.path)

    def end_session(self, blob: Descriptor) -> None:
        """Cancel the upload session that a refused mount opened, if there is one."""
        session = self.waiting_session(blob.digest)
        if session is not None:
            _cancel(self, session.address, "cancelling an upload")
            forget_upload(self.name, session.address)

    def _mount(self, blob: Descriptor, path: str) -> bool:
        """Mount a blob from the repository ``path``; see ``mount``."""
        if path in self._no_mounts:
            return False
        url = self.url("blobs/uploads/")
        query = urlencode({"mount": blob.digest, "from": path})
        try:
            response = self.transport.request(
                "POST",
                f"{url}?{query}",
                f"mount of {blob.digest}",
                expect=frozenset({201, 202, 400, 401, 403, 404, 405, 501}),
                headers={"Content-Length": "0"},
                permit=self.authenticator.permit(
                    scope_of(self.path, "pull", "push"),
                    *([scope_of(path, "pull")] if path != self.path else []),
                ),
                settle=_FAILS,
            )
        except AccessDenied:
            return False
        drain(response)
        if response.status_code in _FAILS:
            self._no_mounts.add(path)
            self.transport.say_once(
                f"  {self.registry.host} answers {response.status_code} to a blob mount from "
                f"{path}; uploading the blobs"
            )
        if response.status_code == 202:
            self.opened_session(blob.digest, _session(self, url, response))
        return response.status_code == 201

    def put_blob(self, blob: Descriptor, content: IO[bytes]) -> None:
        """Upload a blob unless it exists; nothing is stored if its bytes do not match its digest.

        Raises:
            UploadLost: it must be sent again from the start, and ``content`` cannot seek.
            RemoteError: the registry rejects it, or the bytes do not match.
        """
        absent = self.known_absent(blob.digest) or blob.digest in self._sessions
        if absent or not self.has(blob.digest):
            self._tidy()
            upload(self, blob, content)

    def _tidy(self) -> None:
        """Clean up old upload sessions once, before the first upload."""
        with self._lock:
            tidied, self._tidied = self._tidied, True
        if not tidied:
            end_abandoned(self)

    def put_manifest(self, manifest: RawManifest, reference: str) -> None:
        """Push a manifest under a tag or its own digest; this is the last step of a push.

        Raises:
            RemoteError: the registry does not take it.
        """
        self.send_manifest(manifest, reference)

    def send_manifest(self, manifest: RawManifest, reference: str) -> requests.Response:
        """Like ``put_manifest``; returns the registry's response."""
        subject = f"push of {self.path}{separator(reference)}{reference}"
        retries = self.transport.retries(subject, small=True)
        while True:
            response = self.transport.request(
                "PUT",
                self.manifest_url(reference),
                subject,
                expect=frozenset({200, 201, 202}),
                headers={"Content-Type": manifest.media_type},
                body=manifest.data,
                permit=self.writing,
                retries=retries,
            )
            drain(response)
            stored = _named_digest(response)
            if stored in ("", manifest.digest):
                return response
            # damaged in transit, or changed by the registry: a tag must not point to it
            retries.failed(f"{manifest.digest} was stored as {stored}")

    # -- tags

    def tags(self) -> list[str]:
        """All tags in the registry's order; none if the repository does not exist.

        Raises:
            RemoteError: the response is not a list of tags, or has too many pages.
        """
        tags: dict[str, None] = {}
        for _, data in self._pages(f"tags/list?n={_PAGE}", "list of tags", {}):
            try:
                names = parse_json(data)["tags"] or []
            except (ValueError, KeyError, TypeError):
                names = None
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise RemoteError(f"{self.name}: the list of tags is malformed")
            wrong = [name for name in names if not is_tag(name)]
            if wrong:
                raise RemoteError(f"{self.name}: its list of tags has {wrong[0][:200]!r}, no tag")
            tags.update(dict.fromkeys(names))
        return list(tags)

    def set_tag(self, manifest: RawManifest, tag: str, was: str | None) -> None:
        """Move a tag from digest ``was`` (None: a new tag) to a manifest.

        Raises:
            TagTaken: it points to something else, before or after.
            RemoteError: the registry does not take it.
        """
        tries = _Looking(self, tag, manifest.digest, was)
        conditional = True
        try:
            tries.look()
            while True:
                condition = {"If-Match": f'"{tries.was}"'} if tries.was else {"If-None-Match": "*"}
                response = self.transport.request(
                    "PUT",
                    self.manifest_url(tag),
                    f"push of {self.path}:{tag}",
                    expect=frozenset({200, 201, 202, 412}),
                    headers={
                        "Content-Type": manifest.media_type,
                        **(condition if conditional else {}),
                    },
                    body=manifest.data,
                    permit=self.writing,
                    retries=tries,
                )
                drain(response)
                stored = response.headers.get("Docker-Content-Digest") or manifest.digest
                if response.status_code == 412:
                    tries.look()
                    conditional = False  # it is as it was: the registry compares something else
                elif stored == manifest.digest:
                    break
                else:  # damaged on the way, or changed by the registry: no tag may be left on that
                    tries.was = stored
                    tries.failed(f"{manifest.digest} was stored as {stored}")
        except _Done:
            pass  # as HEAD says
        seen = self.stored_digest(tag)
        if seen != manifest.digest:
            name = f"{self.name}:{tag}"
            raise TagTaken(f"{name} is {seen or 'gone'} right after it was set", seen)

    def settle(self) -> None:
        """Wait until a concurrent publisher that saw the tag free has written it too."""
        options = self.transport.options
        options.pause(options.settle)

    def remove(self, reference: str) -> bool:
        """Delete a manifest with all its tags, or a tag; False if the registry refuses.

        Raises:
            RemoteError: the registry does not respond.
        """
        try:
            response = self.transport.request(
                "DELETE",
                self.manifest_url(reference),
                f"removal of {self.path}{separator(reference)}{reference}",
                expect=frozenset({200, 202, 204, 404}) | _NO_DELETE,
                permit=self.authenticator.permit(scope_of(self.path, "pull", "push", "delete")),
            )
        except AccessDenied:
            return False
        drain(response)
        return response.status_code not in _NO_DELETE

    # -- referrers

    def referrers(self, digest: str, artifact_type: str = "") -> tuple[Descriptor, ...]:
        """Manifests whose subject is ``digest``, all of them or those of one type.

        Raises:
            RemoteError: the registry's answer is malformed.
        """
        if not is_digest(digest):
            raise RemoteError(f"{self.name}: {digest[:200]!r} is not a sha256 digest")
        referrers: dict[str, Descriptor] = {}
        query = f"?{urlencode({'artifactType': artifact_type})}" if artifact_type else ""
        known = False
        for response, data in self._pages(
            f"referrers/{digest}{query}", "list of referrers", {"Accept": OCI_INDEX}
        ):
            known = True
            index = check_manifest(
                data,
                content_type=response.headers.get("Content-Type", ""),
                digest="",
                where=f"{self.name}: the list of referrers",
            )
            referrers.update({entry.digest: entry for entry in entries(index)})
        if not known:
            index_by_tag = self._referrers_by_tag(digest)
            if index_by_tag is not None:
                referrers = {entry.digest: entry for entry, _ in _listed(index_by_tag)}
        return tuple(
            entry
            for entry in referrers.values()
            if not artifact_type or entry.artifact_type == artifact_type
        )

    def attach(self, manifest: RawManifest) -> None:
        """Push a manifest that names a ``subject``, so that ``referrers`` finds it there.

        Raises:
            RemoteError: it names none, or the registry rejects it.
        """
        value = manifest.json()
        subject = Descriptor.parse(value.get("subject"), f"subject of {manifest.digest}")
        response = self.send_manifest(manifest, manifest.digest)
        if response.headers.get("OCI-Subject") == subject.digest:
            return
        index = self._referrers_by_tag(subject.digest)
        document: dict[str, Any] = {"schemaVersion": 2, "mediaType": OCI_INDEX}
        others: dict[str, Any] = {}
        if index is not None:
            document = index.json()
            others = {entry.digest: row for entry, row in _listed(index)}
        others.pop(manifest.digest, None)
        own = _referrer(manifest, value).as_json()
        try:
            self._put_list(document, [*others.values(), own], subject.digest)
        except RemoteError:
            # some registries take no list with an entry that was deleted, or never was there
            there = [row for digest, row in others.items() if self.digest_of(digest) is not None]
            if len(there) == len(others):
                raise
            self._put_list(document, [*there, own], subject.digest)

    def _put_list(self, document: dict[str, Any], rows: list[Any], subject: str) -> None:
        """Write the list of a manifest's referrers under its tag."""
        data = json.dumps(
            {**document, "manifests": rows}, sort_keys=True, separators=(",", ":")
        ).encode()
        self.put_manifest(RawManifest(data=data, media_type=OCI_INDEX), _tag(subject))

    def _referrers_by_tag(self, digest: str) -> RawManifest | None:
        tagged = self.digest_of(_tag(digest))
        if tagged is None:
            return None
        index = self.manifest(tagged)
        if not is_index(index):
            raise RemoteError(f"{self.name}:{_tag(digest)} is not an index of referrers")
        return index

    def _pages(
        self, tail: str, subject: str, headers: dict[str, str]
    ) -> Iterator[tuple[requests.Response, bytes]]:
        """The pages of a list, each with a ``Link`` to the next; none if there is no list."""
        url, seen = self.url(tail), set[str]()
        subject = f"{subject} of {self.path}"
        while url:
            if url in seen or len(seen) >= _PAGE_LIMIT:
                raise RemoteError(f"{self.name}: the {subject} never ends: {place(url)}")
            seen.add(url)
            response, data = self.transport.fetch(
                url,
                subject,
                limit=MANIFEST_LIMIT,
                expect=frozenset({200, 404}),
                headers=headers,
                permit=self.reading,
            )
            if response.status_code == 404:
                return
            yield response, data
            link = response.links.get("next", {}).get("url", "")
            following = resolved(url, link, f"{self.name}: the {subject}") if link else ""
            if following and origin(following) != origin(url):
                raise RemoteError(f"{self.name}: the {subject} leads to {place(following)}")
            url = following


def separator(reference: str) -> str:
    """``@`` before a digest, ``:`` before a tag."""
    return "@" if is_digest(reference) else ":"


def _named_digest(response: requests.Response) -> str:
    """The digest in the registry's response, if it is a sha256 digest."""
    digest: str = response.headers.get("Docker-Content-Digest", "")
    return digest if is_digest(digest) else ""


def _referrer(manifest: RawManifest, value: dict[str, Any]) -> Descriptor:
    """Its entry in an index of referrers, with its artifact type and annotations."""
    config = value.get("config")
    of_config = config.get("mediaType") if isinstance(config, dict) else ""
    entry = {
        **manifest.descriptor.as_json(),
        "artifactType": value.get("artifactType") or of_config,
        "annotations": value.get("annotations"),
    }
    return Descriptor.parse(entry, manifest.digest)


def _listed(index: RawManifest) -> Iterator[tuple[Descriptor, dict[str, Any]]]:
    """The entries of a list of referrers, and their JSON; any client can write one.

    Entries that are no descriptors are left out, so that they are in nobody's way.
    """
    for row in index.json()["manifests"] or []:
        with contextlib.suppress(RemoteError):
            yield Descriptor.parse(row, index.digest), row


def _tag(digest: str) -> str:
    return digest.replace(":", "-")


# ------------------------------------------------------------------------------------ setting a tag


class TagTaken(RemoteError):
    """The tag points to an unexpected digest ``seen``, or does not exist (None)."""

    def __init__(self, message: str, seen: str | None) -> None:
        super().__init__(message)
        self.seen = seen


class _Done(Exception):
    """The tag already points to the new image."""


class _Looking(Retries):
    """Reads the tag before each attempt."""

    def __init__(self, repository: Repository, tag: str, new: str, was: str | None) -> None:
        transport = repository.transport
        subject = f"push of {repository.path}:{tag}"
        super().__init__(transport.host, subject, transport.options, say=transport.say_once)
        self._repository, self._tag, self._new = repository, tag, new
        self.was = was

    def failed(self, reason: str, wait: float | None = None) -> None:
        super().failed(reason, wait)
        self.look()

    def look(self) -> None:
        """Continue if the tag is unchanged.

        Raises:
            TagTaken: it points to something else.
            _Done: it points to the new image: an earlier attempt succeeded.
        """
        seen = self._repository.digest_of(self._tag)
        if seen == self._new:
            raise _Done
        if seen != self.was:
            name = f"{self._repository.name}:{self._tag}"
            raise TagTaken(f"{name} is {seen or 'gone'}, but was {self.was or 'free'}", seen)
