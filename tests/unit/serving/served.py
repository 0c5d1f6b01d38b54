"""Releases and profiles as recipes see them, without reading any wheel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import structs

from builder.serving.models import Model, Models
from builder.serving.recipe import Place, RecipeRequest, Setting
from builder.serving.release import ServedProfile
from builder.serving.serveflags import Flag, ServeInterface

if TYPE_CHECKING:
    from builder.serving.recipe import Recipe

_VALUES = (
    "--dtype", "--kv-cache-dtype", "--gpu-memory-utilization", "--reasoning-parser",
    "--tool-call-parser", "--reasoning-parser-plugin", "--host", "--port", "--max-num-seqs",
    "--max-model-len", "--max-num-batched-tokens", "--nnodes", "--node-rank", "--master-addr",
    "--master-port", "--distributed-executor-backend", "--chat-template",
)  # fmt: skip
_SWITCHES = ("--trust-remote-code", "--enable-prefix-caching", "--enable-auto-tool-choice",
             "--headless", "--enforce-eager")  # fmt: skip


def interface(vllm: str, **changed: Any) -> ServeInterface:
    """A release; ``without`` are flags that it does not have."""
    gone = changed.pop("without", ())
    backends = ("auto", "marlin", "cutlass", "flashinfer_b12x")
    flags = [
        *(Flag(names=(name,), takes="one", kind="text") for name in _VALUES),
        *(Flag(names=(name,), takes="nothing", kind="true-or-false") for name in _SWITCHES),
        Flag(names=("--tensor-parallel-size", "-tp"), takes="one", kind="integer"),
        Flag(names=("--pipeline-parallel-size",), takes="one", kind="integer"),
        Flag(names=("--data-parallel-size",), takes="one", kind="integer"),
        Flag(names=("--speculative-config",), takes="one", kind="json"),
        Flag(names=("--moe-backend",), takes="one", kind="text", choices=backends, folds=True),
        Flag(names=("--linear-backend",), takes="one", kind="text", choices=backends, folds=True),
    ]
    known = {
        "vllm": vllm,
        "flags": tuple(flag for flag in flags if flag.names[0] not in gone),
        "variables": {"VLLM_HOST_IP": (), "VLLM_DISABLED_KERNELS": ()},
        "reasoning_parsers": ("nemotron_v3", "qwen3", "gemma4", "openai_gptoss"),
        "tool_parsers": ("qwen3_coder", "qwen3_xml", "gemma4", "openai"),
    }
    return ServeInterface(**{**known, **changed})


def served(vllm: str = "0.33.0", **changed: Any) -> ServedProfile:
    """A profile that asks for b12x, on a release that is patched for it."""
    known: dict[str, Any] = {
        "name": "b12x-full",
        "vllm": vllm,
        "interface": interface(vllm),
        "env": {"CUTE_DSL_ARCH": "sm_121a"},
        "flags": ("--linear-backend", "flashinfer_b12x"),
        "moe_flags": ("--moe-backend", "flashinfer_b12x"),
        "refused": {},
        "image": f"spark-build/b12x-full:{vllm}",
        "named_image": False,
        "unread": False,
        "build": f"spark-build image --layers b12x-full --base vllm/vllm-openai:v{vllm}",
        "mod": "sm121-b12x-full-enable",
        "has_ray": False,
    }
    return ServedProfile(**{**known, **changed})


def request(model: str | Model = "nemotron-3-super", **changed: Any) -> RecipeRequest:
    """A request for one of our models on one Spark."""
    known: dict[str, Any] = {
        "model": Models.discover().model(model) if isinstance(model, str) else model,
        "served": served(),
        "place": Place(topology="solo"),
    }
    return RecipeRequest(**{**known, **changed})


TWO: dict[str, Any] = {"addresses": ("10.0.0.1", "10.0.0.2"), "interface": "enp1s0f0np0"}


#: All that a shell, compose, Kubernetes, sparkrun, eugr or YAML would read as something else.
HARD = (
    "$ { } ( ) ' \" \\ : # `id` $(PORT) $$(PORT) ${HOME} $HOME {port} {{x}} {config.port} a=b %s\n"
    "  second: 'line'\n- third \\1 \\n"
)


def with_hard_values(recipe: Recipe, value: str = HARD) -> Recipe:
    """A recipe in which a variable, a flag and a flag that launchers make a default have it."""
    flags = [structs.replace(f, value=value) if f.name == "--host" else f for f in recipe.flags]
    return structs.replace(
        recipe,
        flags=(*flags, Setting(name="--served-model-name", value=value, origin="a test")),
        env=(*recipe.env, Setting(name="VLLM_DISABLED_KERNELS", value=value, origin="a test")),
    )
