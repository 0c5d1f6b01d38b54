"""Parses references to pull requests and commits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from builder.errors import UsageError

_NAME = r"(?P<owner>[A-Za-z0-9][A-Za-z0-9-]*)/(?P<repo>[A-Za-z0-9._-]+)"
_COMMIT = r"(?P<commit>[0-9a-fA-F]{7,64})"
_SHORT = re.compile(rf"{_NAME}(?:#(?P<number>[1-9][0-9]{{0,9}}))?(?:@{_COMMIT})?")
_PULL_PAGE = re.compile(
    rf"/{_NAME}/pull/(?P<number>[1-9][0-9]{{0,9}})(?:/(?:commits|changes)/{_COMMIT})?(?:/.*)?"
)
_COMMIT_PAGE = re.compile(rf"/{_NAME}/commit/{_COMMIT}(?:\.diff|\.patch)?")
_FORMS = (
    "OWNER/REPO#NUMBER, OWNER/REPO#NUMBER@COMMIT, OWNER/REPO@COMMIT, or the page of one of them"
)


@dataclass(frozen=True, kw_only=True)
class PullRef:
    """A pull request, at its head or at a named commit, or (``number`` 0) a single commit."""

    owner: str
    repo: str
    number: int = 0
    commit: str = ""
    #: host of the given page; empty for short forms
    host: str = ""

    @property
    def repository(self) -> str:
        """``OWNER/REPO``."""
        return f"{self.owner}/{self.repo}"

    def __str__(self) -> str:
        number = f"#{self.number}" if self.number else ""
        return f"{self.repository}{number}{f'@{self.commit}' if self.commit else ''}"

    @property
    def layer_name(self) -> str:
        """The name of its layer: ``pr-vllm-12345``, or ``commit-vllm-`` and 12 digits."""
        repo = re.sub(r"[^a-z0-9]+", "-", self.repo.lower()).strip("-") or "repository"
        return f"pr-{repo}-{self.number}" if self.number else f"commit-{repo}-{self.commit[:12]}"


def parse_pull(text: str) -> PullRef:
    """Parse a reference or a page's URL.

    Raises:
        UsageError: it is neither.
    """
    text = text.strip()
    host = ""
    if re.match(r"https?://", text):
        try:
            parts = urlsplit(text)
            host = (parts.hostname or "").lower()
        except ValueError as error:
            raise UsageError(f"{text[:200]!r} is not an address: {error}") from None
        match = _PULL_PAGE.fullmatch(parts.path.rstrip("/")) or _COMMIT_PAGE.fullmatch(parts.path)
    else:
        match = _SHORT.fullmatch(text)
    found = match.groupdict() if match else {}
    number, commit = found.get("number"), found.get("commit")
    if not match or not (number or commit) or found["repo"] in (".", ".."):
        hint = f"vllm-project/vllm#{text.lstrip('#')}" if re.fullmatch(r"#?\d+", text) else ""
        raise UsageError(f"{text[:200]!r} is not a pull request or commit: {_FORMS}", hint=hint)
    return PullRef(
        owner=found["owner"],
        repo=found["repo"].removesuffix(".git"),
        number=int(number or 0),
        commit=(commit or "").lower(),
        host=host,
    )
