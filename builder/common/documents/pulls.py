"""Pull requests in JSON documents: the pin of each, and how it applies to a base."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from builder.common.document import Count, Part, Sha256, Text, always, read
from builder.errors import UsageError

Commit = Annotated[str, Meta(pattern=r"^[0-9a-f]{40}([0-9a-f]{24})?$(?!\n)")]
Day = Annotated[str, Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$(?!\n)")]


#: The state of a hunk in a file.
Found = Literal["pre", "post", "drift", "ambiguous"]


class Pin(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pull request, or a commit (without a number), fixed by its commits and its diff's sha256.

    The diff is from ``base`` to ``commit``, in normal form (:mod:`builder.common.diffs`).
    Empty fields are omitted.
    """

    base: Annotated[Commit, Meta(description="the commit that the change was made from")]
    commit: Annotated[Commit, Meta(description="its head, or the commit that was named")]
    date: Annotated[Day, Meta(description="day of that commit")]
    forge: Annotated[Text, Meta(description="the forge's host")]
    merge_commit: Commit = ""
    merged_at: Day = ""
    number: Annotated[int, Meta(ge=1)] = 0
    release: Annotated[Text, Meta(description="the first release of the package that has it")] = ""
    repository: Annotated[Text, Meta(description="OWNER/REPO on the forge")]
    request: Annotated[
        Text,
        Meta(description="as requested: OWNER/REPO#NUMBER[@COMMIT], or OWNER/REPO@COMMIT"),
    ]
    sha256: Sha256
    size: Annotated[int, Meta(ge=1, description="bytes of the diff in normal form")]
    state: Annotated[str, Meta(pattern=r"^(open|merged|closed|unknown)$(?!\n)")] = ""
    superseded_by: Text = ""
    title: Text = ""
    url: Annotated[str, Meta(pattern=r"^https?://[!-~]+$(?!\n)", description="its page")] = ""

    def __post_init__(self) -> None:
        """Refuse a release that is no version.

        Raises:
            ValueError: it is none.
        """
        if self.release:
            from packaging.version import Version  # the schema of a plan needs none

            Version(self.release)

    @property
    def short(self) -> str:
        """The abbreviated commit."""
        return self.commit[:12]


def read_pin(value: object, where: str) -> Pin:
    """Read a pin from a lock or ``pins.toml``.

    Raises:
        UsageError: a field is missing or malformed.
    """
    try:
        return read(value, Pin)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None


class PatchedFile(Part, frozen=True, kw_only=True):
    """A file that a pull request changes, with the state of its hunks."""

    path: Annotated[Text, Meta(description="below site-packages")]
    change: Literal["edit", "new", "delete", "rename", "mode"]
    hunks: Annotated[
        tuple[Found, ...],
        Meta(
            description="what each finds: its text from before, from after, neither, "
            "or more than one"
        ),
    ]
    offsets: Annotated[
        tuple[int, ...],
        Meta(description="lines between the position in the diff and the actual one"),
    ]


class DroppedFile(Part, frozen=True, kw_only=True):
    """A changed file that is not installed."""

    path: Text
    why: Text


class Conflict(Part, frozen=True, kw_only=True):
    """A hunk that does not match: the expected text, and the nearest one."""

    path: Text
    hunk: Annotated[int, Meta(ge=1, description="from 1")]
    line: Annotated[
        Count, Meta(description="its line according to the diff, from 1; 0 without one")
    ]
    why: Text
    expected: tuple[str, ...] = always(())
    found_line: Annotated[
        Count, Meta(description="where the nearest text is, from 1; 0 where nothing is near")
    ] = always(0)
    found: tuple[str, ...] = always(())
    history: Annotated[str, Meta(description="the releases that it would fit, in words")] = always(
        ""
    )


class PullReport(Pin, frozen=True, kw_only=True):
    """A pull request of a plan and its state, which can change while the image does not."""

    layer: Text
    in_base: Annotated[
        Literal["whole", "part", "no"], Meta(description="how much of it the base already has")
    ]
    installed: tuple[PatchedFile, ...]
    compiled: Annotated[tuple[Text, ...], Meta(description="files that reach a wheel compiled")]
    dropped: tuple[DroppedFile, ...]
    conflicts: tuple[Conflict, ...]
    hints: tuple[Text, ...]


class PinnedPull(Part, frozen=True, kw_only=True):
    """A layer's pull request."""

    pinned: Pin
    today: Annotated[Pin | None, Meta(description="with --refresh: as the forge has it")] = None
