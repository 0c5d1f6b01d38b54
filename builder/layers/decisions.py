"""Decisions about layers on released wheels, kept in one small file of the cache.

A decision depends on the layers up to it, the sha256 of the wheels, the platform, and the code that
judges: nothing else, so it is never made twice.  Which wheels a release has depends on what the
index says about them.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from msgspec import Meta

from builder.applier.judging import judge_in_order
from builder.applier.trees import OverlayTree
from builder.applier.values import canonical_json, sha256_hex
from builder.common.document import Part, Text
from builder.common.locks import locked
from builder.common.paths import cache_dir, package_file
from builder.common.plan import State
from builder.common.pypi import write_atomically
from builder.images.subject import tracked_for
from builder.layers.evidence import Evidence, evidence_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from builder.applier.sources import Sources
    from builder.common.plan import BaseIdentity, Platform
    from builder.common.pypi import PackageIndex
    from builder.images.subject import Subject
    from builder.layers.catalog import Selection

T = TypeVar("T")

#: Entries of each table that a file keeps, the newest: about 10 MB.
_MOST = 4000
#: Files that are kept, one for each version of the code that judges.
_FILES = 4


class Decision(Part, frozen=True, kw_only=True):
    """The state of one layer on one base, and what shows it."""

    layer: Text
    state: State
    reason: str
    since: Annotated[str, Meta(description="the first release with the change")] = ""
    notes: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()


class KnownBase(Part, frozen=True, kw_only=True):
    """What the index has as the wheels of a release: their digest, and the versions."""

    digest: Text
    packages: dict[str, str]
    #: project -> digest of what the index says about it
    pages: dict[str, str]


class _Kept(msgspec.Struct):
    bases: dict[str, KnownBase] = msgspec.field(default_factory=dict)
    decisions: dict[str, tuple[Decision, ...]] = msgspec.field(default_factory=dict)
    #: other small answers by the hash of what they depend on: excerpts, diffs
    texts: dict[str, str] = msgspec.field(default_factory=dict)


#: What a decision is made by.
_CODE = ("applier/*.py", "common/machinecode.py", "common/pypi.py", "common/wheels.py")
_OURS = ("images/bases/pypi.py", "layers/evidence.py", "layers/decisions.py")


@cache
def version() -> str:
    """A digest of the code that decides: 12 hexadecimal digits."""
    paths = sorted(p for pattern in (*_CODE, *_OURS) for p in package_file().glob(pattern))
    return sha256_hex(b"\0".join(path.read_bytes() for path in paths))[:12]


class DecisionStore:
    """The file; what is added is written by :meth:`save`."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_dir() / "decisions"
        self._file = self._folder / f"decisions-{version()}.json"
        self._kept = self._read()
        self._added = False

    def _read(self) -> _Kept:
        with suppress(OSError, ValueError, RecursionError):
            return msgspec.json.decode(self._file.read_bytes(), type=_Kept)
        return _Kept()

    def base(self, key: str, index: PackageIndex) -> KnownBase | None:
        """A base, if the index says the same about its packages as then."""
        known = self._kept.bases.get(key)
        if known is None:
            return None
        same = all(index.page_digest(name) == digest for name, digest in known.pages.items())
        return known if same else None

    def add_base(self, key: str, identity: BaseIdentity, index: PackageIndex) -> KnownBase:
        """Keep what a base is."""
        packages = dict(identity.packages)
        pages = {name: index.page_digest(name) for name in packages}
        known = KnownBase(digest=identity.digest, packages=packages, pages=pages)
        self._put(self._kept.bases, key, known)
        return known

    def decisions(self, key: str) -> tuple[Decision, ...] | None:
        """What was decided, by :func:`decision_key`."""
        return self._kept.decisions.get(key)

    def add_decisions(self, key: str, decided: tuple[Decision, ...]) -> None:
        """Keep decisions."""
        self._put(self._kept.decisions, key, decided)

    def text(self, key: str, make: Callable[[], str]) -> str:
        """A small text by the hash of what it depends on, made if it is not kept."""
        if key not in self._kept.texts:
            self._put(self._kept.texts, key, make())
        return self._kept.texts[key]

    def _put(self, table: dict[str, T], key: str, value: T) -> None:
        table.pop(key, None)  # the newest come last
        table[key] = value
        self._added = True

    def save(self) -> None:
        """Write what was added, with what other runs have written meanwhile.

        Raises:
            UsageError: the cache cannot be written.
        """
        if not self._added:
            return
        with locked(str(self._file)):
            theirs = self._read()
            ours = self._kept
            self._kept = _Kept(
                bases=_newest(theirs.bases, ours.bases),
                decisions=_newest(theirs.decisions, ours.decisions),
                texts=_newest(theirs.texts, ours.texts),
            )
            write_atomically(self._file, msgspec.json.encode(self._kept))
            self._drop_old()
        self._added = False

    def _drop_old(self) -> None:
        files = self._folder.glob("decisions-*.json")
        with suppress(OSError):  # another run may drop the same ones
            for path in sorted(files, key=lambda p: -p.stat().st_mtime)[_FILES:]:
                path.unlink(missing_ok=True)


def _newest(theirs: Mapping[str, T], ours: Mapping[str, T]) -> dict[str, T]:
    merged = {**{key: value for key, value in theirs.items() if key not in ours}, **ours}
    return dict(islice(merged.items(), max(0, len(merged) - _MOST), None))


# ----------------------------------------------------------------------------------------- deciding


def base_key(ref: str, platform: Platform, selection: Selection, index: PackageIndex) -> str:
    """A hash of what decides which wheels a reference means, besides the index's pages."""
    tracked = list(tracked_for(selection.layers))
    value = [ref, platform.oci, platform.python, selection.pins(), tracked, index.key]
    return sha256_hex(canonical_json(value))


def decision_key(base: KnownBase, platform: Platform, selection: Selection) -> str:
    """A hash of what decisions about these layers on this base depend on."""
    layers = [layer.digest for layer in selection.layers]
    return sha256_hex(canonical_json([base.digest, platform.oci, platform.python, layers]))


def decide(base: Subject, selection: Selection, sources: Sources) -> tuple[Decision, ...]:
    """Judge each layer on the base as patched by those before it.

    Raises:
        ApplyError: an input is not pinned, cannot be downloaded, or does not match its digest.
    """
    identity = base.identity
    below = OverlayTree(base.tree)
    decided = []
    steps = judge_in_order(
        selection.layers, base.tree, sources, identity.platform.target, identity.env
    )
    for step in steps:
        outcome = step.outcome
        decided.append(
            Decision(
                layer=step.layer.name,
                state=outcome.state,  # type: ignore[arg-type]
                reason=outcome.reason,
                since=outcome.since or "",
                notes=tuple(outcome.notes),
                evidence=evidence_of(step.layer, outcome, below),
            )
        )
        below.update(step.changes)
    return tuple(decided)
