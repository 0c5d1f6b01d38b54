"""Callbacks of the launcher, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from builder.util.paths import package_file
from tests.unit.runtime.test_launch_host import NAMES

if TYPE_CHECKING:
    from pathlib import Path

#: Fills a library and calls it from C's side, in a process of its own.
CALLER = """
import ctypes, json, sys
sys.path.insert(0, sys.argv[2])
import call_table
names = json.loads(sys.argv[3])
library = call_table.Library(sys.argv[1], names)
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


def test_each_function_calls_its_own_callback(tmp_path: Path) -> None:
    names = [*NAMES, *(f"function_{n}" for n in range(300))]
    folder = str(package_file("runtime", "call_table.py").parent)
    command = [sys.executable, "-c", CALLER, str(tmp_path / "a.so"), folder, json.dumps(names)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    wanted = [2008 if name == "two" else len(name) * 100 + 7 for name in names]
    assert json.loads(said) == wanted
