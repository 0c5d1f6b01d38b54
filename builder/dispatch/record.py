"""Ask a release everything, and keep what it said: one JSON file a release.

A record says from which wheels and for which profiles it was made, so that one that no longer
belongs to the profiles of this checkout is found without asking again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder.applier.digests import canonical_json, sha256_hex
from builder.applier.versions import all_match
from builder.dispatch import Outcome, setting
from builder.errors import Exit, SparkBuildError, UsageError
from builder.plan.planner import make_plan
from builder.runtime.dispatch_expect import backends
from builder.verify.kinds import KINDS
from builder.verify.targets import target_of_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from builder.bases.model import Base
    from builder.layers.catalog import Catalog, Selection
    from builder.model import BuildPlan
    from builder.plan.sources import IndexSources

SCHEMA = 1
#: What in a layer decides nothing: words for people.
_PROSE = ("summary", "description", "provenance", "notes", "reason")


@dataclass(frozen=True, kw_only=True)
class RecordInputs:
    """What asking needs besides the release."""

    catalog: Catalog
    sources: IndexSources
    #: a release's wheels as the base of a selection
    identify: Callable[[str, Selection], Base]


def inputs_digest(selection: Selection) -> str:
    """Identity of what a profile puts into an answer: its layers, pins and range."""
    value = {
        "layers": [_without_prose(layer) for layer in selection.layers if decides(layer)],
        "pins": selection.pins(),
        "needs": [dict(profile.needs) for profile in selection.profiles],
    }
    return sha256_hex(canonical_json(value))[:16]


def decides(layer: Mapping[str, Any]) -> bool:
    """Whether a layer can decide what is selected: compiled code alone stands behind a selection.

    Which kernel a release takes, its Python says; a kernel's machine code is not asked.
    """
    return not all(op["op"] == "compile" for v in layer["variants"] for op in v["ops"]) or any(
        variant.get("serve-flags") or variant.get("moe-serve-flags")
        for variant in layer["variants"]
    )


def _without_prose(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_prose(v) for k, v in value.items() if k not in _PROSE}
    if isinstance(value, list | tuple):
        return [_without_prose(item) for item in value]
    return value


def record_of(release: str, asking: RecordInputs) -> dict[str, Any]:
    """Everything that is asked of a release: by default, every choice, and with each profile.

    Raises:
        SparkBuildError: the release cannot be asked here.
    """
    record: dict[str, Any] = {"schema": SCHEMA, "vllm": release, "profiles": {}}
    simulated: dict[str, None] = {}
    for name in asking.catalog.profile_files:
        selection = asking.catalog.select([name])
        base = asking.identify(release, selection)
        try:
            if "base" not in record:
                plan = make_plan(base, selection, asking.sources)
                alone = by_itself(plan, base)
                simulated.update(dict.fromkeys(alone.pop("simulated")))
                record |= {"base": _base(base), **alone}
            record["profiles"][name] = _with_profile(base, selection, asking, simulated)
        finally:
            base.close()
    record["simulated"] = list(simulated)
    return record


def _base(base: Base) -> dict[str, Any]:
    identity = base.identity
    return {
        "platform": identity.platform.oci,
        "digest": identity.digest,
        "packages": dict(sorted(identity.packages.items())),
    }


def by_itself(plan: BuildPlan, base: Base) -> dict[str, Any]:
    """What an unpatched base does when nothing is set, and with each choice that it offers.

    Raises:
        SparkBuildError: it cannot be asked here.
    """
    request = {"ask": [{"kind": kind} for kind in KINDS], "choices": list(KINDS)}
    result = _ask(plan, base, request)
    choices: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    for answer in result["choices"]:
        outcome = Outcome.of(answer)  # a kernel as its name alone: there are a hundred choices
        brief = outcome.selected or outcome.as_json()
        choices[answer["kind"]][setting(answer["request"])] = brief
    return {
        "default": {a["kind"]: Outcome.of(a).as_json() for a in result["answers"]},
        "choices": choices,
        "real": result["real"],
        "simulated": result["simulated"],
    }


def _with_profile(
    base: Base, selection: Selection, asking: RecordInputs, simulated: dict[str, None]
) -> dict[str, Any]:
    value: dict[str, Any] = {"inputs": inputs_digest(selection)}
    for profile in selection.profiles:
        if not all_match(profile.needs, base.identity.packages):
            return value | {"not-served": profile.needs_reason}
    plan = make_plan(base, selection, asking.sources)
    body = plan.as_json()
    asks = [{"kind": kind, **backends(body, kind)} for kind in KINDS]
    result = _ask(plan, base, {"env": plan.env, "ask": asks}, patched=True)
    simulated.update(dict.fromkeys(result["simulated"]))
    value |= {
        "layers": {d.name: d.outcome.state for d in plan.decisions if decides(d.layer)},
        "env": plan.env,
        "flags": [*plan.serve_flags, *plan.moe_serve_flags],
        "kinds": {a["kind"]: Outcome.of(a).as_json() for a in result["answers"]},
    }
    return value


def _ask(
    plan: BuildPlan, base: Base, request: Mapping[str, Any], *, patched: bool = False
) -> Mapping[str, Any]:
    target = target_of_plan(plan, base, base.identity.ref, patched=patched)
    if target.ask is None:
        raise SparkBuildError(f"{target.name} cannot be asked: {target.cannot_ask}")
    result = target.ask(request)
    if result["fatal"]:
        fatal = result["fatal"]
        raise SparkBuildError(
            f"{target.name}: vllm cannot be imported: {fatal['type']}: {fatal['message']}",
            Exit.VERIFY_FAILED,
        )
    return result


# --- files ---------------------------------------------------------------------------------------


def file_of(folder: Path, release: str) -> Path:
    """Where a release's record is."""
    return folder / f"vllm-{release}.json"


def record_bytes(record: Mapping[str, Any]) -> bytes:
    """A record as it is kept: readable in a diff, and the same for the same answers."""
    return json.dumps(record, indent=1, sort_keys=True).encode() + b"\n"


def read_records(folder: Path) -> list[dict[str, Any]]:
    """All records of a directory, oldest release first.

    Raises:
        UsageError: there is none, or one is malformed.
    """
    from packaging.version import InvalidVersion, Version

    records = []
    for path in folder.glob("vllm-*.json"):
        try:
            record = json.loads(path.read_bytes())
            Version(record["vllm"])
        except (ValueError, TypeError, KeyError, InvalidVersion) as error:
            raise UsageError(f"{path} is not a record of a release: {error}") from None
        if record.get("schema") != SCHEMA or file_of(folder, record["vllm"]) != path:
            raise UsageError(f"{path} is not a record of that release in the form of today")
        records.append(record)
    if not records:
        raise UsageError(f"no record of a release in {folder}", hint="spark-build dispatch ask")
    return sorted(records, key=lambda record: Version(record["vllm"]))


def stale_records(records: Iterable[Mapping[str, Any]], catalog: Catalog) -> list[str]:
    """What in the records was asked with other profiles than those of this checkout."""
    now = {name: inputs_digest(catalog.select([name])) for name in catalog.profile_files}
    return [
        f"vllm {record['vllm']}: {name}"
        for record in records
        for name in sorted({*now, *record["profiles"]})
        if record["profiles"].get(name, {}).get("inputs") != now.get(name)
    ]
