"""Writes, checks and updates the lock of a project."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, structs

from builder.applier.receipts import STATE_DIR
from builder.applier.states import NEEDS_REBUILD
from builder.common.cache import locked
from builder.common.console import console, megabytes
from builder.common.document import Count, Document, Part, Text
from builder.common.paths import data_dir
from builder.errors import Exit, SparkBuildError, UsageError
from builder.images.engines.oci import check_writable_base
from builder.images.rootfs.facts import RecordedFiles
from builder.layers.lock import (
    NAME,
    Lock,
    chain,
    differences,
    lock_path,
    pins_of,
    read_facts,
    read_lock,
    remove_unnamed,
    stale,
    write_facts,
)
from builder.layers.planner import refuse_nothing, refuse_plan
from builder.pipeline.inputs import inputs_of
from builder.pipeline.show import show_plan
from builder.proof.recorded import read_records

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from builder.common.plan import BuildPlan
    from builder.layers.lock import FactsPin, LockEntry
    from builder.pipeline.inputs import Inputs
    from builder.pipeline.options import PlanOptions


#: The message of ``--check`` for a request that is not in the lock.
_NEW = "not locked yet"


def lock_requests(options: PlanOptions, *, check: bool) -> Locked:
    """Lock one request or, if none is given, all requests in the lock.

    With ``check`` nothing is written; the result says whether the lock is current.

    Raises:
        UsageError: no request is given and there is no lock, or the base is a directory.
    """
    path = lock_path(Path.cwd())
    with locked(str(path)):
        old = read_lock(path) or Lock(path)
        if options.names or options.with_pr:
            fresh_entries = [_one(options)]
        else:
            fresh_entries = [_one(options_of(entry, options)) for entry in old.entries.values()]
            if not fresh_entries:
                raise UsageError(
                    f"nothing to lock: give --layers or --with-pr (there is no {NAME} yet: {path})",
                    hint="spark-build lock --layers L --base BASE",
                )
        changes = _compare(old, fresh_entries)
        requests = tuple(one.key for one in fresh_entries)
        if check:
            return Locked(lock=str(path), changes=changes, requests=requests, written=False)
        for lines in changes.values():
            lines[:] = ["new" if line == _NEW else line for line in lines]
        fresh = Lock(path, dict(old.pulls), dict(old.entries))
        for one in fresh_entries:
            fresh.entries[one.key] = one.entry
            fresh.pulls.update(one.inputs.pins)
        _write_facts(old, fresh, fresh_entries)
        written = fresh.write()
        remove_unnamed(fresh)
    return Locked(lock=str(path), changes=changes, requests=requests, written=written)


class Locked(Document, frozen=True, kw_only=True):
    """The lock's contents, and what changed."""

    lock: Annotated[Text, Meta(description="the lock's file")]
    requests: tuple[Text, ...]
    changes: Annotated[
        dict[str, list[Text]],
        Meta(description="in words, by request; unchanged requests are left out"),
    ]
    written: bool

    def refuse_stale(self) -> None:
        """Raise unless the lock exists and is current.

        Raises:
            SparkBuildError: the lock is missing or stale (exit 9).
        """
        if not Path(self.lock).is_file():
            raise SparkBuildError(f"there is no {self.lock}", Exit.STALE, hint="spark-build lock")
        lines = [f"{key}: {line}" for key, lines in self.changes.items() for line in lines]
        if lines:
            raise stale(Path(self.lock), lines)


@dataclass(frozen=True)
class FreshEntry:
    """A new lock entry, and the recorded facts of its base."""

    inputs: Inputs
    entry: LockEntry
    facts: RecordedFiles | None

    @property
    def key(self) -> str:
        """The request in one line."""
        return self.entry.request.key


def _write_facts(lock: Lock, fresh: Lock, entries: Sequence[FreshEntry]) -> None:
    """Write the facts of the bases, and pin them in every entry with the same image layers.

    Facts that other entries need are kept.  A base that a Docker Engine has read this time
    keeps its previous facts, if it is unchanged.
    """
    asked = {one.key: one.facts for one in entries if one.facts is not None}
    for one in entries:
        old = lock.entries.get(one.key, one.entry).base
        if one.facts is None and old.digest == one.entry.base.digest:
            fresh.entries[one.key] = _with_facts(one.entry, old.facts)
    of_base = {chain(facts.layers): RecordedFiles(facts.layers) for facts in asked.values()}
    others = [entry for key, entry in fresh.entries.items() if key not in asked]
    for pin in pins_of(others).values():
        if pin.layers in of_base:
            try:
                of_base[pin.layers].add(read_facts(lock.path, pin))
            except SparkBuildError as error:
                console.warn(f"{error}")
    for facts in asked.values():
        of_base[chain(facts.layers)].add(facts)
    before = pins_of(lock.entries.values()).values()
    pins = {
        layers: write_facts(fresh.path, facts, [pin for pin in before if pin.layers == layers])
        for layers, facts in of_base.items()
    }
    for key, entry in fresh.entries.items():
        old_facts = entry.base.facts
        layers = chain(asked[key].layers) if key in asked else old_facts.layers if old_facts else ""
        if layers in pins:
            fresh.entries[key] = _with_facts(entry, pins[layers])


def _with_facts(entry: LockEntry, facts: FactsPin | None) -> LockEntry:
    return structs.replace(entry, base=structs.replace(entry.base, facts=facts))


def _one(options: PlanOptions) -> FreshEntry:
    inputs = inputs_of(options)
    ref = inputs.base_ref()
    if ref.kind.is_installed:
        raise UsageError(
            f"{ref} cannot be locked: it is a directory",
            hint="lock the release that it was installed from: --base pypi:vllm==VERSION",
        )
    planning = inputs.identify(ref, locking=True)
    try:
        plan = planning.unchecked_plan()
        _refuse(plan, inputs)
        check_writable_base(plan, planning.base)
    finally:
        planning.close()
    opened = planning.base.in_layers
    return FreshEntry(inputs, planning.entry_for(plan), opened.view.notes if opened else None)


def _refuse(plan: BuildPlan, inputs: Inputs) -> None:
    """Refuse to lock a plan that cannot be built, except one that only needs a compiler."""
    stuck = [d for d in plan.decisions if d.outcome.state == NEEDS_REBUILD]
    try:
        refuse_nothing(plan, inputs.selection)
        if not stuck:
            refuse_plan(plan)
    except SparkBuildError:
        show_plan(plan)
        raise
    for decision in stuck:
        console.warn(f"layer {decision.name} needs a rebuild: {decision.outcome.reason}")


def options_of(entry: LockEntry, options: PlanOptions) -> PlanOptions:
    """The options with an entry's request in place of their own."""
    request = entry.request
    return replace(
        options,
        layers=request.layers,
        with_pr=request.with_pr,
        base=request.base,
        platform=None if request.platform == "own" else request.platform,
        python=None if request.python == "own" else request.python,
    )


def _compare(lock: Lock, entries: list[FreshEntry]) -> dict[str, list[str]]:
    """Changes in the lock, as messages by request; unchanged requests are left out."""
    changes = {}
    for one in entries:
        old = lock.entries.get(one.key)
        rows = differences(old, one.entry) if old else [_NEW]
        if old and not rows:
            rows += _compare_facts(lock, old, one)
        for request, pin in one.inputs.pins.items():
            was = lock.pulls.get(request)
            if was is None or was.commit != pin.commit:
                before = was.short if was else "not pinned yet"
                rows.append(f"pull {request}: {before}, now {pin.short}")
        if rows:
            changes[one.key] = rows
    return changes


def _compare_facts(lock: Lock, old: LockEntry, one: FreshEntry) -> list[str]:
    """Problems with the lock's facts about a base; empty if it has none."""
    pin = old.base.facts
    if pin is None or one.facts is None:
        return []
    try:
        lacking = read_facts(lock.path, pin).lacks(one.facts)
    except SparkBuildError as error:
        return [f"base: {error}"]
    return [f"base: {pin.file} lacks facts about its layers ({lacking})"] if lacking else []


# --------------------------------------------------------------------------------------- an upgrade


class Upgrade(Part, frozen=True, kw_only=True):
    """What one locked request would become."""

    request: Text
    to: Annotated[Text, Meta(description="the base to go to")]
    releases: Annotated[tuple[Text, ...], Meta(description="packages with another version")]
    layers: Annotated[tuple[Text, ...], Meta(description="layers with another state")]
    files: Annotated[tuple[Text, ...], Meta(description="that are patched on one side only")]
    kernels: Annotated[tuple[Text, ...], Meta(description="that SM121 selects otherwise")]
    download: Annotated[
        Count | None, Meta(description="bytes of wheels that are not locked; null for an image")
    ] = None

    def lines(self) -> Iterator[str]:
        """The changes as text, or that there are none."""
        lines = [*self.releases, *self.layers, *self.files, *self.kernels]
        yield from lines or ["nothing changes"]
        if self.download:
            yield f"wheels that are not locked: at most {megabytes(self.download)} to download"


class LockDiff(Document, frozen=True, kw_only=True):
    """What an upgrade of a lock would change."""

    lock: Text
    upgrades: tuple[Upgrade, ...]


@dataclass(frozen=True)
class _Planned:
    plan: BuildPlan
    entry: LockEntry


def lock_diff(options: PlanOptions) -> LockDiff:
    """Compare locked requests with the same on another base, or on their own as it is now.

    Raises:
        UsageError: nothing is locked for these layers.
        RemoteError: the package index or a registry does not respond.
    """
    path = lock_path(Path.cwd())
    lock = read_lock(path)
    entries = [
        entry
        for entry in (lock.entries.values() if lock else ())
        if not options.names or entry.request.layers == options.names
    ]
    if not entries:
        raise UsageError(
            f"{path} has no entry to compare with", hint="spark-build lock --layers L --base BASE"
        )
    return LockDiff(lock=str(path), upgrades=tuple(_upgrade(one, options) for one in entries))


def _upgrade(entry: LockEntry, options: PlanOptions) -> Upgrade:
    request = entry.request
    same = replace(options_of(entry, options), upgrade=False, refresh=False)
    before = _planned(same)
    base = options.base or request.base
    after = _planned(replace(same, base=base, upgrade=True, refresh=True))
    known = {row.sha256 for row in (*entry.base.wheels, *entry.inputs)}
    new = [w for w in (*after.entry.base.wheels, *after.entry.inputs) if w.sha256 not in known]
    return Upgrade(
        request=request.key,
        to=base,
        releases=tuple(_releases(before.plan, after.plan)),
        layers=tuple(_layers(before.plan, after.plan)),
        files=tuple(_files(before.plan, after.plan)),
        kernels=tuple(_kernels(before.plan, after.plan)),
        download=sum(w.size or 0 for w in new) if after.entry.base.wheels else None,
    )


def _planned(options: PlanOptions) -> _Planned:
    inputs = inputs_of(options)
    planning = inputs.identify(inputs.base_ref(), locking=not options.upgrade)
    try:
        plan = planning.unchecked_plan()
        return _Planned(plan, planning.entry_for(plan))
    finally:
        planning.close()


def _releases(before: BuildPlan, after: BuildPlan) -> Iterator[str]:
    was, now = before.base.packages, after.base.packages
    for name in sorted({*was, *now}):
        if was.get(name) != now.get(name):
            yield f"{name}: {was.get(name, 'not there')} -> {now.get(name, 'not there')}"
    if was == now and before.base.digest != after.base.digest:
        yield f"the same versions, built again: {after.base.digest[:19]}"


#: What a new state means for a layer that was needed.
_MEANING = {
    "upstream": "the release has the change: the layer dies",
    "applied": "the release has the same bytes: the layer dies",
    "not-applicable": "the layer is not for this release",
    "drift": "the layer must be fixed: spark-build layers diff",
    "ambiguous": "the layer must be fixed: spark-build layers diff",
}


def _layers(before: BuildPlan, after: BuildPlan) -> Iterator[str]:
    was, now = ({d.name: d.outcome.state for d in plan.decisions} for plan in (before, after))
    for name in dict.fromkeys([*was, *now]):
        old, new = was.get(name, "not selected"), now.get(name, "not selected")
        if old != new:
            meaning = _MEANING.get(new, "") if old == "needed" else ""
            yield f"layer {name}: {old} -> {new}" + (f" ({meaning})" if meaning else "")


def _files(before: BuildPlan, after: BuildPlan) -> Iterator[str]:
    was, now = ({p for p in plan.changes if not _is_ours(p)} for plan in (before, after))
    for path in sorted(was ^ now):
        yield f"{path}: {'no longer patched' if path in was else 'patched now'}"


def _is_ours(path: str) -> bool:
    """Whether a file only says what was patched."""
    return path.startswith(f"{STATE_DIR}/") or path.endswith(".dist-info/RECORD")


def _kernels(before: BuildPlan, after: BuildPlan) -> Iterator[str]:
    """Kernels that differ by the records of both releases, for the plan's profiles."""
    versions = [plan.base.packages.get("vllm", "") for plan in (before, after)]
    records = {}
    with suppress(UsageError, OSError):
        records = {r.vllm: r for r in read_records(data_dir("docs") / "evidence")}
    for version in dict.fromkeys(versions):
        if version not in records and after.profiles:
            yield f"kernels of vLLM {version}: not recorded (spark-build dispatch ask)"
            return
    for profile in after.profiles:
        kinds = [records[version].kinds(profile) or {} for version in versions]
        for kind in dict.fromkeys([*kinds[0], *kinds[1]]):
            was, now = (k[kind].kernel if kind in k else "not supported" for k in kinds)
            if was != now:
                yield f"{profile}, {kind}: {was} -> {now}"
