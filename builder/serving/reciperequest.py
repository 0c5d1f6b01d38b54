"""The inputs of a recipe."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from builder.serving.models import Model
    from builder.serving.profile import ServedProfile
    from builder.serving.topology import Place

SET = "--set"
#: vLLM's own.
DEFAULT_PORT = 8000


@dataclass(frozen=True, kw_only=True)
class RecipeRequest:
    """The model to serve, and how."""

    model: Model
    served: ServedProfile
    place: Place
    port: int = DEFAULT_PORT
    #: ``max-model-len=131072``, ``enforce-eager``, ``VLLM_X=1``; an empty value removes it
    chosen: tuple[str, ...] = ()
    #: with speculative decoding, if the model supports it
    speculate: bool = False
    #: the checkpoint, to estimate the memory
    checkpoint: Path | None = None
    #: the user's folders with models and layers
    models: tuple[Path, ...] = ()
    patches: tuple[Path, ...] = ()

    @property
    def command(self) -> str:
        """The command line that makes the recipe, without the format."""
        return shlex.join(self._words())

    def _words(self) -> Iterator[str]:
        served, place = self.served, self.place
        model = self.model.id.value if self.model.generic else self.model.name
        yield from ("spark-build", "recipe", model, "--profile", served.name)
        yield from ("--release", served.vllm)
        if served.named_image:
            yield from ("--image", served.image)
        yield from ("--topology", place.topology)
        for address in place.addresses:
            yield from ("--address", address)
        if place.interface:
            yield from ("--interface", place.interface)
        if self.port != DEFAULT_PORT:
            yield from ("--port", str(self.port))
        for text in self.chosen:
            yield from (SET, text)
        if self.speculate:
            yield "--speculate"
        if self.checkpoint is not None:
            yield from ("--checkpoint", str(self.checkpoint))
        for option, folders in (("--models", self.models), ("--patches", self.patches)):
            for folder in folders:
                yield from (option, str(folder))
