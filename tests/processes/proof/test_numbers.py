"""Launches of different kernels run in processes of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.ptx.runs import run_calls
from tests.unit.proof.test_numbers import write_launch

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_what_processes_found_comes_in_the_order_of_the_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # without a compiler: the executor without its core
    kernels = ("bar.sync 0;", "frobnicate;", "")
    calls = [(str(tmp_path / str(number)),) for number in range(len(kernels))]
    for (folder,), sync in zip(calls, kernels, strict=True):
        write_launch(tmp_path / folder, sync=sync)
    right, unread, racy = run_calls(calls, 2)
    assert [(run.wrong, run.races) for run in right.ran[0].runs] == [(0, ())] * 3
    assert (unread.error, unread.ran) == ("PTX line 12: unknown instruction frobnicate", ())
    assert racy.ran[0].runs[0].races
