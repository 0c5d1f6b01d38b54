"""The page of preflight: it says what the answer says, and escapes what others wrote."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

import pytest

from builder.cli import preflight as command
from builder.errors import UsageError
from builder.proof.wholemodel import Refusal
from builder.serving.preflight import Cure, ModelMatrix, in_short, room
from builder.serving.preflightfile import preflight_page
from tests.unit.serving.test_preflight import DEVICE, SIZED, answer, document, layer, refused

if TYPE_CHECKING:
    from pathlib import Path

MADE = datetime.datetime(2026, 11, 24, tzinfo=datetime.UTC)
ROWS = (
    layer(pattern="model.layers.*.qkv_proj", kernels=("OwnKernel",), bytes=1 << 30, count=7),
    layer(pattern="visual.proj", kernels=("Other",), part="tower", bytes=1),
    layer(pattern="model.norm", bytes=1, count=9),
)


def test_a_model_that_starts() -> None:
    memory = room(answer(layers=ROWS, parameter_bytes=1 << 30, memory=SIZED), DEVICE)
    page = preflight_page(
        document(starts="yes", refusal=None, layers=ROWS, memory=memory, simulated=("a part",)),
        MADE,
    )
    assert "✓</b> starts" in page
    assert "✕" not in page
    for text in ("OwnKernel", "7 × <code>", "(tower)", "weights 1.00 GiB", "a part", "2026-11-24"):
        assert text in page
    assert "and 9 layers without a choice of kernel" in page
    assert "<script" not in page


def test_a_refusal_and_its_cure() -> None:
    cures = (Cure(change="without --x", flags=()),)
    page = preflight_page(document(cures=cures), MADE)
    assert "DOES NOT START" in page
    assert '<p class="sentence">no kernel</p>' in page
    assert "<code>without --x</code>" in page


def test_what_was_not_run_is_no_refusal() -> None:
    page = preflight_page(document(starts="not run", reason="no torch"), MADE)
    assert "○</b> not run" in page
    assert "no torch" in page
    assert "What the release says" not in page


def test_memory_that_is_too_small() -> None:
    memory = room(answer(parameter_bytes=10**12), DEVICE)
    page = preflight_page(document(starts="yes", refusal=None, memory=memory), MADE)
    assert "It does not fit" in page
    assert "Longest context" not in page


def test_releases() -> None:
    rows = (
        in_short("vLLM 0.17.0", document()),
        in_short("vLLM 0.33.0", document(starts="yes", refusal=None, layers=ROWS)),
    )
    page = preflight_page(ModelMatrix(model="./m", flags=(), layers=("own",), rows=rows), MADE)
    assert "starts on 1 of 2" in page
    assert "OwnKernel" in page
    assert '<td colspan="4">no kernel</td>' in page


def test_what_others_wrote_is_text() -> None:
    evil = "<script>alert(1)</script>\x1b[2J"
    refusal = Refusal(type=evil, message=evil, where=evil)
    page = preflight_page(document(model=evil, refusal=refusal, warnings=(evil,)), MADE)
    assert "<script" not in page
    assert "\x1b" not in page
    assert refused(evil).message == evil


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write"):
        command._write_page(document(), tmp_path / "file" / "page.html")
    command._write_page(document(), tmp_path / "page.html")
    assert "DOES NOT START" in (tmp_path / "page.html").read_text()
