"""What an upgrade of a locked build would change, in words; nothing is written."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from builder.applier.receipts import STATE_DIR
from builder.common.console import megabytes
from builder.common.document import Count, Document, Part, Text
from builder.common.paths import data_dir
from builder.errors import UsageError
from builder.layers.lock import lock_path, read_lock
from builder.pipeline.inputs import inputs_of
from builder.pipeline.locking import options_of
from builder.proof.recorded import read_records

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.common.plan import BuildPlan
    from builder.layers.lock import LockEntry
    from builder.pipeline.options import PlanOptions


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
    "drift": "the layer must be mended: spark-build layers diff",
    "ambiguous": "the layer must be mended: spark-build layers diff",
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
