"""What is verified: files, their expected state, and how to query the vLLM there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from builder.applier.layers import Layer
    from builder.applier.trees import Tree
    from builder.common.documents.plan import PlanDocument
    from builder.proof.checks import VerifierDocument
    from builder.proof.launches import Replies
    from builder.proof.parts import Parts
    from builder.proof.replies import CodegenReply, CodegenRequest, DispatchReply, DispatchRequest
    from builder.proof.unrecorded import Unrecorded


@dataclass(frozen=True, kw_only=True)
class VerifyTarget:
    """A verification target: files, their expected state, and how to query its vLLM.

    ``ask`` runs the dispatch probe with a request and returns its result; None means that it cannot
    run here, and ``cannot_ask`` gives the reason and a command that works.
    """

    name: str
    kind: str
    plan: PlanDocument
    #: rendered layers in order of application, in any state
    layers: Sequence[Layer]
    tree: Tree
    env: Mapping[str, str]
    #: the target's own variables, without those of the plan
    ask: Callable[[DispatchRequest], DispatchReply] | None
    cannot_ask: str = ""
    #: absolute paths that an overlay adds to its base; receipts and the plan explain each
    brought: tuple[str, ...] = ()
    #: digests of manifest and configuration, for an image
    digests: tuple[str, ...] = ()
    #: runs the codegen probe with a request; None means that no compiler is available
    compile: Callable[[CodegenRequest], CodegenReply] | None = None
    #: launches kernels and runs them without a device; None means that this is not possible here
    launch: Callable[[Mapping[str, Any]], Replies] | None = None
    #: runs a level of the in-image verifier where it may find a GPU; returns its document
    on_gpu: Callable[[str], VerifierDocument] | None = None
    #: its name for ``docker run``, if different
    runs_as: str = ""
    cannot_use_gpu: str = "only an image, or an environment of this machine, can run on a GPU"
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
