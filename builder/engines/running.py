"""Runs a build with the docker client, and returns its output."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.engines.progress import read_progress
from builder.util.console import console

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.engines.client import Cli
    from builder.engines.progress import Progress

#: First buildx that can print its progress as JSON.
_DOCUMENTS_SINCE = (0, 13)


@dataclass(frozen=True)
class BuildOutput:
    """A finished build."""

    status: int
    said: Progress
    output: str


def run_build(cli: Cli, words: Sequence[str], env: Mapping[str, str]) -> BuildOutput:
    """Run one build without network; the last of ``words`` is its context."""
    documents = (cli.buildx or (0, 0)) >= _DOCUMENTS_SINCE
    command = [*cli.command, f"--progress={'rawjson' if documents else 'plain'}"]
    command += ["--network=none", *words]
    console.detail(f"+ {' '.join(command)}")
    process = subprocess.run(
        command,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    progress = read_progress(process.stdout)
    for line in progress.lines:
        console.detail(line)
    return BuildOutput(process.returncode, progress, process.stdout)
