"""Checks that a recipe's checkpoint belongs to its model, and that the context fits it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.common.hints import instead
from builder.errors import UsageError
from builder.serving.documents import Setting
from builder.serving.memory import KV_DTYPE
from builder.serving.modelconfig import CONFIG, QUANT_CONFIG, kv_dtype_beside, read_config
from builder.serving.recipechosen import chosen_as
from builder.serving.recipememory import CONTEXT, number_of
from builder.serving.reciperequest import SET

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.serving.modelconfig import ModelConfig
    from builder.serving.models import Model
    from builder.serving.recipedraft import Draft

#: Lets vLLM take a context beyond the model's own.
_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
#: Lower and upper limit of the bytes of a parameter, over all formats that vLLM reads.
_LEAST, _MOST = 0.25, 4.5


def checkpoint_config(draft: Draft) -> ModelConfig | None:
    """The checkpoint's config, if there is a checkpoint; limits the context to its maximum.

    Raises:
        UsageError: it cannot be read, or the user set a context that vLLM refuses.
    """
    folder = draft.request.checkpoint
    if folder is None:
        return None
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", hint="--checkpoint DIR")
    config = read_config(folder)
    if config is not None:
        _shorten(draft, config)
        if KV_DTYPE not in draft.flags and (dtype := kv_dtype_beside(config)):
            draft.flag(KV_DTYPE, dtype, f"checkpoint: kv_cache_quant_algo in {QUANT_CONFIG}")
    return config


def _shorten(draft: Draft, config: ModelConfig) -> None:
    """Shorten a longer context to the checkpoint's maximum.

    Raises:
        UsageError: the user set the longer one.
    """
    context, longest = number_of(draft.flags, CONTEXT), config.longest
    allowed = _LONG in draft.env and draft.env[_LONG].value in ("1", "true")
    if not context or not longest or context <= longest or allowed:
        return
    given = draft.flags[CONTEXT]
    why = f"is more than the model's own maximum, {longest}: vLLM refuses it without {_LONG}=1"
    if given.origin == SET:
        text = chosen_as(draft, given)
        raise UsageError(
            f"{SET} {text}: that {why}", hint=instead(text, f"{CONTEXT[2:]}={longest}")
        )
    draft.flags[CONTEXT] = Setting(
        name=CONTEXT,
        value=str(longest),
        origin=f"checkpoint: max_position_embeddings in {CONFIG}; {given.value} ({given.origin}) "
        f"{why}",
    )
    draft.notes.append(f"{CONTEXT} is {longest}, the checkpoint's own maximum: {given.value} {why}")


def unlike(model: Model, config: ModelConfig, weights: int | None) -> Iterator[str]:
    """Notes if a checkpoint does not look like the model; ``weights`` are its bytes, if known."""
    found = [*_layers(model, config), *_weights(model, weights)]
    if found:
        named = (config.architectures or config.text.architectures or ["unknown"])[0]
        yield (
            f"the checkpoint does not look like {model.name}: {'; '.join(found)} (its {CONFIG}: "
            f"architecture {named[:60]!r}, {config.text.num_hidden_layers} layers)"
        )


def _layers(model: Model, config: ModelConfig) -> Iterator[str]:
    if model.experts is not None and not config.experts:
        yield f"it has no routed experts, and the model has ({model.experts.source})"
    total, active = model.parameters, model.active_parameters
    if total and active and total.value == active.value and config.experts:
        yield f"it has {config.experts} routed experts, and the model has none ({active.source})"
    if model.block_size is not None and config.recurrent is False:
        yield "all its layers are attention, and the model is a hybrid of Mamba and attention"


def _weights(model: Model, weights: int | None) -> Iterator[str]:
    if model.parameters is None or weights is None:
        return
    parameters = model.parameters.value
    if not _LEAST * parameters <= weights <= _MOST * parameters:
        yield f"its weights have {weights} bytes, and the model has {parameters} parameters"
