"""The manifests that a repository's tags reference, directly or through an index."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from builder.errors import RemoteError
from builder.registry.manifests import entries, is_index
from builder.registry.model import INDEX_TYPES

if TYPE_CHECKING:
    from builder.publish.protocols import PublishTarget
    from builder.registry.model import Descriptor

#: Parallel small requests.
_JOBS = 8
#: Limit of nested indexes.
_DEPTH = 8


class TaggedManifests:
    """Reads the tags of a repository; the contents of indexes are cached."""

    def __init__(self, repository: PublishTarget) -> None:
        """Sends no request."""
        self._repository = repository
        self._listed: dict[str, tuple[Descriptor, ...]] = {}

    def look(self) -> dict[str, set[str]]:
        """Each digest that a tag references now, directly or through an index, with those tags.

        Raises:
            RemoteError: the registry does not respond, or a tag's manifest cannot be read: it may
                be an index.
        """
        tags = list(self._repository.tags())
        with ThreadPoolExecutor(_JOBS) as pool:
            roots = list(zip(tags, pool.map(self._repository.digest_of, tags), strict=True))
            digests = sorted({digest for _, digest in roots if digest is not None})
            reached = dict(zip(digests, pool.map(self._reach, digests), strict=True))
        names: dict[str, set[str]] = {}
        for tag, root in roots:
            for digest in reached[root] if root is not None else ():
                names.setdefault(digest, set()).add(tag)
        return names

    def _reach(self, digest: str, depth: int = _DEPTH) -> set[str]:
        if depth == 0:
            raise RemoteError(
                f"{self._repository.name}: indexes are nested more than {_DEPTH} deep"
            )
        found = {digest}
        for entry in self._entries(digest):
            found.add(entry.digest)
            if entry.media_type in INDEX_TYPES:
                found |= self._reach(entry.digest, depth - 1)
        return found

    def _entries(self, digest: str) -> tuple[Descriptor, ...]:
        if digest not in self._listed:
            try:
                manifest = self._repository.manifest(digest)
            except RemoteError:
                if self._repository.digest_of(digest) is None:  # deleted, or not sent yet
                    return ()
                raise
            self._listed[digest] = entries(manifest) if is_index(manifest) else ()
        return self._listed[digest]
