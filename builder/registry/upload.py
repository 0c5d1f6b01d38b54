"""Uploads blobs to a registry, in one piece or several, and resumes.

Each chunk is held in memory until the registry has stored it, so any stream can be
uploaded, and a chunk can be sent again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from typing import IO, TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

from builder.errors import RemoteError
from builder.net.failures import RequestFailed
from builder.net.messages import resolved
from builder.net.retry import RETRIED, retry_after
from builder.registry.reference import is_digest
from builder.registry.responses import answered, drain, number, problem
from builder.registry.transport import origin
from builder.util.leftovers import abandoned_uploads, forget_upload, note_upload

if TYPE_CHECKING:
    import requests

    from builder.net.retry import Retries
    from builder.registry.access import RepositoryAccess
    from builder.registry.auth import ScopedAuthorization
    from builder.registry.model import Descriptor

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
