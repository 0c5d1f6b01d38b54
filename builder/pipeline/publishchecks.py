"""Runs levels of ``verify`` on images that are about to be published; each is opened once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from builder.common.console import console
from builder.common.document import plain
from builder.common.pypi import PackageIndex
from builder.common.reference import Ref
from builder.images.registry.copy import layout_place
from builder.images.rootfs.image import find_image
from builder.layers.lock import LockedFacts, lock_path
from builder.layers.pinned import IndexSources
from builder.pipeline.show import CheckLines, show_report
from builder.proof.cached import EvidenceCache, layout_content, report_of
from builder.proof.checks import DEFAULT_LEVELS
from builder.proof.opening import Opening, open_engine_image, target_of_layers
from builder.proof.run import verify
from builder.proof.trust import TrustedSources
from builder.publishing.evidence import Evidence
from builder.publishing.sources import EngineImage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.proof.report import Report
    from builder.proof.target import VerifyTarget
    from builder.publishing.evidence import Claim
    from builder.publishing.sources import Opened


class Checks:
    """The levels of the images that a source has."""

    def __init__(self, opened: Opened, *, trust_image: bool) -> None:
        """Opens no image."""
        self._opened = opened
        self._index = PackageIndex()
        self._lock = lock_path(Path.cwd())
        self._trust = TrustedSources(index=self._index, everything=trust_image)
        self._targets: dict[str, VerifyTarget] = {}

    def close(self) -> None:
        """Close the images."""
        for target in self._targets.values():
            target.close()

    def name(self, claim: Claim) -> str:
        """The image as the user named it, or by digest where that names others, too."""
        opened = self._opened
        if isinstance(opened, EngineImage) or opened.subject.digest == claim.digest:
            return opened.ref.text
        return self._ref(claim).text

    def run(self, claim: Claim, levels: Sequence[str]) -> Evidence:
        """Run levels, or take what this machine has found of the same content.

        Raises:
            SparkBuildError: the image cannot be opened.
        """
        known = self._known(claim, levels)
        if known is None:
            target = self._target(claim)
            caches = [self._cache(levels), self._cache(DEFAULT_LEVELS)]
            ref = self._ref(claim)
            for cache in caches:
                if found := cache.get(cache.key_of(target, ref)):
                    known = report_of(found, target.name, None, target)
            if known is None:
                with console.step(f"verify {target.name}"):
                    known = verify(target, levels, CheckLines())
                    show_report(known)
                caches[0].put(caches[0].key_of(target, ref), known, ref)
        document = plain(known.document())
        document["checks"] = [row for row in document["checks"] if row["level"] in levels]
        when = f"run at {known.cached}" if known.cached else "run now"
        return Evidence(document=document, origin=f"{', '.join(levels)}, {when}")

    def _ref(self, claim: Claim) -> Ref:
        """The image by digest."""
        if isinstance(self._opened, EngineImage):
            return Ref(claim.digest)
        if self._opened.ref.in_layout:
            return Ref(f"oci:{layout_place(self._opened.ref)[0]}@{claim.digest}")
        return Ref(f"docker://{self._opened.source.name}@{claim.digest}")

    def _cache(self, levels: Sequence[str], trust: TrustedSources | None = None) -> EvidenceCache:
        return EvidenceCache(
            levels=tuple(levels), trust=trust or self._trust, index=self._index, lock=self._lock
        )

    def _known(self, claim: Claim, levels: Sequence[str]) -> Report | None:
        """What ``image``, ``verify`` or this command has found of a layout, before it is opened.

        ``image`` trusts the files that its own plan writes, so its evidence has another key.
        """
        ref = self._ref(claim)
        if isinstance(self._opened, EngineImage) or not ref.in_layout:
            return None
        content = layout_content(ref)
        if not content:
            return None
        trusts = (self._trust, self._trust.with_plan(self._opened.baked[claim.digest].plan))
        for cache in (self._cache(ran, t) for ran in (levels, DEFAULT_LEVELS) for t in trusts):
            if not cache.usable or not set(levels) <= set(cache.levels):
                continue
            if found := cache.get(cache.key(content, "its own")):
                return report_of(found, ref.text, None)
        return None

    def _target(self, claim: Claim) -> VerifyTarget:
        if claim.digest not in self._targets:
            facts = LockedFacts.beside(self._lock)
            opening = Opening(
                index=self._index,
                sources=IndexSources(self._index),
                facts_of=facts.of,
                trust=self._trust,
            )
            self._targets[claim.digest] = _target_of(self._opened, claim.digest, opening)
        return self._targets[claim.digest]


def _target_of(opened: Opened, digest: str, opening: Opening) -> VerifyTarget:
    """One image of what is published; one in a Docker Engine by its ID, not by its tag."""
    if isinstance(opened, EngineImage):
        return open_engine_image(digest, opening)
    image = find_image(opened.source, digest, None)
    return target_of_layers(image, Ref(f"docker://{opened.source.name}@{digest}"), opening)
