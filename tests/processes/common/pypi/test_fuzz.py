"""Pages, wheels and locks of chance, and as large as they may be, with a limit on memory."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tests.unit.chance import CASES

#: Bytes of address space: what a hostile page or wheel took before was 1.3 to 3.1 GB.
SPACE = 1500 << 20
#: MiB that it may really take, and seconds after which it hangs.
MEMORY, PATIENCE = 700, 600


@pytest.mark.parametrize("seed", ["the suite's"])
def test_chance(seed: str) -> None:
    words = [
        sys.executable,
        "-m",
        "tests.processes.common.pypi.fuzz",
        seed,
        str(4 * CASES),
        str(MEMORY),
    ]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=PATIENCE, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (SPACE, SPACE)),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
