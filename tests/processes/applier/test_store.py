"""The record of what was applied, with appliers that are killed or run at the same time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from builder.applier.edits import ENV_PTH
from builder.applier.receipts import RECEIPTS, STATE_DIR
from builder.applier.store import Store, unfinished
from builder.applier.values import ApplyError
from builder.common.programs import APPLIER
from tests.unit.applier.test_store import (
    BIG,
    CORE,
    FIX,
    SECOND,
    SET,
    Writes,
    bundle,
    commit,
    prepare,
    read,
)
from tests.unit.fakes import (
    apply_to,
    env_op,
    make_layer,
    revert_from,
    snapshot,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


# ------------------------------------------------------------------------------------ environment


def environment_in(site: Path, **already: str) -> dict[str, str]:
    """The variables of a new Python process that uses the directory as its site-packages."""
    code = (
        "import json, os, site, sys; site.addsitedir(sys.argv[1]); "
        "print(json.dumps(dict(os.environ)))"
    )
    command = [sys.executable, "-S", "-c", code, str(site)]
    answer = subprocess.run(command, env=already, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(answer.stdout)
    return found


@pytest.mark.parametrize("value", ["marlin", 'it\'s "quoted"', "two\nlines", "{}", "$HOME", "%s"])
def test_variables_reach_a_process_that_starts_later(site: Path, value: str) -> None:
    layer = make_layer("set", env_op("BACKEND", value, reader=CORE))
    apply_to(site, layer)
    assert environment_in(site)["BACKEND"] == value
    assert environment_in(site, BACKEND="mine")["BACKEND"] == "mine"
    revert_from(site)
    assert "BACKEND" not in environment_in(site)


def test_reverting_one_layer_keeps_the_variables_of_the_others(site: Path) -> None:
    other = make_layer("other", env_op("VLLM_USE_FLASHINFER_MOE_FP4", "0"))
    apply_to(site, SET, other)
    revert_from(site, "set")
    found = environment_in(site)
    assert "VLLM_NVFP4_GEMM_BACKEND" not in found
    assert found["VLLM_USE_FLASHINFER_MOE_FP4"] == "0"
    revert_from(site)
    assert not (site / ENV_PTH).exists()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(action: Callable[[], object], number: int) -> int:
    """Run an action in a child process that is killed at a write; gives its wait status."""
    pid = os.fork()
    if not pid:
        with pytest.MonkeyPatch.context() as patch:
            Writes(number, kill).watch(patch)
            try:
                action()
                os._exit(0)
            finally:
                os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return status


def test_a_kill_at_any_step_is_rolled_back_by_the_next_command(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(site)
    before = snapshot(site)
    number, rolled_back = 1, 0
    while os.WIFSIGNALED(in_child(lambda: commit(site, BIG), number)):
        with Store(site):
            pass
        rolled_back += "rolling back" in capsys.readouterr().err
        state = snapshot(site)
        if f"{RECEIPTS}/big.json" in state:  # the journal was gone: it was complete
            revert_from(site)
            state = snapshot(site)
        assert state == before, f"killed at write {number}"
        number += 1
    assert rolled_back > 10


def test_a_revert_that_was_killed_can_be_run_again(site: Path) -> None:
    prepare(site)
    before = snapshot(site)
    number = 1
    while True:
        apply_to(site, BIG, SECOND)
        status = in_child(lambda: revert_from(site), number)
        if unfinished(site) == "revert":  # before, it said "drift" here
            with pytest.raises(ApplyError, match="a revert was interrupted"):
                apply_to(site, BIG, SECOND)
        else:
            apply_to(site, BIG, SECOND)
        revert_from(site)
        assert unfinished(site) == ""
        assert snapshot(site) == before, f"killed at write {number}"
        if not os.WIFSIGNALED(status):
            break
        number += 1
    assert number > 5


def applier(*words: str) -> subprocess.CompletedProcess[str]:
    """The applier in another process."""
    command = [sys.executable, "-B", str(APPLIER.file()), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_second_process_is_told_to_wait(site: Path) -> None:
    layers = bundle(site, FIX)
    with Store(site):
        refused = applier("apply", "--root", str(site), "--layers", layers)
    assert refused.returncode == 2
    assert "another spark-build is writing to it" in refused.stderr
    assert "b12x" not in read(site, CORE)
    assert applier("apply", "--root", str(site), "--layers", layers).returncode == 0
    assert "b12x" in read(site, CORE)


CONTEND = """
import sys
from pathlib import Path
from builder.applier.values import ApplyError
from builder.applier.store import Store
root, inside = Path(sys.argv[1]), Path(sys.argv[1]) / "inside"
for _ in range(200):
    try:
        with Store(root):
            inside.touch(exist_ok=False)  # somebody else in here would have made it
            inside.unlink()
    except ApplyError as error:
        assert "another spark-build is writing" in str(error), error
"""


def test_two_processes_never_hold_the_lock_at_once(site: Path) -> None:
    command = [sys.executable, "-c", CONTEND, str(site)]
    running = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert not (site / STATE_DIR).exists()


def test_a_mod_is_applied_listed_and_reverted(site: Path) -> None:
    before, layers = snapshot(site), bundle(site, FIX, SET)
    applied = applier("apply", "--root", str(site), "--layers", layers)
    assert applied.stdout == ""
    assert "needed         fix: 2 files to change" in applied.stderr
    assert "VLLM_NVFP4_GEMM_BACKEND=marlin" in applied.stderr
    status = applier("status", "--root", str(site))
    assert status.stdout == "fix\tonly\t2 files\nset\tonly\t0 files\n"
    assert applier("revert", "--root", str(site), "--layers", layers).returncode == 0
    assert snapshot(site) == before
