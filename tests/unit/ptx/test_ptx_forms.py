"""Forms of instructions against a GPU, bit by bit.

``golden/ptx_h100_forms.json`` was recorded on an NVIDIA H100 (driver 580): the words that 128
threads were given (special values of float32, float64 and halves, small integers, any bits), and by
body a digest of what the threads left in %r5 to %r8.  ``golden/ptx_h100_registers.json`` has the
same of the kernels of `benchmarks.hopper.forms`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.hopper.forms import in_executor
from builder.ptx.machine import E2M1, E2M3, E3M2
from tests.unit.ptxworld import run

GOLDEN = Path(__file__).parents[1] / "golden"
RECORDED = json.loads((GOLDEN / "ptx_h100_forms.json").read_text("utf-8"))
REGISTERS = json.loads((GOLDEN / "ptx_h100_registers.json").read_text("utf-8"))
WORDS = np.frombuffer(bytes.fromhex(RECORDED["given"]), np.uint32).reshape(-1, 4)
#: Operands of 64 and of 16 bits, and nothing in the words that are left.
BEGIN = (
    "mov.b64 %rd5, {%r1, %r2}; mov.b64 %rd6, {%r3, %r4}; mov.b64 %rd7, {%r2, %r3};"
    "mov.b32 {%rs1, %rs3}, %r1; mov.b32 {%rs2, %rs4}, %r2;"
    "mov.b32 %r5, 0; mov.b32 %r6, 0; mov.b32 %r7, 0; mov.b32 %r8, 0; "
)
OPCODES = sorted({body.partition(".")[0] for body in RECORDED["left"]})


def left(body: str) -> str:
    """A digest of what a body leaves."""
    out = run(BEGIN + body, WORDS, threads=len(WORDS)).out
    return hashlib.sha256(np.ascontiguousarray(out).tobytes()).hexdigest()[:12]


@pytest.mark.parametrize("opcode", OPCODES)
def test_forms_leave_the_bits_of_the_device(opcode: str) -> None:
    bodies = [body for body in RECORDED["left"] if body.partition(".")[0] == opcode]
    assert [body for body in bodies if left(body) != RECORDED["left"][body]] == []


def test_another_result_is_seen() -> None:
    body = next(body for body in RECORDED["left"] if body.startswith("popc.b32"))
    assert left(body.replace("popc", "clz")) != RECORDED["left"][body]


@pytest.mark.parametrize("opcode", sorted({body.partition(".")[0] for body in REGISTERS["left"]}))
def test_forms_on_registers_leave_the_bits_of_the_device(opcode: str) -> None:
    words = np.frombuffer(bytes.fromhex(REGISTERS["given"]), np.uint32).reshape(-1, 4)
    bodies = {b: d for b, d in REGISTERS["left"].items() if b.partition(".")[0] == opcode}
    assert bodies
    for body, digest in bodies.items():
        out = bytes.fromhex(in_executor(body, words.copy()))
        assert hashlib.sha256(out).hexdigest()[:12] == digest, body


# ------------------------------------------------- conversions that an H100 has not: of 4 to 8 bits


def bits_of(values: Any) -> Any:
    """Two words a thread, of float32 values."""
    return np.asarray(values, np.float32).reshape(-1, 2).view(np.uint32)


@pytest.mark.parametrize(
    ("name", "table"), [("e2m3", E2M3), ("e3m2", E3M2), ("e2m1", E2M1)], ids=str
)
def test_small_floats_are_converted_to_the_nearest(name: str, table: Any) -> None:
    """Each code, the ties between two, which go to the even one, and beyond the largest."""
    half = len(table) // 2
    sizes = table[:half].astype(np.float32)
    middles = (sizes[1:] + sizes[:-1]) / 2
    values = np.concatenate([sizes, -sizes, middles, [1e9, np.inf, -np.inf, np.nan]])
    codes = [*range(2 * half), *(n + n % 2 for n in range(half - 1)), half - 1, half - 1]
    codes += [2 * half - 1, half - 1]
    padded = np.concatenate([values, np.zeros(len(values) % 2, np.float32)])
    threads = len(padded) // 2
    convert = f"cvt.rn.satfinite.{name}x2.f32 %rs1, %f2, %f1;"
    body = f"mov.b32 %f1, %r1; mov.b32 %f2, %r2; {convert} cvt.u32.u16 %r5, %rs1;"
    out = run(body, bits_of(padded), threads=threads).out[:, 0]
    width = 4 if name == "e2m1" else 8
    found = np.stack([out & (1 << width) - 1, out >> width], 1).reshape(-1)[: len(codes)]
    assert found.tolist() == codes
    relu = run(body.replace("satfinite.", "satfinite.relu."), bits_of(padded), threads=threads)
    low = relu.out[:, 0] & (1 << width) - 1
    assert low.tolist() == [0 if code >= half else code for code in [*codes, 0][: len(padded)]][::2]


def test_powers_of_two_as_bytes() -> None:
    """UE8M0: towards zero and up, of sizes; infinity is 255, or 254 where only finite ones are."""
    values = [0.0, 2.0**-127, 1.0, 1.5, -2.0, 2.0**127, 3e38, np.inf, np.nan, 2.0**-140]
    wanted = {
        "rz": [0, 0, 127, 127, 128, 254, 254, 255, 255, 0],
        "rp": [0, 0, 127, 128, 128, 254, 255, 255, 255, 0],
        "rz.satfinite": [0, 0, 127, 127, 128, 254, 254, 254, 255, 0],
        "rp.satfinite": [0, 0, 127, 128, 128, 254, 254, 254, 255, 0],
    }
    for mode, codes in wanted.items():
        body = f"mov.b32 %f1, %r1; mov.b32 %f2, %r2; cvt.{mode}.ue8m0x2.f32 %rs1, %f2, %f1;"
        out = run(body + "cvt.u32.u16 %r5, %rs1;", bits_of(values), threads=5).out[:, 0]
        assert np.stack([out & 255, out >> 8], 1).reshape(-1).tolist() == codes, mode
    back = run("cvt.u16.u32 %rs1, %r1; cvt.rn.bf16x2.ue8m0x2 %r5, %rs1;", [[0xFF7F], [0xFE00]])
    assert back.out[:2, 0].tolist() == [0x7FFF3F80, 0x7F000040]


def test_six_bits_as_halves() -> None:
    for name, table in (("e2m3", E2M3), ("e3m2", E3M2)):
        body = f"cvt.u16.u32 %rs1, %r0; cvt.rn.f16x2.{name}x2 %r5, %rs1;"
        out = run(body, threads=64).out[:, 0].astype(np.uint16).view(np.float16)
        assert (out.astype(np.float64) == table).all()
        limited = run(body.replace("rn.", "rn.relu."), threads=64).out[:, 0].astype(np.uint16)
        assert (limited.view(np.float16) == np.maximum(table, 0)).all()
