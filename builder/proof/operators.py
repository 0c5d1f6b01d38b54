"""Loads a release's own operator library, so that a sandbox need not simulate it.

From 0.20.0 on vLLM has the host functions for kernel selection in a module that is linked
only against torch's stable ABI, so this machine's build of it loads with a CPU build of torch,
with generated stubs for the driver and for torch's CUDA part.  The download has 7 to 90 MB,
so it is not the default.
"""

from __future__ import annotations

import platform
import re
import sys
from typing import TYPE_CHECKING

from builder import settings
from builder.common.model.platform import Platform
from builder.common.paths import cache_dir
from builder.common.pypi import PackageIndex, write_atomically
from builder.common.wheels import RemoteWheel
from builder.errors import SparkBuildError
from builder.probes.stub_driver import needed_libraries
from builder.proof.replies import LocalFiles

if TYPE_CHECKING:
    from pathlib import Path

MODULE = "vllm._C_stable_libtorch"
#: The first release with host functions in that module.
SINCE = (0, 20)
_MEMBER = "vllm/_C_stable_libtorch.abi3.so"
_RUNTIME = re.compile(r"libcudart\.so\.(\d+)")


def wanted(vllm: str) -> bool:
    """Whether the user requested it, and the release has it."""
    parts = [int(word) for word in re.findall(r"\d+", vllm)[:2]]
    return settings.REAL_EXTENSIONS.value == "1" and tuple(parts) >= SINCE


def operators(vllm: str, index: PackageIndex | None = None) -> LocalFiles:
    """The files for the probe: the CUDA runtime library, then the module.

    Raises:
        SparkBuildError: the index has no build for this machine, or does not respond.
    """
    index = index or PackageIndex()
    here = Platform.parse(platform.machine(), f"{sys.version_info[0]}.{sys.version_info[1]}")
    wheel = RemoteWheel(index.choose("vllm", vllm, here), index)
    if _MEMBER not in wheel.members:
        raise SparkBuildError(f"{wheel.file.filename} has no {_MEMBER}")
    module = _kept(wheel, _MEMBER)
    needed = " ".join(needed_libraries(str(module)))
    found = _RUNTIME.search(needed)
    libraries = (str(_runtime(found[0], found[1], here, index)),) if found else ()
    return LocalFiles(extensions={MODULE: str(module)}, libraries=libraries)


def _runtime(soname: str, major: str, here: Platform, index: PackageIndex) -> Path:
    """The CUDA runtime library of a major version, from its wheel."""
    releases = [v for v in index.releases("nvidia-cuda-runtime") if v.split(".")[0] == major]
    if not releases:
        raise SparkBuildError(f"the package index has no wheel with {soname}")
    wheel = RemoteWheel(index.choose("nvidia-cuda-runtime", releases[-1], here), index)
    member = next((path for path in wheel.members if path.endswith(f"/{soname}")), None)
    if member is None:
        raise SparkBuildError(f"{wheel.file.filename} has no {soname}")
    return _kept(wheel, member)


def _kept(wheel: RemoteWheel, member: str) -> Path:
    """A file of a wheel in the cache, with its own name."""
    path = cache_dir() / "operators" / wheel.record[:24] / member.rpartition("/")[2]
    if not path.is_file():
        write_atomically(path, wheel.read(member))
    return path
