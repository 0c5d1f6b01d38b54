"""Pinned inputs of layers, read from the package index: single files by range, or whole wheels."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from builder.applier.layers import WheelPin
from builder.applier.values import sha256_hex
from builder.common.wheels import RemoteWheel
from builder.errors import RemoteError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from builder.applier.layers import Compile, DonorPin, InputPin, Kernels
    from builder.applier.machinecode import KernelCode
    from builder.applier.sources import Member, Stage, Unstaged
    from builder.applier.states import Target
    from builder.applier.trees import Tree
    from builder.common.pypi import PackageIndex
    from builder.compile.stage import Stages


class IndexSources:
    """Pinned inputs for the applier: single files by range, whole wheels from the cache."""

    def __init__(self, index: PackageIndex, stages: Stages | None = None) -> None:
        self._index = index
        self._wheels: dict[str, RemoteWheel] = {}
        #: the allowed compile stages; None without ``--compile``
        self.stages = stages

    def _wheel(self, pin: InputPin) -> RemoteWheel:
        name = pin.filename
        if name not in self._wheels:
            file = self._index.find(pin.distribution, name)
            if file is None:
                raise RemoteError(f"{name}, pinned by a layer, is not on the package index")
            if file.sha256 != pin.sha256:
                raise RemoteError(
                    f"{name}: the package index has sha256 {file.sha256}, "
                    f"the layer pins {pin.sha256}",
                    hint="do not build from it; find out why the file changed",
                )
            record = pin.record_sha256 if isinstance(pin, WheelPin) else ""
            file = dataclasses.replace(file, record=record or file.record)
            self._wheels[name] = RemoteWheel(file, self._index)
        return self._wheels[name]

    def donor(self, pin: DonorPin) -> bytes:
        data = self._wheel(pin).read(pin.member)
        if sha256_hex(data) != pin.member_sha256:
            raise RemoteError(
                f"{pin.filename}:{pin.member}: sha256 is {sha256_hex(data)}, "
                f"pinned is {pin.member_sha256}"
            )
        return data

    def members(self, pin: InputPin) -> list[Member]:
        if self.stages and pin.filename in self.stages.wheels:
            return self.stages.members(pin.filename)
        return list(self._wheel(pin).members.values())

    def code(self, tree: Tree, path: str, wanted: Kernels, digest: str) -> KernelCode:
        from builder.common.machinecode import read_module

        return read_module(tree, path, wanted, digest)

    def stage(
        self,
        ops: Sequence[Compile],
        packages: Mapping[str, str],
        target: Target,
        module: Callable[[str], str],
    ) -> Stage | Unstaged | None:
        return self.stages.stage(ops, packages, target, module) if self.stages else None

    def member(self, pin: InputPin, path: str) -> bytes:
        if self.stages and pin.filename in self.stages.wheels:
            return self.stages.member(pin.filename, path)
        return self._wheel(pin).read_whole(path)
