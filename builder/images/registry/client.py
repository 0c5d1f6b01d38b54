"""A registry and its repositories (OCI distribution specification).

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
import json
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlencode

from builder.common.retry import Retries, resolved
from builder.errors import RemoteError
from builder.images.registry.auth import AccessDenied, scope_of
from builder.images.registry.blobs import (
    RepositoryAccess,
    body_from,
    end_abandoned,
    gives,
    note_session,
    session_address,
    upload,
    verified,
)
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
from builder.images.registry.options import Options, Traffic
from builder.images.registry.reference import Reference, is_digest, is_tag
from builder.images.registry.transport import Transport, drain, origin, place

if TYPE_CHECKING:
    from collections.abc import Iterator

    import requests

    from builder.images.registry.model import ImageSource

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
            self.found_absent(blob.digest)
        return there

    @contextlib.contextmanager
    def open(self, blob: Descriptor) -> Iterator[IO[bytes]]:
        """A blob as a stream, in constant memory; see ``blobs.verified``."""
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

    # -- tags

    def tags(self) -> list[str]:
        """All tags in the registry's order; none if the repository does not exist.

        Raises:
            RemoteError: the response is not a list of tags, or has too many pages.
        """
        found: dict[str, None] = {}
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
            found.update(dict.fromkeys(names))
        return list(found)

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
        found: dict[str, Descriptor] = {}
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
            found.update({entry.digest: entry for entry in entries(index)})
        if not known:
            index_by_tag = self._referrers_by_tag(digest)
            if index_by_tag is not None:
                found = {entry.digest: entry for entry in entries(index_by_tag)}
        return tuple(
            entry
            for entry in found.values()
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
        document: dict[str, Any] = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}
        if index is not None:
            document = index.json()
        listed = [entry for entry in document["manifests"] if entry["digest"] != manifest.digest]
        document["manifests"] = [*listed, _referrer(manifest, value).as_json()]
        data = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
        self.put_manifest(RawManifest(data=data, media_type=OCI_INDEX), _tag(subject.digest))

    def _referrers_by_tag(self, digest: str) -> RawManifest | None:
        found = self.digest_of(_tag(digest))
        if found is None:
            return None
        index = self.manifest(found)
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
