"""What several formats say: comments at the top, mounts, the balancer in front of two nodes."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from builder.serving.formats.yamltext import Value, yaml_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from builder.serving.documents import Recipe, RecipeNode

#: Where the official images look for models, and where users have them.
CACHE, HOST_CACHE = "/root/.cache/huggingface", "~/.cache/huggingface"
#: Taken from the user's surroundings, never written down.
TOKEN = "HF_TOKEN"  # noqa: S105 - its name
BALANCER = "litellm.yaml"
#: The only way of sharing requests out that keeps two equal nodes busy.  ``least-busy`` gave 99
#: instead of 156 tokens/s at 64 requests: its counter is raised in a hook that ``acompletion``
#: never calls (write-up of CUTLASS kernels on SM12.1, 2026; sparkrun's LiteLLM plugin).
STRATEGY = "simple-shuffle"


def header(recipe: Recipe, change: str | None = None) -> str:
    """Comments that say what this is, and what to know before it is started.

    ``change`` is what makes the profile's changes to files, where that is not the image.
    """
    lines = [
        f"{recipe.id} on vLLM {recipe.vllm}, profile {recipe.profile}, {recipe.topology}",
        f"made by: {recipe.made_by}",
    ]
    if change is None and recipe.image.build:
        change = f"the image: {recipe.image.build}"
    lines += [change] if change else []
    lines += [f"note: {note}" for note in recipe.notes]
    lines += [f"left out: {one.name} {one.value or ''}: {one.reason}" for one in recipe.left_out]
    return "".join(f"# {' '.join(line.splitlines())}\n" for line in lines)


def for_shell(words: Sequence[str], indent: str = "    ") -> str:
    """A command over several lines, each flag with its value on one."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return f" \\\n{indent}".join(shlex.join(group) for group in groups)


def mounts(recipe: Recipe, cache: str = HOST_CACHE) -> Iterator[tuple[str, str]]:
    """Folders and files of the machine, and where they are in the container."""
    yield cache, CACHE
    for plugin in recipe.plugins:
        yield f"./{plugin.name}", f"{plugin.path}:ro"


def name_of(recipe: Recipe, node: RecipeNode) -> str:
    """A name for one node's container."""
    return recipe.model if len(recipe.nodes) == 1 else f"{recipe.model}-{node.rank}"


def serves_alone(recipe: Recipe) -> bool:
    """Whether each node is a server of its own."""
    return recipe.topology in ("solo", "two-solos")


def balancer(recipe: Recipe) -> dict[str, str]:
    """LiteLLM's configuration in front of two nodes; nothing for other topologies."""
    if recipe.topology != "two-solos":
        return {}
    listed: list[Value] = [
        {
            "model_name": recipe.model,
            "litellm_params": {
                "model": f"hosted_vllm/{recipe.id}",
                "api_base": f"http://{node.address}:{recipe.port}/v1",
                "api_key": "none",
            },
        }
        for node in recipe.nodes
    ]
    text = yaml_text({"model_list": listed, "router_settings": {"routing_strategy": STRATEGY}})
    start = f"# start it with: litellm --config {BALANCER} --port 4000\n"
    return {BALANCER: start + text}
