"""The interface of sources for pinned inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from builder.applier.compiled import KernelCode, StageRequest
    from builder.applier.layers import DonorPin, InputPin
    from builder.applier.opkinds import Compile, Kernels
    from builder.applier.outcomes import Target
    from builder.applier.trees import Tree


class Member(NamedTuple):
    """A file in a wheel, as its central directory and RECORD describe it."""

    path: str
    sha256: str
    size: int
    mode: int


class Sources(Protocol):
    """Where pinned inputs come from: the builder's cached index client, or pip in a mod."""

    def donor(self, pin: DonorPin) -> bytes:
        """The bytes of one member of a pinned wheel, checked against ``member-sha256``."""

    def members(self, pin: InputPin) -> list[Member]:
        """The files of a pinned wheel in archive order."""

    def member(self, pin: InputPin, path: str) -> bytes:
        """One file of a pinned wheel."""

    def code(self, tree: Tree, path: str, wanted: Kernels, digest: str) -> KernelCode:
        """How SM121 runs some kernels of an installed extension module of that sha256."""

    def stage(
        self,
        ops: Sequence[Compile],
        packages: Mapping[str, str],
        target: Target,
        module: Callable[[str], str],
    ) -> Stage | Unstaged | None:
        """Compiling the changes of some ops together, or None where nothing may be compiled.

        What is not compiled is said of the last op; those before it have a stage already.
        ``module`` gives the sha256 of the base's extension of a name, as ``vllm/_C``, or ''.
        """


@dataclass(frozen=True)
class Stage:
    """Changes to compile for one base: everything that goes in, and what came out.

    ``wheel`` is the pin of the wheel that holds the compiled units; None before they are compiled.
    ``sources`` is what was found of a pull request in the release's sources, ``refusal`` why
    nothing would come of it unless a later change joins it.
    """

    request: StageRequest
    wheel: InputPin | None = None
    sources: object = None
    refusal: Unstaged | None = None


@dataclass(frozen=True)
class Unstaged:
    """Why nothing is compiled of a change: the state that this is, and what tells it.

    ``upstream`` and ``not-applicable`` leave the layer's other ops as they are.
    """

    state: str
    reason: str
    sources: object
    notes: tuple[str, ...] = ()
    since: str | None = None
