"""Facts about compiled code when a layer is judged, and compile stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.applier.layers import InputPin


@dataclass(frozen=True)
class KernelCode:
    """How SM121 runs some kernels, their architectures, and the guards in their names."""

    how: str
    arch: str = ""
    guard: str = ""


@dataclass(frozen=True)
class ModuleCode:
    """An extension module of a base, and how SM121 runs some of its kernels: `CODE`."""

    module: str
    sha256: str
    how: str
    #: their architectures, and the guards in their names
    arch: str | None = None
    guard: str | None = None


class StageRequest(Protocol):
    """The inputs of a stage, as far as the applier reads them."""

    @property
    def change(self) -> str:
        """What is changed, by name."""

    @property
    def arch(self) -> str:
        """What it is compiled for."""

    @property
    def operators(self) -> Sequence[str]:
        """The torch operators that are registered anew."""


@dataclass(frozen=True)
class Compiled:
    """The state of compiled code, and the stage that compiles a change to it."""

    code: ModuleCode | None = None
    stage: StageRequest | None = None
    #: what the stage made; None before it has run
    wheel: InputPin | None = None
    #: the layer that installs the result of this layer's change
    carrier: str | None = None
    #: the state of a pull request in the release's sources
    sources: object = None
