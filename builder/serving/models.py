"""Known models, as data with sources.

A value without a source is absent, and everything that depends on it is unknown.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from builder.common.document import Count, Document, Part, Text, load_toml
from builder.common.hints import reason
from builder.common.paths import package_file
from builder.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: Kinds of layers in a checkpoint.  The first six are those that level dispatch queries
#: (``builder/proof/checks.py``).
LayerKind = Literal[
    "nvfp4-linear", "nvfp4-moe", "fp8-linear", "fp8-block", "w4a16-linear", "w4a16-moe",
    "mxfp4-moe", "mxfp8-linear", "mxfp8-moe", "int4-linear", "int4-moe", "unquantized",
]  # fmt: skip
#: The summary of a model without a file.
GENERIC = "unverified: spark-build has no file of this model"
#: An id on Hugging Face: an owner and a name, as the Hub allows them (huggingface_hub,
#: validate_repo_id).
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/([A-Za-z0-9][\w.-]{0,95})", re.ASCII)
#: An id or a revision of a model's file: other programs put it into commands as it is.
_WORD = re.compile(r"[\w./~][\w./~@:+-]*", re.ASCII)
#: Names that scripts, commands and manifests have without quotes, and what they are for.
_FLAG = r"^--[a-z][A-Za-z0-9_.-]*$(?!\n)"
_VARIABLE = r"^[A-Z][A-Za-z0-9_]*$(?!\n)"
_IMAGE = r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$(?!\n)"
_FILE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$(?!\n)"
#: Activations between the experts' two GEMMs, by vLLM's names; kernels support some of them.
Activation = Literal["silu", "relu2", "gelu_tanh", "swigluoai"]


class _Known(Part, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """A value with its source."""

    source: Annotated[Text, Meta(description="the source of the value")]


class KnownText(_Known, frozen=True, kw_only=True):
    """A text with its source."""

    value: Text


class KnownCount(_Known, frozen=True, kw_only=True):
    """A number with its source."""

    value: Count


class KnownFraction(_Known, frozen=True, kw_only=True):
    """A share of the memory, with its source."""

    value: Annotated[str, Meta(pattern=r"^(0?\.[0-9]{1,4}|1(\.0{1,4})?)$(?!\n)")]


class KnownActivation(_Known, frozen=True, kw_only=True):
    """The activation of a model's experts, with its source."""

    value: Activation


class KnownConfiguration(_Known, frozen=True, kw_only=True):
    """What the ``config.json`` of a checkpoint says, for a release that builds the model."""

    value: dict[str, Any]
    source: Text


class HeldLayers(_Known, frozen=True, kw_only=True):
    """One kind of layer in the checkpoint."""

    kind: LayerKind


class _When(_Known, frozen=True, kw_only=True):
    """A value for some releases of vLLM."""

    vllm: Annotated[str, Meta(description="a range of vLLM releases; absent: all")] = ""

    def __post_init__(self) -> None:
        """Refuse a malformed range.

        Raises:
            ValueError: the range is malformed.
        """
        try:
            SpecifierSet(self.vllm)
        except InvalidSpecifier:
            raise ValueError(f"{self.vllm!r} is not a range of releases") from None

    def holds_for(self, vllm: str) -> bool:
        """Whether this release is in the range; pre-releases count by their number."""
        return SpecifierSet(self.vllm).contains(vllm, prereleases=True)


class Needs(_When, frozen=True, kw_only=True):
    """The releases that serve a model."""


class ParserChoice(_When, frozen=True, kw_only=True):
    """A parser of the model's output; the first that a release has is taken."""

    name: Text
    plugin: Annotated[
        Annotated[str, Meta(pattern=_FILE_NAME)] | None,
        Meta(description="file in the checkpoint that provides it; absent: built in"),
    ] = None


class RecommendedFlag(_When, frozen=True, kw_only=True):
    """A flag of ``vllm serve`` that the model should be served with."""

    flag: Annotated[str, Meta(pattern=_FLAG)]
    value: Annotated[Text | None, Meta(description="absent: the flag has no value")] = None
    why: Text


class RecommendedVariable(_When, frozen=True, kw_only=True):
    """An environment variable that the model should be served with."""

    name: Annotated[str, Meta(pattern=_VARIABLE)]
    value: Text
    why: Text


class Speculation(_When, frozen=True, kw_only=True):
    """Speculative decoding with draft layers in the checkpoint itself."""

    method: Text
    tokens: Annotated[int, Meta(ge=1)]
    moe_backend: Annotated[Text | None, Meta(description="of the draft's experts")] = None


#: A value of TensorRT-LLM's options.
Option = bool | int | float | str


class TensorRtLlm(_Known, frozen=True, kw_only=True):
    """How TensorRT-LLM serves a model."""

    image: Annotated[str, Meta(pattern=_IMAGE)]
    variables: dict[Annotated[str, Meta(pattern=_VARIABLE)], str] = msgspec.field(
        default_factory=dict
    )
    flags: Annotated[
        dict[Annotated[str, Meta(pattern=_FLAG)], str],
        Meta(description="of `trtllm-serve`; empty: the flag takes no value"),
    ] = msgspec.field(default_factory=dict)
    options: Annotated[
        dict[str, Option | dict[str, Option]], Meta(description="its file of options")
    ] = msgspec.field(default_factory=dict)


class Measured(_When, frozen=True, kw_only=True):
    """A published measurement on a GB10; spark-build measured none of them."""

    profile: Annotated[Text | None, Meta(description="whose kernels these are, nearest")] = None
    setup: Annotated[Text, Meta(description="release, kernels and topology, in the source's words")]
    concurrency: Annotated[int, Meta(ge=1)]
    tokens_per_second: Annotated[float, Meta(gt=0)]


class KnownFailure(_When, frozen=True, kw_only=True):
    """A known failure of this model, and its fix."""

    what: Text
    helps: Text


class Model(Part, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """Everything known about a model; absent values are unknown."""

    name: Text
    summary: Text
    id: Annotated[KnownText, Meta(description="on Hugging Face")]
    revision: Annotated[KnownText | None, Meta(description="commit on Hugging Face")] = None
    config: Annotated[KnownConfiguration | None, Meta(description="its config.json")] = None
    needs: Annotated[Needs | None, Meta(description="releases that can serve it")] = None
    holds: Annotated[tuple[HeldLayers, ...], Meta(description="kinds of its layers")] = ()
    experts: KnownActivation | None = None
    parameters: KnownCount | None = None
    active_parameters: KnownCount | None = None
    weight_bytes: KnownCount | None = None
    token_bytes: Annotated[
        KnownCount | None, Meta(description="of its weights, what one token reads")
    ] = None
    context: Annotated[KnownCount | None, Meta(description="recommended context in tokens")] = None
    maximum_context: KnownCount | None = None
    block_size: Annotated[
        KnownCount | None, Meta(description="the fewest batched tokens of a hybrid model")
    ] = None
    kv_cache_dtype: KnownText | None = None
    gpu_memory_utilization: KnownFraction | None = None
    reasoning_parsers: tuple[ParserChoice, ...] = ()
    tool_parsers: tuple[ParserChoice, ...] = ()
    speculation: Speculation | None = None
    tensorrt_llm: TensorRtLlm | None = None
    flags: tuple[RecommendedFlag, ...] = ()
    variables: tuple[RecommendedVariable, ...] = ()
    measured: tuple[Measured, ...] = ()

    def __post_init__(self) -> None:
        """Refuse an id or a revision that is not one word.

        Raises:
            ValueError: a shell would read it as something else.
        """
        for what, known in (("id", self.id), ("revision", self.revision)):
            if known is not None and not _WORD.fullmatch(known.value):
                raise ValueError(f"{what} {known.value[:100]!r} is not one plain word, as ME/NAME")

    failures: tuple[KnownFailure, ...] = ()

    def kinds(self) -> set[str]:
        """The kinds of its layers; empty if unknown."""
        return {layers.kind for layers in self.holds}

    @property
    def clamped(self) -> bool:
        """Whether the configuration in its file limits the values in its experts' SwiGLU."""
        config = {} if self.config is None else self.config.value
        text = config.get("text_config")
        return bool((text if isinstance(text, dict) else config).get("swiglu_limit"))

    @property
    def generic(self) -> bool:
        """Whether there is no file of this model, so that nothing is known of it."""
        return self.summary.startswith(GENERIC)

    def unknown(self) -> list[str]:
        """The names of its unknown values."""
        named = [f.encode_name for f in msgspec.structs.fields(type(self)) if not f.required]
        return [n for n in named if not getattr(self, n.replace("-", "_")) and n in _FIGURES]


#: Values that a user needs to plan a deployment.
_FIGURES = (
    "revision", "holds", "experts", "parameters", "active-parameters", "weight-bytes", "context",
    "maximum-context", "block-size", "kv-cache-dtype", "gpu-memory-utilization",
    "reasoning-parsers", "tool-parsers", "speculation", "measured",
)  # fmt: skip


class ModelRow(Part, frozen=True, kw_only=True):
    """A model in a list."""

    name: Text
    id: Text
    summary: Text
    file: Text


class ModelList(Document, frozen=True, kw_only=True):
    """All models that are known."""

    models: tuple[ModelRow, ...]


class ModelShown(Document, frozen=True, kw_only=True):
    """One model, with the names of its unknown values."""

    file: Text
    model: Model
    unknown: tuple[str, ...]


@dataclass(frozen=True)
class Models:
    """Model files by name, each read on demand and once."""

    files: Mapping[str, Path]
    _read: dict[Path, Model] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def discover(cls, extra: Iterable[Path] = ()) -> Models:
        """Load the built-in models, then those of the user's folders; later ones win.

        Raises:
            UsageError: a folder does not exist, or holds no model.
        """
        files = {p.stem: p for p in sorted(package_file("data", "models").glob("*.toml"))}
        for place in extra:
            if not place.is_dir():
                raise UsageError(f"models folder {place} does not exist")
            of_place = {p.stem: p for p in sorted(place.glob("*.toml"))}
            if not of_place:
                raise UsageError(
                    f"{place} contains no model (NAME.toml) like the built-in ones",
                    hint="spark-build models show nemotron-3-super",
                )
            files |= of_place
        return cls(files)

    def model(self, name: str, *, or_folder: bool = False) -> Model:
        """One model, by its name or by its id on Hugging Face.

        With ``or_folder`` the error says that there is no folder of this name either.

        Raises:
            UsageError: it does not exist, or its file is malformed.
        """
        model = self._known(name)
        if model is not None:
            return model
        what = (
            f"{name!r} is neither a folder nor a model" if or_folder else f"unknown model {name!r}"
        )
        raise UsageError(
            f"{what}{did_you_mean(name, (*self.files, *self._ids()))} "
            "(--models DIR adds your own, DIR/NAME.toml)",
            hint="spark-build models list",
        )

    def model_or_generic(self, name: str) -> Model:
        """One model; for an id on Hugging Face without a file, one of which nothing is known.

        Raises:
            UsageError: it is neither, or its file is malformed.
        """
        model = self._known(name)
        if model is not None:
            return model
        match = _ID.fullmatch(name)
        if match is None:
            return self.model(name)
        short = re.sub(r"[^a-z0-9.-]+", "-", match[1].lower()).strip(".-")
        return Model(
            name=short or "model", summary=f"{GENERIC}{did_you_mean(name, self._ids())}",
            id=KnownText(value=name, source="the command line"),
        )  # fmt: skip

    def _known(self, name: str) -> Model | None:
        if name in self.files:
            return self._of(self.files[name])
        for path in self.files.values() if "/" in name else ():
            model = self._of(path)
            if model.id.value == name:
                return model
        return None

    def _of(self, path: Path) -> Model:
        """The model of one of the files."""
        if path not in self._read:
            self._read[path] = read_model(path)
        return self._read[path]

    def _ids(self) -> list[str]:
        """The ids on Hugging Face of all models."""
        return [self._of(path).id.value for path in self.files.values()]

    def listed(self) -> ModelList:
        """All of them, one line each."""
        models = [(self._of(path), path) for _, path in sorted(self.files.items())]
        rows = (
            ModelRow(name=m.name, id=m.id.value, summary=m.summary, file=_shown(path))
            for m, path in models
        )
        return ModelList(models=tuple(rows))

    def shown(self, name: str) -> ModelShown:
        """One of them with all its values."""
        model = self.model(name)
        return ModelShown(
            file=_shown(self.files[model.name]), model=model, unknown=tuple(model.unknown())
        )


def _shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def read_model(path: Path) -> Model:
    """Read one model file.

    Raises:
        UsageError: it is malformed; the message says where.
    """
    try:
        raw = load_toml(path)
        return msgspec.convert({**raw, "name": path.stem}, Model)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {reason(error)}") from None
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {error}", hint="spark-build schema models-show") from None
    except ValueError as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
