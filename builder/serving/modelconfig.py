"""Reads the KV cache and the experts of a model from a checkpoint's ``config.json``.

If a value is missing, `Unknown` has the reason.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from builder.common.hints import reason
from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

CONFIG = "config.json"
#: ModelOpt's own file beside it.  Some checkpoints name the dtype of their KV cache here alone
#: (sglang #27906); vLLM reads it only if config.json has no quantization_config
#: (vllm/transformers_utils/config.py), so such a dtype needs --kv-cache-dtype.
QUANT_CONFIG = "hf_quant_config.json"
#: Tokens of one step, vLLM's default for a server on a GPU of this size (EngineArgs of 0.17 to
#: 0.33); layers with a sliding window keep these besides the window (vLLM's SlidingWindowSpec).
BATCHED_TOKENS = 8192
#: Kinds of layers by letters of Nemotron's ``hybrid_override_pattern`` and names in ``layer_types``
#: and ``layers_block_type``.
FULL, SLIDING, RECURRENT, NOTHING = "full", "sliding", "recurrent", "nothing"
_LETTERS = {"*": FULL, "M": RECURRENT, "-": NOTHING, "E": NOTHING}
_NAMES = {
    "full_attention": FULL, "attention": FULL, "sliding_attention": SLIDING,
    "linear_attention": RECURRENT, "mamba": RECURRENT, "mamba2": RECURRENT, "mlp": NOTHING,
    "moe": NOTHING,
}  # fmt: skip
#: Bytes of a value by the dtype of a config; "auto" of vLLM makes 16 bits of float32.
_MODEL_DTYPES = {"bfloat16": 2, "float16": 2, "float32": 2}
#: Values of ``--kv-cache-dtype`` that a GB10 supports, with bytes; nvfp4 needs SM100.
KV_DTYPES = {"bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}

#: Kinds of scaling that max_position_embeddings already includes (vllm/config/model.py).
_UNSCALED = ("su", "longrope", "llama3")

_Decoded = TypeVar("_Decoded", bound=msgspec.Struct)
_Size = Annotated[int, Meta(ge=0, le=2**32)]


class Unknown(Exception):
    """A value that does not follow from the config; the message is the reason."""


class _KvScheme(msgspec.Struct, frozen=True):
    num_bits: int | None = None
    type: str | None = None


class _Quantization(msgspec.Struct, frozen=True):
    kv_cache_scheme: _KvScheme | None = None
    kv_cache_quant_algo: str | None = None


class _QuantFile(msgspec.Struct, frozen=True):
    """The part of ``hf_quant_config.json`` that is used."""

    quantization: _Quantization | None = None


class _Scaling(msgspec.Struct, frozen=True):
    """How positions are scaled."""

    factor: float | None = None
    rope_type: str | None = None
    type: str | None = None
    original_max_position_embeddings: _Size | None = None

    def longest(self, positions: int) -> float:
        """The longest context that vLLM derives from a number of positions."""
        if (self.rope_type or self.type) in _UNSCALED:
            return positions
        return (self.original_max_position_embeddings or positions) * (self.factor or 1.0)


class _Rope(_Scaling, frozen=True):
    """The same; some models set it for each kind of layer."""

    full_attention: _Scaling | None = None
    sliding_attention: _Scaling | None = None

    def each(self) -> Iterator[_Scaling]:
        """All that is said of it."""
        yield self
        yield from filter(None, (self.full_attention, self.sliding_attention))


class ModelConfig(msgspec.Struct, frozen=True):
    """The keys of ``config.json`` that are used; all others are ignored."""

    num_hidden_layers: _Size | None = None
    hidden_size: _Size | None = None
    num_attention_heads: _Size | None = None
    num_key_value_heads: _Size | list[_Size | None] | None = None
    num_global_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    attention_head_dim: _Size | None = None
    global_head_dim: _Size | None = None
    kv_lora_rank: _Size | None = None
    qk_rope_head_dim: _Size | None = None
    index_topk: _Size | None = None
    sliding_window: _Size | None = None
    layer_types: list[str] | None = None
    layers_block_type: list[str] | None = None
    hybrid_override_pattern: str | None = None
    full_attention_interval: _Size | None = None
    mamba_num_heads: _Size | None = None
    mamba_n_heads: _Size | None = None
    mamba_d_state: _Size | None = None
    ssm_state_size: _Size | None = None
    linear_num_value_heads: _Size | None = None
    attn_layer_period: _Size | None = None
    mamba_head_dim: _Size | None = None
    n_groups: _Size | None = None
    conv_kernel: _Size | None = None
    linear_num_key_heads: _Size | None = None
    linear_key_head_dim: _Size | None = None
    linear_value_head_dim: _Size | None = None
    linear_conv_kernel_dim: _Size | None = None
    num_experts: _Size | None = None
    n_routed_experts: _Size | None = None
    num_local_experts: _Size | None = None
    num_experts_per_tok: _Size | None = None
    experts_per_token: _Size | None = None
    top_k_experts: _Size | None = None
    max_position_embeddings: _Size | None = None
    model_max_length: float | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    architectures: list[str] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: _Quantization | None = None
    #: of ``hf_quant_config.json``
    hf_quant_config: _Quantization | None = None
    text_config: ModelConfig | None = None
    llm_config: ModelConfig | None = None

    @property
    def text(self) -> ModelConfig:
        """The language model's part of the config."""
        return self.text_config or self.llm_config or self

    @property
    def longest(self) -> int | None:
        """Tokens beyond which vLLM refuses a context (vllm/config/model.py); None: unknown.

        If several keys have a value, this is the largest.
        """
        text = self.text
        if not text.max_position_embeddings:
            return None
        ropes = filter(None, (text.rope_scaling, text.rope_parameters))
        lengths = [s.longest(text.max_position_embeddings) for r in ropes for s in r.each()]
        most = max(text.max_position_embeddings, text.model_max_length or 0, *lengths)
        return int(min(most, 2**32))

    @property
    def experts(self) -> int:
        """Routed experts of a layer; 0 of a dense model."""
        text = self.text
        return text.num_experts or text.n_routed_experts or text.num_local_experts or 0

    @property
    def recurrent(self) -> bool | None:
        """Whether it has layers of Mamba or linear attention; None: unknown."""
        try:
            return RECURRENT in _layer_kinds(self.text)
        except Unknown:
            return None

    def routed_experts(self) -> tuple[int, int]:
        """Routed experts that a token uses, and that a layer has; ``(1, 1)`` of a dense model.

        Raises:
            Unknown: the config has experts, and does not say how many a token uses.
        """
        text = self.text
        total = self.experts
        used = text.num_experts_per_tok or text.experts_per_token or text.top_k_experts
        if not total:
            return 1, 1
        if not used or used > total:
            raise Unknown(f"{CONFIG} does not give the number of experts per token, of {total}")
        return used, total


class KvNeed(NamedTuple):
    """The KV cache of one sequence."""

    dtype: str
    source: str
    #: of all attention layers that store the whole context
    bytes_per_token: int
    bytes: int
    #: attention layers: with the whole context, with a window
    full: int
    sliding: int
    #: layers whose state does not grow with the context
    recurrent: int
    #: of all these layers
    state: int


def read_config(folder: Path) -> ModelConfig | None:
    """The ``config.json`` of a checkpoint, with ``hf_quant_config.json``; None without the first.

    Raises:
        UsageError: one of them is malformed; the message says where.
    """
    if not (folder / CONFIG).exists():
        return None
    config = _decoded(folder / CONFIG, ModelConfig)
    beside = folder / QUANT_CONFIG
    quant = _decoded(beside, _QuantFile).quantization if beside.exists() else None
    return msgspec.structs.replace(config, hf_quant_config=quant)


def _decoded(path: Path, kind: type[_Decoded]) -> _Decoded:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read: {reason(error)}") from None


def kv_dtype_beside(config: ModelConfig) -> str:
    """The dtype of the KV cache that ``hf_quant_config.json`` alone names; empty if there is none.

    vLLM does not take it by itself: it needs ``--kv-cache-dtype``.
    """
    quantized = config.quantization_config or config.text.quantization_config
    said = quantized is not None and (quantized.kv_cache_scheme or quantized.kv_cache_quant_algo)
    beside = config.hf_quant_config
    return "fp8" if not said and beside is not None and _fp8_cache(beside) else ""


def _fp8_cache(quantized: _Quantization) -> bool:
    scheme = quantized.kv_cache_scheme
    fp8 = scheme is not None and (scheme.num_bits, scheme.type) == (8, "float")
    return fp8 or (quantized.kv_cache_quant_algo or "").upper() == "FP8"


def kv_need(config: ModelConfig, dtype: str, context: int) -> KvNeed:
    """The KV cache of a sequence of this many tokens.

    Raises:
        Unknown: a value is missing from the config; the message names it.
    """
    text = config.text
    kinds = Counter(_layer_kinds(text))
    name, size, source = _dtype(config, dtype)
    full = kinds[FULL] * _values(text, whole=True) * size
    windows = 0
    if kinds[SLIDING]:
        if not text.sliding_window:
            raise Unknown(f"{CONFIG} has layers with a sliding window, and no sliding_window")
        positions = min(context, text.sliding_window - 1 + BATCHED_TOKENS)
        windows = kinds[SLIDING] * _values(text, whole=False) * size * positions
    state = _state(text) if kinds[RECURRENT] else 0
    # vLLM makes an attention block as large as a state, so each such layer may waste one
    fixed = state * (kinds[RECURRENT] + kinds[FULL])
    return KvNeed(
        dtype=name, source=source, bytes_per_token=full, bytes=full * context + windows + fixed,
        full=kinds[FULL], sliding=kinds[SLIDING], recurrent=kinds[RECURRENT],
        state=state * kinds[RECURRENT],
    )  # fmt: skip


def _layer_kinds(text: ModelConfig) -> list[str]:
    """What each layer stores of a sequence."""
    count = text.num_hidden_layers
    if not count:
        raise Unknown(f"{CONFIG} has no num_hidden_layers")
    if text.hybrid_override_pattern:
        return _known(text.hybrid_override_pattern, _LETTERS, "hybrid_override_pattern", count)
    if names := text.layer_types or text.layers_block_type:
        return _known(names, _NAMES, "its list of layers", count)
    if every := text.full_attention_interval:
        return [FULL if number % every == 0 else RECURRENT for number in range(1, count + 1)]
    if (
        text.mamba_num_heads or text.mamba_n_heads or text.mamba_d_state or text.ssm_state_size
        or text.linear_num_value_heads or text.attn_layer_period
    ):  # fmt: skip
        raise Unknown(f"{CONFIG} does not list which layers of this hybrid model are attention")
    return [FULL] * count


def _known(names: Iterable[str], table: dict[str, str], what: str, count: int) -> list[str]:
    found = list(names)
    strange = sorted(set(found) - set(table))
    if strange:
        raise Unknown(f"{what} in {CONFIG} has {strange[0]!r}, which is not supported")
    if len(found) != count:
        raise Unknown(f"{what} in {CONFIG} has {len(found)} layers, num_hidden_layers is {count}")
    return [table[name] for name in found]


def _values(text: ModelConfig, *, whole: bool) -> int:
    """The number of values that one layer stores for one token."""
    if text.index_topk:
        raise Unknown("the KV cache of sparse attention (index_topk) is not supported")
    if text.kv_lora_rank:
        if text.qk_rope_head_dim is None:
            raise Unknown(f"{CONFIG} has kv_lora_rank, and no qk_rope_head_dim")
        return text.kv_lora_rank + text.qk_rope_head_dim
    heads: object = text.num_key_value_heads
    width = text.head_dim or text.attention_head_dim
    if not width and text.hidden_size and text.num_attention_heads:
        width = text.hidden_size // text.num_attention_heads
    if whole:  # Gemma 4: layers with the whole context have heads of their own
        heads = text.num_global_key_value_heads or heads
        width = text.global_head_dim or width
    if not isinstance(heads, int) or not heads:
        raise Unknown(f"{CONFIG} has no single num_key_value_heads")
    if not width:
        raise Unknown(f"{CONFIG} has no head_dim")
    return 2 * heads * width


def _state(text: ModelConfig) -> int:
    """Bytes that one layer stores of a sequence of any length, with its state in float32.

    The shapes are those of vLLM's MambaStateShapeCalculator: Mamba 2, and gated delta nets.
    """
    if text.linear_num_value_heads:
        heads, groups = text.linear_num_value_heads, text.linear_num_key_heads
        width, depth = text.linear_value_head_dim, text.linear_key_head_dim
        kernel = text.linear_conv_kernel_dim
    else:
        heads, groups = text.mamba_num_heads or 0, text.n_groups
        width, depth = text.mamba_head_dim, text.ssm_state_size
        kernel = text.conv_kernel
    if not (heads and width and depth and groups and kernel):
        raise Unknown(
            f"{CONFIG} does not give the state size of its Mamba or linear-attention layers"
        )
    return heads * width * depth * 4 + (heads * width + 2 * groups * depth) * (kernel - 1) * 2


def _dtype(config: ModelConfig, chosen: str) -> tuple[str, int, str]:
    """Name and bytes of the KV cache's dtype, and the source."""
    if chosen in KV_DTYPES:
        return chosen, KV_DTYPES[chosen], "--kv-cache-dtype"
    quantized = config.quantization_config or config.text.quantization_config
    if quantized is not None and _fp8_cache(quantized):
        return "fp8", 1, f"quantization_config in {CONFIG}"
    if kv_dtype_beside(config):
        return "fp8", 1, f"kv_cache_quant_algo in {QUANT_CONFIG}; vLLM needs --kv-cache-dtype fp8"
    text = config.text
    name = text.dtype or text.torch_dtype or config.dtype or config.torch_dtype
    if name not in _MODEL_DTYPES:
        raise Unknown(f"{CONFIG} does not say the dtype of the model ({name!r})")
    return name, _MODEL_DTYPES[name], f"dtype in {CONFIG}"
