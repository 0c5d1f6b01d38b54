"""The interface of sources for pinned inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from builder.applier.opkinds import Compile
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

    def donor(self, pin: Mapping[str, Any]) -> bytes:
        """The bytes of one member of a pinned wheel, checked against ``member-sha256``."""

    def members(self, pin: Mapping[str, Any]) -> list[Member]:
        """The files of a pinned wheel in archive order."""

    def member(self, pin: Mapping[str, Any], path: str) -> bytes:
        """One file of a pinned wheel."""

    def code(
        self, tree: Tree, path: str, wanted: Mapping[str, Any], digest: str
    ) -> Mapping[str, Any]:
        """How SM121 runs some kernels of an installed extension module: ``how``, see `CODE`, and
        ``arch``, the architectures that they are compiled for.

        ``wanted`` says which: ``symbol`` is a regular expression of their mangled names.
        ``digest`` is the module's sha256.
        """

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

    request: Mapping[str, Any]
    wheel: Mapping[str, Any] | None = None
    sources: Mapping[str, Any] = field(default_factory=dict)
    refusal: Unstaged | None = None


@dataclass(frozen=True)
class Unstaged:
    """Why nothing is compiled of a change: the state that this is, and what tells it.

    ``upstream`` and ``not-applicable`` leave the layer's other ops as they are.
    """

    state: str
    reason: str
    sources: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    since: str | None = None
