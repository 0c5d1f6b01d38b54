"""Fetch pull requests from a forge (its REST API) or a local git clone.

Both have the same interface; :mod:`builder.common.forge.store` pins and caches the results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from builder.common.forge.reference import PullRef

#: States of a pull request.  A single commit has none, and a clone does not always know.
OPEN, MERGED, CLOSED, UNKNOWN = "open", "merged", "closed", "unknown"


#: Size limit of a repository archive; vLLM's has some tens of megabytes.
MAX_ARCHIVE = 512 << 20


@dataclass(frozen=True, kw_only=True)
class PullFacts:
    """A forge's facts about a pull request, or about a single commit (``number`` is 0).

    ``commit`` is the head (or the commit itself), ``target`` a commit of the target
    branch; commits are full object names.  ``merged_at`` is an ISO 8601 date or empty.
    """

    repository: str
    number: int = 0
    commit: str
    target: str
    title: str = ""
    state: str = UNKNOWN
    merge_commit: str = ""
    merged_at: str = ""
    superseded_by: str = ""
    url: str = ""
    #: notices for the user about the commit
    notice: str = ""


class Forge(Protocol):
    """The interface of a forge."""

    def facts(self, ref: PullRef) -> PullFacts:
        """The current facts about a reference.

        Raises:
            RemoteError: the forge does not respond, or the reference does not exist.
        """

    def merge_base(self, repository: str, target: str, commit: str) -> str:
        """The commit that the change is based on."""

    def date(self, repository: str, commit: str) -> str:
        """The date of a commit, ISO 8601."""

    def diff(self, repository: str, base: str, commit: str) -> bytes:
        """The change from ``base`` to ``commit`` as git prints it."""

    def releases_with(self, repository: str, commit: str) -> tuple[str, ...] | None:
        """Versions, oldest first, whose tag contains the commit; None if unknown."""

    def commit(self, repository: str, name: str) -> str:
        """The full name of a commit."""

    def archive(self, repository: str, commit: str) -> bytes:
        """The files of a commit, as a tar that may be compressed, in a folder of any name."""
