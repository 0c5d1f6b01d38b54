"""What is verified: files, their expected state, and a way to run probes on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from builder.applier.layers import Layer
    from builder.applier.sources import Sources
    from builder.applier.trees import Tree
    from builder.common.plan import PlanDocument
    from builder.errors import SparkBuildError
    from builder.images.rootfs.base import Base
    from builder.proof.checks import VerifierDocument
    from builder.proof.kernels import Replies
    from builder.proof.replies import CodegenReply, CodegenRequest, DispatchReply, DispatchRequest
    from builder.proof.unrecorded import Unrecorded


@dataclass(frozen=True)
class Refusal:
    """Why a probe cannot run here, and a command that works."""

    reason: str
    command: str = ""

    @classmethod
    def of(cls, error: SparkBuildError) -> Self:
        """The refusal for an error before or in a probe."""
        return cls(str(error), error.hint)

    def __str__(self) -> str:
        return f"{self.reason}; try: {self.command}" if self.command else self.reason


class Runner(Protocol):
    """Runs probes on some files; what it cannot run, it refuses.

    A probe whose reply is malformed raises `MalformedReply`, and one without a CuTe DSL in the
    files `NoDsl`: both are faults of the files.
    """

    def dispatch(self, request: DispatchRequest) -> DispatchReply | Refusal:
        """Which kernels vLLM selects."""

    def compile(self, request: CodegenRequest) -> CodegenReply | Refusal:
        """The machine code of kernels."""

    def launch(self, request: Mapping[str, Any]) -> Replies | Refusal:
        """The results of kernels that are launched, and run without a device."""

    def on_gpu(self, plan: PlanDocument, level: str) -> VerifierDocument | Refusal:
        """The document of the in-image verifier, where it may find a GPU."""

    def on(self, tree: Tree, env: Mapping[str, str]) -> Runner:
        """The same for these files, with their complete environment."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The base before our layers, and the sources of their inputs."""

    base: Base
    sources: Sources


@dataclass(frozen=True, kw_only=True)
class VerifyTarget:
    """A verification target: files, their expected state, and a way to run probes on them."""

    name: str
    kind: str
    plan: PlanDocument
    #: rendered layers in order of application, in any state
    layers: Sequence[Layer]
    tree: Tree
    #: the target's own variables, without those of the plan
    env: Mapping[str, str]
    runner: Runner
    #: absolute paths that an overlay adds to its base; receipts and the plan explain each
    brought: tuple[str, ...] = ()
    #: digests of manifest and configuration, for an image
    digests: tuple[str, ...] = ()
    #: its name for ``docker run``, if different
    runs_as: str = ""
    close: Callable[[], None] = lambda: None
    #: the plan digest in the image's label ("" without such a
    #: label); None for a new plan
    label: str | None = None
    #: for a baked-in plan: its recomputed digest
    recomputed: str = ""
    #: splits the target into its parts; None if they are unknown
    parts: Callable[[], Parts] | None = None
    #: finds unrecorded files; None if only the checked files are available
    unrecorded: Callable[[], Unrecorded] | None = None
    #: path and bytes of a file, or of all files below a folder, by absolute path; what is no file
    #: has no bytes.  None if only site-packages can be read
    outside: Callable[[str], Mapping[str, bytes]] | None = None

    @property
    def asked_in_itself(self) -> bool:
        """Whether its own interpreter runs in a container, instead of a sandbox."""
        return self.kind == "image"

    @property
    def whole_here(self) -> bool:
        """Whether all its files are local, so that reading them needs no download."""
        return self.kind in ("dir", "image")
