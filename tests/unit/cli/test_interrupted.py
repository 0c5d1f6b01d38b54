"""An apply or a revert that was killed: the next command says so, and does not point at a layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.applier.receipts import RECEIPTS, STATE_DIR
from builder.applier.store import Store
from builder.applier.values import sha256_hex
from tests.unit.fakes import vllm_files, write_tree

if TYPE_CHECKING:
    from tests.unit.caller import Call

SITE = Path("site")


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture
def applied(call: Call) -> dict[str, bytes]:
    """A directory with a layer, and its files from before."""
    write_tree(SITE, vllm_files())
    before = {str(path): path.read_bytes() for path in SITE.rglob("*") if path.is_file()}
    assert call("apply", "site", "-l", "fix").code == 0
    return before


def is_as_before(before: dict[str, bytes]) -> bool:
    return before == {str(path): path.read_bytes() for path in SITE.rglob("*") if path.is_file()}


def kill_the_revert(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the files, before RECORD and the receipts."""

    def killed(*_words: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Store, "_put_records_back", killed)
        with pytest.raises(Killed):
            call("revert", "site")


@pytest.mark.parametrize(
    "again", [("apply", "site", "-l", "fix"), ("plan", "-l", "fix", "-b", "dir:site")]
)
def test_after_a_revert_that_was_killed(
    call: Call, applied: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, again: tuple[str, ...]
) -> None:
    kill_the_revert(call, monkeypatch)
    done = call(*again)
    assert done.code == 4
    assert "a revert was interrupted, or still runs" in done.err
    assert "revert " in done.err
    assert "drift" not in done.out + done.err
    assert call("revert", "site").code == 0
    assert is_as_before(applied)


def test_a_revert_that_was_killed_at_its_very_end(
    call: Call, applied: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No receipt is left, and the variables of the layers are."""
    kill_the_revert(call, monkeypatch)
    for receipt in (SITE / RECEIPTS).iterdir():
        receipt.unlink()
    (SITE / "vllm-0.20.1.dist-info" / "RECORD").write_bytes(
        applied["site/vllm-0.20.1.dist-info/RECORD"]
    )
    assert call("revert", "site").code == 0
    assert is_as_before(applied)


def test_an_apply_that_was_killed_is_rolled_back_by_the_next(
    call: Call, applied: dict[str, bytes]
) -> None:
    """A file was moved to the backup, and nothing was in its place."""
    assert call("revert", "site").code == 0
    core = SITE / "vllm" / "core.py"
    data = core.read_bytes()
    state = SITE / STATE_DIR
    (state / "backup").mkdir(parents=True)
    core.rename(state / "backup" / sha256_hex(data))
    entry = {"path": "vllm/core.py", "backup": sha256_hex(data), "made": None, "moves": True}
    (state / "journal.json").write_text(json.dumps([entry]))
    done = call("plan", "-l", "fix", "-b", "dir:site")
    assert done.code == 4
    assert "an apply was interrupted" in done.err
    done = call("apply", "site", "-l", "fix", "--dry-run")
    assert (done.code, core.exists()) == (4, False)
    done = call("apply", "site", "-l", "fix")
    assert done.code == 0, done.err
    assert "rolling back a change that was interrupted" in done.err
    assert call("revert", "site").code == 0
    assert is_as_before(applied)
