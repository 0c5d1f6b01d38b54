"""The extension wheel of a target, read from its files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder.applier.digests import sha256_hex
from builder.applier.machinecode import EXTENSION_WHEELS
from builder.applier.receipts import receipts_of
from builder.applier.records import parse_record
from builder.applier.sources import Member, Stage, Unstaged
from builder.applier.states import NOT_APPLICABLE, UPSTREAM
from builder.applier.trees import distribution_of
from builder.applier.versions import normalize
from builder.compile.changes import stage_name
from builder.util.documents import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from builder.applier.opkinds import Compile
    from builder.applier.outcomes import Target
    from builder.applier.sources import Sources
    from builder.applier.trees import Tree
    from builder.documents.plan import PlannedLayer


#: What a plan says was found in the sources -> the state that this was.
_UNSTAGED = {"nothing": NOT_APPLICABLE, "there": UPSTREAM}


@dataclass(frozen=True)
class InstalledWheelSources:
    """Sources that give what was compiled for a tree out of the tree itself."""

    sources: Sources
    tree: Tree
    #: layers of the target's plan, which says what its stages were and what had none
    planned: Sequence[PlannedLayer] = ()

    def donor(self, pin: Mapping[str, Any]) -> bytes:
        return self.sources.donor(pin)

    def members(self, pin: Mapping[str, Any]) -> list[Member]:
        if "info_dir" not in pin:
            return self.sources.members(pin)
        return list(self._members(str(pin["info_dir"])))

    def member(self, pin: Mapping[str, Any], path: str) -> bytes:
        if "info_dir" not in pin:
            return self.sources.member(pin, path)
        return self.tree.read(path) or b""

    def code(
        self, tree: Tree, path: str, wanted: Mapping[str, Any], digest: str
    ) -> Mapping[str, Any]:
        return self.sources.code(tree, path, wanted, digest)

    def stage(
        self,
        ops: Sequence[Compile],
        packages: Mapping[str, str],
        target: Target,
        module: Callable[[str], str],
    ) -> Stage | Unstaged | None:
        for layer in self.planned:
            found = layer.compile.sources if layer.compile else None
            state = _UNSTAGED.get(found.found) if found else None
            if found and state and found.change == ops[-1].change_name:
                return Unstaged(state, "as planned", plain(found), since=layer.since)
        change = stage_name(ops)
        wanted = normalize(f"{EXTENSION_WHEELS}{change}")
        request = {"change": change, "arch": ops[-1].arch}
        for receipt in receipts_of(self.tree):
            for path, entry in receipt["files"].items():
                folder, _, name = path.partition("/")
                dist = distribution_of(folder)
                if name != "RECORD" or "compile" not in entry["ops"] or dist is None:
                    continue
                if f"-{normalize(change)}-" in f"-{dist.name}-" and dist.name != wanted:
                    return Stage(request)  # part of it, which does not exist alone
                if dist.name == wanted:
                    pin = {"distribution": dist.name, "version": dist.version}
                    wheel = {"filename": folder, "sha256": entry["after"], "info_dir": folder}
                    return Stage(request, {**pin, **wheel})
        return self.sources.stage(ops, packages, target, module)

    def _members(self, info_dir: str) -> Iterator[Member]:
        """The files of its RECORD, but for the one that laying it out had added."""
        record = self.tree.read(f"{info_dir}/RECORD") or b""
        for row in parse_record(record):
            if row.sha256 and row.path != f"{info_dir}/INSTALLER":
                mode = self.tree.mode(row.path)
                yield Member(row.path, row.sha256, row.size or 0, mode)
        yield Member(f"{info_dir}/RECORD", sha256_hex(record), len(record), 0o644)
