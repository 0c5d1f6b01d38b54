"""``docker run``, one command for each node."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from builder.serving.formats.common import (
    LOCK,
    RDMA,
    TOKEN,
    balancer,
    for_shell,
    header,
    mounts,
    name_of,
    serves_alone,
)

if TYPE_CHECKING:
    from builder.serving.documents import Recipe, RecipeNode

#: What NCCL needs for RDMA between nodes: the devices of the network cards, and locked memory that
#: they read and write (field failures: ``ibv_reg_mr_iova2``).  Other launchers of two Sparks pass
#: the same, or make the container privileged; without the devices NCCL uses TCP.
_CLUSTER = ("--network", "host", "--device", RDMA, "--cap-add", LOCK, "--ulimit", "memlock=-1")


def render(recipe: Recipe) -> dict[str, str]:
    """One script for each node."""
    files = {}
    for node in recipe.nodes:
        number = "" if len(recipe.nodes) == 1 else f"-{node.rank}"
        where = f"# on the node {node.address}\n" if node.address else ""
        text = f"#!/bin/sh\n{header(recipe)}{where}{_command(recipe, node)}\n"
        files[f"run{number}.sh"] = text
    return {**files, **balancer(recipe)}


def _command(recipe: Recipe, node: RecipeNode) -> str:
    words = ["docker", "run", "--rm", "--name", name_of(recipe, node), "--gpus", "all"]
    words += ["--ipc", "host"]
    if serves_alone(recipe):
        words += ["--publish", f"{recipe.port}:{recipe.port}"]
    else:
        words += _CLUSTER
    words += ["--env", TOKEN]
    for name, value in recipe.variables(node).items():
        words += ["--env", f"{name}={value}"]
    volumes = [f'--volume "{_home(host)}:{_quoted(there)}"' for host, there in mounts(recipe)]
    vllm, *rest = container_command(recipe, node)
    head = for_shell([*words])
    tail = for_shell([recipe.image.ref, *rest])
    return " \\\n    ".join([head, *volumes, f"--entrypoint {shlex.quote(vllm)}", tail])


def container_command(recipe: Recipe, node: RecipeNode) -> list[str]:
    """The container's command; with Ray, the nodes join a cluster first."""
    words = recipe.command(node)
    if recipe.topology != "tp2-ray":
        return words
    from builder.serving.topology import RAY_PORT

    head = recipe.nodes[0].address
    if node.rank:
        start = f"exec ray start --block --address {head}:{RAY_PORT}"
        return ["sh", "-c", f"{start} --node-ip-address {node.address}"]
    start = f"ray start --head --port {RAY_PORT} --node-ip-address {head}"
    return ["sh", "-c", f"{start} && exec {shlex.join(words)}"]


def _quoted(path: str) -> str:
    """A path between a shell's double quotes."""
    return re.sub(r'([\\"$`])', r"\\\1", path)


def _home(path: str) -> str:
    """A path for a shell's double quotes, where a tilde is not expanded."""
    quoted = _quoted(path)
    for start, folder in (("~/", "$HOME/"), ("./", "$PWD/")):
        if quoted.startswith(start):
            return folder + quoted.removeprefix(start)
    return quoted
