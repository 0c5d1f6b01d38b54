"""The options of commands that serve a model, as frozen values."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from builder.common import options as opt
from builder.common.options import Argument, Fields, Option
from builder.pipeline.options import PlanOptions

TOPOLOGIES = ("solo", "tp2", "tp2-ray", "pp3", "tp4", "two-solos")
FORMATS = ("docker", "compose", "sparkrun", "eugr", "kubernetes", "shell", "vllm", "trtllm")

ModelName = Annotated[
    str, Argument("Name of a model, or its id on Hugging Face.", "MODEL", complete="models")
]


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Which model to serve, where, with which tool, and with which settings."""

    model: ModelName
    profile: Annotated[
        str | None, Option("The profile (default: b12x-full).", "PROFILE", complete="layer")
    ] = None
    release: Annotated[str | None, Option("A released vLLM.", "VERSION")] = None
    image: Annotated[
        str | None,
        Option("The image to run; without --release, its vLLM release is read from it.", "IMAGE"),
    ] = None
    topology: Annotated[
        str,
        Option(
            "solo; one model over two nodes (tp2, tp2-ray), three (pp3) or four (tp4); two-solos "
            "(behind LiteLLM).",
            "|".join(TOPOLOGIES),
            complete=TOPOLOGIES,
        ),
    ] = "solo"
    address: Annotated[
        tuple[str, ...], Option("Address of a node, the head first; once for each.", "IP")
    ] = ()
    interface: Annotated[str | None, Option("Network interface between the nodes.", "NAME")] = None
    form: Annotated[
        str,
        Option("The tool that starts the server.", "|".join(FORMATS), "--format", complete=FORMATS),
    ] = "docker"
    port: Annotated[int, Option("Port of the server.", "PORT", least=1, most=65535)] = 8000
    #: flags and variables, in place of the recipe's
    chosen: Annotated[
        tuple[str, ...],
        Option(
            "Set a flag or variable: max-model-len=131072, enforce-eager, VLLM_X=1; "
            "an empty value removes it; may be repeated.",
            "NAME[=VALUE]",
            "--set",
        ),
    ] = ()
    checkpoint: Annotated[
        Path | None,
        Option("The checkpoint's folder, to estimate the memory from its headers.", "DIR"),
    ] = None
    speculate: Annotated[bool, Option("Use speculative decoding, if the model supports it.")] = (
        False
    )
    ask: Annotated[
        bool,
        Option(
            "Let the release's own code build the model with the recipe's settings (preflight): "
            "what it refuses is not written, and without --profile another profile is tried."
        ),
    ] = False
    explain: Annotated[
        bool, Option("Explain where each value comes from, and list measurements.")
    ] = False
    output: Annotated[
        Path | None, Option("Write the main file there, and the others next to it.", "FILE", "-o")
    ] = None
    force: Annotated[bool, Option("Replace files that have other content.")] = False
    models: opt.ModelFolders = ()
    patches: opt.Patches = ()


@dataclass(frozen=True, kw_only=True)
class MemoryRequest:
    """What to estimate."""

    subject: Annotated[
        str,
        Argument(
            "A folder with a checkpoint; or a model's name, or its id on Hugging Face.",
            "MODEL_OR_DIR",
            complete="models",
        ),
    ]
    context: Annotated[
        int | None,
        Option("Tokens of each sequence (default: the maximum in config.json).", "N", least=1),
    ] = None
    sequences: Annotated[int, Option("Sequences at the same time.", "N", least=1)] = 1
    kv_cache_dtype: Annotated[str, Option("auto, fp8, bfloat16 or float16.", "DTYPE")] = "auto"
    utilization: Annotated[
        str | None,
        Option("The share of the memory that vLLM takes.", "SHARE", "--gpu-memory-utilization"),
    ] = None
    batched_tokens: Annotated[
        int,
        Option(
            "Tokens of a batch: activations grow with it.", "N", "--max-num-batched-tokens", least=1
        ),
    ] = 2048  # what vLLM chooses by itself on a GB10: see builder.serving.memory
    release: Annotated[
        str | None, Option("Show only flags that this vLLM release has.", "VERSION")
    ] = None
    models: opt.ModelFolders = ()


@dataclass(frozen=True, kw_only=True)
class Given:
    """What to ask of which release; what it leaves open, a serve command may say."""

    model: Annotated[
        str,
        Argument(
            "A folder with a model's config.json; a model's name, or its id on Hugging Face; or a "
            "file with a serve command (FILE or FILE:LINE), or the command itself.",
            "MODEL",
            complete="models",
        ),
    ]
    flags: Annotated[tuple[str, ...], Argument("Flags of vllm serve.", "FLAGS")] = ()
    release: Annotated[str | None, Option("A released vLLM.", "VERSION")] = None
    releases: Annotated[
        str | None,
        Option("Several releases, as a table; all: every one since 0.17.0.", "all|VERSION,..."),
    ] = None
    plan: Annotated[
        PlanOptions,
        Fields("base", "layers", "platform", "patches", layers=opt.TriedLayers),
    ] = field(default_factory=PlanOptions)
    profiles: Annotated[
        bool, Option("Show what the model gets without flags, and with each profile.")
    ] = False
    memory: Annotated[
        str | None,
        Option("Memory of the machine in GiB (MemTotal; default: 121.69, a GB10's).", "GIB"),
    ] = None
    #: in place of the model that a serve command names
    checkpoint: Annotated[
        Path | None,
        Option("The folder of the model that a file with a serve command names.", "DIR"),
    ] = None
    #: ``NAME=VALUE``
    variables: Annotated[
        tuple[str, ...],
        Option("A variable of the server; may be repeated.", "NAME=VALUE", "--env"),
    ] = ()
    models: opt.ModelFolders = ()
