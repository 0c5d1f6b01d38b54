"""Writes a model's file from its checkpoint: ``config.json``, ``hf_quant_config.json``, headers.

What people measured is not in a checkpoint: it is written by hand, with its source.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from builder.applier.files import read_regular
from builder.common.console import console
from builder.common.files import write_atomically
from builder.common.hints import again
from builder.errors import UsageError
from builder.proof.hub import hub_checkpoint
from builder.proof.wholemodel import is_path
from builder.serving.audit import checkpoint_modules
from builder.serving.checkpoint import (
    CONFIG,
    QUANT_CONFIG,
    Tensor,
    checkpoint_tensors,
    kv_dtype_beside,
    read_config,
    refuse_name,
)
from builder.serving.models import Activation, LayerKind, Model, Models

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from builder.serving.checkpoint import ModelConfig

_KINDS: tuple[str, ...] = get_args(LayerKind)
_MOST_BYTES = 64 << 20
_BARE = re.compile(r"[A-Za-z0-9_-]+")
#: The longest value of a key, in characters, that stays in one line.
_LINE = 90
#: A model's file is one table; a checkpoint that needs more nested ones is none.
_DEEPEST = 8
#: ``quant_algo`` of ModelOpt, and ``quant_method`` of others -> the start of a kind of layer.
_ALGORITHMS = {
    "NVFP4": "nvfp4", "W4A16_NVFP4": "w4a16", "NVFP4_AWQ": "nvfp4", "FP8": "fp8", "MXFP4": "mxfp4",
    "MXFP8": "mxfp8",
}  # fmt: skip
#: ``quant_method`` of checkpoints with 4-bit integers, which ``bits`` may contradict.
_INT4 = frozenset({"awq", "gptq", "auto-round", "autoround"})
#: The start of ``format`` of compressed-tensors -> the start of a kind of layer.
_FORMATS = {
    "nvfp4": "nvfp4", "float": "fp8", "naive": "fp8", "mxfp4": "mxfp4", "pack-quantized": "int4",
}  # fmt: skip
#: The activation of experts as Transformers names it -> vLLM's name.
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "relu2": "relu2", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AddedModel:
    """The file of a model."""

    file: Path
    text: str
    model: Model


def added_model(
    subject: str, id_: str | None, models: Path, *, force: bool, dry_run: bool
) -> AddedModel:
    """Write the file of a checkpoint, a folder or an id on Hugging Face, to a folder of models.

    Raises:
        UsageError: it is no checkpoint, or its file exists and ``force`` is not set.
        RemoteError: Hugging Face does not give it.
    """
    if is_path(subject):
        if id_ is None:
            raise UsageError(f"{subject} needs a name", hint=again("--id", "ME/NAME"))
        folder, tensors = Path(subject), None
    else:
        checkpoint = hub_checkpoint(subject, headers=True)
        folder, tensors = checkpoint.folder, [Tensor(*one) for one in checkpoint.tensors]
        for tensor in tensors:
            refuse_name(subject, tensor.name)
        id_ = id_ or subject
        if checkpoint.without_headers:
            console.warn(
                f"the headers of {subject} were not read, so the bytes of its weights are not "
                f"known: {checkpoint.without_headers}"
            )
            tensors = None
    name = Models({}).model_or_generic(id_).name
    text = model_text(folder, id_, tensors)
    file = models / f"{name}.toml"
    if not dry_run:
        _write(file, text, force=force)
    return AddedModel(file=file, text=text, model=model_of(text, name))


def _write(file: Path, text: str, *, force: bool) -> None:
    """Write a model's file.

    Raises:
        UsageError: it exists and is not to be replaced, or it cannot be written.
    """
    if file.exists() and not force:
        raise UsageError(
            f"{file} exists, perhaps with what people measured; --force replaces it",
            hint=again("--dry-run"),
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text.encode())
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None


def model_text(folder: Path, id_: str, tensors: list[Tensor] | None = None) -> str:
    """The file of a model, as TOML; without ``tensors``, those of the folder count.

    Raises:
        UsageError: the folder has no ``config.json``, or one of its files is malformed.
    """
    raw = _raw(folder / CONFIG)
    config = read_config(folder)
    assert config is not None
    beside = folder / QUANT_CONFIG
    quantised = _raw(beside).get("quantization") if beside.exists() else None
    if tensors is None:
        tensors = checkpoint_tensors(folder) if any(folder.glob("*.safetensors")) else []
    tables = [
        _table("[id]", id_, "the name that it was added with"),
        *_weights(raw, config, quantised, tensors),
        *_figures(raw, config),
    ]
    embedded = dict(raw)
    if quantised and not embedded.get("quantization_config"):
        # vLLM reads the file beside it only then (vllm/transformers_utils/config.py)
        embedded["quantization_config"] = {"quant_method": "modelopt", **quantised}
    written = "".join(_lines(embedded, "config.value"))
    tables.append(f'[config]\nsource = "{CONFIG} of the checkpoint"\n{written}')
    architecture = " ".join(str(one) for one in raw.get("architectures") or ["unknown"])
    summary = f"summary = {json.dumps(f'{architecture}, from its checkpoint')}\n"
    text = "\n".join([summary, *tables])
    model_of(text, "x")
    return text


def _raw(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint.

    Raises:
        UsageError: it is none, or it cannot be read.
    """
    try:
        value = json.loads(read_regular(path, _MOST_BYTES))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a JSON object")
    return value


def model_of(text: str, name: str) -> Model:
    """The model of such a file.

    Raises:
        UsageError: a value of the checkpoint has another form than a model's file.
    """
    try:
        return msgspec.convert({**tomllib.loads(text), "name": name}, Model)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{CONFIG} cannot be written as a model's file: {error}") from None


def _table(head: str, value: object, source: str) -> str:
    return f"{head}\nvalue = {_value(value)}\nsource = {json.dumps(source)}\n"


def _weights(
    raw: Mapping[str, Any], config: ModelConfig, quantised: Any, tensors: list[Tensor]
) -> Iterator[str]:
    """The kinds of layers and the bytes of the weights."""
    if tensors:
        modules = checkpoint_modules(tensors, config.text.num_hidden_layers)
        kinds = {module.method for module in modules} & {*_KINDS}
        source = "headers of the safetensors files"
        yield _table("[weight-bytes]", sum(tensor.bytes for tensor in tensors), source)
    else:
        own = raw.get("quantization_config") or quantised or {}
        kinds = set(_kinds_of(own if isinstance(own, dict) else {}, bool(config.experts)))
        source = f"quantisation in {CONFIG} or {QUANT_CONFIG}"
    if len(kinds) > 1:  # embeddings and norms of a quantised model, too, are unquantised
        kinds.discard("unquantized")
    for kind in sorted(kinds):
        yield f'[[holds]]\nkind = "{kind}"\nsource = "{source}"\n'


def _kinds_of(own: Mapping[str, Any], experts: bool) -> Iterator[str]:
    """The kinds of layers that a quantisation names."""
    ends = ("linear", "moe") if experts else ("linear",)
    method = str(own.get("quant_method"))
    if not own:
        yield "unquantized"
    if method == "mxfp4":
        yield "mxfp4-moe"
    if method == "fp8":
        yield "fp8-block" if own.get("weight_block_size") else "fp8-linear"
    for start in sorted({*_algorithms(own, method)}):
        yield from (f"{start}-{end}" for end in ends if f"{start}-{end}" in _KINDS)


def _algorithms(own: Mapping[str, Any], method: str) -> Iterator[str]:
    """The starts of the kinds, by the algorithm of all layers or of each one."""
    if method in _INT4 and own.get("bits", 4) == 4:
        yield "int4"
    groups = own.get("config_groups")
    if method == "compressed-tensors" and isinstance(groups, dict):
        for group in (one for one in groups.values() if isinstance(one, dict)):
            form = str(group.get("format") or own.get("format"))
            weights = group.get("weights")
            bits = weights.get("num_bits") if isinstance(weights, dict) else None
            start = next((s for start, s in _FORMATS.items() if form.startswith(start)), "")
            if start and (start != "int4" or bits == 4):
                yield start
    layers = own.get("quantized_layers")
    algorithms = {str(own.get("quant_algo"))}
    if isinstance(layers, dict):
        algorithms |= {str(v.get("quant_algo")) for v in layers.values() if isinstance(v, dict)}
    yield from (_ALGORITHMS[one] for one in algorithms if one in _ALGORITHMS)


def _figures(raw: Mapping[str, Any], config: ModelConfig) -> Iterator[str]:
    """What ``config.json`` says besides."""
    inner = raw.get("text_config")
    text = inner if isinstance(inner, dict) else raw
    act = text.get("mlp_hidden_act") or text.get("hidden_act") or text.get("hidden_activation")
    if config.experts and str(act) in _ACTIVATIONS:
        yield _table("[experts]", _ACTIVATIONS[str(act)], f"{CONFIG} of the checkpoint")
    if config.longest:
        yield _table("[maximum-context]", config.longest, f"{CONFIG} of the checkpoint")
    if dtype := kv_dtype_beside(config):
        yield _table("[kv-cache-dtype]", dtype, f"{QUANT_CONFIG} of the checkpoint")


def _lines(table: Mapping[str, Any], head: str, depth: int = 0) -> Iterator[str]:
    """A table with its keys, one a line; TOML has no null, so such a key is left out.

    Raises:
        UsageError: it is nested too deep.
    """
    if depth > _DEEPEST:
        raise UsageError(f"{CONFIG} is nested too deep: {head}")
    yield f"\n[{head}]\n"
    large = {key: value for key, value in table.items() if _is_large(value)}
    for key, value in table.items():
        if value is not None and key not in large:
            yield f"{_key(key)} = {_value(value, depth + 1)}\n"
    for key, value in large.items():
        yield from _lines(value, f"{head}.{_key(key)}", depth + 1)


def _is_large(value: object) -> bool:
    """Whether a value gets a table of its own: one that does not fit into a line."""
    return isinstance(value, dict) and len(json.dumps(value)) > _LINE


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else json.dumps(key)


def _value(value: Any, depth: int = 0) -> str:  # noqa: PLR0911 - one a type
    """A value as TOML; a list of many has one a line.

    Raises:
        UsageError: it is nested too deep.
    """
    if depth > _DEEPEST:
        raise UsageError(f"{CONFIG} is nested too deep")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):  # JSON leaves DEL as it is
        return json.dumps(value).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        pairs = [f"{_key(k)} = {_value(v, depth + 1)}" for k, v in value.items() if v is not None]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        items = [_value(one, depth + 1) for one in value if one is not None]
        if len(items) <= 8:
            return f"[{', '.join(items)}]"
        return "[\n" + "".join(f"    {item},\n" for item in items) + "]"
    return repr(value)
