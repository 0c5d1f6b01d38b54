"""What a release said of loading a checkpoint's weights by name."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from msgspec.structs import replace

from builder.proof.wholemodel import Loading, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from builder.proof.weightheaders import WeightHeaders
    from builder.proof.wholemodel import ModelAnswer

#: Characters of the release's words: some list each parameter of a model.
_WIDTH = 400
#: Parameters without a weight that are named.
_NAMED = 3


def loadings(answer: ModelAnswer, weights: WeightHeaders) -> tuple[Loading, ...]:
    """What is known of the model's weights, and of its draft's; nothing if it was not built."""
    if answer.error is not None:
        return ()
    said = {one.part: one.judged() for one in answer.loading}
    parts = {"model": weights.unknown or "the names of its tensors are not known"}
    if any(row.part == "draft" for row in answer.layers):
        parts["draft"] = "the names of its tensors are not known"
    return tuple(said.get(part) or Loading(part=part, not_asked=why) for part, why in parts.items())


def refusal_to_load(said: Sequence[Loading]) -> Refusal | None:
    """The first refusal, in few words, with the tensor that was read last."""
    for one in said:
        if one.refusal is not None:
            words = textwrap.shorten(one.refusal.message, _WIDTH, placeholder=" ...")
            at = f"; last tensor: {one.tensor}" if one.tensor else ""
            return replace(one.refusal, message=f"{words}{at}")
    return None


def loading_words(said: Sequence[Loading]) -> Iterator[str]:
    """A sentence for the model, and for its draft."""
    for one in said:
        of_draft = "draft model: " if one.part == "draft" else ""
        yield f"{of_draft}{_words(one)}"


def _words(one: Loading) -> str:
    if one.refusal is not None:
        return f"the release refuses it: {one.refusal.type}, as above"
    if one.not_asked:
        at = f"; last tensor: {one.tensor}" if one.tensor else ""
        return f"not {'known' if one.tensors else 'asked'}: {one.not_asked}{at}"
    words = f"the release's loader refuses none of {one.tensors} tensors by name and shape"
    if not one.without_weight:
        return words
    named = ", ".join(one.without_weight[:_NAMED])
    more = ", ..." if one.without_weight_total > _NAMED else ""
    return f"{words}; it fills {one.without_weight_total} parameters from none: {named}{more}"
