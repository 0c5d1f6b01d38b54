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
    """A file in a wheel, from its central directory and RECORD."""

    path: str
    sha256: str
    size: int
    mode: int


class Sources(Protocol):
    """The source of pinned inputs: the builder's cached index client, or that of a mod."""

    def donor(self, pin: DonorPin) -> bytes:
        """The bytes of one member of a pinned wheel, checked against ``member-sha256``."""

    def members(self, pin: InputPin) -> list[Member]:
        """The files of a pinned wheel in archive order."""

    def member(self, pin: InputPin, path: str) -> bytes:
        """One file of a pinned wheel."""

    def code(self, tree: Tree, path: str, wanted: Kernels, digest: str) -> KernelCode:
        """How SM121 runs some kernels of an installed extension module with that sha256."""

    def stage(
        self,
        ops: Sequence[Compile],
        packages: Mapping[str, str],
        target: Target,
        module: Callable[[str], str],
    ) -> Stage | Unstaged | None:
        """The stage for the changes of some ops, or None if compiling is not allowed.

        ``Unstaged`` is about the last op; earlier ones already have a stage.
        ``module`` returns the sha256 of the base's extension, such as ``vllm/_C``, or ''.
        """


@dataclass(frozen=True)
class Stage:
    """Changes to compile for one base: the inputs, and the result.

    ``wheel`` is the pin of the wheel that holds the compiled units; None before they are compiled.
    ``sources`` is the state of a pull request in the release's sources, ``refusal`` why
    it has no effect without a later change.
    """

    request: StageRequest
    wheel: InputPin | None = None
    sources: object = None
    refusal: Unstaged | None = None


@dataclass(frozen=True)
class Unstaged:
    """Why a change is not compiled: the layer's state, and the evidence.

    ``upstream`` and ``not-applicable`` do not affect the layer's other ops.
    """

    state: str
    reason: str
    sources: object
    notes: tuple[str, ...] = ()
    since: str | None = None
