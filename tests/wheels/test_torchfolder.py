"""The released torch, without CUDA: it loads with the generated stand-ins, and not without them."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from builder.probes.stub_driver import sysv_hash
from builder.proof.sandbox import STAND_INS, Torch, torch_folder, write_stand_ins

if TYPE_CHECKING:
    from pathlib import Path

IMPORT = "import torch; print(torch.version.cuda, torch.cuda.is_available(), torch.ones(3).sum())"


@pytest.fixture(scope="module")
def torch() -> Torch:
    """The one that vLLM 0.20.1 pins."""
    return torch_folder("2.11.0")


def run(code: str, *arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**env, "PYTHONPATH": str(path)},
    )


def test_it_is_the_cuda_build_and_finds_no_gpu(torch: Torch) -> None:
    assert "CUDA build, with generated stand-ins" in torch.what
    said = run(IMPORT, path=torch.folder)
    assert said.stdout == "13.0 False tensor(3.)\n", said.stderr


def test_without_a_stub_its_library_does_not_load(torch: Torch, tmp_path: Path) -> None:
    """Under a name that no machine has, because this one may have a CUDA toolkit."""
    place = tmp_path / "torch" / "lib"
    place.mkdir(parents=True)
    lib = torch.folder / "torch" / "lib"
    (place / "libc10.so").write_bytes((lib / "libc10.so").read_bytes())
    library, there, stand_in = place / "libc10_cuda.so", "libcudart.so.13", "libnobody.so.13"
    renamed = (lib / library.name).read_bytes().replace(there.encode(), stand_in.encode())
    old, new = (struct.pack("<I", sysv_hash(name)) for name in (there, stand_in))
    library.write_bytes(renamed.replace(old, new))  # the name of its version is the library's
    load = "import ctypes, sys; print(bool(ctypes.CDLL(sys.argv[1])._handle))"
    said = run(load, str(library), path=place).stderr
    assert f"{stand_in}: cannot open shared object file" in said
    assert write_stand_ins(tmp_path) == [stand_in]
    assert (place / STAND_INS).read_text() == f"{stand_in}\n"
    assert run(load, str(library), path=place).stdout == "True\n"


def test_device_code_takes_no_disk_space(torch: Torch) -> None:
    library = (torch.folder / "torch" / "lib" / "libtorch_cuda.so").stat()
    assert library.st_blocks * 512 < library.st_size / 2
