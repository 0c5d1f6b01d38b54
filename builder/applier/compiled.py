"""What is found of compiled code when a layer is judged, and what a stage compiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.applier.layers import InputPin


@dataclass(frozen=True)
class KernelCode:
    """How SM121 runs some kernels, for what they are compiled, and the guards in their names."""

    how: str
    arch: str = ""
    guard: str = ""


@dataclass(frozen=True)
class ModuleCode:
    """An extension module of a base, and how SM121 runs some kernels of it: `CODE`."""

    module: str
    sha256: str
    how: str
    #: the architectures that they are compiled for, and the guards in their names
    arch: str | None = None
    guard: str | None = None


class StageRequest(Protocol):
    """What goes into a stage, as far as the applier looks at it."""

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
    """What was found of compiled code, and the stage that compiles a change to it."""

    code: ModuleCode | None = None
    stage: StageRequest | None = None
    #: what the stage made; None before it has run
    wheel: InputPin | None = None
    #: the layer that brings what is compiled of this one's change
    carrier: str | None = None
    #: what was found of a pull request in the release's sources
    sources: object = None
