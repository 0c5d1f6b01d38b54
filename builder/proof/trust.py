"""Decides which files of a target may be imported on this machine: those with a known hash.

An image's own statements are not trusted: its RECORD, receipts and plan come from whoever made
it.  So a file is known only if another source has its sha256: a released wheel on the
package index, or one of the user's own layers, applied to the released files here.  What a package
index says by range counts only if the wheel's RECORD is pinned, or the whole wheel was hashed.
"""

from __future__ import annotations

import platform as machine
import sys
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from builder.applier.judging import judge_in_order
from builder.applier.layers import Env, Hook
from builder.applier.receipts import receipts_of
from builder.applier.trees import OverlayTree
from builder.applier.values import ApplyError
from builder.common.console import console, some_of
from builder.common.plan import Platform
from builder.common.pypi import PackageIndex
from builder.common.wheels import RemoteWheel, WheelTree
from builder.errors import SparkBuildError
from builder.images.subject import TRACKED
from builder.layers.catalog import Catalog, order
from builder.layers.pinned import IndexSources
from builder.proof.isolation import SandboxUnavailable, find_isolation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from builder.applier.layers import Layer
    from builder.applier.receipts import Receipt
    from builder.applier.trees import Tree
    from builder.common.plan import PlanDocument
    from builder.proof.isolation import Isolation

#: How the evidence of a run with unknown files begins to say that.
ISOLATED = "only read-only programs of this machine"
#: Stands for the sha256 of a file that the user's own layers made.
NEW_FILE = "made here"
#: Files to name in messages; more are only counted.
_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class IsolatedRun:
    """Code must run isolated: the way, and the files that are the reason."""

    isolation: Isolation
    because: str

    def text(self) -> str:
        """The text for the evidence."""
        return f"{ISOLATED} ({self.isolation.name}, no network)"


@dataclass(frozen=True, kw_only=True)
class TrustedSources:
    """Trusted sources of files, besides the package index."""

    index: PackageIndex = field(default_factory=PackageIndex)
    #: layers that the user selected for this command
    layers: Sequence[Layer] = ()
    #: the user's folders of layers, besides ours
    patches: Sequence[Path] = ()
    #: path and sha256 of files written by this command's plan -> the sha256 before, None: new
    written: Mapping[tuple[str, str], str | None] = field(default_factory=dict)
    #: the target's platform, whose wheels are tried first
    platform: Platform | None = None
    #: variables that the user, or a plan of the user's own layers, gives a value
    variables: Mapping[str, str] = field(default_factory=dict)
    #: ``--trust-image``: the user trusts everything in it
    everything: bool = False

    def with_plan(self, plan: PlanDocument) -> TrustedSources:
        """The same, with the files and variables that a plan of the user's own layers sets.

        A file that it changes is only as well known as the file before.
        """
        written = {
            (file.path, file.after): file.before
            for layer in plan.layers
            for file in layer.files
            if file.after is not None
        }
        return self.with_variables(plan.env, {**self.written, **written})

    def with_variables(
        self,
        variables: Mapping[str, str],
        written: Mapping[tuple[str, str], str | None] | None = None,
    ) -> TrustedSources:
        """The same, with variables that are the user's own."""
        more = {**self.variables, **variables}
        return replace(self, variables=more, written=self.written if written is None else written)

    def sets(self, name: str, value: str | None) -> bool:
        """Whether the user, or a layer of this machine, gives a variable this value; None: any."""
        values = {*self._of_layers.get(name, ()), *filter(None, [self.variables.get(name)])}
        return bool(values) if value is None else value in values

    @cached_property
    def _of_layers(self) -> Mapping[str, set[str]]:
        """The variables that layers of this machine set, with their values."""
        values: dict[str, set[str]] = {}
        for layer in (*self.layers, *self._in_catalog()):
            for op in layer.ops:
                if isinstance(op, Env):
                    values.setdefault(op.name, set()).add(op.value)
        return values

    def _in_catalog(self) -> Iterator[Layer]:
        for name in self.catalog.folders:
            try:
                yield self.catalog.layer(name)
            except SparkBuildError as error:
                console.detail(f"the variables of the layer {name} are unknown: {error}")

    @cached_property
    def catalog(self) -> Catalog:
        """The layers of this machine."""
        return Catalog.discover(self.patches)

    def own(self, layer: Layer) -> bool:
        """Whether a layer is identical to one of this machine."""
        name = layer.name
        named = [one for one in self.layers if one.name == name]
        layers = named or ([self.catalog.layer(name)] if name in self.catalog.folders else [])
        return any(one.digest == layer.digest for one in layers)

    def apart(self, tree: Tree, paths: Iterable[str]) -> IsolatedRun | None:
        """How the files of a tree must run: None means without isolation.

        Raises:
            SandboxUnavailable: some are unknown, and isolation is not available.
        """
        paths = list(paths)
        unknown = [] if self.everything else self.unknown(tree, paths)
        if not unknown:
            return None
        if self._hashed(tree, unknown):
            unknown = self.unknown(tree, paths)
            if not unknown:
                return None
        because = (
            f"{some_of(unknown, _NAMED)}: not from a release on the package index or "
            f"from a local layer"
        )
        isolation = find_isolation()
        if isinstance(isolation, str):
            raise SandboxUnavailable(
                f"unknown code is not run on this machine without consent ({because}), and it "
                f"cannot be isolated here: {isolation}; bubblewrap isolates it, --trust-image "
                "gives consent",
                hint="apt-get install bubblewrap",
            )
        console.say(f"  isolated ({isolation.name}): {because}")
        return IsolatedRun(isolation=isolation, because=because)

    def unknown(self, tree: Tree, paths: Iterable[str]) -> list[str]:
        """The files that only the target itself lists, or that nobody has hashed.

        Those that no release has come first.  RECORD is ignored, because it is never run and
        installers rewrite it.
        """
        starts = {p: self._start(p, tree.digest(p)) for p in paths if not _is_record(p)}
        left = [path for path, start in starts.items() if start is not NEW_FILE]
        if not left:
            return []
        released = _Released(self, tree)
        # a file of a wheel that the plan brings is the release's, whatever was there before
        known = {path: (tree.digest(path), starts[path]) for path in left}
        left = [path for path in left if not any(released.has(path, one) for one in known[path])]
        if not left:
            return []
        ours = released.patched(receipts_of(tree))
        unknown = [path for path in left if (path, tree.digest(path)) not in ours]
        return sorted(unknown, key=lambda path: (released.lists(path, starts[path]), path))

    def _hashed(self, tree: Tree, unknown: Sequence[str]) -> bool:
        """Whether whole wheels were downloaded to hash them, because that may make all known."""
        unhashed = [wheel for wheel in _Released(self, tree).wheels if not wheel.is_known]
        wanted = [w for w in unhashed if any(path in w.members for path in unknown)]
        if not all(any(path in wheel.members for wheel in wanted) for path in unknown):
            return False
        for wheel in wanted:
            console.say(
                f"  {wheel.file.filename}: its RECORD is not pinned, so the whole wheel is hashed"
            )
            try:
                wheel.download()
            except SparkBuildError as error:
                console.warn(f"{error}")
                return False
        return True

    def _start(self, path: str, digest: str | None) -> str | None:
        """The digest that a file had before this command's plan, or ``NEW_FILE`` for a new file."""
        for _ in range(len(self.written) + 1):
            if digest is None or (path, digest) not in self.written:
                return digest
            before = self.written[path, digest]
            if before is None:
                return NEW_FILE
            digest = before
        return None


def has_hook(layer: Layer) -> bool:
    """Whether judging a layer runs its Python code."""
    return any(isinstance(op, Hook) for op in layer.ops)


def _is_record(path: str) -> bool:
    return path.count("/") == 1 and path.endswith(".dist-info/RECORD")


def _lists(wheel: RemoteWheel, path: str, digest: str | None) -> bool:
    member = wheel.members.get(path)
    return member is not None and member.sha256 == digest


class _Released:
    """The releases that a target claims to have, from the package index."""

    def __init__(self, trust: TrustedSources, tree: Tree) -> None:
        self._trust = trust
        self._tree = tree

    def has(self, path: str, digest: str | None) -> bool:
        """Whether one of the releases has this file with the same bytes, and was hashed."""
        return digest is not None and any(_lists(one, path, digest) for one in self._known)

    def lists(self, path: str, digest: str | None) -> bool:
        """Whether the index says, unchecked, that one of the releases has this file."""
        return any(_lists(wheel, path, digest) for wheel in self._wheels.wheels)

    @property
    def wheels(self) -> Sequence[RemoteWheel]:
        """The releases, as far as the index has them."""
        return self._wheels.wheels

    @cached_property
    def _known(self) -> list[RemoteWheel]:
        """Those that were hashed, which is looked up once for thousands of files."""
        return [wheel for wheel in self.wheels if wheel.is_known]

    def patched(self, receipts: Sequence[Receipt]) -> set[tuple[str, str]]:
        """The files that this machine's layers write on these releases, if named in receipts."""
        by_name = {layer.name: layer for layer in self._trust.layers}
        names = dict.fromkeys(receipt.layer for receipt in receipts)
        catalog = self._trust.catalog
        try:
            chosen = [
                by_name[name] if name in by_name else catalog.layer(name)
                for name in names
                if name in by_name or name in catalog.folders
            ]
            target = self._platforms[0].target
            sources = IndexSources(self._trust.index)
            steps = judge_in_order(order(chosen), self._wheels, sources, target, {})
            return {
                (path, content.sha256)
                for step in steps
                for path, content in step.changes.items()
                if content is not None and self._is_known(path)
            }
        except (SparkBuildError, ApplyError) as error:
            console.detail(f"the output of these layers on the releases is unknown: {error}")
            return set()

    def _is_known(self, path: str) -> bool:
        """Whether the released file at a path was hashed, or there is none."""
        wheel = self._wheels.wheel_of(path)
        return wheel is None or wheel.is_known

    @cached_property
    def _platforms(self) -> list[Platform]:
        here = Platform.parse(machine.machine(), f"{sys.version_info[0]}.{sys.version_info[1]}")
        return [self._trust.platform, here] if self._trust.platform else [here]

    @cached_property
    def _wheels(self) -> WheelTree:
        bottom = self._tree
        while isinstance(bottom, OverlayTree):
            bottom = bottom.base
        if isinstance(bottom, WheelTree):
            return bottom
        wheels = []
        for dist in self._tree.distributions().values():
            wheel = self._wheel(dist.name, dist.version) if dist.name in TRACKED else None
            if wheel is not None:
                wheels.append(wheel)
        return WheelTree(wheels)

    def _wheel(self, name: str, version: str) -> RemoteWheel | None:
        for platform in self._platforms:
            try:
                wheel = RemoteWheel(
                    self._trust.index.choose(name, version, platform), self._trust.index
                )
                if wheel.members:
                    return wheel
            except (SparkBuildError, ApplyError) as error:
                console.detail(f"{name} {version} is not available from the index: {error}")
        return None
