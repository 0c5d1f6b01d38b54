"""What the probes share: the simulated device, installed versions, and a stdout of their own.

It runs under the target's interpreter, with the standard library alone.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import site
import sys
import types
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Self

#: GB10's streaming multiprocessors.
MULTIPROCESSORS = 48

Json = dict[str, Any]


@dataclasses.dataclass
class SimulatedDevice:
    """The device of a request, and the parts that were simulated so far."""

    capability: tuple[int, int] = (12, 1)
    cuda_version: str = "13.0"
    device_name: str = "NVIDIA GB10"
    simulated: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, request: Json) -> Self:
        """Read the device from the request."""
        major, minor = request.get("capability", (12, 1))
        texts = {field.name for field in dataclasses.fields(cls) if field.type == "str"}
        named = {name: request[name] for name in texts & request.keys()}
        return cls(capability=(int(major), int(minor)), **named)

    def note(self, words: str) -> None:
        """Record a simulated part once."""
        if words not in self.simulated:
            self.simulated.append(words)

    def properties(self, multiprocessors: int, **more: Any) -> types.SimpleNamespace:
        """The device as ``torch.cuda.get_device_properties`` describes it."""
        return types.SimpleNamespace(
            name=self.device_name,
            major=self.capability[0],
            minor=self.capability[1],
            multi_processor_count=multiprocessors,
            total_memory=128 * 1024**3,
            is_integrated=1,
            warp_size=32,
            max_threads_per_multi_processor=1536,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=48 * 1024,
            shared_memory_per_block_optin=99 * 1024,
            shared_memory_per_multiprocessor=100 * 1024,
            L2_cache_size=24 * 1024**2,
            **more,
        )


def apply_environment(env: Mapping[str, str | None]) -> None:
    """Set variables; null unsets one, so that a caller can remove an image's own setting."""
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def add_paths(folders: list[str]) -> None:
    """Put folders first on ``sys.path`` and read their ``.pth`` files.

    Python does not treat a folder that pip filled as a site folder; the CuTe DSL is found
    through such a file.
    """
    folders = [os.path.abspath(folder) for folder in folders]
    before = [entry for entry in sys.path if entry not in folders]
    sys.path[:] = folders + before
    known = {os.path.normcase(folder) for folder in folders}
    for folder in folders:
        site.addsitedir(folder, known)
    added = [entry for entry in sys.path if entry not in before]
    sys.path[:] = added + before


def versions(distributions: Iterable[str]) -> dict[str, str | None]:
    """Installed versions of distributions; None for one that is not there."""
    installed: dict[str, str | None] = {}
    for name in distributions:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return installed


def claim_stdout() -> TextIO:
    """Reserve stdout for the result: all other output, even from C, goes to stderr."""
    ours = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return ours
