"""What is verified: a subject with and without its layers, its expected state, and its probes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from builder.applier.edits import ENV_PTH
from builder.applier.receipts import STATE_DIR, kept_true, receipt_path, receipts_of, true_records
from builder.applier.receipts import originals as digests_before
from builder.applier.trees import Content, OverlayTree, versions
from builder.common.reference import LAYOUT
from builder.errors import SparkBuildError
from builder.images.bases.identify import identify
from builder.images.subject import TRACKED, Subject
from builder.proof.trust import TrustedSources, has_hook
from builder.proof.unrecorded import find_unrecorded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from builder.applier.layers import Layer
    from builder.applier.sources import Sources
    from builder.applier.trees import Changes, Tree
    from builder.common.plan import PlanDocument
    from builder.images.subject import BaseRequest
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


@runtime_checkable
class DoubtingRunner(Protocol):
    """A runner whose replies depend on folders of this machine."""

    def doubt(self, request: DispatchRequest) -> DispatchReply | Refusal | None:
        """The reply again if those folders are damaged; None if every file is as it was made."""


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

    @property
    def unapplied(self) -> tuple[str, ...]:
        """Layers that would change files of it, and that it was not built with."""
        if self.label is not None or self.subject.is_planned:
            return ()
        return tuple(one.name for one in self.plan.layers if one.state == "needed" and one.files)

    def planned(self, tree: Tree, env: Mapping[str, str]) -> VerifyTarget:
        """The same expectations of other files, with their complete environment."""
        return replace(
            self, subject=self.subject.planned(tree, env), runner=self.runner.on(tree, env)
        )

    def close(self) -> None:
        """Close the subject."""
        self.subject.close()


if TYPE_CHECKING:
    #: Returns a loader of a path's original content, by path and sha256; None if it is lost.
    Originals = Callable[[str, str], Callable[[], bytes] | None]


# -------------------------------------------------------------------------------- before its layers


class CannotTakeApart(SparkBuildError):
    """The state of a target before its layers is unknown."""


def without_layers(
    base: Subject, originals: Originals, env: Mapping[str, str] | None = None
) -> Subject:
    """A patched base in its original state, according to the receipts.

    Args:
        base: the patched base.
        originals: returns the original content of a file.
        env: the original environment of the base; by default that of the patched one without what
        the
            receipts set.

    Raises:
        CannotTakeApart: the original content of a file is lost.
    """
    receipts = receipts_of(base.tree)
    changes: Changes = {receipt_path(r.layer): None for r in receipts}
    if base.tree.read(ENV_PTH) is not None:
        changes[ENV_PTH] = None
    former: dict[str, str | None] = {}
    for receipt in receipts:
        for path, entry in receipt.files.items():
            former.setdefault(path, entry.before)
    for path, digest in former.items():
        if digest == base.tree.digest(path):
            continue
        load = None if digest is None else originals(path, digest)
        if digest is not None and load is None:
            raise CannotTakeApart(f"the original of {path} is missing")
        content = None if digest is None else Content(sha256=digest, size=0, load=load, origin=path)
        changes[path] = content
    tree = OverlayTree(base.tree)
    tree.update(changes)
    if kept_true(receipts):  # sizes are not known here, and not looked at
        restored = {path: changes[path] for path in former if path in changes}
        tree.update(true_records(tree, restored, ""))
        for path, digest in digests_before(base.tree).items():
            load = originals(path, digest)
            if load is not None and tree.digest(path) is not None:
                tree.update({path: Content.of(load())})
    ours = {name for receipt in receipts for name in receipt.env}
    identity = replace(
        base.identity,
        packages=_tracked(tree, base),
        env={k: v for k, v in base.identity.env.items() if k not in ours} if env is None else env,
    )
    return Subject(identity, tree)


def _tracked(tree: Tree, base: Subject) -> dict[str, str]:
    known = {*TRACKED, *base.identity.packages}
    return {name: version for name, version in versions(tree).items() if name in known}


def of_tree(tree: Tree) -> Originals:
    """Originals from the files of the base."""

    def original(path: str, digest: str) -> Callable[[], bytes] | None:
        return partial(_read, tree, path) if tree.digest(path) == digest else None

    return original


def _read(tree: Tree, path: str) -> bytes:
    return tree.read(path) or b""


def of_backup(root: Path) -> Originals:
    """Originals from the backup of ``spark-build apply``."""

    def original(path: str, digest: str) -> Callable[[], bytes] | None:
        del path  # kept by content
        backup = root / STATE_DIR / "backup" / digest
        return backup.read_bytes if backup.is_file() else None

    return original


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a subject was before its layers, and the sources of their inputs."""

    #: the subject; of an overlay, the wheels that it lies on
    subject: Subject
    sources: Sources
    #: the base of an image: another image, or the wheels in it; None if it has no plan
    former: BaseRequest | None = None
    #: the layers that come from the subject, and whose hooks are run if ``trust`` has the same
    baked: Sequence[Layer] = ()
    trust: TrustedSources = field(default_factory=TrustedSources)

    def before(self) -> Subject:
        """The subject before its layers; rebuilding it runs no code from it.

        Raises:
            CannotTakeApart: it does not name its base, files of that are lost, or a baked-in layer
                has a hook, and is not one of this machine's.
            RemoteError: its base is not available.
        """
        self._refuse_foreign_hooks()
        if self.subject.identity.is_image:
            return self._image()
        if self.subject.identity.is_installed:
            backup = of_backup(Path(self.subject.identity.site_packages))
            return without_layers(self.subject, backup)
        return self.subject

    def _refuse_foreign_hooks(self) -> None:
        foreign = [x.name for x in self.baked if has_hook(x) and not self.trust.own(x)]
        if foreign:
            raise CannotTakeApart(
                f"layer {foreign[0]} has a hook (Python code), and no local layer is the same: "
                f"hooks from an image are never run; --patches must name a folder with your copy "
                f"of {foreign[0]}/layer.toml",
                hint="--patches DIR",
            )

    def _image(self) -> Subject:
        """An image with the files of its base."""
        ref = self.subject.identity.ref
        if not receipts_of(self.subject.tree):
            return self.subject
        if self.former is None:
            raise CannotTakeApart(f"{ref} has receipts but no plan, so its base is unknown")
        if self.former.ref.text == LAYOUT:
            raise CannotTakeApart(
                f"{ref} was made from a local layout, so its base is not available"
            )
        base = identify(self.former)
        try:
            env = base.identity.env if base.identity.is_image else None
            before = without_layers(self.subject, of_tree(base.tree), env)
        except BaseException:
            base.close()
            raise
        return replace(before, close=base.close)
