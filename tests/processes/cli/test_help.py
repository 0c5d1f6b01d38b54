"""Completion in a shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.unit.startup import HEAVY

#: What a shell is told for the last of these words.
COMPLETED = [
    (["verify", "x", "--level", "d"], ["dispatch", "device"]),
    (["verify", "x", "--level", "static,d"], ["static,dispatch", "static,device"]),
    (["verify", "x", "--require", "im"], ["imports"]),
    (["publish", "--require", "st"], ["static"]),
    (["image", "--engine", "b"], ["buildkit"]),
    (["image", "--output", "o"], ["oci:"]),
    (["image", "-l", "marlin,b12x-f"], ["marlin,b12x-full"]),
    (["plan", "--platform", "linux/am"], ["linux/amd64"]),
    (["layers", "show", "cutlass-d"], ["cutlass-dsl-cu13", "cutlass-dsl-sm121a"]),
    (["schema", "plan"], ["plan"]),
    (["cache", "prune", "--kind", "sand"], ["sandboxes"]),
]


def test_the_shell_completes() -> None:
    """In a program that may not reach the network and imports nothing heavy."""
    code = f"""
import json, os, shlex, socket, sys
def refuse(*_): raise AssertionError("the network")
socket.socket.connect = socket.getaddrinfo = refuse
from builder.__main__ import main
for words in json.loads(sys.argv[1]):
    line = shlex.join(["spark-build", *words])
    os.environ.update(COMP_WORDS=line, COMP_CWORD=str(len(words)), _TYPER_COMPLETE_ARGS=line)
    if os.fork():
        os.wait()
        os.write(1, b";")
        continue
    try: main()
    finally:
        heavy = set(sys.modules) & set({HEAVY!r}) - {{"packaging"}}
        assert not heavy, heavy
"""
    words = json.dumps([words for words, _ in COMPLETED])
    answer = subprocess.run(
        [sys.executable, "-c", code, words],
        env={**os.environ, "_SPARK_BUILD_COMPLETE": "complete_bash"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.stderr == ""
    said = [part.split() for part in answer.stdout.split(";")]
    assert said == [*(wanted for _, wanted in COMPLETED), []]
