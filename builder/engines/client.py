"""The docker client that can drive BuildKit."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder import settings

if TYPE_CHECKING:
    from collections.abc import Mapping

#: First engine whose built-in BuildKit supports ``COPY --link`` (BuildKit 0.11); older clients
#: include their own BuildKit.
LINK_SINCE = 23


@dataclass(frozen=True)
class Cli:
    """A docker client that can drive BuildKit, and its command."""

    binary: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    #: version of buildx; None for an older client that does not use it
    buildx: tuple[int, int] | None = None


def find_cli() -> Cli | None:
    """The first ``docker`` on PATH that can build with BuildKit.

    Several clients may be installed, and the first may lack buildx, so each is tried.
    """
    named = settings.DOCKER.value
    places = os.environ.get("PATH", "").split(os.pathsep)
    binaries = [named] if named else [str(Path(p) / "docker") for p in places if p]
    for binary in binaries:
        if not os.access(binary, os.X_OK):
            continue
        version_output = _output([binary, "buildx", "version"])
        if version_output is not None:
            version = re.search(r"\bv?(\d+)\.(\d+)\.", version_output)
            known = (int(version[1]), int(version[2])) if version else (0, 0)
            command = (binary, "buildx", "build", "--provenance=false")
            return Cli(binary, command, {}, known)
        major = (_output([binary, "version", "--format", "{{.Client.Version}}"]) or "").split(".")[
            0
        ]
        if major.isdigit() and 18 <= int(major) < LINK_SINCE:  # BuildKit is inside these
            return Cli(binary, (binary, "build"), {"DOCKER_BUILDKIT": "1"})
    return None


def _output(command: list[str]) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode and command[-1] == "version" else done.stdout
