"""Output of a command in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.common.test_plain import COMMANDS, EVIL, NO_COMMANDS, SHOWN


def test_stdout_of_a_command(tmp_path: Path) -> None:
    """A folder of layers whose summary recolours the terminal, on its way through ``print``."""
    lines = ["from builder.common import console", "console.watch()", f"print({EVIL!r})"]
    script = "\n".join([*lines, "print('\\x1b[31mred')", ""])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.stdout == f"{SHOWN}\n\\x1b[31mred\n"


@pytest.mark.parametrize(("workflow", "shown"), [("true", NO_COMMANDS), ("", COMMANDS)])
def test_stdout_in_a_workflow(tmp_path: Path, workflow: str, shown: str) -> None:
    """In parts too; outside a workflow data is as it is."""
    lines = ["import sys", "from builder.common import console", "console.watch()"]
    lines += [f"sys.stdout.write({part!r})" for part in COMMANDS.splitlines(keepends=True)]
    lines += [f"print(); print({COMMANDS!r}, 'x', sep='')", "print('a', '::b', sep='')", ""]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": os.environ["PATH"],
             "GITHUB_ACTIONS": workflow}, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout == f"{shown}\n{shown}x\na::b\n"


def test_what_goes_to_a_file_is_as_it_is(tmp_path: Path) -> None:
    """A redirected script or patch is no log; ``${x##[0-9]}`` is the shell's."""
    script = f"from builder.common import console; console.watch(); print({COMMANDS!r})"
    with (tmp_path / "out").open("wb") as out:
        subprocess.run(
            [sys.executable, "-c", script], stdout=out, check=True,
            env={"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": os.environ["PATH"],
                 "GITHUB_ACTIONS": "true"}, cwd=tmp_path,
        )  # fmt: skip
    assert (tmp_path / "out").read_text() == f"{COMMANDS}\n"
