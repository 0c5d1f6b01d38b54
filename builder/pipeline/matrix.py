"""Layers on all releases of a package: their states, with what shows them."""

from __future__ import annotations

from functools import cached_property
from json import dumps
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, field
from msgspec.structs import replace

from builder.applier.values import all_match
from builder.common.console import console, megabytes
from builder.common.document import Count, Document, Part, Text, always, plain
from builder.common.plan import Platform, State
from builder.common.pypi import PackageIndex, vllm_releases, write_atomically
from builder.common.reference import Ref
from builder.errors import UsageError
from builder.layers.catalog import Catalog
from builder.layers.decisions import DecisionStore, base_key, decide, decision_key
from builder.layers.evidence import Evidence
from builder.layers.pulls import without_pulls
from builder.proof.checks import Check
from builder.proof.recorded import Outcome, by_itself

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from builder.common.plan import BuildPlan
    from builder.images.subject import Subject
    from builder.layers.catalog import Selection
    from builder.layers.decisions import Decision, KnownBase
    from builder.layers.planner import IndexSources
    from builder.pipeline.options import MatrixOptions

#: States in which a layer needs its maintainer.
DRIFTED = ("drift", "ambiguous")


class MatrixRow(Part, frozen=True, kw_only=True):
    """The state of each layer on one release."""

    vllm: Text
    states: dict[str, State]
    reasons: dict[str, str]
    served: Annotated[bool, Meta(description="whether the profile is for this release")]
    release: Annotated[str, Meta(description="of the package that the rows are of")] = ""
    platform: Text = "linux/arm64"
    uploaded: Annotated[str, Meta(description="day of its first wheel, if the index says")] = ""
    yanked: Annotated[
        str | None, Meta(description="if all its wheels were yanked: the reason, maybe empty")
    ] = None
    builds: Annotated[Count, Meta(description="more than 1: built again")] = 1
    packages: dict[str, str] = field(default_factory=dict)
    since: Annotated[dict[str, str], Meta(description="first release with a layer's change")] = (
        field(default_factory=dict)
    )
    evidence: Annotated[
        dict[str, tuple[Evidence, ...]], Meta(description="by layer: the places that decide")
    ] = field(default_factory=dict)
    dispatch: Annotated[
        tuple[Check, ...] | None, Meta(description="with --dispatch: what it selects on SM121")
    ] = None
    choices: Annotated[
        dict[str, dict[str, Outcome]] | None,
        Meta(
            description="with --choices: what the unpatched release does by kind of layer and "
            "choice; the empty choice means that nothing is set"
        ),
    ] = None


class Matrix(Document, frozen=True, kw_only=True):
    """Layers x releases."""

    package: Annotated[Text, Meta(description="whose releases the rows are of")] = always("vllm")
    layers: tuple[Text, ...]
    rows: tuple[MatrixRow, ...]

    @property
    def drifted(self) -> list[tuple[str, MatrixRow]]:
        """The layers and releases that a maintainer must look at."""
        return [(n, r) for r in self.rows for n in self.layers if r.states.get(n) in DRIFTED]


# ------------------------------------------------------------------------------------------- asking


class Asking:
    """Where answers come from: what was decided before, else the index."""

    def __init__(self, index: PackageIndex, platform: str | None = None) -> None:
        self.index, self.platform = index, platform
        self.store = DecisionStore()

    @cached_property
    def sources(self) -> IndexSources:
        """The inputs that layers pin."""
        from builder.layers.planner import IndexSources

        return IndexSources(self.index)

    def base(self, ref: str, selection: Selection) -> Subject:
        """A base of released wheels."""
        from builder.pipeline import bases  # slow to import, and not needed for what is kept

        return bases.identify_base(Ref(ref), selection, self.index, platform=self.platform)

    def decided(self, ref: str, selection: Selection) -> tuple[KnownBase, tuple[Decision, ...]]:
        """The decisions on a base: those kept, else made now.

        Raises:
            UsageError: the release does not exist for the platform.
            RemoteError: the index does not respond.
        """
        platform = Platform.parse(self.platform or "linux/arm64")
        base: Subject | None = None
        key = base_key(ref, platform, selection, self.index)
        known = self.store.base(key, self.index)
        if known is None:
            base = self.base(ref, selection)
            known = self.store.add_base(key, base.identity, self.index)
        key = decision_key(known, platform, selection)
        decisions = self.store.decisions(key)
        if decisions is None:
            base = base or self.base(ref, selection)
            decisions = decide(base, selection, self.sources)
            self.store.add_decisions(key, decisions)
        return known, decisions


def selections(options: MatrixOptions) -> list[Selection]:
    """What is judged together: what was named, else each of the user's layers, else each profile.

    A layer that no profile has is judged by itself.
    """
    catalog = Catalog.discover(options.patches)
    if options.layers:
        return [without_pulls(catalog.select(options.layers))]
    own = [name for name, folder in catalog.folders.items() if folder.parent in options.patches]
    if own:
        return [without_pulls(catalog.select([name])) for name in own]
    chosen = [catalog.select([name]) for name in catalog.profile_files]
    used = {layer.name for selection in chosen for layer in selection.layers}
    chosen += [catalog.select([name]) for name in catalog.folders if name not in used]
    return [without_pulls(selection) for selection in chosen]


def matrix(options: MatrixOptions) -> Matrix:
    """The states of layers on releases.

    Raises:
        UsageError: an option has no effect, or a release or layer does not exist.
        RemoteError: the index does not respond.
    """
    if options.evidence is not None and not options.dispatch:
        raise UsageError("--evidence needs --dispatch", hint="--dispatch")
    chosen = selections(options)
    asking = Asking(PackageIndex(refresh=options.refresh), options.platform)
    try:
        rows = list(_vllm_rows(chosen, asking, options))
    finally:
        asking.store.save()
    names = dict.fromkeys(layer.name for s in chosen for layer in s.layers)
    return Matrix(layers=tuple(names), rows=tuple(rows))


def _vllm_rows(
    chosen: Sequence[Selection], asking: Asking, options: MatrixOptions
) -> Iterator[MatrixRow]:
    known = {release.version: release for release in asking.index.history("vllm")}
    for version in vllm_releases(asking.index, options.releases):
        ref = f"pypi:vllm=={version}"
        row = _row(version, ref, chosen, asking, options)
        if (release := known.get(version)) is not None:
            row = replace(
                row, uploaded=release.uploaded, yanked=release.yanked, builds=release.builds
            )
        yield row


def _row(
    version: str,
    ref: str,
    chosen: Sequence[Selection],
    asking: Asking,
    options: MatrixOptions,
) -> MatrixRow:
    before = asking.index.bytes_read
    decisions: dict[str, Decision] = {}
    packages: dict[str, str] = {}
    served = False
    for selection in chosen:
        known, decided = asking.decided(ref, selection)
        decisions = {**{d.layer: d for d in decided}, **decisions}
        packages = {**known.packages, **packages}
        served = served or all(all_match(p.needs, known.packages) for p in selection.profiles)
    read = asking.index.bytes_read - before
    if read:
        console.say(f"  vllm {version}: {megabytes(read)} read")
    dispatch, choices = _asked(version, ref, chosen[0], asking, options, served=served)
    return MatrixRow(
        vllm=version,
        release=version,
        platform=Platform.parse(asking.platform or "linux/arm64").oci,
        states={name: d.state for name, d in decisions.items()},
        reasons={name: d.reason for name, d in decisions.items()},
        since={name: d.since for name, d in decisions.items() if d.since},
        evidence={name: d.evidence for name, d in decisions.items() if d.evidence},
        packages=packages,
        served=served,
        dispatch=dispatch,
        choices=choices,
    )


# ----------------------------------------------------------------------------------------- dispatch


def _asked(
    version: str,
    ref: str,
    selection: Selection,
    asking: Asking,
    options: MatrixOptions,
    *,
    served: bool,
) -> tuple[tuple[Check, ...] | None, dict[str, dict[str, Outcome]] | None]:
    """What the release itself answers, if it is asked."""
    if not options.choices and not (options.dispatch and served):
        return None, None
    from builder.layers.planner import make_plan

    console.say(f"  vllm {version}")
    base = asking.base(ref, selection)
    plan = make_plan(base, selection, asking.sources)
    checks = None
    if options.dispatch and served:
        checks = _dispatch(plan, base, version, options.evidence)
    return checks, _choices(plan, base) if options.choices else None


def _dispatch(
    plan: BuildPlan, base: Subject, release: str, evidence: Path | None
) -> tuple[Check, ...]:
    """What this release selects by default and with the plan; the evidence is written to a file."""
    from builder.proof.opening import target_of_plan
    from builder.proof.run import verify

    target = target_of_plan(plan, base, f"pypi:vllm=={release} as planned", patched=True)
    report = verify(target, ["dispatch"])
    if evidence is not None:
        data = dumps(plain(report.document()), indent=1, sort_keys=True).encode() + b"\n"
        write_atomically(evidence / f"vllm-{release}-{plan.name}.json", data)
    return tuple(report.checks)


def _choices(plan: BuildPlan, base: Subject) -> dict[str, dict[str, Outcome]]:
    """What the unpatched release selects by default and for each of its choices."""
    asked = by_itself(plan, base)
    return {kind: {"": asked.default[kind], **asked.outcomes(kind)} for kind in asked.choices}
