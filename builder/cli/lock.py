"""``spark-build lock``: write, check or renew the project's lock."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.applier.states import NEEDS_REBUILD
from builder.cli.inputs import Inputs
from builder.cli.options import PullOptions
from builder.cli.show import print_json, show_plan
from builder.console import console
from builder.engines.patched import foresee
from builder.errors import Exit, SparkBuildError, UsageError
from builder.lock import NAME, Lock, Request, lock_path, read_lock
from builder.lockentry import differences, stale
from builder.lockfacts import chain, pins_of, read_facts, remove_unnamed, write_facts
from builder.locks import locked
from builder.planner import refuse_nothing, refuse_plan
from builder.rootfs.facts import Facts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.lock import Entry
    from builder.model import BuildPlan


#: What ``--check`` says of a request that the lock does not have.
_NEW = "not locked yet"


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
        for lines in found.values():
            lines[:] = ["new" if line == _NEW else line for line in lines]
        fresh = Lock(path, dict(kept.pulls), dict(kept.entries))
        for one in made:
            fresh.entries[one.key] = one.entry
            fresh.pulls.update(one.inputs.resolved.pins)
        _write_facts(kept, fresh, made)
        written = fresh.write()
        remove_unnamed(fresh)
    if json:
        print_json(_document(path, found, made, written=written))
        return
    for key, lines in found.items():
        console.say(f"  {key}")
        for line in lines:
            console.say(f"    {line}")
    print(f"{path}: {len(made)} locked{'' if written else ', nothing changed'}")


@dataclass(frozen=True)
class Made:
    """An entry as it would be locked now, and what its base was asked for it."""

    inputs: Inputs
    entry: Entry
    facts: Facts | None

    @property
    def key(self) -> str:
        """The request in one line."""
        return Request.of(self.entry).key


def _write_facts(kept: Lock, fresh: Lock, made: Sequence[Made]) -> None:
    """Write what the bases answered, and pin it in every entry on the same layers.

    What other entries need of the same base stays.  A base that a Docker Engine has read this time
    keeps the facts that it had, while it is the same.
    """
    asked = {one.key: one.facts for one in made if one.facts is not None}
    for one in made:
        old = kept.entries.get(one.key, one.entry)["base"]
        if one.facts is None and old["digest"] == one.entry["base"]["digest"] and "facts" in old:
            one.entry["base"]["facts"] = old["facts"]
    of_base = {chain(facts.layers): Facts(facts.layers) for facts in asked.values()}
    others = [entry for key, entry in fresh.entries.items() if key not in asked]
    for pin in pins_of(others).values():
        if pin["layers"] in of_base:
            try:
                of_base[pin["layers"]].add(read_facts(kept.path, pin))
            except SparkBuildError as error:
                console.warn(f"{error}")
    for facts in asked.values():
        of_base[chain(facts.layers)].add(facts)
    before = pins_of(kept.entries.values()).values()
    pins = {
        layers: write_facts(fresh.path, facts, [pin for pin in before if pin["layers"] == layers])
        for layers, facts in of_base.items()
    }
    for key, entry in fresh.entries.items():
        base = entry["base"]
        layers = chain(asked[key].layers) if key in asked else base.get("facts", {}).get("layers")
        if layers in pins:
            base["facts"] = pins[layers]


def _one(
    layers: list[str] | None,
    pulls: PullOptions,
    base: str | None,
    platform: str | None,
    python: str | None,
    patches: list[Path] | None,
    upgrade: bool,
) -> Made:
    inputs = Inputs(layers, patches, pulls, refresh=upgrade, upgrade=upgrade)
    ref = inputs.base_ref(base)
    if ref.startswith("dir:"):
        raise UsageError(
            f"{ref} is not locked: a directory is what it is",
            hint="lock the release that it was installed from: --base pypi:vllm==VERSION",
        )
    identified = inputs.identify(ref, platform=platform, python=python, locking=True)
    try:
        plan = inputs.unchecked_plan(identified)
        _refuse(plan, inputs)
        foresee(plan, identified)
    finally:
        identified.close()
    opened = identified.opened
    return Made(inputs, inputs.entry_for(plan), opened.view.notes if opened else None)


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


def _again(entry: Entry, pulls: PullOptions, patches: list[Path] | None, upgrade: bool) -> Made:
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


def _compare(kept: Lock, made: list[Made]) -> dict[str, list[str]]:
    """What changes in the lock, in words, by request; requests that hold are left out."""
    changes = {}
    for one in made:
        old = kept.entries.get(one.key)
        found = differences(old, one.entry) if old else [_NEW]
        if old and not found:
            found += _compare_facts(kept, old, one)
        for request, pin in one.inputs.resolved.pins.items():
            was = kept.pulls.get(request)
            if was is None or was.commit != pin.commit:
                before = was.short if was else "not pinned yet"
                found.append(f"pull {request}: {before}, now {pin.short}")
        if found:
            changes[one.key] = found
    return changes


def _compare_facts(kept: Lock, old: Entry, one: Made) -> list[str]:
    """What is wrong with what the lock holds of a base; a lock may hold nothing of it."""
    pin = old["base"].get("facts")
    if pin is None or one.facts is None:
        return []
    try:
        lacking = read_facts(kept.path, pin).lacks(one.facts)
    except SparkBuildError as error:
        return [f"base: {error}"]
    return [f"base: {pin['file']} lacks {lacking} answers of its layers"] if lacking else []


def _report_check(path: Path, found: dict[str, list[str]], made: list[Made], json: bool) -> None:
    if json:
        print_json(_document(path, found, made, written=False))
    if not path.is_file():
        raise SparkBuildError(f"there is no {path}", Exit.STALE, hint="spark-build lock")
    if found:
        raise stale(path, [f"{key}: {line}" for key, lines in found.items() for line in lines])
    if not json:
        print(f"{path} holds for {len(made)}")


def _document(
    path: Path, found: dict[str, list[str]], made: list[Made], *, written: bool
) -> dict[str, Any]:
    return {
        "schema": 1,
        "lock": str(path),
        "requests": [one.key for one in made],
        "changes": found,
        "written": written,
    }
