"""CUDA kernels as people write them run without a GPU, and leave what an NVIDIA H100 left.

``kernels_h100.json``: by kernel, a digest of its output there.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from builder.ptx.block import Launch
from builder.ptx.grid import Grid, Schedule
from builder.ptx.memory import GlobalMemory, Region
from builder.ptx.program import Program
from builder.ptx.source import module_of

if TYPE_CHECKING:
    from builder.ptx.grid import Outcome
    from builder.ptx.source import Module

pytestmark = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="NOT RUN: no nvcc, so nothing is compiled here"
)
HERE = Path(__file__).parent
SOURCE = (HERE / "kernels.cu").read_text("utf-8")
SIZES = {
    name: (int(blocks), int(threads))
    for name, blocks, threads in re.findall(r"^KERNEL\((\w+), (\d+), (\d+)\)", SOURCE, re.MULTILINE)
}
RECORDED = json.loads((HERE / "kernels_h100.json").read_text("utf-8"))
COUNT, IN, OUT = 4096, 0x100000, 0x200000


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Module:
    """The compiled kernels."""
    ptx = tmp_path_factory.mktemp("kernels") / "kernels.ptx"
    command = ["nvcc", "-std=c++17", "-w", "-ptx", "-arch=sm_90", "-o", str(ptx)]
    subprocess.run([*command, str(HERE / "kernels.cu")], check=True)
    return module_of(ptx.read_text("utf-8"))


def ran(module: Module, name: str, schedule: Schedule) -> tuple[str, Outcome]:
    """A digest of a kernel's output, and what the run showed."""
    number = np.arange(COUNT, dtype=np.uint64)
    words = ((number + 1) * 0x9E3779B1 ^ (number << 13) & 0xFFFFFFFF).astype(np.uint32)
    out = np.zeros(COUNT, np.uint32)
    memory = GlobalMemory(
        [
            Region(IN, words.view(np.uint8), False, "in"),
            Region(OUT, out.view(np.uint8), True, "out"),
        ]
    )
    blocks, threads = SIZES[name]
    parameters = IN.to_bytes(8, "little") + OUT.to_bytes(8, "little")
    launch = Launch((blocks, 1, 1), (threads, 1, 1), 0, parameters)
    outcome = Grid(Program(module.kernel(name)), launch, memory, schedule).run()
    return hashlib.sha256(out.tobytes()).hexdigest()[:16], outcome


@pytest.mark.parametrize("name", SIZES)
def test_a_kernel_leaves_what_the_device_left(module: Module, name: str) -> None:
    for schedule in (Schedule("eager"), Schedule("random", 1)):
        digest, outcome = ran(module, name, schedule)
        assert digest == RECORDED[name], str(schedule)
        assert outcome.instructions


def test_what_a_kernel_prints(module: Module) -> None:
    _, outcome = ran(module, "print", Schedule())
    assert outcome.printed == [
        f"thread {n} of 3: {'odd' if n % 2 else 'even'}  2.65 123456789abc x%\n" for n in range(3)
    ]


def test_another_output_is_seen(module: Module) -> None:
    assert ran(module, "collatz", Schedule())[0] != RECORDED["switches"]
