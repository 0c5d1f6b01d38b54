"""The stub of the CUDA driver, loaded by a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import TYPE_CHECKING

from builder.probes.stub_driver import (
    NO_DEVICE,
    REFUSAL,
    SONAME,
    TEXT,
    shared_library,
    write_library,
)
from tests.unit.probes.test_stub_driver import MANY

if TYPE_CHECKING:
    from pathlib import Path

#: Loads a library and calls every function named after it, in a process of its own: a library of
#: the driver's name must not stay in the one that runs the tests.
CALLER = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
print([getattr(library, name)() for name in sys.argv[2:]])
print(ctypes.CDLL("libcuda.so.1")._handle == library._handle)
print(hasattr(library, "cuNotThere"))
"""


# ----------------------------------------------------------------------------------------- written


def test_every_function_of_the_stub_returns_an_error(tmp_path: Path) -> None:
    path = write_library(str(tmp_path), SONAME, MANY)
    command = [sys.executable, "-I", "-c", CALLER, path, *MANY]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [str([REFUSAL] * len(MANY)), "True", "False"]


def test_a_library_without_functions_is_valid(tmp_path: Path) -> None:
    path = write_library(str(tmp_path), "libempty.so", [])
    subprocess.run([sys.executable, "-c", f"import ctypes; ctypes.CDLL({path!r})"], check=True)


#: Asks the loader for symbols with a version, calls one, and reads the text that another returns.
VERSIONS = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
dlvsym = ctypes.CDLL(None).dlvsym
dlvsym.restype = ctypes.c_void_p
dlvsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
find = lambda name, version: dlvsym(library._handle, name, version)
print([bool(find(*pair)) for pair in (
    (b"cudaMalloc", b"libcudart.so.13"), (b"nvshmem_init", b"NVSHMEM"),
    (b"cudaMalloc", b"libcudart.so.12"), (b"cudaMalloc", b"NVSHMEM"),
)])
print(ctypes.CFUNCTYPE(ctypes.c_int)(find(b"cudaMalloc", b"libcudart.so.13"))())
library.cudaGetErrorString.restype = ctypes.c_char_p
print(library.cudaGetErrorString(0).decode())
print(library.plain())
"""


def test_symbols_have_the_requested_versions(tmp_path: Path) -> None:
    names = ["cudaMalloc", "cudaGetErrorString", "nvshmem_init", "plain"]
    versions = dict.fromkeys(names[:2], "libcudart.so.13") | {"nvshmem_init": "NVSHMEM"}
    machine = platform.machine()
    path = tmp_path / "libcudart.so.13"
    path.write_bytes(shared_library(path.name, names, machine, versions, NO_DEVICE))
    command = [sys.executable, "-I", "-c", VERSIONS, str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = TEXT.rstrip(b"\0").decode()
    assert said.splitlines() == ["[True, True, False, False]", str(NO_DEVICE), text, str(NO_DEVICE)]
