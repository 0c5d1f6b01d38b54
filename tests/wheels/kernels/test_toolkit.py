"""The compiler out of released wheels: it compiles and links what the installed one does.

The wheels are about 105 MB and fetched once.  The comparison needs an nvcc of the same version;
where there is none it is not run, and says so.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.states import Target
from builder.common.machinecode import read_elf
from builder.compile.link import toolkit_libraries
from builder.compile.toolchain import find_compiler

if TYPE_CHECKING:
    from builder.common.pypi import PackageIndex
    from builder.compile.toolchain import Compiler

HERE = Target.here().platform
SOURCE = Path(__file__).parents[2] / "compiled" / "prebuilt.cu"
pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="NOT RUN: no g++, which nvcc hands the host's part to"
)


@pytest.fixture(scope="module")
def released(index: PackageIndex) -> Compiler:
    found = find_compiler(index, HERE, "wheels")
    found.ready(index)
    return found


def compiled(nvcc: Path, folder: Path, *words: str) -> Path:
    target = folder / "kernels.o"
    command = [str(nvcc), *words, "-Xcompiler", "-fPIC", "-DCUTLASS_KERNELS", "-c", str(SOURCE)]
    command += ["-gencode", "arch=compute_121a,code=sm_121a", "-o", str(target)]
    # neither the toolkit on PATH nor a variable of it may help
    clean = {"PATH": "/usr/bin:/bin"}
    subprocess.run(command, check=True, capture_output=True, timeout=600, env=clean)
    return target


def device_code(path: Path) -> bytes:
    """The machine code for GPUs in a library or object file."""
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as stream:
        file: Any = ELFFile(stream)
        data: bytes = file.get_section_by_name(".nv_fatbin").data()
    return data


def test_machine_code_equals_that_of_the_installed_compiler(
    index: PackageIndex, released: Compiler, tmp_path: Path
) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("NOT RUN: no nvcc is installed here to compare with")
    installed = find_compiler(index, HERE, shutil.which("nvcc"))
    if installed.versions != released.versions:
        pytest.skip(f"NOT RUN: the installed nvcc is {installed.versions['nvcc']}")
    made = []
    for name, nvcc in (("wheels", released.nvcc), ("installed", installed.nvcc)):
        (tmp_path / name).mkdir()
        made.append(device_code(compiled(nvcc, tmp_path / name)))
    assert made[0] == made[1]
    other = compiled(released.nvcc, tmp_path, "-DONLY_1200")
    assert device_code(other) != made[0], "another kernel is told apart"


@pytest.mark.parametrize("runtime", ["shared", "static"])
def test_it_links_with_its_own_runtime(released: Compiler, tmp_path: Path, runtime: str) -> None:
    libraries = toolkit_libraries(released.nvcc)
    assert libraries.is_relative_to(released.nvcc.parent.parent.resolve())
    target = tmp_path / "kernels.so"
    words = [str(released.nvcc), "-shared", "--no-device-link", f"-cudart={runtime}"]
    words += [str(compiled(released.nvcc, tmp_path)), "-o", str(target)]
    subprocess.run(words, check=True, env={"PATH": "/usr/bin:/bin"})
    assert ("libcudart.so.13" in read_elf(target).needed) == (runtime == "shared")
    assert device_code(target) == device_code(tmp_path / "kernels.o")
