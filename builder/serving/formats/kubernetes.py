"""A Kubernetes manifest: a Deployment and its Service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.errors import UsageError
from builder.serving.formats.common import CACHE, TOKEN, Value, header, refuse_files, yaml_text

if TYPE_CHECKING:
    from builder.serving.documents import Recipe

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


def render(recipe: Recipe) -> dict[str, str]:
    """One file with both; the Service balances two servers, in place of LiteLLM.

    Raises:
        UsageError: the recipe uses two nodes for one model, or needs a file of the checkpoint.
    """
    refuse_topology(recipe.topology)
    refuse_files(recipe, "a manifest")
    name = recipe.model.replace(".", "-")
    text = yaml_text(_deployment(recipe, name)) + "---\n" + yaml_text(_service(recipe, name))
    return {f"{name}.yaml": header(recipe) + (_SHARED if len(recipe.nodes) > 1 else "") + text}


def refuse_topology(topology: str) -> None:
    """Refuse one model over two nodes.

    Raises:
        UsageError: it is that.
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


def _service(recipe: Recipe, name: str) -> dict[str, Value]:
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
    """A text in which Kubernetes fills in no variable: ``$$`` becomes ``$``, and ``$(X)`` a value.

    https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables
    """
    return text.replace("$", "$$")
