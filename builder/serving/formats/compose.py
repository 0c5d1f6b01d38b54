"""Compose files, one for each node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.serving.formats.common import (
    LOCK,
    RDMA,
    TOKEN,
    Value,
    balancer,
    header,
    mounts,
    name_of,
    serves_alone,
    yaml_text,
)
from builder.serving.formats.docker import container_command

if TYPE_CHECKING:
    from builder.serving.documents import Recipe, RecipeNode


def render(recipe: Recipe) -> dict[str, str]:
    """One file for each node."""
    files = {}
    for node in recipe.nodes:
        number = "" if len(recipe.nodes) == 1 else f"-{node.rank}"
        where = f"# on the node {node.address}\n" if node.address else ""
        service = {"services": {name_of(recipe, node): _service(recipe, node)}}
        files[f"compose{number}.yaml"] = header(recipe) + where + yaml_text(service)
    return {**files, **balancer(recipe)}


def _service(recipe: Recipe, node: RecipeNode) -> dict[str, Value]:
    program, *rest = container_command(recipe, node)
    network: dict[str, Value] = {
        "network_mode": "host",
        "devices": [f"{RDMA}:{RDMA}"],
        "cap_add": [LOCK],
        "ulimits": {"memlock": -1},
    }
    if serves_alone(recipe):
        network = {"ports": [f"{recipe.port}:{recipe.port}"]}
    device = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    variables = {name: _literal(value) for name, value in recipe.variables(node).items()}
    return {
        "image": _literal(recipe.image.ref),
        "entrypoint": [_literal(program)],
        "command": [_literal(word) for word in rest],
        "environment": {TOKEN: f"${{{TOKEN}:-}}", **variables},
        "volumes": [_literal(f"{host}:{there}") for host, there in mounts(recipe)],
        "ipc": "host",
        **network,
        "deploy": {"resources": {"reservations": {"devices": [device]}}},
    }


def _literal(text: str) -> str:
    """A text in which compose fills in no variable."""
    return text.replace("$", "$$")
