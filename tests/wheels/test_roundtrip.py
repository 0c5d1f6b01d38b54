"""Apply and revert on files of released wheels: the very bytes, nothing else, and all back."""

from __future__ import annotations

import ast
import shutil
import zipfile
from typing import TYPE_CHECKING

import pytest

from builder.applier.applying import apply_layers
from builder.applier.judging import judge_in_order
from builder.applier.receipts import RECEIPTS, kept_true, parse_record, receipts_of
from builder.applier.states import APPLIED, NEEDED
from builder.applier.store import Store
from builder.applier.trees import DirTree, OverlayTree
from builder.common.wheels import WheelTree
from builder.layers.catalog import Catalog
from builder.proof.static import check_static
from builder.proof.target import VerifyTarget
from tests.unit.fakes import FakeRunner, subject_of

from .states import REFS, expected
from .support import PROFILE_OF, VENDORED, lay_out, probed_files, snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from builder.applier.states import Outcome
    from builder.common.wheels import RemoteWheel
    from builder.layers.pinned import IndexSources
    from builder.proof.checks import Check

    from .support import Planned, Planner

TABLES = expected()
TEXT_OPS = {"replace", "diff", "graft", "copy", "hook"}


CATALOG = Catalog.discover()


def layers_with(*kinds: str) -> tuple[str, ...]:
    """The layers of profiles that have such ops."""
    return tuple(n for n in PROFILE_OF if {op.kind for op in CATALOG.layer(n).ops} & {*kinds})


TEXT_LAYERS = layers_with(*TEXT_OPS)
WHEEL_LAYERS = layers_with("wheel")
MMA = "nvidia_cutlass_dsl/python_packages/cutlass/cute/nvgpu/warp/mma.py"


def cases() -> list[tuple[str, str]]:
    """(layer, base) of every text layer on every release that needs it."""
    return [
        (layer, REFS[kind].format(release))
        for kind, table in TABLES.items()
        for layer, release in table.needed(TEXT_LAYERS)
    ]


def op_kinds(made: Planned, layer: str) -> set[str]:
    """Kinds of op that change files in the variant of a layer that was chosen."""
    decision = made.decision(layer)
    variant = next(v for v in decision.layer.variants if v.name == decision.outcome.variant)
    return {op.kind for op in variant.ops} - {"env"}


def apply_one(root: Path, made: Planned, layer: str, sources: IndexSources) -> Outcome:
    """Apply one layer with the Store, as ``spark-build apply`` would on the Spark itself."""
    decision = made.decision(layer)
    target = made.plan.base.platform.target
    (outcome,) = apply_layers(root, [decision.layer], sources, target)
    return outcome


@pytest.mark.parametrize(("layer", "ref"), cases())
def test_text_layer_round_trip(
    planned: Planner, sources: IndexSources, tmp_path: Path, layer: str, ref: str
) -> None:
    made = planned(ref, PROFILE_OF[layer])
    decision = made.decision(layer)
    before = made.before(layer)
    files = set(decision.outcome.changes) | probed_files(decision.layer)
    lay_out(before, files, tmp_path)
    pristine = snapshot(tmp_path)

    outcome = apply_one(tmp_path, made, layer, sources)
    assert outcome.state == NEEDED
    assert_as_planned(tmp_path, made, layer, pristine)

    patched = snapshot(tmp_path)
    times = write_times(tmp_path)
    again = apply_one(tmp_path, made, layer, sources)
    assert again.state == APPLIED
    assert snapshot(tmp_path) == patched
    assert write_times(tmp_path) == times

    with Store(tmp_path) as store:
        assert store.revert([layer]) == [layer]
    assert snapshot(tmp_path) == pristine
    assert not (tmp_path / ".spark-build").exists()


def write_times(root: Path) -> dict[str, int]:
    """When each file was last written; only the lock may be touched by a run without effect."""
    paths = [p for p in root.rglob("*") if p.is_file() and p.name != "lock"]
    return {str(path): path.stat().st_mtime_ns for path in paths}


def assert_as_planned(root: Path, made: Planned, layer: str, pristine: Mapping[str, str]) -> None:
    """What was written is what the plan of the wheels says, parses, and nothing else changed."""
    changes = made.decision(layer).outcome.changes
    tree = DirTree(root)
    for path, content in changes.items():
        assert content is not None
        data = tree.read(path)
        assert data == content.read(), path
        assert data != made.before(layer).read(path), path
        ast.parse(data, path)
    others = {p: d for p, d in snapshot(root).items() if not p.startswith(".spark-build/")}
    receipt = next(r for r in receipts_of(tree) if r.layer == layer)
    assert {p for p in others if others[p] != pristine.get(p)} == {
        *changes,
        *(receipt.records or ()),
    }
    assert receipt.records
    for record in receipt.records:
        rows = [row for row in parse_record(tree.read(record) or b"") if row.path in changes]
        assert rows
        assert all(row.sha256 == others[row.path] for row in rows)
    assert {p: e.after for p, e in receipt.files.items()} == {p: others[p] for p in changes}


@pytest.mark.parametrize(("layer", "release"), TABLES["vllm"].needed(WHEEL_LAYERS))
def test_wheel_layer_keeps_record_correct(
    planned: Planner, sources: IndexSources, layer: str, release: str
) -> None:
    """By digests alone, without reading the big files: every row of RECORD is what is there."""
    made = planned(f"pypi:vllm=={release}", PROFILE_OF[layer])
    decision = made.decision(layer)
    before, after = made.before(layer), made.before(layer)
    after.update(decision.outcome.changes)
    (pin,) = decision.outcome.inputs
    members = {m.path: m.sha256 for m in sources.members(pin)}
    dist = after.distributions()[pin.distribution]
    assert dist.version == pin.version
    record = f"{dist.info_dir}/RECORD"
    rows = {row.path: row.sha256 for row in parse_record(after.read(record) or b"")}
    assert rows.keys() == members.keys() | {f"{dist.info_dir}/INSTALLER"}
    for path, digest in rows.items():
        if path != record:
            assert after.digest(path) == digest, path
    assert {p: d for p, d in rows.items() if p in members and p != record} == {
        p: d for p, d in members.items() if p != record
    }
    assert after.digest(VENDORED) == before.digest(VENDORED)
    assert_old_version_is_gone(before, after, pin.distribution)


def assert_old_version_is_gone(before: OverlayTree, after: OverlayTree, distribution: str) -> None:
    """Files of a replaced version that the new one does not have do not stay behind."""
    old = before.distributions().get(distribution)
    if old is None:
        return
    new = after.distributions()[distribution]
    kept = {row.path for row in parse_record(after.read(f"{new.info_dir}/RECORD") or b"")}
    for row in parse_record(before.read(f"{old.info_dir}/RECORD") or b""):
        if row.path not in kept:
            assert after.digest(row.path) is None, row.path


@pytest.mark.parametrize("release", TABLES["vllm"].releases)
def test_no_layer_edits_the_vendored_copy(planned: Planner, release: str) -> None:
    """FlashInfer's copy of mma.py is on no import path: patching it would prove nothing."""
    made = planned(f"pypi:vllm=={release}")
    after = OverlayTree(made.base.tree)
    after.update(made.plan.changes)
    assert after.digest(VENDORED) is not None
    assert after.digest(VENDORED) == made.base.tree.digest(VENDORED)


# ---------------------------------------------------- the full thing once, with the real big wheels


@pytest.fixture(scope="module")
def stack(planned: Planner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """vLLM 0.20.1 (the files that matter), FlashInfer and the CuTe DSL (whole), laid out by pip's
    order on a real disk; about 600 MB, taken away at the end."""
    root = tmp_path_factory.mktemp("stack")
    made = planned("pypi:vllm==0.20.1", "b12x-full")
    files = set(made.plan.changes)
    for decision in made.plan.decisions:
        files |= probed_files(decision.layer)
    wheels = wheels_of(made)
    in_part = [w for w in wheels if w.file.distribution in ("vllm", "flashinfer-cubin")]
    for wheel in wheels:
        if wheel not in in_part:
            unpack(wheel, root)
    lay_out(WheelTree(in_part), files, root)
    yield root
    shutil.rmtree(root)


def wheels_of(made: Planned) -> list[RemoteWheel]:
    """The base's wheels, in the order in which they are laid out."""
    assert isinstance(made.base.tree, WheelTree)
    return list(made.base.tree.wheels)


def unpack(wheel: RemoteWheel, root: Path) -> list[str]:
    """Lay a whole wheel out, over whatever is there, as an installer would."""
    with zipfile.ZipFile(wheel.download()) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        for name in names:
            (root / name).unlink(missing_ok=True)
        archive.extractall(root, names)
    return names


def states_on(root: Path, made: Planned, sources: IndexSources) -> dict[str, str]:
    """Every layer judged again on a real directory, with the environment that it now gives."""
    from builder.applier.receipts import env_of

    tree = DirTree(root)
    target = made.plan.base.platform.target
    steps = judge_in_order(made.selection.layers, tree, sources, target, env_of(tree))
    return {step.outcome.layer: step.outcome.state for step in steps}


def static_checks(root: Path, made: Planned) -> dict[str, Check]:
    """The static level on a real directory, by the plan that was applied to it."""
    target = VerifyTarget(
        name="dir",
        subject=subject_of(DirTree(root), "dir", env=made.plan.env),
        plan=made.plan.document,
        layers=[decision.layer for decision in made.plan.decisions],
        runner=FakeRunner(),
    )
    checks = check_static(target)
    return {check.name: check for check in checks}


def assert_all_applied(root: Path, made: Planned, sources: IndexSources) -> None:
    """No layer undid another: each is still there, and the static level agrees."""
    expected = dict.fromkeys((d.name for d in made.plan.needed), APPLIED)
    states = states_on(root, made, sources)
    assert {name: states[name] for name in expected} == expected
    found = static_checks(root, made)
    not_read = found.pop("startup hooks")
    assert (not_read.status, not_read.moot) == ("not-run", True), "of a directory it is not known"
    failed = [c for c in found.values() if c.status != "pass"]
    assert not failed, [(c.name, c.seen, c.reason) for c in failed]


def reinstall_libs_base(root: Path, made: Planned) -> list[str]:
    """What ``pip install --force-reinstall nvidia-cutlass-dsl-libs-base`` does to the files."""
    (wheel,) = [w for w in wheels_of(made) if w.file.distribution.endswith("libs-base")]
    return unpack(wheel, root)


def apply_all(root: Path, made: Planned, sources: IndexSources) -> dict[str, str]:
    """Apply the whole profile; states as they were found."""
    target = made.plan.base.platform.target
    outcomes = apply_layers(root, made.selection.layers, sources, target)
    return {outcome.layer: outcome.state for outcome in outcomes}


def test_b12x_full_on_a_real_disk(planned: Planner, sources: IndexSources, stack: Path) -> None:
    """Apply, judge, reinstall a wheel behind our back twice, repair, revert: exact bytes."""
    made = planned("pypi:vllm==0.20.1", "b12x-full")
    pristine = snapshot(stack)
    failing = {c.name for c in static_checks(stack, made).values() if c.status == "fail"}
    assert failing == {f"layer {d.name}" for d in made.plan.needed}

    assert apply_all(stack, made, sources) == made.states
    assert_files_as_planned(stack, made)
    assert_all_applied(stack, made, sources)
    applied = without_receipts(snapshot(stack))

    for _ in range(2):
        reinstall_libs_base(stack, made)
        states = states_on(stack, made, sources)
        assert states["cutlass-dsl-cu13"] == NEEDED
        assert states["cutlass-dsl-sm121a"] == NEEDED, "the reinstall brought its own mma.py"
        assert states["flashinfer-b12x"] == states["vllm-b12x-backend"] == APPLIED
        broken = static_checks(stack, made)
        assert broken["layer cutlass-dsl-cu13"].status == "fail"
        assert broken["layer cutlass-dsl-sm121a"].status == "fail"

        repaired = apply_all(stack, made, sources)
        assert [n for n, s in repaired.items() if s == NEEDED] == [
            "cutlass-dsl-cu13",
            "cutlass-dsl-sm121a",
        ]
        assert without_receipts(snapshot(stack)) == applied
        assert_all_applied(stack, made, sources)

    with Store(stack) as store:
        assert set(store.revert(None)) == {d.name for d in made.plan.needed}
    reverted = snapshot(stack)
    assert sorted(set(reverted) - set(pristine)) == [], "left behind"
    assert sorted(set(pristine) - set(reverted)) == [], "not put back"
    assert reverted == pristine


def without_receipts(files: Mapping[str, str]) -> dict[str, str]:
    """Only the packages' own files."""
    return {path: digest for path, digest in files.items() if not path.startswith(".spark-build/")}


def assert_files_as_planned(root: Path, made: Planned) -> None:
    """The real files, the big ones too, have the digests that the plan promised."""
    tree = DirTree(root)
    # the RECORD of an installer says more than that of a wheel
    records = kept_true(d.receipt for d in made.plan.needed if d.receipt is not None)
    for path, content in made.plan.changes.items():
        if path.startswith(RECEIPTS) or path in records:
            continue
        assert tree.digest(path) == (content.sha256 if content else None), path
    assert tree.digest(VENDORED) == made.base.tree.digest(VENDORED)
    mma = tree.read(MMA) or b""
    assert b"sm_121a" in mma
    assert b"if not arch == Arch.sm_120a:" not in mma
