"""The ops ``wheel`` and ``remove``: install and remove complete distributions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.applier.digests import sha256_hex
from builder.applier.failures import EXIT_USAGE, ApplyError
from builder.applier.outcomes import OpResult, Target
from builder.applier.receipts import explained, receipts_of
from builder.applier.records import INSTALLER, OWN_RECORD, record_of, record_row, recorded_paths
from builder.applier.states import DRIFT, POST, PRE
from builder.applier.trees import (
    Changes,
    Content,
    Distribution,
    OverlayTree,
    Tree,
    stale_pyc,
    versions,
)
from builder.applier.versions import normalize, version_matches

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from builder.applier.layers import InputPin, Layer, WheelPin
    from builder.applier.opkinds import Remove, Wheel
    from builder.applier.sharedstage import SharedStage
    from builder.applier.sources import Member, Sources


class WheelOps:
    """The ops of a layer that install or remove a distribution, on a view of the tree."""

    def __init__(
        self,
        layer: Layer,
        tree: Tree,
        sources: Sources,
        target: Target,
        env: Mapping[str, str],
        together: SharedStage,
    ) -> None:
        self.layer, self.sources, self.target, self.base_env = layer, sources, target, env
        self.together = together
        self.view = OverlayTree(tree)
        self.packages = versions(tree)
        self.receipts = receipts_of(tree)
        #: diffs that come after the op at hand in the same stack
        self.later: list[str] = []

    def op_wheel(self, op: Wheel) -> OpResult:
        name = normalize(op.distribution)
        version = op.version or self.packages.get(normalize(op.version_of))
        if version is None:
            return OpResult(DRIFT, reason=f"{op.version_of} is not in the base")
        return self._installed(self._wheel_pin(name, version))

    def _installed(self, pin: InputPin) -> OpResult:
        """A pinned wheel, unpacked; another installed version of it is removed."""
        name, version = normalize(pin.distribution), pin.version
        members = self.sources.members(pin)
        installed = self.view.distributions().get(name)
        if installed and installed.version == version and self._wins(members):
            return OpResult(
                POST, reason=f"{name} {version} is installed and its files take precedence"
            )
        changes: Changes = {}
        if installed:
            changes.update(self._without(installed))
        for member in members:
            changes.update(self._laid_out(pin, member))
        info_dir = next(m.path.split("/")[0] for m in members if OWN_RECORD.fullmatch(m.path))
        changes[f"{info_dir}/INSTALLER"] = Content.of(INSTALLER)
        changes[f"{info_dir}/RECORD"] = self._record(members, info_dir)
        return OpResult(PRE, changes=self._minimal(changes), inputs=[pin])

    def op_remove(self, op: Remove) -> OpResult:
        installed = self.view.distributions().get(normalize(op.distribution))
        if installed is None:
            return OpResult(POST, reason=f"{op.distribution} is not in the base")
        if op.unless is not None and version_matches(installed.version, op.unless):
            return OpResult(POST, reason=f"{op.distribution} {installed.version} is allowed")
        return OpResult(PRE, changes=self._without(installed))

    def _wheel_pin(self, name: str, version: str) -> WheelPin:
        for pin in self.layer.pins.wheel:
            fits = (
                normalize(pin.distribution) == name
                and pin.version == version
                and pin.platform in ("any", self.target.platform)
                and pin.python in ("py3", self.target.python)
            )
            if fits:
                return pin
        raise ApplyError(
            f"layer {self.layer.name}: no pinned wheel of {name} {version} for "
            f"{self.target.platform} and {self.target.python}",
            EXIT_USAGE,
            f"spark-build layers pin {self.layer.name}",
        )

    def _wins(self, members: Iterable[Member]) -> bool:
        for member in members:
            if OWN_RECORD.fullmatch(member.path):
                continue
            path = self._site_path(member.path)
            if path is None:
                continue
            if not explained(path, member.sha256, self.view.digest(path), self.receipts):
                return False
        return True

    @staticmethod
    def _site_path(path: str) -> str | None:
        """Where a wheel member lies in site-packages; None for scripts, headers and data."""
        head, _, rest = path.partition("/")
        if not head.endswith(".data"):
            return path
        scheme, _, below = rest.partition("/")
        return below if scheme in ("purelib", "platlib") else None

    def _laid_out(self, pin: InputPin, member: Member) -> Changes:
        path = self._site_path(member.path)
        if path is None:
            return {}
        if member.size == 0:
            return {path: Content.of(b"", member.mode)}
        sources, name = self.sources, member.path
        content = Content(
            sha256=member.sha256,
            size=member.size,
            mode=member.mode,
            load=lambda: sources.member(pin, name),
            origin=f"{pin.filename}:{name}",
        )
        return {path: content}

    def _record(self, members: Sequence[Member], info_dir: str) -> Content:
        """The wheel's RECORD as an installer leaves it: laid-out paths, plus our INSTALLER."""
        lines = []
        own = f"{info_dir}/RECORD"
        rows = [(m.path, m.sha256, m.size) for m in members if m.path != own]
        rows.append((f"{info_dir}/INSTALLER", sha256_hex(INSTALLER), len(INSTALLER)))
        for name, digest, size in rows:
            path = self._site_path(name)
            if path is not None:
                lines.append(record_row(path, digest, size))
        return Content.of("\n".join([*lines, f"{info_dir}/RECORD,,", ""]).encode())

    def _without(self, dist: Distribution) -> Changes:
        """Deletes a distribution's files, except those that another distribution also owns."""
        shared: set[str] = set()
        for other in self.view.distributions().values():
            data = self.view.read(f"{other.info_dir}/RECORD") if other != dist else None
            if data is not None:
                shared.update(recorded_paths(data))
        gone: Changes = {}
        for row in record_of(self.view, dist):
            if row.path in shared or row.path.startswith(("/", "../")):
                continue
            if self.view.digest(row.path) is not None:
                gone[row.path] = None
        return {**gone, **dict.fromkeys(stale_pyc(self.view, gone))}

    def _minimal(self, changes: Changes) -> Changes:
        """Without the files that already have exactly these bytes, and their compiled files."""
        same = {
            path
            for path, content in changes.items()
            if content is not None and content.sha256 == self.view.digest(path)
        }
        same |= set(stale_pyc(self.view, same))
        return {path: content for path, content in changes.items() if path not in same}
