"""Lists the tensors of a checkpoint, from the headers of its safetensors files alone.

A file is the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and
``data_offsets`` of each tensor, and ``__metadata__``), then the data, without a gap
(https://github.com/huggingface/safetensors, "Format").  No data is read.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
from msgspec import Meta

from builder.common.hints import reason
from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The longest header that the safetensors library reads (its MAX_HEADER_SIZE).
MAX_HEADER = 100_000_000
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


def means_a_path(subject: str) -> bool:
    """Whether a user means a file or folder, which may not exist, and not a model by its name."""
    return Path(subject).exists() or subject.startswith((".", "/", "~"))


def checkpoint_tensors(folder: Path) -> list[Tensor]:
    """All tensors of a folder, from the headers of the files that vLLM would load.

    Raises:
        UsageError: there are none, one is missing, or one is malformed.
    """
    found: dict[str, Tensor] = {}
    for path in _files(folder):
        for tensor in read_header(path):
            if tensor.name in found:
                raise UsageError(f"{path}: tensor {tensor.name[:200]!r} is in another file too")
            found[tensor.name] = tensor
    return list(found.values())


def _files(folder: Path) -> list[Path]:
    """The files that the index lists; without an index, all files.

    Raises:
        UsageError: there are none, or one of them is missing.
    """
    index = folder / INDEX
    if not index.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise UsageError(
                f"{folder} contains no *.safetensors", hint="name the folder of a checkpoint"
            )
        return found
    try:
        named = sorted(
            set(msgspec.json.decode(index.read_bytes(), type=_WeightMap).weight_map.values())
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
        if not path.is_file():
            raise UsageError(f"{path} is not a file")
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            _refuse_length(path, size, len(prefix), length)
            header = file.read(length)
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
