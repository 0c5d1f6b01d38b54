"""``spark-build matrix``: layers x releases, from the released wheels."""

from __future__ import annotations

from json import dumps
from typing import TYPE_CHECKING, cast

from builder.applier.states import AMBIGUOUS, DRIFT
from builder.applier.versions import all_match
from builder.dispatch.documents import Matrix, MatrixRow
from builder.errors import Exit, SparkBuildError, UsageError
from builder.layers.catalog import Catalog
from builder.pipeline import bases
from builder.pipeline.select import without_pulls
from builder.plan.planner import make_plan
from builder.plan.sources import IndexSources
from builder.pypi.index import PackageIndex, vllm_releases
from builder.util.console import console, print_json
from builder.util.documents import plain

if TYPE_CHECKING:
    from pathlib import Path

    from builder.dispatch import Outcome
    from builder.documents.plan import State
    from builder.model.plan import BuildPlan
    from builder.rootfs.base import Base
    from builder.verify.checks import Check

_SHORT = {
    "needed": "needed",
    "applied": "applied",
    "upstream": "upstream",
    "not-applicable": "-",
    "needs-rebuild": "REBUILD",
    "drift": "DRIFT",
    "ambiguous": "AMBIGUOUS",
}

_DRIFTED = (DRIFT, AMBIGUOUS)


def matrix_command(
    *,
    layers: list[str],
    releases: str | None,
    platform: str | None,
    patches: list[Path] | None,
    refresh: bool,
    dispatch: bool,
    choices: bool,
    evidence: Path | None,
    json: bool,
) -> None:
    """Print the table; exit 4 if a layer drifted, 5 if an expected kernel is not selected."""
    if evidence is not None and not dispatch:
        raise UsageError("--evidence needs --dispatch", hint="--dispatch")
    selection = without_pulls(Catalog.discover(patches or ()).select(layers))
    index = PackageIndex(refresh=refresh)
    sources = IndexSources(index)
    rows: list[MatrixRow] = []
    for release in vllm_releases(index, releases):
        console.say(f"  vllm {release}")
        base = bases.identify_base(f"pypi:vllm=={release}", selection, index, platform=platform)
        plan = make_plan(base, selection, sources)
        states = {d.name: d.outcome.state for d in plan.decisions}
        served = all(all_match(p.needs, base.identity.packages) for p in selection.profiles)
        asked = _dispatch(plan, base, release, evidence) if dispatch and served else None
        row = MatrixRow(
            vllm=release,
            states=cast("dict[str, State]", states),
            reasons={d.name: d.outcome.reason for d in plan.decisions},
            served=served,
            dispatch=asked,
            choices=_choices(plan, base) if choices else None,
        )
        rows.append(row)
    names = [layer.name for layer in selection.layers]
    if json:
        print_json(Matrix(layers=tuple(names), rows=tuple(rows)))
    else:
        _print_table(names, rows)
        if dispatch:
            _print_dispatch(rows)
        if choices:
            _print_choices(rows)
    drifted = [
        f"{name} on vllm {row.vllm}: {row.reasons[name]}"
        for row in rows
        for name in names
        if row.states[name] in _DRIFTED
    ]
    if drifted:
        name = next(n for n in names if any(row.states[n] in _DRIFTED for row in rows))
        hint = f"spark-build layers show {name}"
        raise SparkBuildError("\n  ".join(drifted), Exit.DRIFT, hint=hint)
    failed = [
        f"vllm {row.vllm}: {check.name}: {check.seen}"
        for row in rows
        for check in row.dispatch or ()
        if check.status == "fail"
    ]
    if failed:
        raise SparkBuildError("\n  ".join(failed), Exit.VERIFY_FAILED)


def _dispatch(
    plan: BuildPlan, base: Base, release: str, evidence: Path | None
) -> tuple[Check, ...]:
    """What this release selects by default and with the plan; the evidence is written to a file."""
    from builder.verify.run import verify
    from builder.verify.targets import target_of_plan

    target = target_of_plan(plan, base, f"pypi:vllm=={release} as planned", patched=True)
    report = verify(target, ["dispatch"])
    if evidence is not None:
        from builder.pypi.index import write_atomically

        data = dumps(plain(report.document()), indent=1, sort_keys=True).encode() + b"\n"
        write_atomically(evidence / f"vllm-{release}-{plan.name}.json", data)
    return tuple(report.checks)


def _print_dispatch(rows: list[MatrixRow]) -> None:
    print(f"\n{'vllm':<10}{'':<18}{'kind':<15}{'by default':<40}as planned")
    for row in rows:
        if not row.served:
            print(f"{row.vllm:<10}the profile does not support this release")
        for check in row.dispatch or ():
            default = check.reason.rpartition(": ")[2]
            line = check.seen.split(" out of ")[0]
            word = "expected refusal" if check.refusal else check.status
            print(f"{row.vllm:<10}{word:<18}{check.name:<15}{default:<40}{line}")


def _choices(plan: BuildPlan, base: Base) -> dict[str, dict[str, Outcome]]:
    """What the unpatched release selects by default and for each of its choices."""
    from builder.dispatch.record import by_itself

    asked = by_itself(plan, base)
    return {kind: {"": asked.default[kind], **asked.outcomes(kind)} for kind in asked.choices}


def _print_choices(rows: list[MatrixRow]) -> None:
    print(f"\n{'vllm':<10}{'kind':<15}{'choice':<66}unpatched")
    for row in rows:
        for kind, found in (row.choices or {}).items():
            for choice, outcome in found.items():
                what, text = next(iter(plain(outcome).items()))
                shown = text if what == "selected" else f"{what}: {text}"
                print(f"{row.vllm:<10}{kind:<15}{choice or '(nothing set)':<66}{shown}")


def _print_table(names: list[str], rows: list[MatrixRow]) -> None:
    widths = [max(len(name), 9) for name in names]
    print("vllm      " + "  ".join(f"{n:<{w}}" for n, w in zip(names, widths, strict=True)))
    for row in rows:
        cells = [
            f"{_SHORT[row.states[name]]:<{width}}"
            for name, width in zip(names, widths, strict=True)
        ]
        served = "" if row.served else "  (not supported by the profile)"
        print(f"{row.vllm:<10}" + "  ".join(cells) + served)
