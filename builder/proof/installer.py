"""Installs packages for verification with uv, or else pip.

Both use pip's configured index and certificates: uv does not read pip's
configuration, so it gets the settings as variables.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from builder.common.background import check_cancelled
from builder.common.console import console
from builder.common.pypi import pip_index_url, pip_setting
from builder.errors import SparkBuildError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


#: Seconds between checks for cancellation of an installation.
_LOOK = 0.2


class SandboxUnavailable(SparkBuildError):
    """The sandbox cannot be created here; the check that needs it is not run."""


@dataclass(frozen=True)
class Command:
    """A command with additional environment variables."""

    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def environment_command(root: Path) -> Command:
    """Create a virtual environment with this interpreter."""
    if uv := shutil.which("uv"):
        words = ("venv", "--quiet", "--no-project", "--python", sys.executable, str(root))
        return Command((uv, *words), uv_environment())
    own = ("--without-pip",) if _pip_here() else ()  # unpacking pip takes as long as its use
    return Command((sys.executable, "-m", "venv", *own, str(root)))


def install_command(python: Path, packages: Iterable[str], into: Path | None = None) -> Command:
    """Install exactly these packages for an interpreter, or ``into`` a folder."""
    what = ("--no-deps", *(("--target", str(into)) if into else ()), *packages)
    if uv := shutil.which("uv"):
        words = ("pip", "install", "--quiet", "--no-config", "--python", str(python))
        return Command((uv, *words, *uv_index(), *what), uv_environment())
    pip = (sys.executable, "-m", "pip", "--python") if _pip_here() else ()
    run = (*pip, str(python)) if pip else (str(python), "-m", "pip")
    # compiling everything takes most of the time; imported modules are compiled on import
    return Command((*run, "install", "-q", "--no-compile", *what))


def _pip_here() -> bool:
    return importlib.util.find_spec("pip") is not None


def uv_index() -> list[str]:
    """Pip's indexes as options of uv, which must also choose the best version of all indexes."""
    words = []
    if index := pip_index_url():
        words += ["--default-index", index]
    if extra := (pip_setting("extra-index-url") or "").split():
        words += [word for url in extra for word in ("--index", url)]
        words += ["--index-strategy", "unsafe-best-match"]
    for place in (pip_setting("find-links") or "").split():
        words += ["--find-links", place]
    for host in (pip_setting("trusted-host") or "").split():
        words += ["--allow-insecure-host", host]
    if (pip_setting("no-index") or "").lower() in ("1", "true", "yes", "on"):
        words.append("--no-index")
    return words


def uv_environment() -> dict[str, str]:
    """Pip's certificates and proxy as uv's environment variables."""
    env = {}
    if (cert := pip_setting("cert")) and not os.environ.get("SSL_CERT_FILE"):
        env["SSL_CERT_FILE"] = cert
    if proxy := pip_setting("proxy"):
        env |= {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy}
    return env


def call(command: Command) -> str:
    """Run a command; returns its output.  Python imports nothing from the current folder.

    Raises:
        SandboxUnavailable: it failed; the message has the end of its output.
    """
    words = command.words
    console.detail(f"+ {' '.join(words)}")
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1", **command.env},
    ) as process:
        try:
            out, err = _ended(process)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        tail = (err or out).strip().splitlines()[-3:]
        raise SandboxUnavailable(
            f"{words[0]} {' '.join(words[1:4])} ... failed: {' | '.join(tail)}",
            hint="see --verbose; on Debian, apt-get install python3-venv",
        )
    return out


def _ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    while True:
        try:
            return process.communicate(timeout=_LOOK)
        except subprocess.TimeoutExpired:
            check_cancelled()
