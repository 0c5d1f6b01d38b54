"""Several processes write to one layout, and one is killed."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from builder.images.registry.layout import work_folder
from tests.unit.images.registry.test_layoutwriter import blobs_in, blobs_of, build, names

KILLED = """
import sys, os, signal
from pathlib import Path
from tests.unit.images.registry.test_layoutwriter import build
real = Path.replace
def replace(path, target):
    made = real(path, target)
    if "blobs" in str(target) and ".spark-build-" not in str(target):
        os.kill(os.getpid(), signal.SIGKILL)
    return made
Path.replace = replace
build(Path(sys.argv[1]), "2", "me/b:1")
"""


@pytest.mark.parametrize("there", ["empty", "layout"])
def test_a_killed_run_leaves_a_valid_layout_and_the_next_one_cleans_up(
    tmp_path: Path, there: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    if there == "layout":
        build(out, "1", "me/a:1")
    index = (out / "index.json").read_bytes() if there == "layout" else None
    root = Path(__file__).parents[4]
    ran = subprocess.run([sys.executable, "-c", KILLED, str(out)], cwd=root, check=False)
    assert ran.returncode == -signal.SIGKILL
    assert list(out.glob(".spark-build-*"))
    if index is not None:
        assert (out / "index.json").read_bytes() == index
        with work_folder(out):  # what another run works in is not taken away
            build(out, "3", "me/c:1")
            assert len(list(out.glob(".spark-build-*"))) == 1
    build(out, "2", "me/b:1")
    assert set(names(out)) == ({"me/a:1", "me/b:1", "me/c:1"} if index else {"me/b:1"})
    assert not list(out.glob(".spark-build-*"))


@pytest.mark.parametrize("exists", [False, True])
def test_concurrent_runs_lose_no_image(tmp_path: Path, exists: bool) -> None:
    out = tmp_path / "out"
    if exists:
        build(out, "0", "me/first:1")
    fork = multiprocessing.get_context("fork")
    runs = [fork.Process(target=build, args=(out, f"{n}", f"me/a:{n}")) for n in range(4)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert [run.exitcode for run in runs] == [0] * 4
    wanted = {f"me/a:{number}" for number in range(4)} | ({"me/first:1"} if exists else set())
    assert set(names(out)) == wanted
    for digest in names(out).values():
        assert blobs_of(out, digest) <= blobs_in(out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
