"""The clients, installed as users do, each in an environment of its own in the cache."""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path

from tests.engine import cache
from tests.engine.debs import unpack

#: Where pyenv keeps its interpreters.
_PYENV = Path.home() / ".pyenv" / "versions"


def python_of(minor: int) -> str:
    """An interpreter of at least Python 3.``minor``: the machine's, pyenv's, or uv's.

    Raises:
        MachineError: there is none, and none can be had.
    """
    if sys.version_info >= (3, minor):
        return sys.executable
    named = (shutil.which(f"python3.{n}") or "" for n in range(minor, minor + 4))
    kept = (p for n in range(minor, minor + 4) for p in _PYENV.glob(f"3.{n}.*/bin/python"))
    for python in (*map(str, kept), *named):
        if python and _runs(python):
            return python
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    folder = cache.entry(f"python/3.{minor}", partial(_install_python, uv, f"3.{minor}"))
    return next(str(path) for path in folder.glob("*/bin/python3"))


def _runs(python: str) -> bool:
    try:
        cache.call(python, "-c", "import venv")
    except cache.MachineError:
        return False
    return True


def _install_python(uv: str, version: str, folder: Path) -> None:
    cache.call(uv, "python", "install", "--install-dir", folder, version)


def environment(*packages: str, minor: int = 11) -> Path:
    """The folder of interpreters of an environment with these packages.

    Its scripts name the place where it was made, so modules are run: ``python -m``.
    """
    python = python_of(minor)
    name = packages[0].partition("=")[0].partition("[")[0]
    folder = cache.entry(
        f"client/{name}-{cache.key([python, *packages])}", partial(_install, python, packages)
    )
    return folder / "bin"


def _install(python: str, packages: tuple[str, ...], folder: Path) -> None:
    cache.say(f"installing {', '.join(packages)}")
    cache.call(python, "-m", "venv", "--copies", folder)
    cache.call(folder / "bin" / "python", "-m", "pip", "install", "-q", *packages)


def compose() -> Path:
    """``docker-compose`` of Debian 13; ``config`` needs no engine."""
    return _of_debian("docker-compose")


def buildx() -> Path:
    """``docker-buildx`` of Debian 13; ``bake --print`` needs no engine."""
    return _of_debian("docker-buildx")


def _of_debian(name: str) -> Path:
    """The program of that name in the package of that name."""
    short = name.removeprefix("docker-")
    folder = cache.entry(f"client/{short}-trixie", lambda to: unpack("trixie", [name], to))
    found = [path for path in folder.rglob(name) if path.is_file() and os.access(path, os.X_OK)]
    if not found:
        raise cache.MachineError(f"no {name} in {folder}")
    return found[0]
