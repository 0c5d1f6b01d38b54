"""What is known of a model whose configuration is not here: the nearest known one stands in.

Only what a release refuses of every model is known of this one; the rest is assumed, and said.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from builder.proof.wholemodel import configuration_of
from builder.serving.configurations import nearest

if TYPE_CHECKING:
    from pathlib import Path

    from builder.errors import RemoteError
    from builder.proof.wholemodel import Refusal
    from builder.serving.configurations import Nearest
    from builder.serving.models import Models

#: Kinds of pydantic's errors that only look at the value, and not at the model.
_SHAPE = re.compile(
    r"\[type=(literal_error|unexpected_keyword_argument|\w+_type|\w+_parsing|missing|enum|"
    r"(less|greater)_than\w*)"
)
#: A value that no model has: the release lists all that it knows.
_NO_VALUE = re.compile(r"\bInvalid [\w-]+: .{1,80}\. Valid values are\b")
#: A refusal of the attention backends that a model without a peculiarity gets, too.
_CACHE = "kv_cache_dtype not supported"


def is_general(refusal: Refusal) -> bool:
    """Whether a release would refuse the same for every model."""
    return (
        refusal.stage == "arguments"
        or bool(_SHAPE.search(refusal.message))
        or bool(_NO_VALUE.search(refusal.message))
        or _CACHE in refusal.message
    )


def near_folder(model: str, models: Models, error: RemoteError) -> tuple[Nearest, Path]:
    """The nearest known configuration of a model, and a folder with it.

    Raises:
        RemoteError: none is near; this is the error with which its own could not be had.
    """
    near = nearest(model, models)
    if near is None:
        raise error
    text = json.dumps(dict(near.config), sort_keys=True)  # some have Infinity
    return near, configuration_of({"config.json": text.encode()})
