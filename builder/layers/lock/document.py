"""The lock file as typed values: requests, and the inputs of each plan."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field
from packaging.utils import parse_wheel_filename

from builder.common.document import Count, Digest, Part, Sha256, Text
from builder.common.documents.pulls import Commit, Pin
from builder.common.pypi import WheelFile

#: Names of the files of facts beside the lock (``facts.py``).
FACTS_NAME = r"base-[0-9a-f]{12}\.json\.gz"


class Request(Part, frozen=True, kw_only=True):
    """The options of a locked plan: ``--layers``, ``--with-pr``, base and platform."""

    layers: tuple[str, ...]
    with_pr: tuple[str, ...] = field(name="with-pr")
    base: str
    platform: str
    python: str

    @property
    def key(self) -> str:
        """A unique key of the request, in one line."""
        what = " + ".join([*filter(None, [",".join(self.layers)]), *self.with_pr])
        return f"{what} on {self.base} for {self.platform}, Python {self.python}"


class FactsPin(Part, frozen=True, kw_only=True):
    """The file of facts about a base, by sha256."""

    file: Annotated[str, Meta(pattern=rf"^{FACTS_NAME}\Z")]
    sha256: Sha256
    layers: Annotated[Sha256, Meta(description="one sha256 for the digests of its layers")]
    depth: Annotated[int, Meta(ge=1, description="how many layers those are")]


class LockedInput(Part, frozen=True, kw_only=True):
    """A wheel by its file name, or a pull request."""

    sha256: Sha256
    filename: Text | None = None
    size: Count | None = None
    record: Annotated[
        Sha256 | None,
        Meta(description="of the wheel's RECORD, which files read by range are held against"),
    ] = None
    request: Text | None = None
    repository: Text | None = None
    number: Count | None = None
    commit: Commit | None = None

    def __post_init__(self) -> None:
        """Refuse a wheel whose file name is none, because it becomes a path.

        Raises:
            ValueError: that.
        """
        if self.filename is not None:
            file = WheelFile(
                filename=self.filename, url="", sha256=self.sha256, size=self.size or 0
            )
            parse_wheel_filename(file.filename)

    @property
    def subject(self) -> str:
        """A description for messages."""
        return self.filename or self.request or ""


class LockedBase(Part, frozen=True, kw_only=True):
    """The locked base."""

    kind: Text
    digest: Digest
    platform: Text
    python: Text
    packages: dict[str, str]
    wheels: tuple[LockedInput, ...] = ()
    facts: FactsPin | None = None


class LockedLayer(Part, frozen=True, kw_only=True):
    """A layer's digest, and the digests of its folder's files; none for a pull request."""

    name: Text
    digest: Sha256
    files: dict[str, Sha256]


class LockEntry(Part, frozen=True, kw_only=True):
    """The pinned inputs of the plan for one request."""

    request: Request
    base: LockedBase
    layers: tuple[LockedLayer, ...]
    inputs: tuple[LockedInput, ...]


class LockFile(Part, frozen=True, kw_only=True):
    """The whole file."""

    schema: Literal[1]
    pulls: dict[str, Pin]
    locked: dict[str, LockEntry]
