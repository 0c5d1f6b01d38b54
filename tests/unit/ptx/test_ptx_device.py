"""The executor against a GPU, bit by bit: instructions of SM12x that Hopper has too.

``golden/ptx_h100.json`` was recorded on an NVIDIA H100 (driver 580.159.04): each body as a kernel
of ``ptxworld.source``, with ``.version 8.0`` and ``.target sm_90`` in its head, compiled by the
driver; one block of 96 threads with 8 KiB of shared memory, on the words of :func:`given`.  A row
holds a body and, in hexadecimal, what its threads left in those of %r5 to %r8 that it names.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.unit.ptxworld import run

RECORDED = dict(
    json.loads((Path(__file__).parents[1] / "golden" / "ptx_h100.json").read_text("utf-8"))
)
THREADS = 96


def given(thread: int, column: int) -> int:
    """An input word: any bits in the first warp, small integers in the second, then floats."""
    number = thread * 4 + column
    hashed = ((number + 1) * 0x9E3779B1 ^ number << 13) & 0xFFFFFFFF
    if thread < 32:
        return hashed
    if thread < 64:
        return (hashed % 41 - 20) & 0xFFFFFFFF
    return int(struct.unpack("<I", struct.pack("<f", (hashed % 4001 - 2000) / 64))[0])


WORDS = np.array([[given(t, c) for c in range(4)] for t in range(THREADS)], np.uint32)


def named(body: str) -> list[int]:
    """The output words that a body writes."""
    return [column for column in range(4) if f"%r{5 + column}" in body]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("body", RECORDED)
def test_the_same_bits_as_on_the_device(body: str) -> None:
    columns = named(body)
    wanted = np.frombuffer(bytes.fromhex(RECORDED[body]), np.uint32).reshape(THREADS, len(columns))
    found = run(body, WORDS, threads=THREADS).out[:, columns]
    if ".approx" not in body:
        assert (found == wanted).all(), np.argwhere(found != wanted)[:4]
        return
    # the device's own approximation: next to the exact result, which the executor gives
    off = np.abs(found.astype(np.int64) - wanted.astype(np.int64))
    assert off.max() == 1


def test_the_recording_covers_many_instructions() -> None:
    opcodes = {part.split(".")[0] for body in RECORDED for part in body.replace(";", " ").split()}
    assert {"ldmatrix", "stmatrix", "shfl", "vote", "prmt", "lop3", "cvt", "fma", "shl"} <= opcodes
    assert len(RECORDED) >= 90
