"""What several of these tests share: plans of real releases, and trees laid out from them."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from builder.applier.layers import Env
from builder.applier.receipts import parse_record
from builder.applier.trees import OverlayTree
from builder.common.reference import Ref
from builder.layers.catalog import Catalog
from builder.layers.planner import make_plan
from builder.pipeline.bases import identify_base
from builder.proof.kernels import Replies

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from builder.applier.layers import Layer
    from builder.applier.receipts import RecordRow
    from builder.applier.trees import Changes, Tree
    from builder.common.plan import BuildPlan, LayerDecision
    from builder.common.pypi import PackageIndex
    from builder.images.subject import Subject
    from builder.layers.catalog import Selection
    from builder.layers.pinned import IndexSources
    from builder.proof.target import VerifyTarget

HERE = Path(__file__).parent
#: Every profile of ours.  They exclude one another, so each has its own plan.
PROFILES = tuple(sorted(Catalog.discover().profile_files))
#: layer -> a profile that has it
PROFILE_OF = {
    layer: name for name in reversed(PROFILES) for layer in Catalog.discover().profile(name).layers
}
#: FlashInfer's own copy of the file that cutlass-dsl-sm121a edits.  It is on no import path.
VENDORED = "flashinfer/data/cutlass/python/CuTeDSL/cutlass/cute/nvgpu/warp/mma.py"


@dataclass(frozen=True)
class Planned:
    """A base and what a plan makes of it."""

    base: Subject
    plan: BuildPlan
    selection: Selection

    def decision(self, layer: str) -> LayerDecision:
        """What was decided about one layer."""
        return next(d for d in self.plan.decisions if d.name == layer)

    @property
    def states(self) -> dict[str, str]:
        """Layer -> state, in order of application."""
        return {d.name: d.outcome.state for d in self.plan.decisions}

    def before(self, layer: str) -> OverlayTree:
        """The files as the layers before this one leave them, without anybody's receipt."""
        overlay = OverlayTree(self.base.tree)
        for decision in self.plan.decisions:
            if decision.name == layer:
                break
            overlay.update(decision.outcome.changes)
        return overlay


class Planner:
    """Makes plans the way the commands do, each once."""

    def __init__(self, index: PackageIndex, sources: IndexSources) -> None:
        self.index, self.sources = index, sources
        self._made: dict[tuple[str, str, str | None], Planned] = {}

    def __call__(self, ref: str, layers: str = "b12x-full", platform: str | None = None) -> Planned:
        """The plan for a base."""
        key = (ref, layers, platform)
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key]

    def of_all(self, ref: str, platform: str | None = None) -> list[Planned]:
        """The plans of all profiles for a base."""
        return [self(ref, profile, platform) for profile in PROFILES]

    def states(self, ref: str, platform: str | None = None) -> dict[str, str]:
        """The state of every layer, of profiles and of none."""
        states: dict[str, str] = {}
        for made in self.of_all(ref, platform):
            states |= made.states
        for layer in Catalog.discover().folders.keys() - states.keys():
            states |= self(ref, layer, platform).states
        return states

    def _make(self, ref: str, layers: str, platform: str | None) -> Planned:
        selection = Catalog.discover().select([layers])
        base = identify_base(Ref(ref), selection, self.index, platform=platform)
        return Planned(base, make_plan(base, selection, self.sources), selection)


def snapshot(root: Path) -> dict[str, str]:
    """Path -> sha256 of every file below a directory."""
    found = {}
    for path in sorted(root.rglob("*")):
        if path.is_file():
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            found[path.relative_to(root).as_posix()] = digest
    return found


def lay_out(tree: Tree, paths: Iterable[str], root: Path) -> None:
    """Make a site-packages of some of a tree's files.

    Each distribution's RECORD lists just those files, as that of a smaller wheel would: the tree
    is then whole in itself, and the static check can be asked about it.
    """
    present = {path for path in paths if tree.digest(path) is not None}
    for dist in tree.distributions().values():
        record = f"{dist.info_dir}/RECORD"
        data = tree.read(record) or b""
        own = {f"{dist.info_dir}/METADATA", record}
        kept = {row.path for row in record_rows(data)} & (present | own)
        write(root, record, trimmed_record(data, kept))
        present = (present | own) - {record}
    for path in sorted(present):
        write(root, path, tree.read(path) or b"", tree.mode(path))


@lru_cache(maxsize=64)
def record_rows(data: bytes) -> tuple[RecordRow, ...]:
    """The rows of a RECORD; parsing those of vLLM and FlashInfer takes longer than a test."""
    return tuple(parse_record(data))


def write(root: Path, path: str, data: bytes, mode: int = 0o644) -> None:
    """Write one file and the directories above it."""
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    target.chmod(mode)


def trimmed_record(data: bytes, kept: set[str]) -> bytes:
    """A RECORD with the rows of some files only."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    for row in record_rows(data):
        if row.path in kept:
            rows.writerow([row.path, _record_hash(row.sha256), row.size or ""])
    return out.getvalue().encode()


def _record_hash(sha256: str | None) -> str:
    if sha256 is None:
        return ""
    return "sha256=" + base64.urlsafe_b64encode(bytes.fromhex(sha256)).rstrip(b"=").decode()


def probed_files(layer: Layer) -> set[str]:
    """Files that a layer's probes and settings look at without changing them."""
    probes = {clause.file for entry in layer.upstream for clause in entry.probe}
    return probes | {op.reader for op in layer.ops if isinstance(op, Env)}


def digests_of(changes: Changes) -> dict[str, str | None]:
    """Path -> sha256 that a change leads to, None for a file that goes away."""
    return {path: content.sha256 if content else None for path, content in changes.items()}


def replies_of(target: VerifyTarget, request: Mapping[str, Any]) -> Replies:
    """The replies to launches, which are not refused."""
    replies = target.runner.launch(request)
    assert isinstance(replies, Replies), str(replies)
    return replies
