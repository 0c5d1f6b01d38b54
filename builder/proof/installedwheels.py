"""The extension wheel of a target, read from its files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from builder.applier.layers import InputPin
from builder.applier.machinecode import EXTENSION_WHEELS
from builder.applier.outcomes import NOT_APPLICABLE, UPSTREAM
from builder.applier.receipts import parse_record, receipts_of
from builder.applier.sources import Member, Stage, Unstaged
from builder.applier.trees import distribution_of
from builder.applier.values import normalize, sha256_hex
from builder.common.plan import StageRequest
from builder.compile.changes import stage_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from builder.applier.layers import Compile, DonorPin, Kernels
    from builder.applier.machinecode import KernelCode
    from builder.applier.outcomes import Target
    from builder.applier.sources import Sources
    from builder.applier.trees import Tree
    from builder.common.plan import PlannedLayer


#: State of the sources in a plan -> the layer's state.
_UNSTAGED = {"nothing": NOT_APPLICABLE, "there": UPSTREAM}


@dataclass(frozen=True)
class InstalledWheelSources:
    """Sources that take compiled files from the tree itself."""

    sources: Sources
    tree: Tree
    #: layers of the target's plan, with and without compile stages
    planned: Sequence[PlannedLayer] = ()

    def donor(self, pin: DonorPin) -> bytes:
        return self.sources.donor(pin)

    def members(self, pin: InputPin) -> list[Member]:
        if not distribution_of(pin.filename):
            return self.sources.members(pin)
        return list(self._members(pin.filename))

    def member(self, pin: InputPin, path: str) -> bytes:
        if not distribution_of(pin.filename):
            return self.sources.member(pin, path)
        return self.tree.read(path) or b""

    def code(self, tree: Tree, path: str, wanted: Kernels, digest: str) -> KernelCode:
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
                return Unstaged(state, "as planned", found, since=layer.since)
        change = stage_name(ops)
        wanted = normalize(f"{EXTENSION_WHEELS}{change}")
        request = _stand_in(change, ops[-1].arch)
        for receipt in receipts_of(self.tree):
            for path, entry in receipt.files.items():
                folder, _, name = path.partition("/")
                dist = distribution_of(folder)
                if name != "RECORD" or "compile" not in entry.ops or dist is None:
                    continue
                if f"-{normalize(change)}-" in f"-{dist.name}-" and dist.name != wanted:
                    return Stage(request)  # part of it, which does not exist alone
                if dist.name == wanted:
                    digest = entry.after or ""
                    return Stage(request, InputPin(dist.name, dist.version, folder, digest))
        return self.sources.stage(ops, packages, target, module)

    def _members(self, info_dir: str) -> Iterator[Member]:
        """The files in its RECORD, without those that the installation added."""
        record = self.tree.read(f"{info_dir}/RECORD") or b""
        for row in parse_record(record):
            if row.sha256 and row.path != f"{info_dir}/INSTALLER":
                mode = self.tree.mode(row.path)
                yield Member(row.path, row.sha256, row.size or 0, mode)
        yield Member(f"{info_dir}/RECORD", sha256_hex(record), len(record), 0o644)


def _stand_in(change: str, arch: str) -> StageRequest:
    """A stage of which only the result is known."""
    return StageRequest(
        change=change,
        arch=arch,
        platform="",
        vllm="",
        torch="",
        module="",
        compilers={},
        operators=(),
        files=(),
        units=(),
        inputs=(),
    )
