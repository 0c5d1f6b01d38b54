"""The inputs of a plan as the lock records them, and their differences."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from builder.applier.digests import sha256_hex
from builder.applier.opkinds import Compile, Diff
from builder.common.document import read
from builder.common.pypi import WheelFile
from builder.common.wheels import RemoteWheel
from builder.errors import Exit, SparkBuildError
from builder.layers.lock.document import LockedBase, LockedInput, LockedLayer, LockEntry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from builder.common.documents.plan import PlanDocument
    from builder.common.model.plan import BuildPlan
    from builder.common.pypi import PackageIndex
    from builder.layers.lock.document import Request


def entry_of(
    request: Request, plan: BuildPlan, folders: Mapping[str, Path], index: PackageIndex
) -> LockEntry:
    """The lock entry for a plan."""
    base = plan.base
    layers = (
        LockedLayer(name=d.name, digest=d.layer.digest, files=files_of(folders, d.name))
        for d in plan.decisions
    )
    return LockEntry(
        request=request,
        base=LockedBase(
            kind=base.kind,
            digest=base.digest,
            platform=base.platform.oci,
            python=".".join(map(str, base.platform.python_version)),
            packages=dict(sorted(base.packages.items())),
            wheels=tuple(_wheel(row.filename, row.sha256, index) for row in base.wheels),
        ),
        layers=tuple(layers),
        inputs=tuple(_inputs(plan, index)),
    )


def files_of(folders: Mapping[str, Path], layer: str) -> dict[str, str]:
    """sha256 of every file in a layer's folder; empty for a pull request's layer."""
    folder = folders.get(layer)
    if folder is None:
        return {}
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        path.relative_to(folder).as_posix(): sha256_hex(path.read_bytes())
        for path in files
        if "__pycache__" not in path.parts
    }


def _inputs(plan: BuildPlan, index: PackageIndex) -> Iterator[LockedInput]:
    """Wheels and pull requests that layers use."""
    rows: dict[str, LockedInput] = {}
    for decision in plan.decisions:
        for pin in decision.outcome.inputs:
            wheel = _wheel(pin.filename, pin.sha256, index, getattr(pin, "size", None))
            rows[f"wheel {wheel.filename}"] = wheel
        for op in decision.layer.ops:
            if isinstance(op, (Diff, Compile)) and op.pull:
                row = {"request": op.file, **asdict(op.pull)}
                rows[f"pull {op.file}"] = read(row, LockedInput)
    yield from (rows[key] for key in sorted(rows))


def _wheel(filename: str, sha256: str, index: PackageIndex, size: int | None = None) -> LockedInput:
    file = WheelFile(filename=filename, url="", sha256=sha256)
    found = index.find(file.distribution, file.filename)
    known = size or (found.size if found else 0)
    record = index.records.get(sha256)
    if record is None and found and found.sha256 == sha256:
        record = RemoteWheel(found, index).record
    return LockedInput(filename=filename, sha256=sha256, size=known or None, record=record)


def wheels_of(entry: LockEntry) -> list[WheelFile]:
    """The wheels of an entry, which replace the package index's pages."""
    rows = {row.filename: row for row in (*entry.base.wheels, *entry.inputs) if row.filename}
    return [
        WheelFile(
            filename=name, url="", sha256=row.sha256, size=row.size or 0, record=row.record or ""
        )
        for name, row in rows.items()
    ]


def differences(old: LockEntry, new: LockEntry) -> list[str]:
    """Differences from the lock, as messages; empty if there are none."""
    found = []
    if old.base.digest != new.base.digest:
        found.append(f"base: changed from {old.base.digest[:19]} to {new.base.digest[:19]}")
    found += _changed("package", old.base.packages, new.base.packages)
    found += layer_differences(old.layers, new.layers)
    inputs = [{row.subject: row.sha256 for row in side.inputs} for side in (old, new)]
    found += _changed("input", *inputs)
    return found or _changed_records(old, new)


def _changed_records(old: LockEntry, new: LockEntry) -> list[str]:
    """Wheels whose contents the lock does not pin, as no lock did before, or pins differently."""
    now = _records(new)
    return [
        f"{name}: its RECORD has sha256 {_short(now[name] or 'unknown')}, "
        + (f"locked is {_short(record)}" if record else "which is not locked yet")
        for name, record in _records(old).items()
        if name in now and record != now[name]
    ]


def _records(entry: LockEntry) -> dict[str, str | None]:
    rows = (*entry.base.wheels, *entry.inputs)
    return {row.filename: row.record for row in rows if row.filename}


def plan_differences(old: LockEntry, plan: PlanDocument) -> list[str]:
    """Differences between a plan, such as an image's, and the lock."""
    found = _changed("package", old.base.packages, plan.base.packages)
    if old.base.digest != plan.base.digest:
        digests = old.base.digest[:19], plan.base.digest[:19]
        found.insert(0, f"base: the lock has {digests[0]}, the target was made from {digests[1]}")
    made = [LockedLayer(name=row.name, digest=row.digest, files={}) for row in plan.layers]
    return found + layer_differences(old.layers, made)


def layer_differences(old: Sequence[LockedLayer], new: Sequence[LockedLayer]) -> list[str]:
    """Layers that differ from the lock, with the changed files."""
    before = {layer.name: layer.digest for layer in old}
    after = {layer.name: layer.digest for layer in new}
    found = _changed("layer", before, after)
    files = {layer.name: layer.files for layer in new}
    for layer in old:
        name = layer.name
        if name in after and before[name] != after[name] and files[name]:
            found += [
                f"layer {name}: {line}" for line in _changed("file", layer.files, files[name])
            ]
    if not found and list(before) != list(after):
        found.append(f"layers: the order changed from {', '.join(before)} to {', '.join(after)}")
    return found


def _changed(kind: str, old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    lines = []
    for name in sorted({*old, *new}):
        was, now = old.get(name), new.get(name)
        if was is None or now is None:
            lines.append(f"{kind} {name}: {'new' if was is None else 'removed'}")
        elif was != now:
            lines.append(f"{kind} {name}: changed from {_short(was)} to {_short(now)}")
    return lines


def _short(value: str) -> str:
    return value[:12] if len(value) == 64 else value


def stale(path: Path, found: Sequence[str]) -> SparkBuildError:
    """The error for a stale lock (exit 9)."""
    lines = "\n  ".join(found)
    return SparkBuildError(f"{path} is stale:\n  {lines}", Exit.STALE, hint="spark-build lock")
