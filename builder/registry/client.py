"""A registry and its repositories (OCI distribution specification).

registry = Registry(reference.host)
repository = registry.repository(reference.repository)
manifest = repository.manifest(reference.identifier)
with repository.open(descriptor) as stream: ...
"""

from __future__ import annotations

import contextlib
from typing import IO, TYPE_CHECKING
from urllib.parse import urlencode

from builder.registry.access import RepositoryAccess
from builder.registry.auth import AccessDenied, scope_of
from builder.registry.download import body_from, gives
from builder.registry.manifests import check_manifest
from builder.registry.model import (
    INDEX_TYPES,
    MANIFEST_LIMIT,
    MANIFEST_TYPES,
    Descriptor,
    RawManifest,
)
from builder.registry.options import Options, Traffic
from builder.registry.reference import Reference, is_digest
from builder.registry.responses import drain
from builder.registry.stream import verified
from builder.registry.transport import Transport
from builder.registry.upload import end_abandoned, note_session, session_address, upload

if TYPE_CHECKING:
    from collections.abc import Iterator

    import requests

    from builder.registry.model import ImageSource

#: Statuses of a registry that failed for a reason other than permissions or a missing name.
_FAILS = frozenset({500, 502, 503, 504})
ACCEPT = {"Accept": ", ".join((*INDEX_TYPES, *MANIFEST_TYPES))}


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

    def gives(self, blob: Descriptor) -> bool:
        """Whether the last byte of a blob can be read at its expected offset.

        ``has`` trusts the registry; some report blobs that their storage has lost.
        """
        there = gives(self, blob)
        if not there:
            self.found_absent(blob.digest)
        return there

    @contextlib.contextmanager
    def open(self, blob: Descriptor) -> Iterator[IO[bytes]]:
        """A blob as a stream, in constant memory; see ``stream.verified``."""
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
        if not isinstance(source, Repository) or source.registry.host != self.registry.host:
            return False
        if source.path == self.path:
            return self.has(blob.digest)
        if source.path in self._no_mounts:
            return False
        url = self.url("blobs/uploads/")
        query = urlencode({"mount": blob.digest, "from": source.path})
        try:
            response = self.transport.request(
                "POST",
                f"{url}?{query}",
                f"mount of {blob.digest}",
                expect=frozenset({201, 202, 400, 401, 403, 404, 405, 501}),
                headers={"Content-Length": "0"},
                permit=self.authenticator.permit(
                    scope_of(self.path, "pull", "push"), scope_of(source.path, "pull")
                ),
                settle=_FAILS,
            )
        except AccessDenied:
            return False
        drain(response)
        if response.status_code in _FAILS:
            self._no_mounts.add(source.path)
            self.transport.say_once(
                f"  {self.registry.host} answers {response.status_code} to a blob mount from "
                f"{source.path}; uploading the blobs"
            )
        if response.status_code == 202:
            address = session_address(self, url, response)
            note_session(self, address)
            self.opened_session(blob.digest, address)
        return response.status_code == 201

    def put_blob(self, blob: Descriptor, content: IO[bytes]) -> None:
        """Upload a blob unless it exists; nothing is stored if its bytes do not match its digest.

        Raises:
            UploadLost: it must be sent again from the start, and ``content`` cannot seek.
            RemoteError: the registry rejects it, or the bytes do not match.
        """
        if self.known_absent(blob.digest) or not self.has(blob.digest):
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


def separator(reference: str) -> str:
    """``@`` before a digest, ``:`` before a tag."""
    return "@" if is_digest(reference) else ":"


def _named_digest(response: requests.Response) -> str:
    """The digest in the registry's response, if it is a sha256 digest."""
    digest: str = response.headers.get("Docker-Content-Digest", "")
    return digest if is_digest(digest) else ""
