"""Forms of instructions against a GPU, bit by bit.

``golden/ptx_h100_forms.json`` was recorded on an NVIDIA H100 (driver 580): the words that 128
threads were given (special values of float32, float64 and halves, small integers, any bits), and by
body a digest of what the threads left in %r5 to %r8.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from tests.unit.ptxworld import run

RECORDED = json.loads(
    (Path(__file__).parents[1] / "golden" / "ptx_h100_forms.json").read_text("utf-8")
)
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
