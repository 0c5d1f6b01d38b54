"""What is verified: a subject, its expected state, and a way to run probes on it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, Self

from builder.proof.trust import TrustedSources
from builder.proof.unrecorded import find_unrecorded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from builder.applier.layers import Layer
    from builder.applier.trees import Tree
    from builder.common.plan import PlanDocument
    from builder.errors import SparkBuildError
    from builder.images.subject import Subject
    from builder.proof.checks import VerifierDocument
    from builder.proof.kernels import Replies
    from builder.proof.parts import Origin
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
class ModelToBuild:
    """A model: its ``config.json``, or where it is."""

    name: str
    #: the kinds of its layers, as far as they are known
    kinds: frozenset[str] = frozenset()
    config: Mapping[str, Any] | None = None
    #: if it has no ``config``; without either, its name is an id on Hugging Face
    folder: Path | None = None
    #: the activation of its experts; profiles promise kernels for gated SiLU
    activation: str = "silu"
    #: whether the user named it, so that it must start
    named: bool = True


@dataclass(frozen=True, kw_only=True)
class VerifyTarget:
    """A subject, what is expected of it, and a way to run probes on it."""

    name: str
    subject: Subject
    plan: PlanDocument
    #: rendered layers in order of application, in any state
    layers: Sequence[Layer]
    runner: Runner
    #: the sources of code that may run here as the user
    trust: TrustedSources = field(default_factory=TrustedSources)
    #: for level ``model``
    models: Sequence[ModelToBuild] = ()
    #: the plan digest in the image's label ("" without such a
    #: label); None for a new plan
    label: str | None = None
    #: for a baked-in plan: its recomputed digest
    recomputed: str = ""
    #: what it was before its layers, if that is known
    origin: Origin | None = None

    @property
    def tree(self) -> Tree:
        """Its site-packages."""
        return self.subject.tree

    @property
    def env(self) -> Mapping[str, str]:
        """Its own variables, without those of the plan."""
        return self.subject.identity.env

    @property
    def digests(self) -> tuple[str, ...]:
        """Digests of manifest and configuration, for an image."""
        return self.subject.image.digests if self.subject.image else ()

    @property
    def brought(self) -> tuple[str, ...]:
        """Absolute paths that an overlay adds to its base; receipts and the plan explain each."""
        image, is_planned = self.subject.image, self.subject.is_planned
        return () if image is None or is_planned else image.brought

    @cached_property
    def unrecorded(self) -> Unrecorded | None:
        """Unrecorded files; None if only the checked files are available."""
        image = self.subject.in_layers
        if image is None or self.subject.is_planned:
            return None
        return find_unrecorded(image, self.subject.identity.site_packages, self.tree)

    def planned(self, tree: Tree, env: Mapping[str, str]) -> VerifyTarget:
        """The same expectations of other files, with their complete environment."""
        return replace(
            self, subject=self.subject.planned(tree, env), runner=self.runner.on(tree, env)
        )

    def close(self) -> None:
        """Close the subject."""
        self.subject.close()
