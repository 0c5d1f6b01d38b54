"""A checkpoint's files: the headers of its safetensors files, and its ``config.json``.

No weights are read, and no code of a checkpoint runs.  A safetensors file is the length of its
header (8 bytes, little-endian), the header (JSON: dtype, shape and ``data_offsets`` of each tensor,
and ``__metadata__``), then the data, without a gap
(https://github.com/huggingface/safetensors, "Format").

If a value of ``config.json`` is missing, `Unknown` has the reason.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from builder.applier.files import DOCUMENT, open_regular, read_regular
from builder.common.hints import reason
from builder.errors import UsageError
from builder.probes.model_counts import too_many

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


#: The longest header that the safetensors library reads (its MAX_HEADER_SIZE).
MAX_HEADER = 100_000_000
#: Characters of a tensor's name; those of models have about 100.
_LONGEST_NAME = 1000
INDEX = "model.safetensors.index.json"
_METADATA = "__metadata__"
#: Bits of a value, by dtype; the size of newer dtypes is not checked.
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16,
    "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64,
}  # fmt: skip
EXPERTS, EMBEDDING, HEAD = "routed experts", "embedding", "output head"
VISION, DRAFT = "vision and audio", "draft layers"
#: Groups by the tensor names of vLLM's models; the first match counts.
_GROUPS = (
    (VISION, r"(^|\.)(visual|mlp1|(embed_)?(vision|audio)\w*|(mm_proj|multi_modal)\w*)\."),
    (DRAFT, r"(^|\.)(mtp|nextn)\w*\."),
    ("shared experts", r"shared_expert|shared_mlp"),
    ("router", r"\.(gate|router)(\.|$)"),
    (EXPERTS, r"\.experts(\.|_|$)"),
    (HEAD, r"(^|\.)lm_head\."),
    (EMBEDDING, r"(^|\.)(embed_tokens\w*|embeddings?|word_embeddings|wte)\."),
    ("norms", r"norm"),
    ("Mamba and linear attention", r"linear_attn|mamba"),
    ("attention", r"attn|attention|\.(q|k|v|o|qkv)_proj(\.|$)"),
    ("Mamba and linear attention", r"\.(in_proj\w*|out_proj|conv1d|A_log|dt_bias|D)(\.|$)"),
    ("feed-forward", r"mlp|feed_forward|ffn|(up|down|gate)_proj"),
)  # fmt: skip
_COMPILED = tuple((group, re.compile(pattern)) for group, pattern in _GROUPS)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

_Size = Annotated[int, Meta(ge=0)]


class _Entry(msgspec.Struct, frozen=True):
    """A tensor as a header describes it."""

    dtype: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_]{1,32}$(?!\n)")]
    shape: list[_Size]
    data_offsets: tuple[_Size, _Size]


class Tensor(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    dtype: str
    bytes: int


class _WeightMap(msgspec.Struct, frozen=True):
    """The part of the index that lists the files."""

    weight_map: dict[str, str]


def group_of(name: str, layers: int | None) -> str:
    """The kind of layer of a tensor; layers after the model's last one are draft layers."""
    number = _LAYER.search(name)
    for group, pattern in _COMPILED:
        if pattern.search(name):
            late = number and layers is not None and int(number[1]) >= layers
            return DRAFT if late and group != VISION else group
    return "other"


def refuse_name(where: str, name: str) -> None:
    """Refuse a name of a tensor that is no line of text.

    Raises:
        UsageError: it is long, or has control characters.
    """
    if len(name) > _LONGEST_NAME or not name.isprintable():
        raise UsageError(
            f"{where}: a tensor's name of {len(name)} characters is not printable or is too long: "
            f"{name[:80]!r}"
        )


def means_a_path(subject: str) -> bool:
    """Whether a user means a file or folder, which may not exist, and not a model by its name."""
    return Path(subject).exists() or subject.startswith((".", "/", "~"))


_GGUF = re.compile(r"(?i)[.-]gguf(?::[\w.-]+)?$")


def refuse_gguf(subject: str) -> None:
    """Raise if a user means a checkpoint in the format of llama.cpp.

    Raises:
        UsageError: it is in GGUF, or a folder of such files without a configuration.
    """
    folder = Path(subject)
    if folder.is_dir():
        is_gguf = not (folder / CONFIG).exists() and any(folder.glob("*.gguf"))
    else:
        is_gguf = _GGUF.search(subject) is not None
    if is_gguf:
        raise UsageError(
            f"{subject} is in GGUF, the format of llama.cpp; only safetensors files are read",
            hint="name the model's checkpoint in safetensors, or one of: spark-build models list",
        )


def checkpoint_tensors(folder: Path) -> list[Tensor]:
    """All tensors of a folder, from the headers of the files that vLLM would load.

    Raises:
        UsageError: there are none, one is missing, or one is malformed.
    """
    tensors: dict[str, Tensor] = {}
    for path in _files(folder):
        for tensor in read_header(path):
            if tensor.name in tensors:
                raise UsageError(f"{path}: tensor {tensor.name[:200]!r} is in another file too")
            tensors[tensor.name] = tensor
    return list(tensors.values())


def _files(folder: Path) -> list[Path]:
    """The files that the index lists; without an index, all files.

    Raises:
        UsageError: there are none, or one of them is missing.
    """
    index = folder / INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UsageError(
                f"{folder} contains no *.safetensors", hint="name the folder of a checkpoint"
            )
        return files
    try:
        named = sorted(
            set(
                msgspec.json.decode(
                    read_regular(index, DOCUMENT), type=_WeightMap
                ).weight_map.values()
            )
        )
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{index}: cannot be read: {reason(error)}") from None
    outside = [name for name in named if "/" in name or name in ("", "..")]
    if outside or not named:
        raise UsageError(
            f"{index}: names no file of this folder: {outside[0] if outside else ''!r}"
        )
    missing = [name for name in named if not (folder / name).is_file()]
    if missing:
        raise UsageError(
            f"{folder} lacks {len(missing)} of {len(named)} files of {INDEX}: {missing[0]!r}",
            hint="download the checkpoint again: hf download ID",
        )
    return [folder / name for name in named]


def read_header(path: Path) -> list[Tensor]:
    """The tensors of one file.

    Raises:
        UsageError: it is malformed; the message says where.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            _refuse_length(path, size, len(prefix), length)
            header = file.read(length)
    except IsADirectoryError:
        raise UsageError(f"{path} is not a file") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    if len(header) < length:
        raise _truncated(path, f"{len(header)} of {length} bytes of header")
    entries = _entries(path, header)
    _refuse_offsets(path, entries, size - 8 - length)
    return [
        Tensor(name, entry.dtype, entry.data_offsets[1] - entry.data_offsets[0])
        for name, entry in entries.items()
    ]


def _refuse_length(path: Path, size: int, prefix: int, length: int) -> None:
    if prefix < 8:
        raise _truncated(path, f"{size} bytes, less than the length of a header")
    if length > MAX_HEADER:
        raise UsageError(
            f"{path} is not a safetensors file: its header would have {length} bytes, and the "
            f"format allows {MAX_HEADER}"
        )
    if length > size - 8:
        raise _truncated(path, f"the header has {length} bytes, the file {size}")


def _truncated(path: Path, evidence: str) -> UsageError:
    return UsageError(f"{path} is truncated: {evidence}", hint="download the file again")


def _entries(path: Path, header: bytes) -> dict[str, _Entry]:
    name = ""
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries = {}
        for name, value in raw.items():
            if name != _METADATA:
                refuse_name(str(path), name)
                entries[name] = msgspec.json.decode(value, type=_Entry)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        where = f" of tensor {name[:200]!r}" if name else ""
        raise UsageError(f"{path}: bad header{where}: {reason(error)}") from None
    return entries


def _refuse_offsets(path: Path, entries: dict[str, _Entry], data: int) -> None:
    """Refuse tensors that overlap, leave a gap, or have a size other than their shape's."""
    reached = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if begin != reached or end < begin:
            raise UsageError(
                f"{path}: tensor {name[:200]!r} has data_offsets [{begin}, {end}], "
                f"and the data before it ends at {reached}"
            )
        if entry.dtype in _BITS and _bits(entry) != (end - begin) * 8:
            raise UsageError(
                f"{path}: tensor {name[:200]!r} has {end - begin} bytes; {entry.dtype} of shape "
                f"{entry.shape[:8]} has another size"
            )
        reached = end
    if reached > data:
        raise _truncated(
            path, f"its tensors have {reached} bytes, the file {data} after the header"
        )
    if reached < data:
        raise UsageError(
            f"{path}: {data - reached} bytes after the last tensor belong to no tensor"
        )


def _bits(entry: _Entry) -> int:
    # a hostile shape is long: its product would take minutes
    if len(entry.shape) > 16:
        return -1
    return math.prod(entry.shape) * _BITS[entry.dtype]


def rows(tensors: list[Tensor], layers: int | None) -> Iterator[tuple[str, str, int, int]]:
    """Kind of layer, dtype, number of tensors and bytes; the most bytes first."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for tensor in tensors:
        key = (group_of(tensor.name, layers), tensor.dtype)
        number, size = sums.get(key, (0, 0))
        sums[key] = (number + 1, size + tensor.bytes)
    for (group, dtype), (number, size) in sorted(
        sums.items(), key=lambda one: (-one[1][1], one[0])
    ):
        yield group, dtype, number, size


CONFIG = "config.json"
#: ModelOpt's own file beside it.  Some checkpoints name the dtype of their KV cache here alone
#: (sglang #27906); vLLM reads it only if config.json has no quantization_config
#: (vllm/transformers_utils/config.py), so such a dtype needs --kv-cache-dtype.
QUANT_CONFIG = "hf_quant_config.json"
#: Tokens of one step that layers with a sliding window keep besides the window (vLLM's
#: SlidingWindowSpec).  On a GB10 vLLM takes 2,048 by itself, and then fills up groups of layers:
#: with 8,192 the sum is 1.06 to 1.32 times what 0.33.0 needs (gpt-oss, Gemma 4; 8K and 64K).
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
_Count = Annotated[int, Meta(ge=0, le=2**32)]


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
    original_max_position_embeddings: _Count | None = None

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

    num_hidden_layers: _Count | None = None
    hidden_size: _Count | None = None
    num_attention_heads: _Count | None = None
    num_key_value_heads: _Count | list[_Count | None] | None = None
    num_global_key_value_heads: _Count | None = None
    head_dim: _Count | None = None
    attention_head_dim: _Count | None = None
    global_head_dim: _Count | None = None
    kv_lora_rank: _Count | None = None
    qk_rope_head_dim: _Count | None = None
    index_topk: _Count | None = None
    sliding_window: _Count | None = None
    layer_types: list[str] | None = None
    layers_block_type: list[str] | None = None
    hybrid_override_pattern: str | None = None
    full_attention_interval: _Count | None = None
    mamba_num_heads: _Count | None = None
    mamba_n_heads: _Count | None = None
    mamba_d_state: _Count | None = None
    ssm_state_size: _Count | None = None
    linear_num_value_heads: _Count | None = None
    attn_layer_period: _Count | None = None
    mamba_head_dim: _Count | None = None
    n_groups: _Count | None = None
    conv_kernel: _Count | None = None
    linear_num_key_heads: _Count | None = None
    linear_key_head_dim: _Count | None = None
    linear_value_head_dim: _Count | None = None
    linear_conv_kernel_dim: _Count | None = None
    num_experts: _Count | None = None
    n_routed_experts: _Count | None = None
    num_local_experts: _Count | None = None
    num_experts_per_tok: _Count | None = None
    experts_per_token: _Count | None = None
    top_k_experts: _Count | None = None
    max_position_embeddings: _Count | None = None
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


def decoded_config(raw: Mapping[str, Any]) -> ModelConfig:
    """A configuration that a model's file has.

    Raises:
        UsageError: it is malformed; the message says where.
    """
    where = "the configuration in the model's file"
    if why := too_many(raw):
        raise UsageError(f"{where}: {why}")
    try:
        return msgspec.convert(raw, ModelConfig)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {error}") from None


def _decoded(path: Path, kind: type[_Decoded]) -> _Decoded:
    """A JSON file, read as Transformers reads it: Nemotron's has ``Infinity``."""
    try:
        raw = json.loads(read_regular(path, DOCUMENT))
        if why := too_many(raw):
            raise UsageError(f"{path}: {why}")
        return msgspec.convert(raw, kind)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read: {reason(error)}") from None


def kv_dtype_beside(config: ModelConfig) -> str:
    """The dtype of the KV cache that ``hf_quant_config.json`` alone names; empty if there is none.

    vLLM does not take it by itself: it needs ``--kv-cache-dtype``.
    """
    quantized = config.quantization_config or config.text.quantization_config
    is_stated = quantized is not None and (
        quantized.kv_cache_scheme or quantized.kv_cache_quant_algo
    )
    beside = config.hf_quant_config
    return "fp8" if not is_stated and beside is not None and _fp8_cache(beside) else ""


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
    kinds = list(names)
    strange = sorted(set(kinds) - set(table))
    if strange:
        raise Unknown(f"{what} in {CONFIG} has {strange[0]!r}, which is not supported")
    if len(kinds) != count:
        raise Unknown(f"{what} in {CONFIG} has {len(kinds)} layers, num_hidden_layers is {count}")
    return [table[name] for name in kinds]


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
