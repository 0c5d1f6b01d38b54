"""The core of the executor built with sanitizers; and tests that run with it.

``python -m tests.processes.ptx.sanitized ARGUMENTS...`` is pytest with this core.  Both need
``LD_PRELOAD`` of gcc's libasan, which then also watches numpy's memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from builder.ptx import native

FLAGS = (
    "-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fPIC", "-shared",
    "-fno-omit-frame-pointer", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip


def sanitize() -> None:
    """Let this process build and load the core with sanitizers; the compiler runs without them."""
    os.environ.pop("LD_PRELOAD", None)
    native._FLAGS = FLAGS  # type: ignore[assignment]
    native.core.cache_clear()
    library = native.core()
    assert "asan" in Path("/proc/self/maps").read_text()
    assert library is not None


def environment() -> dict[str, str]:
    """What a program needs to load it, besides the other variables."""
    name = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    return {
        **os.environ,
        "LD_PRELOAD": os.path.realpath(name.stdout.strip()),
        # a wrong register is 128 bytes or more behind its file: without a wide red zone that may
        # be in the next allocation, which is no error
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:redzone=1024",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }


if __name__ == "__main__":
    import pytest

    sanitize()
    sys.exit(pytest.main(sys.argv[1:]))
