"""What belongs to a run that is no more is found by the identity of its process, and nothing else.

Real kills at real commands are in ``tests/registry/test_litter.py``.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.common import leftovers
from builder.common.leftovers import Owner

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
#: Says where it is, and does what a test says.
PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from builder.common import leftovers, shutdown
with shutdown.own_temporary_folder():
    leftovers.use(Path(sys.argv[1]))
    with leftovers.making(Path(sys.argv[1], "final")) as partial:
        partial.mkdir()
        (partial / "file").write_text("half")
        leftovers.note_upload("host/name", "http://host/upload?a=1&b=2")
        if len(sys.argv) > 2:
            started = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL)
            print(started.pid, flush=True)
        print(os.environ["TMPDIR"], flush=True)
        sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_notes() -> Iterator[None]:
    leftovers.close()
    yield
    leftovers.close()


@pytest.fixture
def here() -> Owner:
    found = leftovers.identity()
    assert found is not None
    return found


def start(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    (tmp_path / "tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "cache"), *words],
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def sweep(tmp_path: Path) -> list[str]:
    """Look for leftovers as another run does; what is there afterwards."""
    leftovers.close()
    leftovers.use(tmp_path / "cache")
    leftovers.sweep_temporary(tmp_path / "tmp")
    leftovers.close()
    return sorted(
        path.name.partition(".")[0] if path.parent.name == "cache" else path.name.partition("-")[0]
        for path in (*tmp_path.glob("cache/*.part"), *tmp_path.glob("tmp/*"),
                     *tmp_path.glob("cache/locks/runs/*/*"))
    )  # fmt: skip


def runs(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return False


# ------------------------------------------------------------------------------------- whose it is


def test_an_identity_is_found_in_a_name(here: Owner) -> None:
    assert here.pid == os.getpid()
    assert Owner.parse(f"spark-build-run-{here}-01ab23cd") == here
    assert Owner.parse(f"index.json.{here}.7.part") == here
    for name in ("spark-build-run-123-01ab23cd", "final.123.part", "", "-----"):
        assert Owner.parse(name) is None, "an older one, or none of ours"


def old(folder: Path, seconds: float = 3600.0) -> Path:
    folder.mkdir(exist_ok=True)
    then = time.time() - seconds
    os.utime(folder, (then, then))
    return folder


def test_processes_that_have_ended(here: Owner, tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    folder = old(tmp_path / "a")
    assert not here.has_ended(folder)
    assert dataclasses.replace(here, pid=ended.pid).has_ended(folder)
    again = dataclasses.replace(here, start=here.start - 1)
    assert again.has_ended(folder), "its number has another process now"
    for impossible in (0, 2**40):
        other = dataclasses.replace(here, pid=impossible)
        assert other.has_ended(folder) is (impossible > 0)


def test_a_process_of_another_container_is_not_mistaken_for_a_local_one(
    here: Owner, tmp_path: Path
) -> None:
    """The same kernel knows whether somebody holds the folder; by its number nothing is said."""
    other = dataclasses.replace(here, namespace="1", pid=2**22 + 1)
    folder = old(tmp_path / "a")
    handle = leftovers.hold(folder)
    assert handle is not None
    assert not other.has_ended(folder)
    os.close(handle)
    assert other.has_ended(folder)
    old(folder, 0.0)
    assert not other.has_ended(folder), "it may not have got to holding it"
    assert not other.has_ended(tmp_path / "none")


def test_a_process_from_before_a_reboot_has_ended(here: Owner, tmp_path: Path) -> None:
    earlier = dataclasses.replace(here, boot="00000000")
    folder = old(tmp_path / "a", 10.0 + float(Path("/proc/uptime").read_text().split()[0]))
    assert earlier.has_ended(folder)
    handle = leftovers.hold(folder)
    assert handle is not None
    assert not earlier.has_ended(folder), "a copy of this machine, on a shared disk"
    os.close(handle)
    assert not earlier.has_ended(old(folder, 0.0)), "then it is no machine that was started again"


def test_processes_of_another_machine_are_unknown(here: Owner, tmp_path: Path) -> None:
    elsewhere = dataclasses.replace(here, boot="00000000", machine="00000000")
    assert not elsewhere.has_ended(old(tmp_path / "a", 1e9))


def test_a_system_without_boot_id(
    here: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "identity", lambda: None)
    assert not dataclasses.replace(here, start=1).has_ended(old(tmp_path / "a"))
    assert leftovers.temporary_name().startswith(f"spark-build-run-{os.getpid()}-")
    leftovers.use(tmp_path / "cache")
    with leftovers.making(tmp_path / "x") as partial:
        partial.write_text("1")
    assert not partial.exists()
    assert not (tmp_path / "cache").exists()


# ------------------------------------------------------------------------------------ what becomes


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    process = start(tmp_path)
    line_of(process)
    there = ["final", "made", "spark", "upload"]
    assert sweep(tmp_path) == there, "it is alive"
    process.kill()
    process.communicate()
    assert sweep(tmp_path) == ["upload"], "that needs its registry"
    leftovers.use(tmp_path / "cache")
    assert not list(leftovers.abandoned_uploads("host/other"))
    assert list(leftovers.abandoned_uploads("host/name")) == ["http://host/upload?a=1&b=2"]
    assert not list((tmp_path / "cache/locks/runs").iterdir())


def test_a_finished_run_leaves_only_the_upload(tmp_path: Path) -> None:
    process = start(tmp_path)
    process.communicate("")
    assert process.returncode == 0
    assert sweep(tmp_path) == ["upload"]


def test_a_child_of_a_killed_run_keeps_its_files(tmp_path: Path) -> None:
    process = start(tmp_path, "child")
    child = int(line_of(process))
    line_of(process)
    process.kill()
    process.wait()
    try:
        assert sweep(tmp_path) == ["final", "made", "spark", "upload"]
    finally:
        os.kill(child, 9)
    while runs(child):
        time.sleep(0.01)
    assert sweep(tmp_path) == ["upload"]


def test_a_note_removes_only_files_with_its_name(here: Owner, tmp_path: Path) -> None:
    """Whoever can write into the cache cannot have other files removed."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    owner = dataclasses.replace(here, pid=ended.pid)
    notes = tmp_path / "cache/locks/runs" / str(owner)
    notes.mkdir(parents=True)
    (tmp_path / str(owner)).mkdir()
    precious = tmp_path / str(owner) / "precious"
    precious.write_text("1")
    (notes / "made-1").symlink_to(precious)
    partial = tmp_path / f"x.{owner}.part"
    partial.symlink_to(precious)
    (notes / "made-2").symlink_to(partial)
    sweep(tmp_path)
    assert precious.exists()
    assert not partial.is_symlink()


def test_old_notes_of_uploads_are_removed(tmp_path: Path) -> None:
    process = start(tmp_path)
    process.communicate("")
    (note,) = (tmp_path / "cache/locks/runs").glob("*/*")
    week = time.time() - 8 * 24 * 3600
    os.utime(note, (week, week), follow_symlinks=False)
    assert sweep(tmp_path) == []


def test_nothing_below_a_mount_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a b"
    (folder / "below").mkdir(parents=True)
    text = f"36 35 98:0 / {folder}/below rw - tmpfs x rw\n".replace("a b", "a\\040b")
    info = tmp_path / "mountinfo"
    info.write_text(text)
    read = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda self: read(info if self.name == "mountinfo" else self)
    )
    with leftovers.noted(folder):
        pass
    assert folder.exists()
    info.write_text("")
    with leftovers.noted(folder):
        pass
    assert not folder.exists()


def test_a_read_only_cache_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    leftovers.use(tmp_path / "cache")
    with leftovers.making(tmp_path / "x") as partial:
        partial.write_text("1")
        partial.rename(tmp_path / "x")
    assert (tmp_path / "x").read_text() == "1"


def test_what_another_run_removed_meanwhile_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "here.bin").write_bytes(b"x")
    leftovers.keep_latest([tmp_path / "gone.bin", tmp_path / "here.bin"], most=0)
    assert not list(tmp_path.iterdir())


def test_the_latest_that_have_so_many_bytes_are_kept(tmp_path: Path) -> None:
    """A damaged order would remove what was used last, or leave more than the limit."""
    for number in range(5):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(b"x" * 10)
        os.utime(path, (number, number))
    leftovers.keep_latest(tmp_path.glob("*.bin"), most_bytes=29)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3.bin", "4.bin"]
    leftovers.keep_latest(tmp_path.glob("*.bin"), most=1, most_bytes=1000)
    assert [path.name for path in tmp_path.iterdir()] == ["4.bin"]
    leftovers.keep_latest(tmp_path.glob("*.bin"), most=0, unused_for=1e12)
    assert [path.name for path in tmp_path.iterdir()] == ["4.bin"]
