"""Diffs at their limits, read by a process that may not have more memory than that."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Bytes of address space; a diff of 300 MB took 3.3 GB.
MEMORY = 1500 << 20
PROGRAM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (%d, %d))
from builder.applier.diff import parse_diff
from builder.errors import UsageError
from builder.common.diffs import MAX_LINES, normalise, read_sections
head = b"diff --git a/x.py b/x.py\\nnew file mode 100644\\n--- /dev/null\\n+++ b/x.py\\n"
lines = MAX_LINES - 10
data = {
    "lines": lambda: head + b"@@ -0,0 +1,%%d @@\\n" %% lines + (b"+" + b"x" * 50 + b"\\n") * lines,
    "line": lambda: head + b"@@ -0,0 +1 @@\\n+" + b"x" * (63 << 20) + b"\\n",
    "long": lambda: head + b"@@ -0,0 +1 @@\\n+" + b"x" * (15 << 20) + b"\\n",
    "empty": lambda: b"\\n" * (60 << 20),
    "huge": lambda: b"x" * (300 << 20),
}[sys.argv[1]]()
try:
    normal = normalise(data)
    text = b"".join(section.render() for section in read_sections(normal)).decode()
    print(len(parse_diff(text)))
except UsageError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("lines", "1"),
        ("line", "line 6 of the diff has more than 16 MiB"),
        ("long", "1"),
        ("empty", "the diff has 60 MiB and 62914560 lines; the limits are 64 MiB"),
        ("huge", "the diff has 300 MiB and 0 lines; the limits are 64 MiB"),
    ],
)
def test_memory_is_bounded(kind: str, answer: str) -> None:
    words = [sys.executable, "-c", PROGRAM % (MEMORY, MEMORY), kind]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(answer)
