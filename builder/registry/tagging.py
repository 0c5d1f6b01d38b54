"""Sets a tag, and detects concurrent writes to the same tag.

Registries need not support conditional requests, so the tag is also read: right before each attempt
of the request that writes it, and after it.  On a registry that supports ``If-None-Match`` and
``If-Match`` (RFC 9110, 13.1) no other client's tag is overwritten; on others, an overwritten client
is told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.errors import RemoteError
from builder.net.retry import Retries
from builder.registry.responses import drain

if TYPE_CHECKING:
    from builder.registry.client import Repository
    from builder.registry.model import RawManifest


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


def set_tag(repository: Repository, manifest: RawManifest, tag: str, was: str | None) -> None:
    """Move a tag from digest ``was`` (None: a new tag) to a manifest.

    Raises:
        TagTaken: it points to something else, before or after.
        RemoteError: the registry does not take it.
    """
    tries = _Looking(repository, tag, manifest.digest, was)
    conditional = True
    try:
        tries.look()
        while True:
            condition = {"If-Match": f'"{tries.was}"'} if tries.was else {"If-None-Match": "*"}
            response = repository.transport.request(
                "PUT",
                repository.manifest_url(tag),
                f"push of {repository.path}:{tag}",
                expect=frozenset({200, 201, 202, 412}),
                headers={
                    "Content-Type": manifest.media_type,
                    **(condition if conditional else {}),
                },
                body=manifest.data,
                permit=repository.writing,
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
        return
    seen = repository.digest_of(tag)
    if seen != manifest.digest:
        name = f"{repository.name}:{tag}"
        raise TagTaken(f"{name} is {seen or 'gone'} right after it was set", seen)
