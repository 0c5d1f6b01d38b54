"""Compilers that the tests ask for: ``python -m tests.compilers`` brings in what is missing.

g++ for this machine and for the Spark, and an emulator of its processor, out of Debian's packages
where we may install them; nvcc out of released wheels where none is installed.  The last line of
stdout is the folder that nvcc is in, or empty where it is on PATH.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

from builder.applier.states import Target
from builder.common.pypi import PackageIndex
from builder.compile.executor import installed_nvcc
from builder.compile.toolchain import WHEELS, find_compiler
from builder.errors import SparkBuildError
from tests.engine import debs
from tests.engine.cache import MachineError

if TYPE_CHECKING:
    from pathlib import Path

#: Command -> Debian package, on x86-64.
_PACKAGES = {
    "g++": "g++",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64-static": "qemu-user-static",
}


def missing_packages() -> list[str]:
    """Debian packages of commands that are not on PATH; on arm64 nothing is cross-compiled."""
    wanted = _PACKAGES if Target.here().platform == "linux/amd64" else {"g++": "g++"}
    return [package for command, package in wanted.items() if shutil.which(command) is None]


def install(packages: list[str]) -> None:
    """Install them, or say that tests will not run without."""
    if not packages:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"not root on Debian, so without: {' '.join(packages)}", file=sys.stderr)
        return
    try:
        debs.install(*packages)
    except MachineError as error:
        print(f"{error}", file=sys.stderr)


def nvcc_folder() -> Path | None:
    """Where nvcc out of wheels is laid out; None where one is installed, or none is to be had."""
    if installed_nvcc() is not None:
        return None
    index = PackageIndex()
    try:
        compiler = find_compiler(index, Target.here().platform, WHEELS)
        compiler.ready(index)
    except SparkBuildError as error:
        print(f"no nvcc: {error}", file=sys.stderr)
        return None
    return compiler.nvcc.parent


if __name__ == "__main__":
    install(missing_packages())
    print(nvcc_folder() or "")
