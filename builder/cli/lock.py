"""``spark-build lock``: write, check or renew the project's lock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.cli.inputs import Inputs
from builder.cli.options import PullOptions
from builder.cli.show import print_json, show_plan
from builder.console import console
from builder.errors import Exit, SparkBuildError, UsageError
from builder.lock import NAME, Lock, Request, lock_path, read_lock
from builder.lockentry import differences, stale
from builder.locks import locked
from builder.planner import refuse_nothing, refuse_plan
from builder.runtime.spark_apply import NEEDS_REBUILD

if TYPE_CHECKING:
    from builder.lock import Entry
    from builder.model import BuildPlan


def lock_command(
    *,
    layers: list[str] | None,
    pulls: PullOptions,
    base: str | None,
    platform: str | None,
    python: str | None,
    patches: list[Path] | None,
    check: bool,
    upgrade: bool,
    json: bool,
) -> None:
    """Lock one request, or, when none is named, every one that the lock has.

    Raises:
        SparkBuildError: ``check`` found the lock missing or stale (exit 9).
        UsageError: nothing is named and there is no lock, or the base is a directory.
    """
    path = lock_path(Path.cwd())
    with locked(str(path)):
        kept = read_lock(path) or Lock(path)
        if layers or pulls.with_pr:
            made = [_one(layers, pulls, base, platform, python, patches, upgrade)]
        else:
            made = [_again(entry, pulls, patches, upgrade) for entry in kept.entries.values()]
            if not made:
                raise UsageError(
                    f"nothing is named, and there is no {NAME} to go by ({path})",
                    hint="spark-build lock --layers L --base BASE",
                )
        found = _compare(kept, made)
        if check:
            _report_check(path, found, made, json)
            return
        fresh = Lock(path, dict(kept.pulls), dict(kept.entries))
        for inputs, entry in made:
            fresh.entries[Request.of(entry).key] = entry
            fresh.pulls.update(inputs.resolved.pins)
        written = fresh.write()
    if json:
        print_json(_document(path, found, made, written=written))
        return
    for key, lines in found.items():
        console.say(f"  {key}")
        for line in lines:
            console.say(f"    {line}")
    print(f"{path}: {len(made)} locked{'' if written else ', nothing changed'}")


def _one(
    layers: list[str] | None,
    pulls: PullOptions,
    base: str | None,
    platform: str | None,
    python: str | None,
    patches: list[Path] | None,
    upgrade: bool,
) -> tuple[Inputs, Entry]:
    inputs = Inputs(layers, patches, pulls, refresh=upgrade, upgrade=upgrade)
    ref = inputs.base_ref(base)
    if ref.startswith("dir:"):
        raise UsageError(
            f"{ref} is not locked: a directory is what it is",
            hint="lock the release that it was installed from: --base pypi:vllm==VERSION",
        )
    identified = inputs.identify(ref, platform=platform, python=python, keep=True)
    try:
        plan = inputs.unchecked_plan(identified)
    finally:
        identified.close()
    _refuse(plan, inputs)
    return inputs, inputs.entry_for(plan)


def _refuse(plan: BuildPlan, inputs: Inputs) -> None:
    """What cannot be built is not locked; what a compiler could still build, is."""
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


def _again(
    entry: Entry, pulls: PullOptions, patches: list[Path] | None, upgrade: bool
) -> tuple[Inputs, Entry]:
    """An entry's request, locked once more."""
    request = Request.of(entry)
    return _one(
        list(request.layers),
        PullOptions(with_pr=request.with_pr, forge_clone=pulls.forge_clone),
        request.base,
        None if request.platform == "own" else request.platform,
        None if request.python == "own" else request.python,
        patches,
        upgrade,
    )


def _compare(kept: Lock, made: list[tuple[Inputs, Entry]]) -> dict[str, list[str]]:
    """What changes in the lock, in words, by request; requests that hold are left out."""
    changes = {}
    for inputs, entry in made:
        key = Request.of(entry).key
        old = kept.entries.get(key)
        found = differences(old, entry) if old else ["not locked yet"]
        for request, pin in inputs.resolved.pins.items():
            was = kept.pulls.get(request)
            if was is None or was.commit != pin.commit:
                before = was.short if was else "not pinned yet"
                found.append(f"pull {request}: {before}, now {pin.short}")
        if found:
            changes[key] = found
    return changes


def _report_check(
    path: Path, found: dict[str, list[str]], made: list[tuple[Inputs, Entry]], json: bool
) -> None:
    if json:
        print_json(_document(path, found, made, written=False))
    if not path.is_file():
        raise SparkBuildError(f"there is no {path}", Exit.STALE, hint="spark-build lock")
    if found:
        raise stale(path, [f"{key}: {line}" for key, lines in found.items() for line in lines])
    if not json:
        print(f"{path} holds for {len(made)}")


def _document(
    path: Path, found: dict[str, list[str]], made: list[tuple[Inputs, Entry]], *, written: bool
) -> dict[str, Any]:
    return {
        "schema": 1,
        "lock": str(path),
        "requests": [Request.of(entry).key for _, entry in made],
        "changes": found,
        "written": written,
    }
