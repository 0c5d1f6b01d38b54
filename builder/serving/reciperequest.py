"""What a recipe is asked for."""

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
    """What is to be served, and how."""

    model: Model
    served: ServedProfile
    place: Place
    port: int = DEFAULT_PORT
    #: ``max-model-len=131072``, ``enforce-eager``, ``VLLM_X=1``; an empty value takes it out
    chosen: tuple[str, ...] = ()
    #: with draft tokens, where the model has them
    speculate: bool = False
    #: the checkpoint, where it is at hand: memory is estimated by it
    checkpoint: Path | None = None
    #: folders that the user named, of models and of layers
    models: tuple[Path, ...] = ()
    patches: tuple[Path, ...] = ()

    @property
    def command(self) -> str:
        """The command line that makes it again, but for the format."""
        return shlex.join(self._words())

    def _words(self) -> Iterator[str]:
        served, place = self.served, self.place
        yield from ("spark-build", "recipe", self.model.name, "--profile", served.name)
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
