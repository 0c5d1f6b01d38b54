"""Collects the files that a mod downloads from the package index, for a vendored mod."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.applier.layers import DonorPin
from builder.applier.outcomes import AMBIGUOUS, DRIFT
from builder.applier.sources import VENDORED, donor_name
from builder.applier.values import all_match
from builder.common.reference import Ref
from builder.errors import Exit, SparkBuildError, UsageError
from builder.layers.planner import IndexSources, make_plan
from builder.pipeline.bases import identify_base

if TYPE_CHECKING:
    from builder.applier.layers import InputPin
    from builder.applier.sources import Member
    from builder.common.pypi import PackageIndex
    from builder.layers.catalog import Selection
    from builder.layers.mods import ModFiles

#: The platform of a DGX Spark.
_PLATFORM = "linux/arm64"


class _Asking(IndexSources):
    """Records requests, by the names that the applier caches them under.

    These are more than a plan's inputs: the applier also reads a wheel to see that it is already
    installed.
    """

    def __init__(self, index: PackageIndex) -> None:
        super().__init__(index)
        self.asked: dict[str, InputPin] = {}

    def donor(self, pin: DonorPin) -> bytes:
        self.asked[donor_name(pin)] = pin
        return super().donor(pin)

    def members(self, pin: InputPin) -> list[Member]:
        self.asked[pin.filename] = pin
        return super().members(pin)

    def content(self, name: str) -> bytes:
        """The requested bytes, checked against their pin."""
        pin = self.asked[name]
        return (
            self.donor(pin)
            if isinstance(pin, DonorPin)
            else self._wheel(pin).download().read_bytes()
        )


def vendored_files(selection: Selection, named: str, index: PackageIndex) -> ModFiles:
    """The files that layers take from the package index on the given vLLM releases, for arm64.

    Raises:
        UsageError: no release is given, or the profile does not support one.
        SparkBuildError: a layer drifted on one (exit 4).
    """
    releases = [word.strip() for word in named.split(",") if word.strip()]
    if not releases:
        raise UsageError("no vLLM release named", hint="--vendor 0.22.1")
    sources = _Asking(index)
    for release in releases:
        base = identify_base(Ref(f"pypi:vllm=={release}"), selection, index, platform=_PLATFORM)
        for profile in selection.profiles:
            if not all_match(profile.needs, base.identity.packages):
                raise UsageError(
                    f"{profile.name} does not support vllm {release}: {profile.needs_reason}",
                    hint="spark-build matrix -l " + profile.name,
                )
        for decision in make_plan(base, selection, sources).decisions:
            if decision.outcome.state in (DRIFT, AMBIGUOUS):
                raise SparkBuildError(
                    f"{decision.name} on vllm {release}: {decision.outcome.reason}",
                    Exit.DRIFT,
                    hint=f"spark-build layers show {decision.name}",
                )
    return {f"{VENDORED}/{name}": (sources.content(name), 0o644) for name in sorted(sources.asked)}
