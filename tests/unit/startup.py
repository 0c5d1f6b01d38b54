"""What a command imports, seen in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Libraries that no start needs: each takes longer than all of ours.
HEAVY = (
    "docker", "elftools", "filelock", "jinja2", "numpy", "packaging", "pydantic", "pypi_simple",
    "requests", "rich", "urllib3",
)  # fmt: skip
_PROGRAM = """
import json, sys
from builder.__main__ import run
code = run(sys.argv[1:])
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
sys.exit(code)
"""


def imported(*words: str, env: Mapping[str, str] | None = None) -> set[str]:
    """The modules that are loaded when a command has ended well."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *words],
        capture_output=True, text=True, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))
