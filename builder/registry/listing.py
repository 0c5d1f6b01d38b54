"""Lists the tags of a repository, and the referrers of a manifest.

Referrers come from the registry's API, or else from the tag ``sha256-<hex>``, an index
that clients maintain (OCI distribution specification 1.1, "referrers tag schema").
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from builder.errors import RemoteError
from builder.net.messages import resolved
from builder.registry.manifests import check_manifest, entries, is_index
from builder.registry.model import MANIFEST_LIMIT, OCI_INDEX, Descriptor, RawManifest, parse_json
from builder.registry.reference import is_digest, is_tag
from builder.registry.transport import origin, place

if TYPE_CHECKING:
    from collections.abc import Iterator

    import requests

    from builder.registry.client import Repository

#: Tags per page, and the most pages read; a larger repository is an error.
_PAGE = 1000
_PAGE_LIMIT = 200


def tags(repository: Repository) -> list[str]:
    """All tags in the registry's order; none if the repository does not exist.

    Raises:
        RemoteError: the response is not a list of tags, or has too many pages.
    """
    found: dict[str, None] = {}
    for _, data in _pages(repository, f"tags/list?n={_PAGE}", "list of tags", {}):
        try:
            names = parse_json(data)["tags"] or []
        except (ValueError, KeyError, TypeError):
            names = None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise RemoteError(f"{repository.name}: the list of tags is malformed")
        wrong = [name for name in names if not is_tag(name)]
        if wrong:
            raise RemoteError(f"{repository.name}: its list of tags has {wrong[0][:200]!r}, no tag")
        found.update(dict.fromkeys(names))
    return list(found)


def referrers(
    repository: Repository, digest: str, artifact_type: str = ""
) -> tuple[Descriptor, ...]:
    """Manifests whose subject is ``digest``, all of them or those of one type.

    Raises:
        RemoteError: the registry's answer is malformed.
    """
    if not is_digest(digest):
        raise RemoteError(f"{repository.name}: {digest[:200]!r} is not a sha256 digest")
    found: dict[str, Descriptor] = {}
    query = f"?{urlencode({'artifactType': artifact_type})}" if artifact_type else ""
    known = False
    for response, data in _pages(
        repository, f"referrers/{digest}{query}", "list of referrers", {"Accept": OCI_INDEX}
    ):
        known = True
        index = check_manifest(
            data,
            content_type=response.headers.get("Content-Type", ""),
            digest="",
            where=f"{repository.name}: the list of referrers",
        )
        found.update({entry.digest: entry for entry in entries(index)})
    if not known:
        index_by_tag = _by_tag(repository, digest)
        if index_by_tag is not None:
            found = {entry.digest: entry for entry in entries(index_by_tag)}
    return tuple(
        entry
        for entry in found.values()
        if not artifact_type or entry.artifact_type == artifact_type
    )


def attach(repository: Repository, manifest: RawManifest) -> None:
    """Push a manifest that names a ``subject``, so that ``referrers`` finds it there.

    Raises:
        RemoteError: it names none, or the registry rejects it.
    """
    value = manifest.json()
    subject = Descriptor.parse(value.get("subject"), f"subject of {manifest.digest}")
    response = repository.send_manifest(manifest, manifest.digest)
    if response.headers.get("OCI-Subject") == subject.digest:
        return
    index = _by_tag(repository, subject.digest)
    document: dict[str, Any] = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": []}
    if index is not None:
        document = index.json()
    listed = [entry for entry in document["manifests"] if entry["digest"] != manifest.digest]
    document["manifests"] = [*listed, _referrer(manifest, value).as_json()]
    data = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    repository.put_manifest(RawManifest(data=data, media_type=OCI_INDEX), _tag(subject.digest))


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


def _by_tag(repository: Repository, digest: str) -> RawManifest | None:
    found = repository.digest_of(_tag(digest))
    if found is None:
        return None
    index = repository.manifest(found)
    if not is_index(index):
        raise RemoteError(f"{repository.name}:{_tag(digest)} is not an index of referrers")
    return index


def _pages(
    repository: Repository, tail: str, subject: str, headers: dict[str, str]
) -> Iterator[tuple[requests.Response, bytes]]:
    """The pages of a list, each with a ``Link`` to the next; none if there is no list."""
    url, seen = repository.url(tail), set[str]()
    subject = f"{subject} of {repository.path}"
    while url:
        if url in seen or len(seen) >= _PAGE_LIMIT:
            raise RemoteError(f"{repository.name}: the {subject} never ends: {place(url)}")
        seen.add(url)
        response, data = repository.transport.fetch(
            url,
            subject,
            limit=MANIFEST_LIMIT,
            expect=frozenset({200, 404}),
            headers=headers,
            permit=repository.reading,
        )
        if response.status_code == 404:
            return
        yield response, data
        link = response.links.get("next", {}).get("url", "")
        following = resolved(url, link, f"{repository.name}: the {subject}") if link else ""
        if following and origin(following) != origin(url):
            raise RemoteError(f"{repository.name}: the {subject} leads to {place(following)}")
        url = following
