"""The table of instructions: tried on the decoder; and what a file lacks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from builder.ptx import program, supported
from builder.ptx.program import EMITTERS
from tests.documents import validated
from tests.unit.ptxworld import source

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from tests.unit.conftest import Called

TABLE = supported.table()
#: Instructions whose operand is a label or a function.
JUMPS = {"bra", "brx", "call", "ret"}
LACKING = "mov.u32 %r5, 1; vmad.s32.s32.s32 %r5, %r1, %r2, %r3;\ntex %r5, %r6; tex %r5, %r6;"


def test_each_implemented_opcode_is_in_the_table() -> None:
    known = {name.partition(".")[0] for form in TABLE for name in form.known}
    assert set(EMITTERS) - JUMPS == known


def test_each_form_is_once_in_the_table() -> None:
    names = [name for form in TABLE for name in (*form.known, *form.unknown)]
    assert len(names) > 3000
    both = {n for form in TABLE for n in form.known} & {n for form in TABLE for n in form.unknown}
    assert not both


def test_the_table_follows_from_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(program.EMITTERS, "popc")
    (form,) = (f for f in supported.table() if f.form == "{popc|clz}{.b32|.b64}")
    assert form.known == ("clz.b32", "clz.b64")
    assert form.unknown == ("popc.b32", "popc.b64")


def test_the_page_names_what_is_not_there() -> None:
    text = supported.page()
    assert "| `wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16` | no |  |\n" in text
    assert "| `{popc\\|clz}{.b32\\|.b64}` | all |  |\n" in text


def test_all_missing_instructions_of_a_file_are_listed(
    spark_build: Callable[..., Called],
) -> None:
    Path("k.ptx").write_text(source(LACKING), "utf-8")
    found = validated(
        "ptx-instructions", spark_build("ptx", "instructions", "k.ptx", "--json").json
    )
    whys = [(one["kernel"], one["text"].partition(" ")[0]) for one in found["missing"]]
    assert len(whys) == 2
    text = spark_build("ptx", "instructions", "k.ptx")
    assert text.code == 5
    assert "unknown instruction vmad.s32.s32.s32" in text.out
    assert "unknown instruction tex" in text.out
    assert text.err.startswith("error: k.ptx: 2 instructions of its kernels do not run\n")


def test_a_file_that_runs(spark_build: Callable[..., Called]) -> None:
    Path("k.ptx").write_text(source("mov.u32 %r5, %r1;"), "utf-8")
    called = spark_build("ptx", "instructions", "k.ptx")
    assert (called.code, called.out) == (0, "every instruction of 1 kernel runs\n")


def test_a_file_that_is_no_ptx(spark_build: Callable[..., Called]) -> None:
    Path("k.ptx").write_bytes(b"\xff\xfe")
    assert spark_build("ptx", "instructions", "k.ptx").code == 2
    Path("k.ptx").write_text("nothing", "utf-8")
    assert "is this PTX?" in spark_build("ptx", "instructions", "k.ptx").err


def test_the_table_is_a_document(spark_build: Callable[..., Called]) -> None:
    found = validated("ptx-instructions", spark_build("ptx", "instructions", "--json").json)
    assert len(found["forms"]) == len(TABLE)
    out = spark_build("ptx", "instructions").out
    assert "   4 of   4  {popc|clz}{.b32|.b64}\n" in out
