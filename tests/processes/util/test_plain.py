"""Output of a command in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.util.test_plain import EVIL, SHOWN


def test_stdout_of_a_command(tmp_path: Path) -> None:
    """A folder of layers whose summary recolours the terminal, on its way through ``print``."""
    lines = ["from builder.util import streams", "streams.watch()", f"print({EVIL!r})"]
    script = "\n".join([*lines, "print('\\x1b[31mred')", ""])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.stdout == f"{SHOWN}\n\\x1b[31mred\n"
