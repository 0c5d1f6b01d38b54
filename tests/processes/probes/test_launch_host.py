"""Callbacks of the launcher, in a process of its own."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from builder.common.paths import package_file
from tests.unit.probes.test_launch_host import NAMES

if TYPE_CHECKING:
    from pathlib import Path

#: Fills a library and calls it from C's side, in a process of its own.
CALLER = """
import ctypes, json, sys
sys.path.insert(0, sys.argv[2])
from builder.probes import launch_host
names = json.loads(sys.argv[3])
library = launch_host.Library(sys.argv[1], names)
kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_double)
library.fill({
    "two": kind(lambda a, b: 2000 + a + int(b)),
    "": lambda name: kind(lambda a, b: len(name) * 100 + a),
})
loaded = ctypes.CDLL(sys.argv[1])
out = []
for name in names:
    function = getattr(loaded, name)
    function.argtypes = [ctypes.c_int, ctypes.c_double]
    out.append(function(7, 1.5))
print(out)
"""


#: Calls a function with more arguments than either machine has registers for, whole numbers and
#: reals in turn, and gives what its callback was called with, and what that returned.
ARGUMENTS = """
import ctypes, json, sys
sys.path.insert(0, sys.argv[2])
from builder.probes import launch_host
if len(sys.argv) > 3:
    right = launch_host._jump
    launch_host._jump = lambda machine, distance: bytes.fromhex(sys.argv[3]) + right(
        machine, distance - len(sys.argv[3]) // 2)
kinds = [ctypes.c_int64, ctypes.c_double] * 12
got = []
kind = ctypes.CFUNCTYPE(ctypes.c_void_p, *kinds)
library = launch_host.Library(sys.argv[1], ["one", "two"])
library.fill({"": lambda name: kind(lambda *values: got.extend(values) or 0xFEDCBA9876543210)})
function = ctypes.CDLL(sys.argv[1]).two
function.restype, function.argtypes = ctypes.c_void_p, kinds
print(json.dumps([function(*[one for n in range(12) for one in (~n << 40, n / 3)]), got]))
"""
#: What it prints where nothing is lost between the two.
ARRIVED = [0xFEDCBA9876543210, [one for n in range(12) for one in (~n << 40, n / 3)]]
#: Code in front of a jump that spoils an argument: xor edi, edi; mov x7, #0.
SPOILS = {"x86_64": "31ff", "aarch64": "070080d2"}


@pytest.mark.parametrize("spoiled", [False, True])
def test_all_arguments_and_the_result_arrive(tmp_path: Path, spoiled: bool) -> None:
    folder = str(package_file().parent)
    command = [sys.executable, "-c", ARGUMENTS, str(tmp_path / "a.so"), folder]
    command += [SPOILS[platform.machine()]] * spoiled
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (json.loads(said) == ARRIVED) is not spoiled


def test_each_function_calls_its_own_callback(tmp_path: Path) -> None:
    names = [*NAMES, *(f"function_{n}" for n in range(300))]
    folder = str(package_file().parent)
    command = [sys.executable, "-c", CALLER, str(tmp_path / "a.so"), folder, json.dumps(names)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    wanted = [2008 if name == "two" else len(name) * 100 + 7 for name in names]
    assert json.loads(said) == wanted
