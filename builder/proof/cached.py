"""Evidence of complete passes, kept by the digest of everything that it depends on.

An entry is found by digests of content, never by a name or a time: the blobs of a layout are hashed
again at each run.  Only a complete pass is kept; what failed or did not run is asked again.

There is no entry for a directory, for an image in a Docker Engine, for a layout with more bytes
than are hashed sooner than verified, and for a level that needs hardware.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from builder import settings
from builder.applier.files import DOCUMENT, open_regular, read_regular
from builder.applier.values import canonical_json, sha256_hex
from builder.common.document import Moment, Part, Text, moment, plain, read
from builder.common.files import read_entry, write_entry
from builder.common.leftovers import keep_latest
from builder.common.paths import cache_dir, package_file
from builder.common.plan import BakedPlan
from builder.common.reference import base_kind
from builder.errors import SparkBuildError
from builder.images.registry.copy import layout_place
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import blobs, is_index
from builder.proof.checks import LEVELS, Check
from builder.proof.report import Report
from builder.proof.trust import ISOLATED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from builder.common.pypi import PackageIndex
    from builder.common.reference import Ref
    from builder.proof.checks import Listener
    from builder.proof.target import VerifyTarget
    from builder.proof.trust import TrustedSources

#: Entries that are kept, the latest; one has about 100 kB.
_MOST = 200
#: Bytes of a layout that are hashed: SHA-256 takes half a second for them.
_MOST_HASHED = 512 << 20
#: Settings that decide what a sandbox has in it.
_SETTINGS = (settings.TORCH, settings.TORCH_INDEX, settings.REAL_EXTENSIONS, settings.NVCC)


class KeptEvidence(Part, frozen=True, kw_only=True):
    """An entry: what was checked, when, and against which plan."""

    key: Text
    when: Moment
    #: the plan in the image, whose files are not read again
    plan: dict[str, Any]
    digests: tuple[str, ...]
    checks: tuple[Check, ...]
    #: package -> digest of what the index said about it
    pages: dict[str, str]


@cache
def code_digest() -> str:
    """A digest of spark-build itself: its modules, probes, tables and applier."""
    return folders_digest([package_file()])


def folders_digest(folders: Iterable[Path]) -> str:
    """A digest of all files in some folders, by their paths there."""
    sha = hashlib.sha256()
    for number, top in enumerate(folders):
        for path in sorted(top.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                data = read_regular(path, DOCUMENT)
                sha.update(f"{number}\0{path.relative_to(top)}\0{len(data)}\0".encode())
                sha.update(data)
    return sha.hexdigest()


@dataclass(frozen=True, kw_only=True)
class EvidenceCache:
    """The evidence for these questions: levels, and what may run here."""

    levels: tuple[str, ...]
    trust: TrustedSources
    index: PackageIndex
    #: the project's lock, whose facts stand for files of a base
    lock: Path | None = None
    platform: str | None = None
    #: ask again, and keep the new evidence
    refresh: bool = False

    @property
    def usable(self) -> bool:
        """Whether the levels depend on content alone; ``model`` also depends on folders.

        What code that nobody knows says of itself (``--trust-image``) is not evidence to keep.
        """
        named = [LEVELS.get(level) for level in self.levels]
        by_content = all(level and not level.on_gb10 and level.name != "model" for level in named)
        return by_content and not self.trust.everything and not settings.KEEP_LAUNCHES.is_set

    def key(self, content: Sequence[str], plan: str) -> str:
        """The key for a subject by its digests, held against a plan: 64 hexadecimal digits."""
        trust = self.trust
        written = sorted([*pair, before or ""] for pair, before in trust.written.items())
        own = folders_digest(trust.catalog.folders.values())
        facts = (
            sha256_hex(read_regular(self.lock, DOCUMENT))
            if self.lock and self.lock.is_file()
            else ""
        )
        machine = [platform.machine(), sys.version, *(one.value for one in _SETTINGS)]
        asked = [list(self.levels), self.platform or "", self.index.key]
        parts = [code_digest(), list(content), plan, asked, written, own, facts, machine]
        return sha256_hex(canonical_json(parts))

    def key_of_layout(self, ref: Ref) -> str:
        """The key for an image in a layout, held against its own plan; "" without one.

        All its blobs are read and hashed, so a damaged one has no key.
        """
        content = layout_content(ref) if self.usable and ref.in_layout else ()
        return self.key(content, "its own") if content else ""

    def key_of(self, target: VerifyTarget, ref: Ref) -> str:
        """The key for an open target, held against its plan; "" if evidence is not kept."""
        content = _content(target, ref) if self.usable else ()
        if not content:
            return ""
        layers = [layer.digest for layer in target.layers]
        plan = sha256_hex(canonical_json([plain(target.plan), layers, target.label or ""]))
        return self.key(content, plan)

    def get(self, key: str) -> KeptEvidence | None:
        """The evidence, or None: there is none, it is damaged, or the index has other wheels."""
        if not key or self.refresh:
            return None
        with suppress(OSError, ValueError, TypeError, RecursionError):
            entry = read(msgspec.json.decode(read_entry(_file(key))), KeptEvidence)
            same = all(self.index.page_digest(p) == digest for p, digest in entry.pages.items())
            if entry.key == key and same and _complete(entry.checks, self.levels):
                return entry
        return None

    def put(self, key: str, report: Report, ref: Ref) -> None:
        """Keep a report if it is a complete pass, and of a layout that is still the same.

        Raises:
            UsageError: the cache cannot be written.
        """
        if not key or report.necessity is not None or not _complete(report.checks, self.levels):
            return
        if ref.in_layout and not set(layout_content(ref)[:1]).intersection(report.digests):
            return  # it was written anew meanwhile
        base = report.plan.base
        names = base.packages if base_kind(base.kind).is_wheels else ()
        entry = KeptEvidence(
            key=key,
            when=moment(time.time()),
            plan=plain(report.plan),
            digests=report.digests,
            checks=tuple(report.checks),
            pages={name: self.index.page_digest(name) for name in names},
        )
        write_entry(_file(key), msgspec.json.encode(plain(entry)))
        keep_latest(_file(key).parent.glob("*.json"), most=_MOST)


def report_of(
    entry: KeptEvidence, name: str, heard: Listener | None, target: VerifyTarget | None = None
) -> Report:
    """The report from the cache for a target of this name; ``heard`` hears it as if it ran."""
    report = Report(
        target=name,
        plan=target.plan if target else read(entry.plan, BakedPlan),
        unapplied=target.unapplied if target else (),
        digests=entry.digests,
        checks=list(entry.checks),
        cached=entry.when,
    )
    if heard is not None:
        for level in dict.fromkeys(check.level for check in entry.checks):
            for check in entry.checks:
                if check.level == level:
                    heard(check)
            heard.end()
    return report


def layout_content(ref: Ref) -> tuple[str, ...]:
    """Digests of an image's manifest and blobs in a layout, each read and hashed.

    Empty if it is no single image, a blob is missing or is not what its digest says, or the blobs
    have more than ``_MOST_HASHED`` bytes.
    """
    layout, name = layout_place(ref)
    with suppress(SparkBuildError, OSError, ValueError):
        place = LayoutDirectory(layout)
        manifest = place.manifest(name)
        if is_index(manifest):
            return ()
        if sum(one.size for one in blobs(manifest)) > _MOST_HASHED:
            return ()
        digests = [one.digest for one in blobs(manifest)]
        if all(_hash(layout / place.blob_path(one)) == one for one in dict.fromkeys(digests)):
            return (manifest.digest, *digests)
    return ()


def _hash(path: Path) -> str:
    with open_regular(path) as stream:
        return f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"


def _content(target: VerifyTarget, ref: Ref) -> tuple[str, ...]:
    """Digests of what an open target has in it; none where only this machine knows."""
    subject = target.subject
    if ref.in_layout:
        return layout_content(ref)
    if subject.identity.is_wheels:
        return (subject.identity.digest,) if subject.image is None else ()
    by_digest = subject.in_layers is not None and not subject.is_planned
    return target.digests if by_digest else ()


def _complete(checks: Sequence[Check], levels: Sequence[str]) -> bool:
    """Whether every level ran, all that there was to check passed, and no unknown code answered."""
    ran = {check.level for check in checks if check.status == "pass"}
    passed = all(check.status == "pass" or check.idle for check in checks)
    known = not any(part.startswith(ISOLATED) for check in checks for part in check.simulated)
    return passed and known and ran.issuperset(levels)


def _file(key: str) -> Path:
    return cache_dir() / "evidence" / f"{key}.json"
