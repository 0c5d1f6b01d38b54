"""What ``run-recipe.py`` of spark-vllm-docker does with a recipe, in our own words.

Read in its repository (form "1" of recipes, and ``launch-cluster.sh`` of 2026).  Its files are not
here: what counts is written down as code, and a shell runs what comes out.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any

#: Without one of these it stops.
REQUIRED = ("name", "recipe_version", "container", "command")
#: All that it reads, with the type that it needs of each.
FIELDS: dict[str, type] = {
    "name": str,
    "recipe_version": str,
    "container": str,
    "command": str,
    "description": str,
    "model": str,
    "mods": list,
    "defaults": dict,
    "env": dict,
    "build_args": list,
    "cluster_only": bool,
    "solo_only": bool,
}
#: What users may override on its command line; each is a placeholder of the command.
OVERRIDES = ("port", "host", "tensor_parallel", "gpu_memory_utilization", "max_model_len")
#: What ``launch-cluster.sh`` adds itself: a command that has one of these is started wrongly.
ITS_OWN = ("--distributed-executor-backend", "--nnodes", "--node-rank", "--master-addr",
           "--master-port", "--headless")  # fmt: skip


class RefusedError(Exception):
    """It would not start this recipe."""


def launch_script(recipe: dict[str, Any], *, nodes: int = 1, rank: int = 0, **given: object) -> str:
    """The script that it runs in the container of one node.

    Raises:
        RefusedError: it would not, or would with another meaning.
    """
    missing = [name for name in REQUIRED if name not in recipe]
    unknown = sorted(set(recipe) - set(FIELDS))
    if missing or unknown:
        raise RefusedError(f"missing {missing}, unknown {unknown}")
    wrong = [name for name, value in recipe.items() if type(value) is not FIELDS[name]]
    if wrong or recipe["recipe_version"] != "1":
        raise RefusedError(f"of another type: {wrong}; form {recipe['recipe_version']}")
    if recipe.get("solo_only") and nodes > 1:
        raise RefusedError("for one node")
    if recipe.get("cluster_only") and nodes == 1:
        raise RefusedError("for more than one node")
    if any(not isinstance(value, str) for value in recipe.get("env", {}).values()):
        raise RefusedError("YAML's own words (true, 1e5) become Python's")
    if nodes == 1:
        given = {"tensor_parallel": 1, **given}
    try:
        command = recipe["command"].format(**{**recipe.get("defaults", {}), **given})
    except (KeyError, ValueError, IndexError) as error:
        raise RefusedError(f"no placeholder: {error!r}") from error
    if any(re.search(rf"{flag}\b", command) for flag in ITS_OWN):
        raise RefusedError("has flags that join nodes")
    lines = command.rstrip().splitlines()
    if nodes > 1:
        lines[-1] += f" --nnodes {nodes} --node-rank {rank} --master-addr 10.0.0.1"
        lines[-1] += " --master-port 29501" + (" --headless" if rank else "")
    # between double quotes: a shell still reads $, `, " and backslashes there
    exports = [f'export {name}="{value}"' for name, value in recipe.get("env", {}).items()]
    return "\n".join(["#!/bin/bash", *exports, *lines, ""])


def mod_folder(reference: str, repository: Path) -> Path:
    """The folder of a mod; it copies this one's files, but none that begins with a dot, to workers.

    Raises:
        RefusedError: it is no folder below the repository, or workers would lack files.
    """
    place = PurePosixPath(reference)
    folder = repository / place
    if place.is_absolute() or ".." in place.parts or not (folder / "run.sh").is_file():
        raise RefusedError(f"no mod: {reference}")
    hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    if hidden:
        raise RefusedError(f"not on workers: {hidden}")
    return folder


def started(script: str, *names: str) -> tuple[list[str], dict[str, str]]:
    """The words of ``vllm`` and some variables, as bash leaves them."""
    shown = "".join(f'printf "%s\\0" "${{{name}-}}"; ' for name in names)
    stub = f'vllm() {{ {shown} printf "%s\\0" vllm "$@"; }}\n'
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-s"], input=stub + script, text=True,
        capture_output=True, check=True, env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert not done.stderr
    words = done.stdout.split("\0")[:-1]
    return words[len(names) :], dict(zip(names, words, strict=False))
