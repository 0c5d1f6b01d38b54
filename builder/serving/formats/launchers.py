"""Recipes of sparkrun (form 2) and of eugr's spark-vllm-docker (form 1).

Both start the containers of all nodes themselves.  They set the ranks, addresses and interfaces,
and the variables of NCCL, Gloo and Hugging Face.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from builder.errors import UsageError
from builder.serving.formats.common import (
    Block,
    Value,
    for_shell,
    header,
    refuse_files,
    yaml_text,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from builder.serving.documents import Recipe

#: Flags that users of both tools override by these names.
_DEFAULTS = {
    "--port": "port",
    "--host": "host",
    "--tensor-parallel-size": "tensor_parallel",
    "--gpu-memory-utilization": "gpu_memory_utilization",
    "--max-model-len": "max_model_len",
}
#: sparkrun also uses this one to estimate memory.
_SPARKRUN = {**_DEFAULTS, "--kv-cache-dtype": "kv_cache_dtype"}
_EXECUTOR = "--distributed-executor-backend"
#: The registry of this repository, in which sparkrun finds mods.
REGISTRY = "@spark-build"
#: Variables that sparkrun sets on a GB10 itself (``restated-platform-env`` of its 0.4.2).
_PLATFORM = ("CUTE_DSL_ARCH",)
#: The topologies of each tool; two servers are two recipes.  eugr's launcher starts Ray with
#: ``--ray``, and removes Ray's flag from commands otherwise (``launch-cluster.sh``).
_TOPOLOGIES = {"sparkrun": ("solo", "tp2", "tp2-ray"), "eugr": ("solo", "tp2")}
#: sparkrun's names for them.
_RUNTIMES = {"tp2-ray": "vllm-ray"}
#: A value that no shell reads as something else.
_ONE_WORD = re.compile(r"[\w.,:/@+-]+", re.ASCII)
#: What sparkrun 0.4.2 fills in, in a command and in a variable; doubled braces are braces.
_PLACE = re.compile(r"\{\{|\{[\w.-]+\}")
_FIELD = re.compile(r"(?<![${])(\{+)((?:config|launch)\.(?:[^{}]*(?=\}))?)(\}*)")


def sparkrun(recipe: Recipe) -> dict[str, str]:
    """A recipe of sparkrun, form 2, which ``sparkrun recipe validate --strict`` accepts."""
    _refuse(recipe, "sparkrun")
    nodes = len(recipe.nodes)
    counted: dict[str, Value] = {"min_nodes": nodes} if nodes > 1 else {}
    pinned: dict[str, Value] = {"model_revision": recipe.revision} if recipe.revision else {}
    mods: dict[str, Value] = (
        {"mods": [f"{REGISTRY}/{recipe.image.mod}"]} if recipe.image.build else {}
    )
    document: dict[str, Value] = {
        "recipe_version": "2",
        "description": f"{recipe.model}, profile {recipe.profile}, vLLM {recipe.vllm}",
        "model": recipe.id,
        **pinned,
        "runtime": _RUNTIMES.get(recipe.topology, "vllm-distributed"),
        "builder": "docker-pull",
        "container": recipe.image.official if mods else recipe.image.ref,
        "executor_config": {"entrypoint": ""},
        **counted,
        "max_nodes": nodes,
        "defaults": _defaults(recipe, _SPARKRUN),
        "env": {
            one.name: _without_fields(one.value or "")
            for one in recipe.env
            if one.name not in _PLATFORM
        },
        **mods,
        "command": Block(_command(recipe, _SPARKRUN, "{model}") + "\n"),
    }
    own = [one.name for one in recipe.env if one.name in _PLATFORM]
    note = f"# env: sparkrun sets {', '.join(own)} itself on a GB10\n" if own else ""
    text = header(recipe, _change(recipe)) + note + yaml_text(document)
    return {f"{_name(recipe)}.yaml": text}


def eugr(recipe: Recipe) -> dict[str, str]:
    """A recipe of spark-vllm-docker, form 1, for its ``run-recipe.py``."""
    _refuse(recipe, "eugr")
    mods: dict[str, Value] = {"mods": [f"mods/{recipe.image.mod}"]} if recipe.image.build else {}
    only = "cluster_only" if len(recipe.nodes) > 1 else "solo_only"
    document: dict[str, Value] = {
        "recipe_version": "1",
        "name": _name(recipe),
        "description": f"{recipe.model}, profile {recipe.profile}, vLLM {recipe.vllm}",
        "model": recipe.id,
        "container": recipe.image.official if mods else recipe.image.ref,
        only: True,
        **mods,
        "defaults": _defaults(recipe, _DEFAULTS),
        "env": {one.name: _between_quotes(one.value or "") for one in recipe.env},
        "command": Block(_command(recipe, _DEFAULTS, recipe.id, doubled=True) + "\n"),
    }
    return {f"{_name(recipe)}.yaml": header(recipe, _change(recipe)) + yaml_text(document)}


def _change(recipe: Recipe) -> str:
    """A note on the mod that changes the container's files."""
    if not recipe.image.build:
        return ""
    return f"the mod: {recipe.image.mod} changes {recipe.image.official} when it starts"


def _name(recipe: Recipe) -> str:
    """The recipe's name for users."""
    return recipe.model if recipe.topology == "solo" else f"{recipe.model}-{recipe.topology}"


def refuse_topology(topology: str, form: str) -> None:
    """Refuse a topology that these tools cannot start.

    Raises:
        UsageError: they cannot.
    """
    if topology not in _TOPOLOGIES[form]:
        ray = topology == "tp2-ray"
        why = ": its launcher starts Ray itself (launch-cluster.sh --ray)" if ray else ""
        raise UsageError(
            f"a recipe of {form} cannot describe topology {topology}{why}",
            hint="--topology tp2" if ray else "--format docker",
        )


def _refuse(recipe: Recipe, form: str) -> None:
    """Refuse recipes that these tools cannot start.

    Raises:
        UsageError: they cannot.
    """
    refuse_topology(recipe.topology, form)
    refuse_files(recipe, f"a recipe of {form}")


def _between_quotes(value: str) -> str:
    """A value escaped for bash: eugr's script puts it in double quotes."""
    return re.sub(r'([\\"$`])', r"\\\1", value)


def _without_fields(value: str) -> str:
    """A value in which sparkrun fills in nothing: ``{config.x}`` is written ``{{config.x}}``."""
    return _FIELD.sub(_escaped_field, value)


def _escaped_field(match: re.Match[str]) -> str:
    opening, name, closing = match.groups()
    ends = closing[: len(opening)]
    more = "}" if len(ends) == len(opening) else ""
    return f"{{{opening}{name}{ends}{more}{closing[len(opening) :]}"


def _is_default(name: str, value: str | None, names: Mapping[str, str]) -> bool:
    """Whether a flag's value can be a default: the tools fill those in without quotes."""
    return name in names and value is not None and bool(_ONE_WORD.fullmatch(value))


def _defaults(recipe: Recipe, names: Mapping[str, str]) -> dict[str, Value]:
    found: dict[str, Value] = {"tensor_parallel": len(recipe.nodes)}
    for flag in recipe.flags:
        if flag.value is not None and _is_default(flag.name, flag.value, names):
            found[names[flag.name]] = _number(flag.value)
    return found


def _number(text: str) -> int | float | str:
    """Numbers as numbers, so that the tools can calculate with them, if they print them alike."""
    if re.fullmatch(r"0|[1-9]\d{0,17}", text):
        return int(text)
    return float(text) if re.fullmatch(r"\d{1,9}\.\d{1,6}", text) and _same(text) else text


def _same(text: str) -> bool:
    return str(float(text)) == text


def _command(recipe: Recipe, names: Mapping[str, str], model: str, *, doubled: bool = False) -> str:
    """``vllm serve`` with placeholders in braces; ``doubled``: other braces are doubled."""
    # the launcher joins the nodes, and sets how
    flags = [(flag.name, flag.value) for flag in recipe.flags if flag.name != _EXECUTOR]
    if all(name != "--tensor-parallel-size" for name, _ in flags):
        flags.append(("--tensor-parallel-size", "1"))
    mark = "PLACE_OF_"  # a word that no shell quotes, and that no value has
    while any(mark in (value or "") for _, value in flags):
        mark = f"P{mark}"
    words: list[str] = []
    places: dict[str, str] = {}
    for name, value in flags:
        words.append(name)
        if _is_default(name, value, names):
            places[f"{mark}{names[name]}"] = f"{{{names[name]}}}"
            words.append(f"{mark}{names[name]}")
        elif value is not None:
            words.append(value)
    revision = ["--revision", "{model_revision}"] if recipe.revision else []
    text = for_shell(["vllm", "serve", f"{mark}MODEL", *words], indent="  ")
    if doubled or _PLACE.search(text):
        text = text.replace("{", "{{").replace("}", "}}")
    if doubled:
        revision = ["--revision", recipe.revision] if recipe.revision else []
    places[f"{mark}MODEL"] = " ".join([model, *revision])
    return re.sub(rf"\b{mark}\w+\b", lambda match: places.get(match[0], match[0]), text)
