"""A release that builds its parser the way vLLM does, made of a few small files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.applier.values import sha256_hex

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVE = "from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args\n"

CLI_ARGS = """
import json
from dataclasses import field
from typing import Any, Literal
import vllm.envs as envs
from vllm.config import config
from vllm.engine.arg_utils import AsyncEngineArgs, optional_type

@config
class BaseFrontendArgs:
    lora_modules: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None

    @classmethod
    def _customize_cli_kwargs(cls, frontend_kwargs):
        frontend_kwargs["chat_template_kwargs"]["type"] = json.loads
        return frontend_kwargs

    @classmethod
    def add_cli_args(cls, parser):
        from vllm.engine.arg_utils import get_kwargs
        frontend_kwargs = get_kwargs(cls)
        frontend_kwargs = cls._customize_cli_kwargs(frontend_kwargs)
        frontend_group = parser.add_argument_group(title="x")
        for key, value in frontend_kwargs.items():
            frontend_group.add_argument(f"--{key.replace('_', '-')}", **value)
        return parser

@config
class FrontendArgs(BaseFrontendArgs):
    port: int = 8000
    allowed_origins: list[str] = field(default_factory=lambda: ["*"])

    @classmethod
    def _customize_cli_kwargs(cls, frontend_kwargs):
        frontend_kwargs = super()._customize_cli_kwargs(frontend_kwargs)
        frontend_kwargs["allowed_origins"]["type"] = json.loads
        del frontend_kwargs["allowed_origins"]["nargs"]
        return frontend_kwargs

def make_arg_parser(parser):
    parser.add_argument("model_tag", type=str, nargs="?")
    parser.add_argument("--headless", action="store_true", default=False)
    parser.add_argument("--api-server-count", "-asc", type=int, default=None)
    parser = FrontendArgs.add_cli_args(parser)
    parser = AsyncEngineArgs.add_cli_args(parser)
    return parser
"""

ARG_UTILS = """
import argparse, json, sys
from typing import TYPE_CHECKING, Any, Literal, get_args
from vllm.config import ModelConfig, ParallelConfig, KernelConfig
from vllm.config.kernel import Shade

if TYPE_CHECKING:
    from vllm.quantization import Methods
else:
    Methods = str

_GONE = "--old-way is deprecated: use --new-way"
ODD = "odd"

def optional_type(kind): ...
def get_kwargs(cls):
    for name in cls:
        human_readable_int_args = {"max_num_batched_tokens", "max_num_queued_tokens"}
        if name == "max_model_len":
            kwargs[name]["type"] = human_readable_int_or_auto
        elif name in human_readable_int_args:
            kwargs[name]["type"] = human_readable_int
        elif name in ("kv_cache_memory_bytes",):
            kwargs[name]["type"] = human_readable_int
        else:
            kwargs[name]["type"] = int

class EngineArgs:
    @staticmethod
    def add_cli_args(parser):
        model_kwargs = get_kwargs(ModelConfig)
        model_group = parser.add_argument_group(title="ModelConfig")
        if not ("serve" in sys.argv[1:] and "--help" in sys.argv[1:]):
            model_group.add_argument("--model", **model_kwargs["model"])
        model_group.add_argument("--quantization", "-q", **model_kwargs["quantization"])
        model_group.add_argument("--max-model-len", **model_kwargs["max_model_len"])
        for_queues = model_kwargs["max_num_queued_tokens"]
        model_group.add_argument("--max-num-queued-tokens", **for_queues)
        model_group.add_argument(
            "--kv-cache-memory-bytes", **model_kwargs["kv_cache_memory_bytes"]
        )
        model_group.add_argument("--load-format", **model_kwargs["load_format"])
        model_group.add_argument("--tokenizer-mode", **model_kwargs["tokenizer_mode"])
        model_group.add_argument("--attention-backend", **model_kwargs["attention"])
        model_group.add_argument("--old-way", type=str, help=_GONE)
        model_group.add_argument("--hf-token", type=str, nargs="?", const=True)
        parallel_kwargs = get_kwargs(ParallelConfig)
        parallel_kwargs["backend"]["choices"].remove(ODD)
        group = parser.add_argument_group(title="ParallelConfig")
        group.add_argument(
            "--tensor-parallel-size", "-tp", **parallel_kwargs["tensor_parallel_size"]
        )
        group.add_argument("--ids", **parallel_kwargs["ids"])
        group.add_argument("--pair", **parallel_kwargs["pair"])
        group.add_argument("--backend", **{**parallel_kwargs["backend"], "default": None})
        kernel_kwargs = get_kwargs(KernelConfig)
        kernel_group = parser.add_argument_group(title="KernelConfig")
        moe_backend_kwargs = kernel_kwargs["moe_backend"]
        moe_backend_kwargs["type"] = lambda s: s.lower().replace("-", "_")
        kernel_group.add_argument("--moe-backend", **moe_backend_kwargs)
        kernel_group.add_argument("--nested", **kernel_kwargs["nested"])
        kernel_group.add_argument("--shade", choices=get_args(Shade))
        kernel_group.add_argument("--device", choices=["cpu"] + ([sys.platform] if 1 else []))
        parser.add_argument("--disable-log-stats", action="store_true")
        return parser

class AsyncEngineArgs(EngineArgs):
    @staticmethod
    def add_cli_args(parser, async_args_only=False):
        load_general_plugins()
        if not async_args_only:
            parser = EngineArgs.add_cli_args(parser)
        parser.add_argument("--enable-log-requests", action=argparse.BooleanOptionalAction)
        current_platform.pre_register_and_update(parser)
        return parser
"""

CONFIG = """
from vllm.config.kernel import KernelConfig
from vllm.config.model import ModelConfig
from .parallel import ParallelConfig
def config(cls): return cls
"""

MODEL = """
from dataclasses import InitVar
from typing import TYPE_CHECKING, ClassVar, Literal
from pydantic import Field, SkipValidation
from vllm.config.utils import config
from vllm.backends import AttentionEnum
Quantization = Literal["fp8", "modelopt"]
Mode = Literal["auto", "hf"]

if TYPE_CHECKING:
    from vllm.loader import LoadFormats
else:
    LoadFormats = str

@config
class ModelConfig:
    counted: ClassVar[int] = 1
    seen: InitVar[bool] = False
    model: str = "Qwen/Qwen3-0.6B"
    quantization: Quantization | str | None = None
    max_model_len: int = Field(default=None, gt=0)
    max_num_queued_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    load_format: str | LoadFormats = "auto"
    tokenizer_mode: Mode | str = "auto"
    attention: AttentionEnum | None = None

    def before(cls, value):
        return AttentionEnum[value.upper()]
"""

BACKENDS = """
class AttentionEnum(Enum):
    FLASH_ATTN = "a.b"
    TRITON_ATTN = "c.d"
    def path(self): ...
"""

PARALLEL = """
from typing import Literal, Optional
from vllm.config.utils import config
Backend = Literal["mp", "ray", "odd"]

@config
class ParallelConfig:
    tensor_parallel_size: int = 1
    ids: list[int] | None = None
    pair: tuple[int, int] = (1, 2)
    backend: Optional[Backend] = None
"""

KERNEL = """
from typing import Literal
from vllm.config.utils import config
MoEBackend = Literal["auto", "marlin", "flashinfer_b12x"]
Shade = Literal["dark", "light"]

@config
class Inner:
    level: int = 1
    again: Inner | None = None

@config
class Nested(Inner):
    depth: int = 1
    shade: Shade | None = None
    inner: Inner = Field(default_factory=Inner)
    counted: ClassVar[int] = 1
    computed: int = Field(default=1, init=False)

@config
class KernelConfig:
    moe_backend: MoEBackend = "auto"
    nested: Nested | None = None
"""

ENVS = """
environment_variables = {
    "VLLM_HOST_IP": lambda: None,
    "VLLM_NVFP4_GEMM_BACKEND": env_with_choices("VLLM_NVFP4_GEMM_BACKEND", None, ["marlin"]),
}
"""

PARSERS = """
{table} = {{
    "{name}": ("file", "Class"),
    "qwen3": ("file", "Class"),
}}
"""

#: Newer releases pair ``--enable-x`` with ``--disable-x``.
ARGPARSE_UTILS = """
from argparse import BooleanOptionalAction
class EnableDisableAction(BooleanOptionalAction):
    _inverse_prefixes = {"--enable-": "--disable-", "--disable-": "--enable-"}
"""


def files(changed: Mapping[str, str] | None = None) -> dict[str, bytes]:
    """The files of the release; ``changed`` are texts of modules in place of ours."""
    texts = {
        "vllm/entrypoints/cli/serve.py": SERVE,
        "vllm/entrypoints/openai/cli_args.py": CLI_ARGS,
        "vllm/engine/arg_utils.py": ARG_UTILS,
        "vllm/config/__init__.py": CONFIG,
        "vllm/config/model.py": MODEL,
        "vllm/config/parallel.py": PARALLEL,
        "vllm/config/kernel.py": KERNEL,
        "vllm/envs.py": ENVS,
        "vllm/backends.py": BACKENDS,
        "vllm/loader.py": 'from typing import Literal\nLoadFormats = Literal["auto", "dummy"]\n',
        "vllm/reasoning/__init__.py": PARSERS.format(
            table="_REASONING_PARSERS_TO_REGISTER", name="nemotron_v3"
        ),
        "vllm/tool_parsers/__init__.py": PARSERS.format(
            table="_TOOL_PARSERS_TO_REGISTER", name="qwen3_coder"
        ),
    }
    texts |= {f"vllm/{name}.py": text for name, text in (changed or {}).items()}
    return {path: text.encode() for path, text in texts.items()}


class Files:
    """A tree of these files."""

    def __init__(self, held: Mapping[str, bytes]) -> None:
        self._held = held

    def read(self, path: str) -> bytes | None:
        return self._held.get(path)

    def digest(self, path: str) -> str | None:
        return sha256_hex(self._held[path]) if path in self._held else None

    def children(self, directory: str) -> list[str]:
        inside = (p.removeprefix(f"{directory}/") for p in self._held if p.startswith(directory))
        return sorted({path.split("/")[0] for path in inside})
