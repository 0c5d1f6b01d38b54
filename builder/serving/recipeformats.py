"""A recipe as files of other tools, one function for each."""

from __future__ import annotations

import math
import re
import shlex
import sys
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, TypeAlias

import yaml
from msgspec.structs import replace

from builder import settings
from builder.common.hints import again
from builder.errors import UsageError, did_you_mean
from builder.serving.checkpoint import decoded_config
from builder.serving.recipe import RAY_PORT
from builder.serving.release import official_image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from builder.serving.models import Model
    from builder.serving.recipe import Recipe, RecipeNode


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
    return _comments(*lines)


def _comments(*lines: str) -> str:
    """A comment of one line for each text, whatever it has in it."""
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
        UsageError: the recipe has such a file.
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


#: What NCCL needs for RDMA between nodes: the devices of the network cards, and locked memory that
#: they read and write (field failures: ``ibv_reg_mr_iova2``).  Other launchers of two Sparks pass
#: the same, or make the container privileged; without the devices NCCL uses TCP.
_CLUSTER = ("--network", "host", "--device", RDMA, "--cap-add", LOCK, "--ulimit", "memlock=-1")


def docker_scripts(recipe: Recipe) -> dict[str, str]:
    """One script for each node."""
    files = {}
    for node in recipe.nodes:
        number = "" if len(recipe.nodes) == 1 else f"-{node.rank}"
        where = f"# on the node {node.address}\n" if node.address else ""
        text = f"#!/bin/sh\n{header(recipe)}{where}{_docker_command(recipe, node)}\n"
        files[f"run{number}.sh"] = text
    return {**files, **balancer(recipe)}


def _docker_command(recipe: Recipe, node: RecipeNode) -> str:
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


def shell_scripts(recipe: Recipe) -> dict[str, str]:
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


def compose_files(recipe: Recipe) -> dict[str, str]:
    """One file for each node."""
    files = {}
    for node in recipe.nodes:
        number = "" if len(recipe.nodes) == 1 else f"-{node.rank}"
        where = f"# on the node {node.address}\n" if node.address else ""
        service = {"services": {name_of(recipe, node): _compose_service(recipe, node)}}
        files[f"compose{number}.yaml"] = header(recipe) + where + yaml_text(service)
    return {**files, **balancer(recipe)}


def _compose_service(recipe: Recipe, node: RecipeNode) -> dict[str, Value]:
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


#: Nemotron 3 Super with 17 files loads in 8 minutes (write-up of one GB10, 2026-03); twice
#: that, in probes of ten seconds.
_STARTS_IN, _PERIOD = 960, 10
_SHARED = (
    "# two servers, on nodes that Kubernetes chooses: --address is not used\n"
    "# the Service gives each connection to one of them, without LiteLLM; a client that keeps its\n"
    "# connection stays with that one\n"
)
#: vLLM's own path.
_HEALTH = "/health"


def kubernetes_manifest(recipe: Recipe) -> dict[str, str]:
    """One file with both; the Service balances two servers, in place of LiteLLM.

    Raises:
        UsageError: the recipe uses two nodes for one model, or needs a file of the checkpoint.
    """
    _refuse_two_nodes(recipe.topology)
    refuse_files(recipe, "a manifest")
    name = recipe.model.replace(".", "-")
    text = (
        yaml_text(_deployment(recipe, name))
        + "---\n"
        + yaml_text(_kubernetes_service(recipe, name))
    )
    return {f"{name}.yaml": header(recipe) + (_SHARED if len(recipe.nodes) > 1 else "") + text}


def _refuse_two_nodes(topology: str) -> None:
    """Refuse one model over two nodes.

    Raises:
        UsageError: the recipe has two nodes.
    """
    if topology not in ("solo", "two-solos"):
        raise UsageError(
            f"a Deployment cannot describe topology {topology}, whose nodes need fixed addresses",
            hint="--format compose",
        )


def _deployment(recipe: Recipe, name: str) -> dict[str, Value]:
    labels: dict[str, Value] = {"app.kubernetes.io/name": name}
    replicas = len(recipe.nodes)
    apart: dict[str, Value] = {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
            ]
        }
    }
    pod: dict[str, Value] = {
        # a Service called vllm would set VLLM_PORT and others, which vLLM reads
        "enableServiceLinks": False,
        **({"affinity": apart} if replicas > 1 else {}),
        "containers": [_container(recipe)],
        "volumes": [
            {"name": "models", "hostPath": {"path": "/var/lib/huggingface",
                                            "type": "DirectoryOrCreate"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }  # fmt: skip
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": replicas,
            # one GPU a node: the old pod must be gone before the new one can start
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _container(recipe: Recipe) -> dict[str, Value]:
    program, *rest = recipe.command(recipe.nodes[0])
    token: dict[str, Value] = {
        "name": TOKEN,
        "valueFrom": {"secretKeyRef": {"name": "huggingface", "key": "token", "optional": True}},
    }
    variables: list[Value] = [
        {"name": name, "value": _literal(value)}
        for name, value in recipe.variables(recipe.nodes[0]).items()
    ]
    probe: dict[str, Value] = {
        "httpGet": {"path": _HEALTH, "port": recipe.port},
        "periodSeconds": _PERIOD,
    }
    return {
        "name": "vllm",
        "image": recipe.image.ref,
        "command": [_literal(program)],
        "args": [_literal(word) for word in rest],
        "env": [token, *variables],
        "ports": [{"containerPort": recipe.port, "name": "http"}],
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "startupProbe": {**probe, "failureThreshold": _STARTS_IN // _PERIOD},
        "readinessProbe": probe,
        "volumeMounts": [
            {"name": "models", "mountPath": CACHE},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - torch's processes share it
        ],
    }


def _kubernetes_service(recipe: Recipe, name: str) -> dict[str, Value]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "selector": {"app.kubernetes.io/name": name},
            "ports": [{"name": "http", "port": recipe.port, "targetPort": "http"}],
        },
    }


def _literal(text: str) -> str:
    """A text in which compose and Kubernetes fill in no variable: ``$$`` becomes ``$``.

    https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables
    """
    return text.replace("$", "$$")


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
_TOPOLOGIES = {
    "sparkrun": ("solo", "tp2", "tp2-ray"), "eugr": ("solo", "tp2"), "vllm": ("solo", "tp2"),
}  # fmt: skip
#: sparkrun's names for them.
_RUNTIMES = {"tp2-ray": "vllm-ray"}
#: A value that no shell reads as something else.
_ONE_WORD = re.compile(r"[\w.,:/@+-]+", re.ASCII)
#: What sparkrun 0.4.2 fills in, in a command and in a variable; doubled braces are braces.
_BRACES = re.compile(r"\{\{|\{[\w.-]+\}")
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
        "command": Block(_launcher_command(recipe, _SPARKRUN, "{model}") + "\n"),
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
        "command": Block(
            _launcher_command(recipe, _DEFAULTS, _literally(recipe.id), doubled=True) + "\n"
        ),
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


def _refuse_launcher(topology: str, form: str) -> None:
    """Refuse a topology that these tools cannot start.

    Raises:
        UsageError: these tools cannot start the topology.
    """
    if topology not in _TOPOLOGIES[form]:
        ray = topology == "tp2-ray"
        own = ray and form == "eugr"
        why = ": its launcher starts Ray itself (launch-cluster.sh --ray)" if own else ""
        raise UsageError(
            f"a recipe of {form} cannot describe topology {topology}{why}",
            hint="--topology tp2" if ray else "--format docker",
        )


def _refuse(recipe: Recipe, form: str) -> None:
    """Refuse recipes that these tools cannot start.

    Raises:
        UsageError: these tools cannot start the recipe.
    """
    _refuse_launcher(recipe.topology, form)
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
    defaults: dict[str, Value] = {"tensor_parallel": len(recipe.nodes)}
    for flag in recipe.flags:
        if flag.value is not None and _is_default(flag.name, flag.value, names):
            defaults[names[flag.name]] = _number(flag.value)
    return defaults


def _number(text: str) -> int | float | str:
    """Numbers as numbers, so that the tools can calculate with them, if they print them alike."""
    if re.fullmatch(r"0|[1-9]\d{0,17}", text):
        return int(text)
    return float(text) if re.fullmatch(r"\d{1,9}\.\d{1,6}", text) and _same(text) else text


def _same(text: str) -> bool:
    return str(float(text)) == text


def _launcher_command(
    recipe: Recipe, names: Mapping[str, str], model: str, *, doubled: bool = False
) -> str:
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
    if doubled or _BRACES.search(text):
        text = text.replace("{", "{{").replace("}", "}}")
    if doubled:
        revision = ["--revision", _literally(recipe.revision)] if recipe.revision else []
    places[f"{mark}MODEL"] = " ".join([model, *revision])
    return re.sub(rf"\b{mark}\w+\b", lambda match: places.get(match[0], match[0]), text)


def _literally(text: str) -> str:
    """A word of a command in which eugr's script fills in nothing, and its shell runs nothing."""
    return shlex.quote(text).replace("{", "{{").replace("}", "}}")


#: The form of vllm-project/recipes, which also describes the model.
VLLM = "vllm"
#: What its command builder adds itself.
_BUILT = {"--host", "--port", "--tensor-parallel-size", _EXECUTOR, "--trust-remote-code"}
#: Flags of a feature that users of its page turn on and off.
_FEATURES = {
    "tool_calling": ("Tool calls in the form of this model",
                     ("--enable-auto-tool-choice", "--tool-call-parser", "--tool-parser-plugin")),
    "reasoning": ("Thoughts apart from the answer",
                  ("--reasoning-parser", "--reasoning-parser-plugin")),
    "spec_decoding": ("Speculative decoding", ("--speculative-config",)),
}  # fmt: skip
#: The start of a kind of layer -> its name of the precision, and bytes of a parameter; the first
#: that a model has counts.
_PRECISIONS = (
    ("nvfp4", "nvfp4", 0.5), ("w4a16", "nvfp4", 0.5), ("mxfp4", "mxfp4", 0.5),
    ("int4", "int4", 0.5), ("mxfp8", "fp8", 1), ("fp8", "fp8", 1), ("", "bf16", 2),
)  # fmt: skip
#: Its strategy for each topology.
_STRATEGIES = {"solo": "single_node_tp", "tp2": "multi_node_tp"}


def vllm_recipe(recipe: Recipe, model: Model, day: date) -> dict[str, str]:
    """A recipe of vllm-project/recipes (its CONTRIBUTING.md, September 2026) for one model on GB10.

    Raises:
        UsageError: it cannot express the recipe, or a value that it requires is not known.
    """
    _refuse(recipe, VLLM)
    if recipe.image.build:
        raise UsageError(
            f"a recipe of vllm-project/recipes names an image that everybody can pull, and "
            f"{recipe.profile} changes files for {recipe.model}",
            hint=again("--image", "HOST/NAME:TAG"),
        )
    parameters, context = model.parameters, _context(model)
    if parameters is None or context is None:
        what = "number of parameters" if parameters is None else "longest context"
        raise UsageError(
            f"the {what} of {model.name} is not known, and vllm-project/recipes needs it",
            hint=f"spark-build models show {model.name}",
        )
    owner, _, name = recipe.id.partition("/")
    kinds = model.kinds()
    experts = any(kind.endswith("-moe") for kind in kinds) or model.experts is not None
    active = model.active_parameters or parameters
    document: dict[str, Value] = {
        "meta": {
            "title": name, "slug": name.lower(), "provider": owner,
            "description": f"{model.summary}; settings for a DGX Spark",
            "date_added": str(day), "date_updated": str(day),
            "difficulty": "beginner" if recipe.topology == "solo" else "intermediate",
            "tasks": ["multimodal" if _sees(model) else "text"],
        },
        "model": {
            "model_id": recipe.id, "min_vllm_version": _oldest(model, recipe),
            "architecture": "moe" if experts else "dense",
            "parameter_count": _billions(parameters.value),
            "active_parameters": _billions(active.value if experts else parameters.value),
            "context_length": context,
            "base_args": [f.name for f in recipe.flags if f.name == "--trust-remote-code"],
            "base_env": {},
        },
        **_features(recipe),
        "variants": {"default": _variant(recipe, kinds, parameters.value)},
        "compatible_strategies": [_STRATEGIES[recipe.topology]],
        "hardware_overrides": {},
        "strategy_overrides": {},
        "guide": Block(_guide(recipe)),
    }  # fmt: skip
    return {f"{name}.yaml": header(recipe) + yaml_text(document)}


def _features(recipe: Recipe) -> dict[str, Value]:
    """The features of a recipe; its page turns all of them on but speculative decoding."""
    features: dict[str, Value] = {}
    for name, (description, flags) in _FEATURES.items():
        words = [word for flag in recipe.flags if flag.name in flags for word in flag.words]
        if words:
            features[name] = {"description": description, "args": words}
    return {
        "features": features, "opt_in_features": [n for n in ("spec_decoding",) if n in features],
    }  # fmt: skip


def _variant(recipe: Recipe, kinds: set[str], parameters: int) -> dict[str, Value]:
    """The checkpoint, and the settings of a GB10."""
    _, precision, size = next(
        row for row in _PRECISIONS if any(kind.startswith(row[0]) for kind in kinds or {""})
    )
    apart = {flag for _, flags in _FEATURES.values() for flag in flags} | _BUILT
    own: dict[str, Value] = {
        "extra_args": [word for f in recipe.flags if f.name not in apart for word in f.words],
        "extra_env": {one.name: one.value or "" for one in recipe.env},
        "docker_image": recipe.image.ref,
    }
    if recipe.image.ref != official_image(recipe.vllm):
        own["install"] = {"pip": False}  # its kernels may be in no wheel
    return {
        "precision": precision,
        "vram_minimum_gb": math.ceil(parameters / 10**9 * size * 1.2),
        "description": f"As published; profile {recipe.profile} on a DGX Spark",
        "hardware_overrides": {"dgx_spark_gb10": own},
    }


def _context(model: Model) -> int | None:
    """The longest context of a model, by its file or its configuration."""
    if model.maximum_context is not None:
        return model.maximum_context.value
    config = None if model.config is None else decoded_config(model.config.value)
    return None if config is None else config.longest


def _oldest(model: Model, recipe: Recipe) -> str:
    """The oldest release that serves a model; without a known one, the recipe's."""
    bound = re.search(r">=\s*(\d[\d.]*\d)", model.needs.vllm if model.needs else "")
    return bound[1] if bound else recipe.vllm


def _sees(model: Model) -> bool:
    """Whether a model reads pictures or sound, by its configuration."""
    config = {} if model.config is None else model.config.value
    return any(key in config for key in ("vision_config", "audio_config"))


def _billions(count: int) -> str:
    return f"{count / 10**9:.3g}B"


def _guide(recipe: Recipe) -> str:
    """The text of the page: what was checked, what others measured, and what fails."""
    place = "one DGX Spark" if len(recipe.nodes) == 1 else f"{len(recipe.nodes)} DGX Sparks"
    overview = (
        f"{recipe.id} on {place} (GB10), vLLM {recipe.vllm}. Flags and variables were checked "
        "against the code of the release, without the hardware; so `meta.hardware` names none."
    )
    lines = ["## Overview", "", overview]
    measured = [
        f"- {one.tokens_per_second:g} tokens/s at {one.concurrency} "
        f"{'request' if one.concurrency == 1 else 'requests'}: {one.setup} ({one.source})"
        for one in recipe.measured
    ]
    failures = [f"- {one.what}: {one.helps} ({one.source})" for one in recipe.failures]
    for title, rows in (
        ("Measured by others", measured),
        ("Troubleshooting", failures),
        ("References", [f"- [{recipe.id}](https://huggingface.co/{recipe.id})"]),
    ):
        if rows:
            lines += ["", f"## {title}", "", *rows]
    return "\n".join(lines) + "\n"


OPTIONS = "trtllm-options.yaml"
#: The path of the options file in the container.
_OPTIONS_PATH = f"/app/{OPTIONS}"


def refuse_settings(given: Mapping[str, object]) -> None:
    """Refuse options that are about vLLM, by their names.

    Raises:
        UsageError: one of them is set.
    """
    for name, value in given.items():
        if value is not None and value is not False and value != ():
            raise UsageError(
                f"{name} is for vLLM, and --format trtllm prints the model file's settings for "
                "TensorRT-LLM",
                hint=f"leave {name} out",
            )


def trtllm(model: Model, port: int) -> dict[str, str]:
    """A script with ``docker run``, and the file of options.

    Raises:
        UsageError: the model's file does not say how TensorRT-LLM serves it.
    """
    known = model.tensorrt_llm
    if known is None:
        raise UsageError(
            f"the file of {model.name} has no settings for TensorRT-LLM",
            hint="--format docker",
        )
    head = _comments(f"{model.id.value} on TensorRT-LLM, {known.image}", f"source: {known.source}")
    words = ["docker", "run", "--rm", "--name", f"{model.name}-trtllm", "--gpus", "all"]
    words += ["--ipc", "host", "--publish", f"{port}:{port}", "--env", TOKEN]
    for name, value in known.variables.items():
        words += ["--env", f"{name}={value}"]
    serve = ["trtllm-serve", model.id.value, "--host", "0.0.0.0", "--port", str(port)]  # noqa: S104
    for name, value in known.flags.items():
        serve += [name, value] if value else [name]
    serve += ["--extra_llm_api_options", _OPTIONS_PATH]
    volumes = [
        f'--volume "$HOME/.cache/huggingface:{CACHE}"',
        f'--volume "$PWD/{OPTIONS}:{_OPTIONS_PATH}:ro"',
    ]
    command = " \\\n    ".join([for_shell(words), *volumes, for_shell([known.image, *serve])])
    return {
        "run.sh": f"#!/bin/sh\n{head}{command}\n",
        OPTIONS: head + yaml_text(known.options),
    }


#: The formats by name, with the function that renders the files.
FORMATS: dict[str, Callable[[Recipe], dict[str, str]]] = {
    "docker": docker_scripts,
    "compose": compose_files,
    "sparkrun": sparkrun,
    "eugr": eugr,
    "kubernetes": kubernetes_manifest,
    "shell": shell_scripts,
}


#: Formats of tools that find the nodes of a model themselves.
LAUNCHERS = ("sparkrun", "eugr", VLLM)
#: TensorRT-LLM's format, which needs only the model.
TRTLLM = "trtllm"


def refuse_format(form: str) -> None:
    """Refuse an unknown format, before anything is read.

    Raises:
        UsageError: no format has this name.
    """
    known = (*FORMATS, VLLM, TRTLLM)
    if form not in known:
        raise UsageError(
            f"unknown format {form!r}{did_you_mean(form, known)} (known: {', '.join(known)})",
            hint=f"--format {known[0]}",
        )


def today() -> date:
    """The day of ``SOURCE_DATE_EPOCH``, or today."""
    text = settings.EPOCH.value
    moment = datetime.fromtimestamp(int(text), UTC) if text.isdigit() else datetime.now(UTC)
    return moment.date()


def refuse_topology(form: str, topology: str) -> None:
    """Refuse a topology that a format cannot express, before anything is read or asked for.

    Raises:
        UsageError: the format cannot express the topology.
    """
    if form in LAUNCHERS:
        _refuse_launcher(topology, form)
    elif form == "kubernetes":
        _refuse_two_nodes(topology)


def rendered(recipe: Recipe, form: str, model: Model | None = None) -> dict[str, str]:
    """The files of a format, the main one first; that of vllm-project/recipes needs the model.

    Raises:
        UsageError: there is no such format, or it cannot express this recipe.
    """
    refuse_format(form)
    recipe = replace(recipe, made_by=f"{recipe.made_by} --format {form}")
    if form == VLLM and model is not None:
        return vllm_recipe(recipe, model, today())
    return FORMATS[form](recipe)
