"""Runs the dispatch probe on a release, and writes one JSON record.

A record names its wheels and profiles, so that a stale one, which no longer
matches this checkout's profiles, is found without new queries.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from builder.applier.digests import canonical_json, sha256_hex
from builder.applier.opkinds import Compile
from builder.applier.versions import all_match
from builder.common.document import plain, read
from builder.errors import Exit, SparkBuildError, UsageError
from builder.layers.plan.planner import make_plan
from builder.probes.dispatch_expect import backends
from builder.proof.kinds import KINDS
from builder.proof.opening import target_of_plan
from builder.proof.recorded import Outcome, setting
from builder.proof.recorded.documents import Alone, AskedBase, Record, WithProfile
from builder.proof.replies import Ask, DispatchRequest
from builder.proof.target import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from builder.applier.layers import Layer
    from builder.common.documents.plan import State
    from builder.common.model.plan import BuildPlan
    from builder.images.rootfs.base import Base
    from builder.layers.catalog import Catalog, Selection
    from builder.layers.plan.sources import IndexSources
    from builder.proof.replies import DispatchReply

#: Keys of a layer without effect: descriptions.
_PROSE = ("summary", "description", "provenance", "notes", "reason")


@dataclass(frozen=True, kw_only=True)
class RecordInputs:
    """Inputs of a record besides the release."""

    catalog: Catalog
    sources: IndexSources
    #: a release's wheels as a base
    identify: Callable[[str, Selection], Base]


def inputs_digest(selection: Selection) -> str:
    """Digest of a profile's layers, pins and range."""
    value = {
        "layers": [_without_prose(layer.rendered) for layer in selection.layers if decides(layer)],
        "pins": selection.pins(),
        "needs": [dict(profile.needs) for profile in selection.profiles],
    }
    return sha256_hex(canonical_json(value))[:16]


def decides(layer: Layer) -> bool:
    """Whether a layer can affect the selection, which only Python code decides.

    Machine code has no effect on it.
    """
    return not all(isinstance(op, Compile) for op in layer.ops) or any(
        variant.serve_flags or variant.moe_serve_flags for variant in layer.variants
    )


def _without_prose(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_prose(v) for k, v in value.items() if k not in _PROSE}
    if isinstance(value, list | tuple):
        return [_without_prose(item) for item in value]
    return value


def record_of(release: str, asking: RecordInputs) -> Record:
    """The record of a release: by default, with every choice, and with each profile.

    Raises:
        SparkBuildError: the release cannot be queried here.
    """
    names = list(asking.catalog.profile_files)
    selection = asking.catalog.select(names[:1])
    with closing(asking.identify(release, selection)) as base:
        asked = _base(base)
        alone = by_itself(make_plan(base, selection, asking.sources), base)
    simulated = dict.fromkeys(alone.simulated)
    profiles: dict[str, WithProfile] = {}
    for name in names:
        selection = asking.catalog.select([name])
        with closing(asking.identify(release, selection)) as base:
            profiles[name], parts = _with_profile(base, selection, asking)
        simulated.update(dict.fromkeys(parts))
    return Record(
        vllm=release,
        base=asked,
        default=alone.default,
        choices=alone.choices,
        real=alone.real,
        simulated=tuple(simulated),
        profiles=profiles,
    )


def _base(base: Base) -> AskedBase:
    identity = base.identity
    return AskedBase(
        platform=identity.platform.oci, digest=identity.digest, packages=dict(identity.packages)
    )


def by_itself(plan: BuildPlan, base: Base) -> Alone:
    """Kernels of an unpatched base, by default and with each of its choices.

    Raises:
        SparkBuildError: it cannot be queried here.
    """
    request = DispatchRequest(ask=tuple(Ask(kind=kind) for kind in KINDS), choices=tuple(KINDS))
    reply = _ask(plan, base, request)
    choices: dict[str, dict[str, str | Outcome]] = {kind: {} for kind in KINDS}
    for answer in reply.choices:
        outcome = Outcome.of(answer)  # a kernel as its name alone: there are a hundred choices
        choices[answer.kind][setting(answer.request)] = outcome.selected or outcome
    return Alone(
        default={answer.kind: Outcome.of(answer) for answer in reply.answers},
        choices=choices,
        real=reply.real,
        simulated=reply.simulated,
    )


def _with_profile(
    base: Base, selection: Selection, asking: RecordInputs
) -> tuple[WithProfile, Sequence[str]]:
    """Kernels that a release selects with a profile, and the simulated parts."""
    inputs = inputs_digest(selection)
    for profile in selection.profiles:
        if not all_match(profile.needs, base.identity.packages):
            return WithProfile(inputs=inputs, not_served=profile.needs_reason), ()
    plan = make_plan(base, selection, asking.sources)
    flags = (*plan.serve_flags, *plan.moe_serve_flags)
    asks = tuple(read({"kind": kind, **backends(flags, kind)}, Ask) for kind in KINDS)
    reply = _ask(plan, base, DispatchRequest(env={**plan.env}, ask=asks), patched=True)
    states = {d.name: d.outcome.state for d in plan.decisions if decides(d.layer)}
    found = WithProfile(
        inputs=inputs,
        layers=cast("dict[str, State]", states),
        env=dict(plan.env),
        flags=flags,
        kinds={answer.kind: Outcome.of(answer) for answer in reply.answers},
    )
    return found, reply.simulated


def _ask(
    plan: BuildPlan, base: Base, request: DispatchRequest, *, patched: bool = False
) -> DispatchReply:
    target = target_of_plan(plan, base, base.identity.ref, patched=patched)
    reply = target.runner.dispatch(request)
    if isinstance(reply, Refusal):
        raise SparkBuildError(f"{target.name}: {reply.reason}", hint=reply.command)
    if reply.fatal:
        raise SparkBuildError(
            f"{target.name}: vllm cannot be imported: {reply.fatal}", Exit.VERIFY_FAILED
        )
    return reply


# --- files ---------------------------------------------------------------------------------------


def file_of(folder: Path, release: str) -> Path:
    """The path of a release's record."""
    return folder / f"vllm-{release}.json"


def record_bytes(record: Record) -> bytes:
    """A record as bytes: readable in a diff, and reproducible."""
    return json.dumps(plain(record), indent=1, sort_keys=True).encode() + b"\n"


def read_records(folder: Path) -> list[Record]:
    """All records of a directory, oldest release first.

    Raises:
        UsageError: no record exists, or one is malformed.
    """
    from packaging.version import Version

    records = []
    for path in folder.glob("vllm-*.json"):
        try:
            record = read(json.loads(path.read_bytes()), Record)
            Version(record.vllm)
        except ValueError as error:
            raise UsageError(f"{path} is not a record of a release: {error}") from None
        if file_of(folder, record.vllm) != path:
            raise UsageError(f"{path} is not a record of that release: it is of {record.vllm}")
        records.append(record)
    if not records:
        raise UsageError(f"no record of a release in {folder}", hint="spark-build dispatch ask")
    return sorted(records, key=lambda record: Version(record.vllm))


def stale_records(records: Iterable[Record], catalog: Catalog) -> list[str]:
    """Stale records: those made with other profiles than this checkout's."""
    now = {name: inputs_digest(catalog.select([name])) for name in catalog.profile_files}
    return [
        f"vllm {record.vllm}: {name}"
        for record in records
        for name in sorted({*now, *record.profiles})
        if name not in record.profiles or record.profiles[name].inputs != now.get(name)
    ]
