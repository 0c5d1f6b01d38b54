"""What upstream did since the lock, a release or a day: for a scheduled job and a pull request."""

from __future__ import annotations

import datetime
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta
from packaging.utils import parse_wheel_filename
from packaging.version import InvalidVersion, Version

from builder.applier.diff import parse_diff
from builder.applier.files import DOCUMENT, read_regular
from builder.applier.layers import Diff, Replace
from builder.applier.values import all_match
from builder.common.console import console
from builder.common.document import Count, Document, Part, Sha256, Text
from builder.common.forge import MERGED, Forges, Thread, parse_pull
from builder.common.hints import instead
from builder.common.paths import package_file
from builder.common.plan import State
from builder.common.reference import NEWEST_VLLM, Ref
from builder.errors import SparkBuildError, UsageError
from builder.layers.catalog import Selection
from builder.layers.decisions import Decision, decide
from builder.layers.lock import lock_path, read_lock
from builder.layers.pulls import described_projects
from builder.pipeline import bases
from builder.pipeline.layerexport import PAGE
from builder.pipeline.matrix import DRIFTED, Asked, Asking, selections
from builder.pipeline.options import MatrixOptions
from builder.proof.recorded import read_records
from builder.proof.recording import RecordInputs, record_of
from builder.serving.lint import Linter, lint
from builder.serving.models import Models
from builder.serving.preflight import preflight
from builder.serving.serveflags import interface_of_wheels, replaced

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from builder.applier.layers import Layer
    from builder.common.pypi import PackageIndex, Release, WheelFile
    from builder.layers.lock import Lock
    from builder.pipeline.matrix import MatrixRow
    from builder.pipeline.options import OutdatedOptions
    from builder.proof.recorded import Outcome, Record
    from builder.serving.lint import Finding
    from builder.serving.serveflags import Flag

#: Commits of a file that a report has at most.
_MOST_COMMITS = 6
#: Letters of a line that says something by itself: not ``else:``, not ``return x``.
_TELLING = 9
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
_AGE = re.compile(r"(\d{1,4})d")


# ---------------------------------------------------------------------------------------- documents


class NewRelease(Part, frozen=True, kw_only=True):
    """A release of vLLM since then."""

    vllm: Text
    uploaded: Annotated[str, Meta(description="the day; empty if the index does not say")] = ""
    packages: Annotated[dict[str, str], Meta(description="that it pins otherwise than before")] = (
        msgspec.field(default_factory=dict)
    )
    yanked: Annotated[str | None, Meta(description="why, maybe empty; null if it was not")] = None
    young: Annotated[bool, Meta(description="younger than --min-age, or of an unknown age")] = False


class ChangedWheel(Part, frozen=True, kw_only=True):
    """A wheel that was known before, and is not what it was."""

    filename: Text
    what: Literal["rebuilt", "yanked", "gone"]
    known: Annotated[Sha256, Meta(description="the sha256 that was locked or recorded")]
    detail: Text


class FileCommit(Part, frozen=True, kw_only=True):
    """A commit that touched a file."""

    commit: Text
    title: Text
    pull: Annotated[str, Meta(description="OWNER/REPO#NUMBER, from its title")] = ""


class FileDiff(Part, frozen=True, kw_only=True):
    """How a file changed around the text that decides."""

    file: Text
    diff: Text


class LayerChange(Part, frozen=True, kw_only=True):
    """A layer whose state is not that on the release before."""

    layer: Text
    vllm: Text
    before: State
    after: State
    reason: str
    would: Annotated[
        str, Meta(description="where the layer's range ends before: its state without the range")
    ] = ""
    merged: Annotated[str, Meta(description="why it looks merged in another form")] = ""
    diffs: tuple[FileDiff, ...] = ()
    commits: Annotated[tuple[FileCommit, ...], Meta(description="that touched the first file")] = ()
    command: Annotated[str, Meta(description="the next command")] = ""


class KernelChange(Part, frozen=True, kw_only=True):
    """What SM121 selects with a profile, where it changed or is not recorded."""

    profile: Text
    kind: Annotated[str, Meta(description="of layer; empty if the release is not recorded")] = ""
    vllm: Text
    before: str = ""
    after: str = ""


class FlagChange(Part, frozen=True, kw_only=True):
    """A flag of ``vllm serve``, or a variable, that is not as before."""

    what: Literal["flag", "variable"]
    change: Literal["appeared", "went", "changed", "renamed"]
    name: Text
    detail: Annotated[str, Meta(description="what changed, or what may take its place")] = ""


class RecipeChange(Part, frozen=True, kw_only=True):
    """What ``lint`` finds in a recipe on the newest release and did not before."""

    file: Text
    line: Count
    rule: Text
    message: Text


class WatchedThread(Part, frozen=True, kw_only=True):
    """A thread that layers name, with its state."""

    thread: Text
    layers: tuple[Text, ...]
    state: Annotated[str, Meta(description="empty if the forge did not say")] = ""
    title: str = ""
    updated: str = ""


class ReadyReport(Part, frozen=True, kw_only=True):
    """A layer with a text for its project that was not sent."""

    layer: Text
    vllm: Text
    state: Annotated[State, Meta(description="of the layer on the newest release")]
    command: Annotated[Text, Meta(description="that prints the pull request")]


class Outdated(Document, frozen=True, kw_only=True):
    """What upstream did."""

    since: Annotated[Text, Meta(description="the vLLM release that it is compared with")]
    newest: Annotated[str, Meta(description="the newest release to go to; empty if none")]
    layers: tuple[Text, ...]
    releases: tuple[NewRelease, ...]
    wheels: tuple[ChangedWheel, ...]
    changes: tuple[LayerChange, ...]
    kernels: tuple[KernelChange, ...]
    flags: tuple[FlagChange, ...]
    recipes: tuple[RecipeChange, ...]
    linted: Annotated[Count, Meta(description="recipes that were checked")] = 0
    threads: tuple[WatchedThread, ...]
    ready: Annotated[tuple[ReadyReport, ...], Meta(description="texts that were not sent")] = ()
    notes: Annotated[tuple[Text, ...], Meta(description="what was not looked up, and why")] = ()

    @property
    def anything(self) -> bool:
        """Whether there is a release to go to, or a wheel that is not what it was."""
        return bool(self.newest or self.wheels)


# ------------------------------------------------------------------------------------- the question


@dataclass(kw_only=True)
class _Watch:
    """What is compared, and with what."""

    options: OutdatedOptions
    asked: Asked
    chosen: Sequence[Selection]
    lock: Lock | None
    old: str
    #: final releases after the old one, oldest first, and those of them to go to
    releases: Sequence[Release]
    newer: Sequence[str]
    forges: Forges
    notes: dict[str, None] = field(default_factory=dict)
    silent: bool = False

    @property
    def index(self) -> PackageIndex:
        return self.asked.index

    @property
    def layers(self) -> dict[str, Layer]:
        return {layer.name: layer for one in self.chosen for layer in one.layers}

    @property
    def asks_forge(self) -> bool:
        return not (self.silent or self.options.no_forge)

    def forge_failed(self, error: SparkBuildError) -> None:
        self.silent = True
        self.notes[f"the forge was not asked further: {error}"] = None


def outdated(options: OutdatedOptions) -> Outdated:
    """What changed since the lock, or since a release or day.

    Raises:
        UsageError: an option is malformed, or names an unknown layer.
        RemoteError: the package index does not respond.
    """
    days = _days(options.min_age)
    lock = read_lock(lock_path(Path.cwd()))
    judged = MatrixOptions(
        layers=options.layers or _locked_layers(lock),
        platform=options.platform,
        patches=options.patches,
        refresh=options.refresh,
    )
    asked = Asked(judged)
    old = _old_release(options.since, lock, asked.index)
    releases = [
        release
        for release in asked.index.history("vllm")
        if Version(release.version) > Version(old) and not Version(release.version).is_prerelease
    ]
    newer = [r.version for r in releases if r.yanked is None and not _is_young(r, days)]
    asked.options = replace(judged, releases=",".join([old, *newer]))
    watch = _Watch(
        options=options, asked=asked, chosen=selections(judged, asked.catalog), lock=lock, old=old,
        releases=releases, newer=newer, forges=Forges(options.forge_clone),
    )  # fmt: skip
    if options.no_forge:
        watch.notes["the forge was not asked about commits and threads (--no-forge)"] = None
    return _report(watch, days)


def _report(watch: _Watch, days: int) -> Outdated:
    rows = watch.asked.matrix().rows
    newest = watch.newer[-1] if watch.newer else ""
    linted, recipes = _recipes(watch, newest) if newest else (0, ())
    return Outdated(
        since=watch.old,
        newest=newest,
        layers=tuple(watch.layers),
        releases=tuple(_releases(watch, rows, days)),
        wheels=tuple(_wheels(watch)),
        changes=tuple(c for old, new in pairwise(rows) for c in _changes(watch, old, new)),
        kernels=tuple(_kernels(watch, newest)) if newest else (),
        flags=tuple(_flags(watch, newest)) if newest else (),
        recipes=tuple(recipes),
        linted=linted,
        threads=tuple(_threads(watch)),
        ready=tuple(_ready(watch, rows[-1])),
        notes=tuple(watch.notes),
    )


def _days(text: str) -> int:
    """``--min-age`` in days.

    Raises:
        UsageError: it is not a number of days.
    """
    match = _AGE.fullmatch(text)
    if match is None:
        raise UsageError(f"--min-age {text!r} is not a number of days", hint=instead(text, "7d"))
    return int(match[1])


def _is_young(release: Release, days: int) -> bool:
    """Whether a release is younger than so many days; one of an unknown age is, for caution."""
    if not days:
        return False
    today = datetime.datetime.now(datetime.UTC).date()
    with suppress(ValueError):
        return (today - datetime.date.fromisoformat(release.uploaded[:10])).days < days
    return True


def _locked_layers(lock: Lock | None) -> tuple[str, ...]:
    entries = lock.entries.values() if lock else ()
    return tuple(dict.fromkeys(name for entry in entries for name in entry.request.layers))


def _old_release(since: str | None, lock: Lock | None, index: PackageIndex) -> str:
    """The release to compare with: named, the last before a day, locked, or the newest known one.

    Raises:
        UsageError: ``since`` is neither a release nor a day, or there was none before that day.
    """
    if since and _DAY.fullmatch(since):
        before = [
            r.version
            for r in index.history("vllm")
            if r.uploaded and r.uploaded < since and not Version(r.version).is_prerelease
        ]
        if not before:
            raise UsageError(f"the index has no release of vLLM from before {since}")
        return max(before, key=Version)
    if since:
        try:
            return str(Version(since.removeprefix("v")))
        except InvalidVersion:
            raise UsageError(
                f"--since {since!r} is neither a release nor a day",
                hint=instead(since, NEWEST_VLLM),
            ) from None
    entries = lock.entries.values() if lock else ()
    locked = [entry.base.packages["vllm"] for entry in entries if "vllm" in entry.base.packages]
    return min(locked, key=Version, default=NEWEST_VLLM)


# ----------------------------------------------------------------------------- releases and wheels


def _releases(watch: _Watch, rows: Sequence[MatrixRow], days: int) -> Iterator[NewRelease]:
    packages = {row.vllm: row.packages for row in rows}
    before = packages[watch.old]
    for release in watch.releases:
        now = packages.get(release.version, before)
        yield NewRelease(
            vllm=release.version,
            uploaded=release.uploaded,
            packages={n: v for n, v in now.items() if before.get(n) != v and n != "vllm"},
            yanked=release.yanked,
            young=_is_young(release, days),
        )
        before = now


def _known_wheels(lock: Lock | None) -> dict[str, str]:
    """The sha256 of wheels by file name: as locked, else as this version of spark-build knows."""
    if lock and lock.entries:
        rows = (row for e in lock.entries.values() for row in (*e.base.wheels, *e.inputs))
        return {row.filename: row.sha256 for row in rows if row.filename}
    lines = package_file("data", "records.txt").read_text("utf-8").splitlines()
    words = (line.split() for line in lines if line and not line.startswith("#"))
    return {name: sha256 for sha256, _, name in words}


def _wheels(watch: _Watch) -> Iterator[ChangedWheel]:
    """Wheels that were built again, yanked or removed; the last two if they are locked."""
    is_locked = bool(watch.lock and watch.lock.entries)
    pages: dict[str, dict[str, WheelFile]] = {}
    for filename, sha256 in _known_wheels(watch.lock).items():
        name = parse_wheel_filename(filename)[0]
        if name not in pages:
            pages[name] = {}
            with suppress(UsageError):
                pages[name] = {file.filename: file for file in watch.index.wheels(name)}
        what, detail = _fate(filename, sha256, pages[name])
        if what == "rebuilt" or (what and is_locked):
            yield ChangedWheel(filename=filename, what=what, known=sha256, detail=detail)


def _fate(
    filename: str, sha256: str, page: Mapping[str, WheelFile]
) -> tuple[Literal["rebuilt", "yanked", "gone", ""], str]:
    """What happened to a wheel, and what shows it."""
    file = page.get(filename)
    if file is None:
        return "gone", "the index does not have it any more"
    if file.sha256 != sha256:
        return "rebuilt", f"the same file name now has sha256 {file.sha256}"
    project, version, build, tags = parse_wheel_filename(filename)
    for other in page:
        if parse_wheel_filename(other)[:2] == (project, version):
            _, _, later, same = parse_wheel_filename(other)
            if later > build and same == tags:
                return "rebuilt", f"the index also has {other}, which installers take"
    if file.yanked is not None:
        return "yanked", file.yanked or "no reason is given"
    return "", ""


# ------------------------------------------------------------------------------------------- layers


def _changes(watch: _Watch, old: MatrixRow, new: MatrixRow) -> Iterator[LayerChange]:
    """Layers whose state on a release differs from that on the release before."""
    beyond = _beyond(watch, old, new)
    for name, layer in watch.layers.items():
        if old.states[name] == new.states[name]:
            continue
        would = beyond.get(name)
        drifted = new.states[name] in DRIFTED or (would is not None and would.state in DRIFTED)
        places = (*new.evidence.get(name, ()), *old.evidence.get(name, ()))
        diffs = watch.asked.diffs(name, old, new)
        fitting = drifted or would is not None
        yield LayerChange(
            layer=name,
            vllm=new.vllm,
            before=old.states[name],
            after=new.states[name],
            reason=would.reason if would and drifted else new.reasons[name],
            would=would.state if would else "",
            merged=_merged(watch, layer, old, new) if drifted else "",
            diffs=tuple(FileDiff(file=file, diff=diff) for file, diff in diffs),
            commits=tuple(_commits(watch, layer, places[0].file, old, new)) if places else (),
            command=_diff_command(watch, name, new.vllm) if fitting else "",
        )


def _diff_command(watch: _Watch, name: str, vllm: str) -> str:
    words = ["spark-build", "layers", "diff", name, "--base", f"pypi:vllm=={vllm}"]
    words += [word for folder in watch.options.patches for word in ("--patches", str(folder))]
    return shlex.join([*words, "--edit", "work"])


def _beyond(watch: _Watch, old: MatrixRow, new: MatrixRow) -> dict[str, Decision]:
    """Layers that were needed and whose ranges end: their decisions without the ranges."""
    beyond: dict[str, Decision] = {}
    asking = Asking(watch.index, watch.asked.store, watch.options.platform)
    for selection in watch.chosen:
        ended = {
            layer.name: _without_range(layer, old)
            for layer in selection.layers
            if (old.states[layer.name], new.states[layer.name]) == ("needed", "not-applicable")
        }
        if not ended:
            continue
        layers = tuple(ended.get(layer.name, layer) for layer in selection.layers)
        base = asking.base(f"pypi:vllm=={new.vllm}", selection)
        decisions = decide(base, Selection(layers, ()), asking.sources)
        beyond |= {d.layer: d for d in decisions if d.layer in ended}
    return beyond


def _without_range(layer: Layer, old: MatrixRow) -> Layer:
    """A layer whose variant of the old release is for every release."""
    fitting = [v for v in layer.variants if all_match(v.when, old.packages)]
    variants = tuple(replace(v, when={layer.package: ">=0"}) for v in fitting)
    return replace(layer, variants=variants, not_applicable=())


def _merged(watch: _Watch, layer: Layer, old: MatrixRow, new: MatrixRow) -> str:
    """Why a drifted layer's change may be in the release in another form; or empty."""
    for name in _named(layer):
        known = _thread(watch, name)
        if known is not None and known.state == MERGED:
            return f"{name} was merged"
    added = _added(layer, old)
    lines = {file: _new_lines(watch, file, old, new) for file in added}
    total = sum(map(len, added.values()))
    there = sum(len(added[file] & lines[file]) for file in added)
    if total and 2 * there >= total:
        return f"{there} of the {total} lines that the layer adds are new in the release"
    return ""


def _new_lines(watch: _Watch, file: str, old: MatrixRow, new: MatrixRow) -> set[str]:
    asking = Asking(watch.index, watch.asked.store, watch.options.platform)
    texts = [
        asking.base(f"pypi:vllm=={row.vllm}", watch.chosen[0]).tree.read(file) or b""
        for row in (old, new)
    ]
    before, after = (
        {line.strip() for line in text.decode("utf-8", "replace").splitlines()} for text in texts
    )
    return after - before


def _added(layer: Layer, old: MatrixRow) -> dict[str, set[str]]:
    """The telling lines that the layer adds to each file of the old release."""
    added: dict[str, set[str]] = {}
    fitting = (v for v in layer.variants if all_match(v.when, old.packages))
    for op in (op for variant in fitting for op in variant.ops):
        pairs = [(op.file, op.old, op.new)] if isinstance(op, Replace) else []
        if isinstance(op, Diff):
            changes = parse_diff(op.diff)
            pairs = [(c.path, "".join(h.old), "".join(h.new)) for c in changes for h in c.hunks]
        for file, was, now in pairs:
            lines = {x.strip() for x in now.splitlines()} - {x.strip() for x in was.splitlines()}
            telling = {x for x in lines if len(x) >= _TELLING and not x.startswith("#")}
            added.setdefault(file, set()).update(telling)
    return added


def _commits(
    watch: _Watch, layer: Layer, file: str, old: MatrixRow, new: MatrixRow
) -> Iterator[FileCommit]:
    """The commits of the layer's project that touched a file between two releases."""
    project = next((p for p in described_projects() if p.package == layer.package), None)
    versions = [row.packages.get(layer.package, "") for row in (old, new)]
    if project is None or not watch.asks_forge or versions[0] == versions[1]:
        return
    roots = [root for layout in project.layouts for root in layout.roots]
    folder, becomes = next(((a, b) for a, b in roots if file.startswith(b)), ("", ""))
    path = folder + file.removeprefix(becomes)
    try:
        forge, _ = watch.forges.for_repository(project.repository)
        commits = forge.commits_of(project.repository, path, f"v{versions[0]}", f"v{versions[1]}")
    except SparkBuildError as error:
        watch.forge_failed(error)
        return
    for commit, title in commits[:_MOST_COMMITS]:
        number = re.search(r"\(#(\d+)\)$", title)
        pull = f"{project.repository}#{number[1]}" if number else ""
        yield FileCommit(commit=commit[:12], title=title or commit[:12], pull=pull)


# ------------------------------------------------------------------------------------------ kernels


def _kernels(watch: _Watch, newest: str) -> Iterator[KernelChange]:
    """What each profile selects on the newest release, where it is not as before."""
    records: dict[str, Record] = {}
    with suppress(UsageError):
        records = {record.vllm: record for record in read_records(watch.options.evidence)}
    if watch.options.ask:
        for version in (watch.old, newest):
            if version not in records:
                try:
                    records[version] = _recorded_now(watch, version)
                except SparkBuildError as error:
                    watch.notes[f"kernels of vLLM {version}: {error}"] = None
    before, after = records.get(watch.old), records.get(newest)
    for profile in dict.fromkeys(p.name for one in watch.chosen for p in one.profiles):
        if before is None or after is None:
            missing = newest if after is None else watch.old
            yield KernelChange(profile=profile, vllm=missing)
            continue
        kinds = [one.kinds(profile) or {} for one in (before, after)]
        for kind in dict.fromkeys([*kinds[0], *kinds[1]]):
            was, now = (_kernel(one.get(kind)) for one in kinds)
            if was != now:
                yield KernelChange(profile=profile, kind=kind, vllm=newest, before=was, after=now)


def _recorded_now(watch: _Watch, version: str) -> Record:
    inputs = RecordInputs(
        catalog=watch.asked.catalog,
        sources=Asking(watch.index, watch.asked.store).sources,
        identify=lambda release, selection: bases.identify_base(
            Ref(f"pypi:vllm=={release}"), selection, watch.index, platform=watch.options.platform
        ),
    )
    with console.step(f"asking vllm {version}"):
        return record_of(version, inputs)


def _kernel(outcome: Outcome | None) -> str:
    return outcome.kernel if outcome else "not supported"


# ------------------------------------------------------------------------------ flags and variables


def _flags(watch: _Watch, newest: str) -> Iterator[FlagChange]:
    """Flags and variables of the newest release that are not those of the old one."""
    try:
        old, new = (interface_of_wheels(f"pypi:vllm=={v}") for v in (watch.old, newest))
    except SparkBuildError as error:
        watch.notes[f"flags: {error}"] = None
        return
    before, after = ({flag.names[0]: flag for flag in one.flags} for one in (old, new))
    yield from _moved_flags(before, after)
    for name in before:
        if name in after and (detail := _changed(before[name], after[name])):
            yield FlagChange(what="flag", change="changed", name=name, detail=detail)
    for name in old.variables:
        if name not in new.variables:
            known = replaced().get(name)
            detail = f"{known.flag} has the same effect" if known else ""
            yield FlagChange(what="variable", change="went", name=name, detail=detail)
    for name in new.variables:
        if name not in old.variables:
            yield FlagChange(what="variable", change="appeared", name=name)


def _moved_flags(before: Mapping[str, Flag], after: Mapping[str, Flag]) -> Iterator[FlagChange]:
    went = {name: flag for name, flag in before.items() if name not in after}
    came = {name: flag for name, flag in after.items() if name not in before}
    renamed = {name: new for name in went if (new := _new_name(name, went, came))}
    for name, new in renamed.items():
        yield FlagChange(what="flag", change="renamed", name=name, detail=new)
    for name in went:
        if name not in renamed:
            yield FlagChange(what="flag", change="went", name=name)
    for name in came:
        if name not in renamed.values():
            yield FlagChange(what="flag", change="appeared", name=name)


def _new_name(name: str, went: Mapping[str, Flag], came: Mapping[str, Flag]) -> str:
    """The one new flag that takes the same and shares half of a flag's words, both ways; or ""."""
    alike = [other for other in came if _is_alike(name, went[name], other, came[other])]
    if len(alike) != 1:
        return ""
    back = [old for old in went if _is_alike(old, went[old], alike[0], came[alike[0]])]
    return alike[0] if len(back) == 1 else ""


def _is_alike(name: str, flag: Flag, other: str, new: Flag) -> bool:
    words, others = (set(one.strip("-").split("-")) for one in (name, other))
    same = _form(flag) == _form(new)
    return same and 2 * len(words & others) >= max(len(words), len(others))


def _form(flag: Flag) -> tuple[object, ...]:
    return flag.takes, flag.kind, flag.choices, flag.known, flag.keys, flag.nullable


def _changed(old: Flag, new: Flag) -> str:
    """What a flag takes otherwise than before."""
    words = []
    for what, before, after in (
        ("value", (*old.choices, *old.known), (*new.choices, *new.known)),
        ("key", [k.name for k in old.keys], [k.name for k in new.keys]),
    ):
        gone = [one for one in before if one not in after]
        more = [one for one in after if one not in before]
        words += [f"{what}s that went: {', '.join(gone)}"] if gone else []
        words += [f"new {what}s: {', '.join(more)}"] if more else []
    if (old.takes, old.kind) != (new.takes, new.kind):
        words.append(f"takes {new.takes} {new.kind}, not {old.takes} {old.kind}")
    if new.deprecated and not old.deprecated:
        words.append(f"deprecated: {new.deprecated}")
    return "; ".join(words)


# ------------------------------------------------------------------------------------------ recipes


def _recipes(watch: _Watch, newest: str) -> tuple[int, Sequence[RecipeChange]]:
    """How many recipes were checked, and what is wrong with them now and was not before."""
    folder = watch.options.recipes
    paths = sorted(folder.rglob("*.yaml")) if folder.is_dir() else []
    files = [(str(path), read_regular(path, DOCUMENT).decode()) for path in paths]
    if not files:
        return 0, ()
    models = Models.discover()
    ask = preflight if watch.options.ask else None
    try:
        before = {_finding_key(f) for f in lint(files, Linter(release=watch.old), models).findings}
        now = lint(files, Linter(release=newest, ask=ask), models).findings
    except SparkBuildError as error:
        watch.notes[f"recipes: {error}"] = None
        return 0, ()
    return len(files), [
        RecipeChange(file=f.file, line=f.line, rule=f.rule, message=f.message)
        for f in now
        if _finding_key(f) not in before
    ]


def _finding_key(finding: Finding) -> tuple[str, int, str]:
    return finding.file, finding.line, finding.rule


# ------------------------------------------------------------------------------------------ threads


def _named(layer: Layer) -> Iterator[str]:
    """The threads in a layer's provenance."""
    bug = layer.provenance.get("bug", ())
    words = [*(bug if isinstance(bug, (list, tuple)) else ()), layer.provenance.get("forwarded")]
    for word in map(str, words):
        with suppress(UsageError):
            ref = parse_pull(word)
            if ref.number:
                yield f"{ref.repository}#{ref.number}"


#: How a text names a thread of a known project: ``vLLM #1``, or with the repository.
_PROJECTS = {"vLLM": "vllm-project/vllm", "FlashInfer": "flashinfer-ai/flashinfer"}
_MENTION = re.compile(rf"\b({'|'.join(_PROJECTS)}|[\w-]+/[\w.-]+) ?#(\d+)")


def _mentioned(text: str) -> list[str]:
    """The threads that a text names.

    >>> _mentioned("vLLM #48536 builds on FlashInfer #3932; see a/b#7, and vLLM #48536")
    ['vllm-project/vllm#48536', 'flashinfer-ai/flashinfer#3932', 'a/b#7']
    """
    threads = (f"{_PROJECTS.get(name, name)}#{number}" for name, number in _MENTION.findall(text))
    return list(dict.fromkeys(threads))


def _page(watch: _Watch, layer: Layer) -> str:
    """The text for the layer's project, or empty."""
    file = watch.asked.catalog.folders[layer.name] / PAGE
    return read_regular(file, DOCUMENT).decode() if file.is_file() else ""


def _ready(watch: _Watch, newest: MatrixRow) -> Iterator[ReadyReport]:
    """The texts that were not sent, with the state of their layers on the newest release."""
    for layer in watch.layers.values():
        if _page(watch, layer) and layer.provenance.get("forwarded") == "no":
            words = ["spark-build", "layers", "export", layer.name, "--format", "pr"]
            words += [w for folder in watch.options.patches for w in ("--patches", str(folder))]
            yield ReadyReport(
                layer=layer.name, vllm=newest.vllm, state=newest.states[layer.name],
                command=shlex.join(words),
            )  # fmt: skip


def _thread(watch: _Watch, name: str) -> Thread | None:
    """The state of a thread, or None if the forge does not say."""
    if not watch.asks_forge:
        return None
    ref = parse_pull(name)
    try:
        forge, _ = watch.forges.for_repository(ref.repository)
        return forge.thread(ref.repository, ref.number)
    except SparkBuildError as error:
        watch.forge_failed(error)
        return None


def _threads(watch: _Watch) -> Iterator[WatchedThread]:
    """The threads that layers and their texts for their projects name."""
    named: dict[str, list[str]] = {}
    for layer in watch.layers.values():
        for thread in dict.fromkeys([*_named(layer), *_mentioned(_page(watch, layer))]):
            named.setdefault(thread, []).append(layer.name)
    for name, layers in named.items():
        known = _thread(watch, name) or Thread()
        yield WatchedThread(
            thread=name, layers=tuple(layers), state=known.state, title=known.title,
            updated=known.updated,
        )  # fmt: skip


# -------------------------------------------------------------------------------------- as Markdown


def markdown(report: Outdated) -> str:
    """The report as the text of a pull request."""
    parts = [f"# vLLM since {report.since}", *_head(report)]
    for title, lines in (
        ("Wheels that are not what they were", [
            f"`{w.filename}`: **{w.what}**: {w.detail}" for w in report.wheels
        ]),
        ("Layers", []),
        ("Kernels on SM121", list(map(_of_kernel, report.kernels))),
        (f"Flags and variables of {report.newest}", list(_of_flags(report.flags))),
        ("Recipes", list(_of_recipes(report))),
        ("Threads", list(map(_of_thread, report.threads))),
        ("Ready to send", [
            f"`{one.layer}`, {one.state} on {one.vllm}: `{one.command}`" for one in report.ready
        ]),
        ("Not looked up", list(report.notes)),
    ):  # fmt: skip
        blocks = [_of_change(c) for c in report.changes] if title == "Layers" else []
        blocks += ["\n".join(f"- {line}" for line in lines)] if lines else []
        parts += [f"## {title}", *blocks] if blocks else []
    return "\n\n".join(parts) + "\n"


def _head(report: Outdated) -> Iterator[str]:
    if not report.releases:
        yield "No release since then."
        return
    yield "\n".join(f"- {_of_release(release)}" for release in report.releases)
    if report.newest:
        ended = [c.layer for c in report.changes if c.would == "needed"]
        stuck = [c.layer for c in report.changes if c.after in DRIFTED or c.would in DRIFTED]
        dead = [c.layer for c in report.changes if c.after in ("upstream", "applied")]
        words = [f"to fix: {', '.join(dict.fromkeys(stuck))}"] if stuck else []
        words += [f"to widen: {', '.join(dict.fromkeys(ended))}"] if ended else []
        words += [f"no longer needed: {', '.join(dict.fromkeys(dead))}"] if dead else []
        words += [] if report.changes else ["every layer is as before"]
        yield f"The newest release to go to is **{report.newest}**; {'; '.join(words)}."


def _of_release(release: NewRelease) -> str:
    words = [f"**{release.vllm}**"]
    words += [f"of {release.uploaded}"] if release.uploaded else []
    if release.yanked is not None:
        words.append(f"**yanked**: {release.yanked or 'no reason is given'}")
    if release.young:
        words.append("too young to go to (--min-age)")
    if release.packages:
        words.append("with " + ", ".join(f"{n} {v}" for n, v in release.packages.items()))
    return ", ".join(words)


def _of_change(change: LayerChange) -> str:
    parts = [f"### `{change.layer}` on {change.vllm}: {change.before} -> {change.after}"]
    if change.would == "needed":
        parts.append("Its range ends before this release; it still fits and is still needed.")
    elif change.would:
        parts.append(f"Its range ends before this release; without the range: {change.would}.")
    parts.append(change.reason)
    if change.merged:
        parts.append(f"Perhaps upstream in another form: {change.merged}.")
    parts += [f"`{one.file}`\n\n{_fenced(one.diff)}" for one in change.diffs]
    parts.append("\n".join(f"- {c.pull or c.commit}: {_code(c.title)}" for c in change.commits))
    parts.append(f"`{change.command}`" if change.command else "")
    return "\n\n".join(part for part in parts if part)


def _fenced(diff: str) -> str:
    """A diff as a block that nothing in it ends."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", diff)), default=0))
    return f"{fence}diff\n{diff.rstrip()}\n{fence}"


def _code(text: str) -> str:
    """What somebody wrote elsewhere, so that it mentions nobody and links nothing here."""
    return f"`{text.replace('`', chr(39))}`"


def _of_kernel(change: KernelChange) -> str:
    if not change.kind:
        return f"`{change.profile}` on {change.vllm}: not recorded; `--ask` asks the release"
    return f"`{change.profile}` on {change.vllm}, {change.kind}: {change.before} -> {change.after}"


def _of_flags(changes: Sequence[FlagChange]) -> Iterator[str]:
    for c in changes:
        if c.change == "renamed":
            yield f"flag `{c.name}` went; `{c.detail}`, which takes the same, appeared"
        elif c.detail:
            yield f"{c.what} `{c.name}` {c.change}: {c.detail}"
    for what in ("flag", "variable"):
        for word in ("went", "appeared"):
            plain = [c for c in changes if (c.what, c.change, c.detail) == (what, word, "")]
            if plain:
                yield f"{what}s that {word}: {', '.join(f'`{c.name}`' for c in plain)}"


def _of_recipes(report: Outdated) -> Iterator[str]:
    if report.linted and not report.recipes:
        yield f"`lint` finds nothing new in {report.linted} recipes on {report.newest}"
    for one in report.recipes:
        yield f"`{one.file}:{one.line}`: {one.message} ({one.rule})"


def _of_thread(thread: WatchedThread) -> str:
    state = thread.state or "not known"
    title = f", {_code(thread.title)}" if thread.title else ""
    updated = f" (last change {thread.updated})" if thread.updated else ""
    return f"{thread.thread}: **{state}**{title}{updated}; named by {', '.join(thread.layers)}"
