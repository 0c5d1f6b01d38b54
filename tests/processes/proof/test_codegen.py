"""Checks that run in children."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.unit.proof.test_codegen import probe

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_results_of_children_are_separate_and_a_crash_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def build(ask: dict[str, Any]) -> None:
        if ask["n"] == 1:
            raise SystemExit(3)
        raise probe.Compiled

    monkeypatch.setitem(probe.KINDS, "mma-gate", build)
    asks = [{"kind": "mma-gate", "n": n} for n in range(3)]
    first, second, third = probe.compile_all(asks, 2, tmp_path)
    assert first["compiled"]
    assert third["compiled"]
    assert [reply["request"]["n"] for reply in (first, second, third)] == [0, 1, 2]
    assert second["error"]["type"] == "Crashed"


def test_the_slow_ones_start_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def build(ask: dict[str, Any]) -> None:
        with (tmp_path / "order").open("a") as log:
            log.write(f"{ask['n']} ")
        raise probe.Compiled

    for kind in ("mma-gate", "moe-b12x"):
        monkeypatch.setitem(probe.KINDS, kind, build)
    kinds = ("mma-gate", "moe-b12x", "mma-gate", "moe-b12x")
    replies = probe.compile_all(
        [{"kind": kind, "n": n} for n, kind in enumerate(kinds)], 1, tmp_path
    )
    assert (tmp_path / "order").read_text() == "1 3 0 2 "
    assert [reply["request"]["n"] for reply in replies] == [0, 1, 2, 3]
