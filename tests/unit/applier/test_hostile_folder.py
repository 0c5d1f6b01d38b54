"""A folder that somebody else made: odd files, links out of it, changes left half done."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from builder.applier.receipts import RECEIPTS, STATE_DIR, receipts_of
from builder.applier.store import Store, unfinished
from builder.applier.trees import DirTree
from builder.applier.values import ApplyError
from tests.unit.applier.test_files import ODD
from tests.unit.applier.test_store import BIG, CORE, FIX, SECOND, applier_here, bundle, prepare
from tests.unit.fakes import BACKEND, apply_to, make_layer, replace_op, revert_from, snapshot

VLLM_RECORD = "vllm-0.20.1.dist-info/RECORD"

#: Files of a directory that any program may have put there.
PLACES = [
    CORE,
    VLLM_RECORD,
    f"{RECEIPTS}/fix.json",
    f"{STATE_DIR}/lock",
    f"{STATE_DIR}/journal.json",
    f"{STATE_DIR}/reverting.json",
]


def put(site: Path, place: str, kind: str) -> None:
    """Put something odd in the place of a file."""
    path = site / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    ODD[kind][0](path)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", ["apply", "revert", "status"])
def test_an_odd_file_ends_every_command_with_one_line(
    site: Path, place: str, kind: str, command: str
) -> None:
    layers = bundle(site, FIX)
    put(site, place, kind)
    answer = applier_here(command, "--root", str(site), "--layers", layers)
    assert "Traceback" not in answer.stderr
    assert answer.returncode in (0, 2, 4)
    if answer.returncode:
        (line,) = (line for line in answer.stderr.splitlines() if line.startswith("error: "))
        assert "internal" not in line


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("which", [CORE, VLLM_RECORD])
def test_an_odd_backup_ends_a_revert_before_anything_is_written(
    site: Path, kind: str, which: str
) -> None:
    apply_to(site, FIX)
    (receipt,) = receipts_of(DirTree(site))
    records = receipt.records or {}
    put(site, f"{STATE_DIR}/backup/{(records.get(which) or receipt.files[which]).before}", kind)
    applied = snapshot_of_files(site)
    with pytest.raises(ApplyError, match="backup"):
        revert_from(site)
    assert snapshot_of_files(site) == applied


def snapshot_of_files(site: Path) -> dict[str, bytes]:
    """The regular files outside of spark-build's folder."""
    return {
        str(path): path.read_bytes()
        for path in sorted(site.rglob("*"))
        if path.is_file() and STATE_DIR not in path.parts
    }


# ------------------------------------------------------------------------------ links that lead out


def lead_out(site: Path, folder: str) -> Path:
    """Move a folder elsewhere and leave a link to it."""
    outside = site.parent / "outside"
    if (site / folder).exists():
        shutil.move(site / folder, outside)
    else:
        outside.mkdir()
    (site / folder).symlink_to(outside)
    return outside


def test_apply_does_not_write_through_a_link_out_of_the_folder(site: Path) -> None:
    outside = lead_out(site, "vllm")
    before = snapshot(outside)
    with pytest.raises(ApplyError, match=r"/vllm leads out of .*nothing was changed"):
        apply_to(site, FIX)
    assert snapshot(outside) == before
    assert not (site / STATE_DIR).exists()


def test_revert_does_not_write_through_a_link_out_of_the_folder(site: Path) -> None:
    apply_to(site, FIX)
    outside = lead_out(site, "vllm")
    before = snapshot(outside)
    with pytest.raises(ApplyError, match=r"leads out of .*nothing was changed"):
        revert_from(site)
    assert snapshot(outside) == before


def test_a_link_within_the_folder_is_followed(site: Path) -> None:
    """An installer may share folders between two names."""
    shutil.move(site / "vllm", site / "real")
    (site / "vllm").symlink_to("real")
    before = snapshot(site / "real")
    apply_to(site, FIX)
    assert "b12x" in (site / "real" / "core.py").read_text()
    revert_from(site)
    assert snapshot(site / "real") == before


@pytest.mark.parametrize("name", ["", "/backup", "/stage", "/receipts"])
def test_a_folder_of_ours_that_is_a_link_is_refused(site: Path, name: str) -> None:
    """Originals would move, or files be removed, where it leads."""
    if name:
        (site / STATE_DIR).mkdir()
    outside = lead_out(site, f"{STATE_DIR}{name}")
    (outside / "mine").write_text("mine")
    core = (site / CORE).read_bytes()
    with pytest.raises(ApplyError, match="is not a folder of spark-build's"):
        apply_to(site, FIX)
    assert (site / CORE).read_bytes() == core
    assert (outside / "mine").read_text() == "mine"


def test_a_journal_does_not_lead_out_through_a_link(site: Path) -> None:
    outside = lead_out(site, "vllm")
    (site / STATE_DIR).mkdir()
    entries = [{"path": "vllm/sub/x.py", "backup": None, "moves": False, "made": "vllm/sub"}]
    (site / STATE_DIR / "journal.json").write_text(json.dumps(entries))
    (outside / "sub").mkdir()
    (outside / "sub" / "mine").write_text("mine")
    with pytest.raises(ApplyError, match="leads out of"):
        revert_from(site)
    assert (outside / "sub" / "mine").read_text() == "mine"


@pytest.mark.parametrize("name", ["journal.json.part", "record.part", "env.pth.part", "lock"])
def test_a_note_is_not_written_through_a_link(site: Path, name: str) -> None:
    victim = site.parent / "victim"
    victim.write_text("mine")
    (site / STATE_DIR).mkdir()
    (site / STATE_DIR / name).symlink_to(victim)
    if name == "lock":
        with pytest.raises(ApplyError, match="cannot write"):
            apply_to(site, BIG)
    else:
        prepare(site)
        apply_to(site, BIG)
        revert_from(site)
    assert victim.read_text() == "mine"


# ---------------------------------------------------------------------------------- damaged backups


@pytest.mark.parametrize("damage", [b"", b"something else", None])
def test_a_revert_with_a_damaged_backup_of_record_is_refused(
    site: Path, damage: bytes | None
) -> None:
    """It said "reverted" and left the sha256 of the patched files in RECORD."""
    before = snapshot_of_files(site)
    apply_to(site, FIX)
    (receipt,) = receipts_of(DirTree(site))
    assert receipt.records
    kept = site / STATE_DIR / "backup" / str(receipt.records[VLLM_RECORD].before)
    kept.unlink() if damage is None else kept.write_bytes(damage)
    applied = snapshot(site)
    with pytest.raises(ApplyError, match=r"the original of .*RECORD is missing or damaged") as got:
        revert_from(site)
    assert (
        "pip install --force-reinstall --no-deps vllm==0.20.1, then revert again" in got.value.hint
    )
    assert snapshot(site) == applied
    assert revert_from(site, force=True) == ["fix"]  # its rows are computed
    assert snapshot_of_files(site) == before


def test_after_a_reinstallation_no_backup_of_record_is_needed(site: Path) -> None:
    before = snapshot(site)
    originals = {path: (site / path).read_bytes() for path in (CORE, VLLM_RECORD)}
    apply_to(site, FIX)
    for kept in (site / STATE_DIR / "backup").iterdir():
        kept.write_bytes(b"")
    for path, data in originals.items():
        (site / path).write_bytes(data)
    (site / VLLM_RECORD).write_bytes(originals[VLLM_RECORD] + b"vllm/more.txt,,\n")
    revert_from(site)
    (site / VLLM_RECORD).write_bytes(originals[VLLM_RECORD])
    assert snapshot(site).keys() == before.keys()


def test_a_damaged_backup_is_not_taken_for_the_original(site: Path) -> None:
    """Its name is the sha256 of the file: a second apply kept no other copy."""
    apply_to(site, FIX)
    (receipt,) = receipts_of(DirTree(site))
    name = str(receipt.files[CORE].before)
    revert_from(site)
    before = snapshot(site)
    (site / STATE_DIR / "backup").mkdir(parents=True)
    (site / STATE_DIR / "backup" / name).write_bytes(b"")
    apply_to(site, FIX)
    revert_from(site)
    assert snapshot(site) == before


def test_a_rollback_with_a_damaged_backup_is_refused_before_anything_is_written(
    site: Path,
) -> None:
    apply_to(site, FIX)
    (receipt,) = receipts_of(DirTree(site))
    entry = receipt.files[CORE]
    (site / STATE_DIR / "backup" / str(entry.before)).write_bytes(b"")
    journal = [{"path": CORE, "backup": entry.before, "moves": True, "made": None}]
    (site / STATE_DIR / "journal.json").write_text(json.dumps(journal))
    applied = snapshot(site)
    with pytest.raises(ApplyError, match=r"the original of vllm/core\.py is missing or damaged"):
        revert_from(site)
    assert snapshot(site) == applied


# ------------------------------------------------------------------------- a revert that was killed


def half_revert(site: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Revert, and end at a write."""

    class Killed(BaseException):
        pass

    count = iter(range(number))
    real = os.replace

    def replace(*words: object, **more: object) -> None:
        if next(count, None) is None:
            raise Killed
        real(*words, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        with pytest.raises(Killed):
            revert_from(site)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_apply_after_a_revert_that_was_killed_names_the_revert(
    site: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It said "drift", and pointed at the layer."""
    prepare(site)
    before = snapshot(site)
    apply_to(site, BIG, SECOND)
    half_revert(site, monkeypatch, number)
    assert unfinished(site) == "revert"
    half = snapshot(site)
    with pytest.raises(ApplyError, match="a revert was interrupted") as caught:
        apply_to(site, BIG, SECOND)
    assert caught.value.hint == "run revert again, then apply"
    assert snapshot(site) == half
    revert_from(site, "second")  # and what was interrupted
    assert snapshot(site) == before
    assert unfinished(site) == ""


def test_a_half_reverted_layer_without_a_note_is_named_too(site: Path) -> None:
    """As another version left it, or as the installation of one of two packages again does."""
    layer = make_layer("two", BACKEND, replace_op("'x'", "'y'", file="vllm/other.py"))
    (site / "vllm" / "other.py").write_text("A = 'x'\n")
    apply_to(site, layer)
    (site / CORE).write_text((site / CORE).read_text().replace("'b12x'", "'cutlass'"))
    with pytest.raises(ApplyError, match="layer two: drift: some files of two are as before it"):
        apply_to(site, layer)


def test_an_interrupted_apply_is_known(site: Path) -> None:
    assert unfinished(site) == ""
    (site / STATE_DIR).mkdir()
    (site / STATE_DIR / "journal.json").write_text("[]")
    assert unfinished(site) == "apply"
    with Store(site):
        assert unfinished(site) == ""
