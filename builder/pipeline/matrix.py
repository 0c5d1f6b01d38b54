"""Layers on all releases of a package: their states, with what shows them."""

from __future__ import annotations

import dataclasses
import datetime
import re
from contextlib import suppress
from functools import cached_property, partial
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, field
from msgspec.structs import replace
from packaging.version import Version

from builder.applier.values import all_match, canonical_json, sha256_hex
from builder.common.console import console, megabytes
from builder.common.document import Count, Document, Part, Text, always, plain
from builder.common.files import write_atomically
from builder.common.paths import data_dir
from builder.common.plan import Platform, State
from builder.common.pypi import PackageIndex, vllm_releases
from builder.common.reference import Ref
from builder.errors import UsageError
from builder.layers.catalog import Catalog, Selection
from builder.layers.decisions import DecisionStore, Evidence, around, base_key, decide, decision_key
from builder.layers.pulls import without_pulls
from builder.pipeline.options import MATRIX_PACKAGES
from builder.proof.checks import Check
from builder.proof.recorded import Outcome
from builder.proof.recording import by_itself

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from builder.applier.trees import Tree
    from builder.common.plan import BuildPlan
    from builder.images.subject import Subject
    from builder.layers.decisions import Decision, KnownBase
    from builder.layers.pinned import IndexSources
    from builder.pipeline.options import MatrixOptions

#: The platform of a DGX Spark, and both: what ``--platform both`` means.
FIRST = "linux/arm64"
BOTH = (FIRST, "linux/amd64")
#: Files of a decision whose diff is shown.
_FILES = 2
#: States in which a layer needs its maintainer.
DRIFTED = ("drift", "ambiguous")


class MatrixRow(Part, frozen=True, kw_only=True):
    """The state of each layer on one release."""

    vllm: Text
    states: dict[str, State]
    reasons: dict[str, str]
    served: Annotated[bool, Meta(description="whether the profile is for this release")]
    release: Annotated[str, Meta(description="of the package that the rows are of")] = ""
    platform: Text = FIRST
    uploaded: Annotated[str, Meta(description="day of its first wheel, if the index says")] = ""
    yanked: Annotated[
        str | None, Meta(description="if all its wheels were yanked: the reason, maybe empty")
    ] = None
    builds: Annotated[Count, Meta(description="more than 1: built again")] = 1
    packages: dict[str, str] = field(default_factory=dict)
    since: Annotated[dict[str, str], Meta(description="first release with a layer's change")] = (
        field(default_factory=dict)
    )
    after: Annotated[
        dict[str, str], Meta(description="by layer: the layer before it that makes its change")
    ] = field(default_factory=dict)
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

    @property
    def name(self) -> str:
        """The release, with its architecture where that is not the first one's."""
        release = self.release or self.vllm
        return release if self.platform == FIRST else f"{release} {self.platform[6:]}"


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

    def __init__(
        self, index: PackageIndex, store: DecisionStore, platform: str | None = None
    ) -> None:
        self.index, self.store, self.platform = index, store, platform
        #: the base at hand: its key, and the base
        self._last: tuple[str, Subject] | None = None

    @cached_property
    def sources(self) -> IndexSources:
        """The inputs that layers pin."""
        from builder.layers.pinned import IndexSources

        return IndexSources(self.index)

    def key(self, ref: str, selection: Selection) -> str:
        """The key of a base in the store."""
        return base_key(ref, Platform.parse(self.platform or FIRST), selection, self.index)

    def base(self, ref: str, selection: Selection) -> Subject:
        """A base of released wheels; the last one is at hand."""
        from builder.pipeline import bases  # slow to import, and not needed for what is kept

        key = self.key(ref, selection)
        if self._last is None or self._last[0] != key:
            self._last = None  # frees its files first
            base = bases.identify_base(Ref(ref), selection, self.index, platform=self.platform)
            self._last = key, base
        return self._last[1]

    def known(self, ref: str, selection: Selection) -> KnownBase:
        """What a base is: as kept, else as the index says now.

        Raises:
            UsageError: the release does not exist for the platform.
            RemoteError: the index does not respond.
        """
        key = self.key(ref, selection)
        known = self.store.base(key, self.index)
        if known is None:
            identity = self.base(ref, selection).identity
            known = self.store.add_base(key, identity, self.index)
        return known

    def decided(self, ref: str, selection: Selection) -> tuple[KnownBase, tuple[Decision, ...]]:
        """The decisions on a base: those kept, else made now.

        Raises:
            UsageError: the release does not exist for the platform.
            RemoteError: the index does not respond.
        """
        known = self.known(ref, selection)
        key = decision_key(known, Platform.parse(self.platform or FIRST), selection)
        decisions = self.store.decisions(key)
        if decisions is None:
            decisions = decide(self.base(ref, selection), selection, self.sources)
            self.store.add_decisions(key, decisions)
        return known, decisions


def catalog_of(options: MatrixOptions, unread: list[str] | None = None) -> Catalog:
    """The layers of the checkout, of the user's folders, and of mods and patch files.

    What of a mod could not be read is added to ``unread``.

    Raises:
        UsageError: a mod or patch cannot be converted.
    """
    if not options.mods:
        return Catalog.discover(options.patches)
    with TemporaryDirectory(prefix="spark-build-") as folder:
        for path in options.mods:
            texts = _convert(path, Path(folder), options)
            if unread is not None:
                unread += texts
        catalog = Catalog.discover([*options.patches, Path(folder)])
        for name in catalog.folders:  # read while they are there
            catalog.layer(name)
    return catalog


def _convert(path: Path, folder: Path, options: MatrixOptions) -> list[str]:
    """A mod (a folder or zip file with ``run.sh``) or a patch file as a layer; what is left out."""
    from builder.layers.conversion import Reading, Source, write_drafts

    name = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-") or "mod"
    if path.is_dir() or path.suffix == ".zip":
        from builder.pipeline.modlayer import draft_on_newest

        drafts = [draft_on_newest(name, path, _newest_first(options))]
        console.say(f"  {path.name}: made of its run on {drafts[0].origin.rpartition(' ')[2]}")
    else:
        drafts = Source(patches=(path,)).drafts(name, Reading())
    write_drafts(drafts, folder, datetime.date(1980, 1, 1))  # a layer's digest has it
    return [f"{path.name}: no op for: {text}" for one in drafts for text in one.unconverted]


def _newest_first(options: MatrixOptions) -> Iterator[tuple[str, Tree]]:
    """The releases of vLLM that are looked at, with their files."""
    from builder.pipeline.bases import ReleasedTrees

    index = _index(options)
    own = index.hold_folder(options.wheels) if options.wheels else []
    named = options.releases or ",".join(f.version for f in own if f.distribution == "vllm")
    platform = options.platform if options.platform in BOTH else None
    released = ReleasedTrees(
        package="vllm", selection=Selection((), ()), index=index, platform=platform
    )
    for version in reversed(released.versions(named)):
        with suppress(UsageError):
            yield f"pypi:vllm=={version}", released.tree(version)


def selections(options: MatrixOptions, catalog: Catalog) -> list[Selection]:
    """What is judged together: what was named, else each of the user's layers, else each profile.

    A layer that no profile has is judged by itself; so is each layer on releases of its package.
    """
    shipped = data_dir("patches")
    own = [name for name, folder in catalog.folders.items() if folder.parent != shipped]
    if options.layers:
        chosen = [catalog.select(options.layers)]
    elif own:
        chosen = [catalog.select([name]) for name in own]
    else:
        chosen = [catalog.select([name]) for name in catalog.profile_files]
        used = {layer.name for selection in chosen for layer in selection.layers}
        chosen += [catalog.select([name]) for name in catalog.folders if name not in used]
    if options.package != "vllm":
        layers = {layer.name: layer for selection in chosen for layer in selection.layers}
        mine = [layer for layer in layers.values() if layer.package == options.package]
        chosen = [Selection((layer,), ()) for layer in mine]
        if not chosen:
            raise UsageError(f"none of these layers changes {options.package}")
    return [without_pulls(selection) for selection in chosen]


class Asked:
    """One question, with what it is asked of; the page asks several.

    Raises:
        UsageError: an option has no effect, or a mod or a wheel cannot be read.
    """

    def __init__(self, options: MatrixOptions) -> None:
        if options.evidence is not None and not options.dispatch:
            raise UsageError("--evidence needs --dispatch", hint="--dispatch")
        if options.dispatch and options.package != "vllm":
            raise UsageError("--dispatch asks releases of vLLM", hint="leave out --package")
        #: what of the mods could not be read
        self.unread: list[str] = []
        self.options, self.catalog = options, catalog_of(options, self.unread)
        self.index = _index(options)
        self.local = self.index.hold_folder(options.wheels) if options.wheels else []
        self.store = DecisionStore()

    def matrix(self, package: str = "") -> Matrix:
        """The states on releases of a package, by default of the one that was named.

        Raises:
            UsageError: a release or layer does not exist, or no layer changes the package.
            RemoteError: the index does not respond.
        """
        options = dataclasses.replace(self.options, package=package or self.options.package)
        chosen = selections(options, self.catalog)
        platforms = BOTH if options.platform == "both" else (options.platform,)
        rows: list[MatrixRow] = []
        try:
            for platform in platforms:
                asking = Asking(self.index, self.store, platform)
                of_platform = self._rows(chosen, asking, options)
                rows += (row for row in of_platform if not _is_repeated(row, rows))
        finally:
            self.store.save()
        names = dict.fromkeys(layer.name for s in chosen for layer in s.layers)
        return Matrix(package=options.package, layers=tuple(names), rows=tuple(rows))

    def others(self, first: Matrix) -> Iterator[Matrix]:
        """The releases of the other packages that these layers change, unless one was named."""
        changed = {self.catalog.layer(name).package for name in first.layers}
        if self.options.package == "vllm" and not self.options.releases:
            yield from (self.matrix(name) for name in MATRIX_PACKAGES[1:] if name in changed)

    def diffs(self, name: str, before: MatrixRow, row: MatrixRow) -> list[tuple[str, str]]:
        """What changed around a layer's anchors from one release to the next: files and diffs."""
        layer = self.catalog.layer(name)
        package = layer.package if row.release != row.vllm else "vllm"
        options = dataclasses.replace(self.options, package=package)
        chosen = [s for s in selections(options, self.catalog) if layer in s.layers]
        places = [*row.evidence.get(name, ()), *before.evidence.get(name, ())]
        if not chosen or not places:
            return []
        asking = Asking(self.index, self.store, row.platform)
        refs = [_ref(package, one) for one in (before, row)]
        digests = [asking.known(ref, chosen[0]).digest for ref in refs]
        diffs = []
        for file in list(dict.fromkeys(place.file for place in places))[:_FILES]:
            anchors = sorted({p.anchor for p in places if p.file == file and p.anchor})
            key = sha256_hex(canonical_json(["diff", *digests, file, anchors]))
            text = self.store.text(key, partial(self._diff, asking, refs, chosen[0], file, anchors))
            if text:
                diffs.append((file, text))
        return diffs

    def _diff(
        self,
        asking: Asking,
        refs: Sequence[str],
        selection: Selection,
        file: str,
        anchors: Sequence[str],
    ) -> str:
        old, new = (asking.base(ref, selection).tree.read(file) for ref in refs)
        return around(old, new, anchors)

    def _rows(
        self, chosen: Sequence[Selection], asking: Asking, options: MatrixOptions
    ) -> Iterator[MatrixRow]:
        """A row for each release; wheels of this machine are rows instead of the index's."""
        own = [file.version for file in self.local if file.distribution == options.package]
        named = options.releases or ",".join(dict.fromkeys(own))
        history = {} if own else {r.version: r for r in self.index.history(options.package)}
        if options.package == "vllm":
            versions = vllm_releases(self.index, named, pre=options.pre)
            refs = {version: f"pypi:vllm=={version}" for version in versions}
        else:
            refs = _beside(options.package, named, chosen[0], asking, options)
        with console.progress("releases", len(refs), "files", leaves_line=False) as bar:
            for version, ref in refs.items():
                row = _row(version, ref, chosen, asking, options)
                if (release := history.get(version)) is not None:
                    row = replace(
                        row, uploaded=release.uploaded, yanked=release.yanked, builds=release.builds
                    )
                bar.advance()
                yield row


def _ref(package: str, row: MatrixRow) -> str:
    vllm = f"pypi:vllm=={row.vllm}"
    return vllm if package == "vllm" else f"{vllm},{package}=={row.release}"


def _index(options: MatrixOptions) -> PackageIndex:
    rest = PackageIndex(refresh=options.refresh)
    if not options.index_url:
        return rest
    return PackageIndex(options.index_url, refresh=options.refresh, rest=rest)


def _is_repeated(row: MatrixRow, before: Sequence[MatrixRow]) -> bool:
    """Whether the first platform has the same states."""
    return row.platform != FIRST and any(
        other.platform == FIRST and other.release == row.release and other.states == row.states
        for other in before
    )


def _beside(
    package: str, named: str, selection: Selection, asking: Asking, options: MatrixOptions
) -> dict[str, str]:
    """Each release of a package, beside the newest vLLM whose own pin is not newer than it."""
    pinned: list[tuple[Version, str]] = []
    for release in vllm_releases(asking.index):
        known = asking.known(f"pypi:vllm=={release}", selection)
        if package in known.packages:
            pinned.append((Version(known.packages[package]), release))
    if not pinned:
        raise UsageError(f"no release of vLLM requires {package}")
    oldest = min(version for version, _ in pinned)
    first = Version(f"{oldest.major}.{oldest.minor}")
    listed = [word.strip() for word in named.split(",") if word.strip()] or [
        version
        for version in asking.index.releases(package)
        if Version(version) >= first and (options.pre or not Version(version).is_prerelease)
    ]
    refs = {}
    for version in listed:
        below = [pair for pair in pinned if pair[0] <= Version(version)] or [min(pinned)]
        newest = max(pair[0] for pair in below)
        vllm = [release for pin, release in below if pin == newest][-1]
        refs[version] = f"pypi:vllm=={vllm},{package}=={version}"
    return refs


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
        for decision in decided:
            decisions.setdefault(decision.layer, decision)
        packages = {**known.packages, **packages}
        served = served or all(all_match(p.needs, known.packages) for p in selection.profiles)
    read = asking.index.bytes_read - before
    if read:
        console.say(f"  {options.package} {version}: {megabytes(read)} read")
    dispatch, choices = _asked(version, ref, chosen[0], asking, options, served=served)
    return MatrixRow(
        vllm=version if options.package == "vllm" else packages["vllm"],
        release=version,
        platform=Platform.parse(asking.platform or FIRST).oci,
        states={name: d.state for name, d in decisions.items()},
        reasons={name: d.reason for name, d in decisions.items()},
        since={name: d.since for name, d in decisions.items() if d.since},
        after={name: d.after for name, d in decisions.items() if d.after},
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
