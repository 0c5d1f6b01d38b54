"""Configurations of known checkpoints, and the nearest one for a checkpoint that is not known.

A near one has the family and the size that the name says, in the quantisation that it says.  Else
it has another size, or is the next model of the family; what differs is said with it.

``builder/data/configurations.json`` has what decides of each published ``config.json``; a list of
modules is written with braces, ``layers.{3-5,8}.gate``.  The files of known models have others.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from builder.common.document import Part, Text
from builder.common.paths import package_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from builder.serving.models import Models

#: 4-bit weights of compressed-tensors.
GROUP: dict[str, Any] = {
    "weights": {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128,
    },
    "targets": ["Linear"],
}  # fmt: skip
#: The quantisations, as checkpoints state them.
FORMS: dict[str, dict[str, Any] | None] = {
    "BF16": None,
    "NVFP4": {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": "0.33"},
    },
    "FP8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "FP8 per tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    "MXFP4": {"quant_method": "mxfp4"},
    "MXFP8": {"quant_method": "modelopt_mxfp8", "quant_algo": "MXFP8", "group_size": 32,
              "ignore": ["lm_head"], "producer": {"name": "modelopt", "version": "0.41"}},
    "INT4 AutoRound": {
        "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True,
        "data_type": "int", "packing_format": "auto_round:auto_gptq",
    },
    "W4A16": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": GROUP},
    },
}  # fmt: skip
#: Linear layers of a block of Qwen's vision tower.
_TOWER = ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
#: What a name says -> the quantisation; the first that is found counts.
_SAYS = (
    ("autoround|auto-round", "INT4 AutoRound"), ("nvfp4|fp4", "NVFP4"), ("mxfp4", "MXFP4"),
    ("mxfp8", "MXFP8"), ("fp8-dynamic", "FP8 per tensor"), ("fp8", "FP8"), ("bf16|fp16", "BF16"),
    ("awq-4bit|w4a16|int4|gptq|4bit", "W4A16"), ("awq", "AWQ"),
)  # fmt: skip
#: What a name says that nothing here can make.
_NOT_MADE = re.compile(r"(?:^|[-_.])(gguf|exl[23]|int8\w*|w8a8|mlx|bnb|\d+(?:\.\d+)?bpw|reap)\b")
_SIZE = re.compile(r"\d+(?:\.\d+)?b|a\d+(?:\.\d+)?b")
#: Words of a name that change no shape.
_SAME_SHAPE = frozenset(
    ("nvidia", "instruct", "it", "thinking", "chat", "base", "hf", "local", "spark", "mtp", "sm121",
     "gb10", "dspark", "0731", "dynamic", "autoround", "auto", "round", "awq", "gptq", "4bit",
     "int4", "w4a16", "nvfp4", "fp4", "mxfp4", "mxfp8", "fp8", "bf16", "fp16", "code")
)  # fmt: skip
#: Words of a name that say another size, or parts that the others of the family do not have.
_OTHER_SHAPE = frozenset(
    ("flash", "pro", "nano", "super", "ultra", "mini", "lite", "small", "medium", "large", "air",
     "max", "next", "lightning", "vision", "vl", "omni", "embedding", "embed", "reranker", "asr",
     "ocr", "tts", "audio", "image", "reward", "draft", "eagle3", "dflash", "exp")
)  # fmt: skip
#: The letters of a word with their whole number where it is one letter: ``v4``, ``m2``, ``k2``.
_PARTS = re.compile(r"(?:\b[a-z]\d+|[a-z]+|(?<![.\d])\d+)")
_DATE = re.compile(r"\d{3,}")
_BRACES = re.compile(r"\{([\d,-]+)\}")


class Configuration(Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published configuration."""

    id: Text
    source: Text
    config: dict[str, Any]
    #: whether it is the checkpoint's own, and nothing that decides is missing
    whole: bool = True


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """The configuration that is nearest to a checkpoint's."""

    config: Mapping[str, Any]
    #: whose it is, and what was changed
    of: str
    #: whether it is the checkpoint's own
    own: bool
    #: whether it has the checkpoint's size, as far as the names say
    sized: bool = True
    #: what differs; empty: nothing, as far as the names say
    differs: str = ""

    @property
    def assumed(self) -> str:
        """What is assumed; empty for the checkpoint's own."""
        if self.own:
            return ""
        return f"the configuration of {self.of}" + (f" ({self.differs})" if self.differs else "")


@dataclass(frozen=True, kw_only=True)
class _Name:
    """What the name of a checkpoint says."""

    family: tuple[str, ...]
    sizes: tuple[str, ...]
    #: a key of ``FORMS``; empty: nothing
    form: str

    @classmethod
    def of(cls, id_: str) -> _Name:
        last = name_of(id_).lower()
        form = next((form for words, form in _SAYS if re.search(words, last)), "")
        words = [word for word in re.split(r"[-_]", last) if word not in _SAME_SHAPE]
        sizes = tuple(word for word in words if _SIZE.fullmatch(word))
        return cls(family=tuple(w for w in words if w not in sizes), sizes=sizes, form=form)

    @property
    def total(self) -> float:
        """Billions of parameters; 0: the name does not say."""
        return max((float(size.strip("ab")) for size in self.sizes), default=0.0)

    @property
    def line(self) -> frozenset[str]:
        """The family without minor versions and dates: ``m2.7`` is ``m2``, ``qwen3.5`` ``qwen``
        and ``3``.
        """
        parts = (part for word in self.family for part in _PARTS.findall(word))
        return frozenset(part for part in parts if not _DATE.fullmatch(part))

    def is_alike(self, other: _Name) -> bool:
        """Whether another checkpoint may have these shapes, in another size or quantisation."""
        if self.sizes and other.sizes and len(self.sizes) != len(other.sizes):
            return False  # "A3B": one has experts and the other has none
        return bool(self.family) and self.family == other.family

    def is_next(self, other: _Name) -> bool:
        """Whether another checkpoint is of the same line, with the same size."""
        more = self.line - other.line
        return (
            bool(other.line) and other.line <= self.line and self.sizes == other.sizes
            and not more & _OTHER_SHAPE and not any(map(str.isdigit, more))
        )  # fmt: skip


def name_of(model: str) -> str:
    """The name of a checkpoint, without its owner, of an id or of a folder."""
    cached = re.search(r"models--([^/]+)", model)
    return (cached[1] if cached else model.rstrip("/").rpartition("/")[2]).rpartition("--")[2]


def nearest(model: str, models: Models) -> Nearest | None:
    """The configuration of a checkpoint, else the nearest one; None: none is near."""
    known = {one.id: one for one in (*_of_models(models), *_published())}
    own = known.get(model)
    if own is not None and own.whole:
        return Nearest(config=own.config, of=own.id, own=True)
    if _NOT_MADE.search(name_of(model).lower()):
        return None
    wanted = _Name.of(model)
    named = [(_Name.of(one.id), one) for one in known.values()]
    alike = [pair for pair in named if wanted.is_alike(pair[0])]
    alike = alike or [pair for pair in named if wanted.is_next(pair[0])]
    if not alike:
        return None
    name, one = min(
        alike,
        key=lambda pair: (
            pair[1].id != model, len(wanted.line ^ pair[0].line), pair[0].sizes != wanted.sizes,
            abs(pair[0].total - wanted.total) * bool(wanted.sizes), pair[0].form != wanted.form,
            pair[1].id.partition("/")[0] != model.partition("/")[0], pair[1].id,
        ),
    )  # fmt: skip
    found = _found(wanted, name, one, {other.sizes for other, _ in alike})
    if one.id == model:
        return replace(found, differs="what it leaves in 16 bits is not complete here")
    return found


def _found(wanted: _Name, name: _Name, one: Configuration, sizes: set[tuple[str, ...]]) -> Nearest:
    """A known configuration in the quantisation that is wanted, and what differs."""
    sized = name.sizes == wanted.sizes or (not wanted.sizes and len(sizes) == 1)
    differs = []
    if not sized and wanted.sizes:
        differs.append(f"another size: the name says {'-'.join(wanted.sizes).upper()}")
    elif not sized:
        differs.append("the name says no size, and there are several")
    if name.family != wanted.family:
        differs.append("another model of the family")
        sized = sized and bool(wanted.sizes)
    near = Nearest(config=one.config, of=one.id, own=False, sized=sized, differs="; ".join(differs))
    if name.form == wanted.form:
        return near
    form = wanted.form or "BF16"
    config = {key: value for key, value in one.config.items() if key != "quantization_config"}
    if (quantisation := quantised(config, form)) is not None:
        config["quantization_config"] = quantisation
    said = "as the name says" if wanted.form else "as the name says no other"
    return replace(near, config=config, of=f"{one.id}, in {form} {said}")


def quantised(config: Mapping[str, Any], form: str) -> dict[str, Any] | None:
    """A quantisation of the language model: its tower stays in 16 bits.

    Qwen3.6-35B-A3B-FP8 was refused for a width of 64 on eight GPUs (vllm-project/vllm#52915), and
    not for the 144 of its tower.
    """
    quantisation = FORMS[form]
    blocks = config.get("vision_config", {}).get("depth", 0)
    if quantisation is None:
        return None
    if quantisation["quant_method"] == "compressed-tensors":
        weights = {**GROUP["weights"], "group_size": 32}  # Gemma 4 has 2112 columns
        return {
            **quantisation, "config_groups": {"group_0": {**GROUP, "weights": weights}},
            "ignore": ["lm_head", "re:.*visual.*", "re:.*vision_tower.*"],
        }  # fmt: skip
    if quantisation["quant_method"] == "fp8":
        names = [f"model.visual.blocks.{n}.{name}" for n in range(blocks) for name in _TOWER]
        names += ["model.visual.merger.linear_fc1", "model.visual.merger.linear_fc2"]
        return {**quantisation, "modules_to_not_convert": names}
    return quantisation


def _of_models(models: Models) -> Iterator[Configuration]:
    for model in map(models.model, models.files):
        if model.config is not None:
            yield Configuration(
                id=model.id.value, source=model.config.source, config=model.config.value
            )


@cache
def _published() -> tuple[Configuration, ...]:
    data = package_file("data", "configurations.json").read_text("utf-8")
    read = msgspec.convert(json.loads(data), tuple[Configuration, ...])  # it has Infinity
    return tuple(msgspec.structs.replace(one, config=_expanded(one.config)) for one in read)


def _expanded(value: Any) -> Any:
    """A value with the names that braces stand for."""
    if isinstance(value, dict):
        return {key: _expanded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [name for one in value for name in (_names(one) if isinstance(one, str) else [one])]
    return value


def _names(text: str) -> list[str]:
    match = _BRACES.search(text)
    if match is None:
        return [text]
    ends = (part.partition("-") for part in match[1].split(","))
    numbers = (n for a, _, b in ends for n in range(int(a), int(b or a) + 1))
    return [f"{text[: match.start()]}{n}{text[match.end() :]}" for n in numbers]
