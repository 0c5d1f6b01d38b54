"""Access to a repository of a registry: addresses, authorization, and which blobs it has."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from builder.errors import RemoteError
from builder.registry.auth import Authenticator, scope_of
from builder.registry.reference import is_digest, is_repository, is_tag
from builder.registry.responses import drain

if TYPE_CHECKING:
    from builder.registry.auth import ScopedAuthorization
    from builder.registry.transport import Transport


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
