"""Parts that formats share: comments at the top, mounts, the load balancer for two nodes."""

from __future__ import annotations

import re
import shlex
import sys
from typing import TYPE_CHECKING, TypeAlias

import yaml

from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from builder.serving.documents import Recipe, RecipeNode

#: The values of a YAML document.
Value: TypeAlias = "str | int | float | bool | Mapping[str, Value] | Sequence[Value] | None"

#: The models folder of the official images, and the user's.
CACHE, HOST_CACHE = "/root/.cache/huggingface", "~/.cache/huggingface"
#: A variable that is passed on from the user's environment, never written into a file.
TOKEN = "HF_TOKEN"  # noqa: S105 - its name
BALANCER = "litellm.yaml"
#: The folder with the devices of RDMA, and the capability to lock memory.
RDMA, LOCK = "/dev/infiniband", "IPC_LOCK"
#: The only routing strategy that keeps two equal nodes busy.  ``least-busy`` gave 99
#: instead of 156 tokens/s at 64 requests: its counter is raised in a hook that ``acompletion``
#: never calls (write-up of CUTLASS kernels on SM12.1, 2026; sparkrun's LiteLLM plugin).
STRATEGY = "simple-shuffle"


def header(recipe: Recipe, change: str | None = None) -> str:
    """Comments that describe the recipe, with notes for the user.

    ``change`` describes how the profile's file changes are made, if not by the image.
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


#: A key that begins like this is no number in YAML 1.1 or 1.2; PyYAML quotes on, yes, null and so
#: on, but not y and n.
_PLAIN_KEY = re.compile(r"(?![yYnN]$)[A-Za-z_][\w./-]*")


class Block(str):
    """A text of several lines, written as a YAML block."""

    __slots__ = ()


class _Key(str):
    """A key of a mapping."""

    __slots__ = ()


class _Writer(yaml.SafeDumper):
    """Quotes texts, so that neither YAML 1.1 nor 1.2 reads one as a number or a boolean."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        """Do not use YAML aliases."""
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        """Indent lists below their key."""
        super().increase_indent(flow, indentless=False)

    def mapping(self, value: Mapping[str, Value]) -> yaml.MappingNode:
        """Keep the given order."""
        keyed = {_Key(key): inner for key, inner in value.items()}
        return self.represent_mapping("tag:yaml.org,2002:map", keyed.items())

    def text(self, value: str) -> yaml.ScalarNode:
        """Quote texts, or write a block; quote keys only if a YAML reader needs it."""
        style = "|" if isinstance(value, Block) else '"'
        if isinstance(value, _Key) and _PLAIN_KEY.fullmatch(value):
            style = ""
        return self.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Writer.add_representer(dict, _Writer.mapping)
_Writer.add_representer(str, _Writer.text)
_Writer.add_representer(Block, _Writer.text)
_Writer.add_representer(_Key, _Writer.text)


def yaml_text(value: Mapping[str, Value]) -> str:
    """A YAML document."""
    text: str = yaml.dump(
        value, Dumper=_Writer, allow_unicode=True, default_flow_style=False, width=sys.maxsize
    )
    return text


def for_shell(words: Sequence[str], indent: str = "    ") -> str:
    """A command over several lines, one for each flag with its value."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return f" \\\n{indent}".join(shlex.join(group) for group in groups)


def refuse_files(recipe: Recipe, what: str) -> None:
    """Refuse a recipe with files of the machine, for a format that has no mounts.

    Raises:
        UsageError: it has one.
    """
    for plugin in recipe.plugins[:1]:
        if plugin.chosen:
            why, hint = "which --set names", "--format docker"
        else:
            why = (
                f"which vLLM {recipe.vllm} needs for the parser; newer releases have the parser "
                "built in"
            )
            hint = "--release 0.33.0"
        raise UsageError(f"{what} cannot mount {plugin.name}, {why}", hint=hint)


def mounts(recipe: Recipe, cache: str = HOST_CACHE) -> Iterator[tuple[str, str]]:
    """Folders and files of the machine, with their paths in the container."""
    yield cache, CACHE
    for plugin in recipe.plugins:
        yield plugin.source, f"{plugin.path}:ro"


def name_of(recipe: Recipe, node: RecipeNode) -> str:
    """A name for one node's container."""
    return recipe.model if len(recipe.nodes) == 1 else f"{recipe.model}-{node.rank}"


def serves_alone(recipe: Recipe) -> bool:
    """Whether each node is a server of its own."""
    return recipe.topology in ("solo", "two-solos")


def balancer(recipe: Recipe) -> dict[str, str]:
    """LiteLLM's configuration for two servers; empty for other topologies."""
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
