"""Plain shell, for a virtual environment that has vLLM."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from builder.serving.formats.common import balancer, for_shell, header
from builder.serving.formats.docker import container_command

if TYPE_CHECKING:
    from builder.serving.documents import Recipe


def render(recipe: Recipe) -> dict[str, str]:
    """One script for each node."""
    files = {}
    change = ""
    if recipe.image.mod:
        change = f"the environment: spark-build apply SITE_PACKAGES --layers {recipe.profile}"
    for node in recipe.nodes:
        number = "" if len(recipe.nodes) == 1 else f"-{node.rank}"
        words = container_command(recipe, node)
        for plugin in recipe.plugins:  # without a container there is no mount
            words = [plugin.source if word == plugin.path else word for word in words]
        exports = "".join(
            f"export {name}={shlex.quote(value)}\n"
            for name, value in recipe.variables(node).items()
        )
        where = f"# on the node {node.address}\n" if node.address else ""
        files[f"serve{number}.sh"] = (
            f"#!/bin/sh\n{header(recipe, change)}{where}{exports}{for_shell(words)}\n"
        )
    return {**files, **balancer(recipe)}
