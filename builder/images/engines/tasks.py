"""Scripts that run in containers of an image, as values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: The folder of mounts and results in a container.
ROOT = Path("/spark-build")


@dataclass(frozen=True, kw_only=True)
class PinnedImage:
    """An image for one platform (``linux/arm64``): its reference and its digest."""

    ref: str
    digest: str
    platform: str

    @property
    def name(self) -> str:
        """The name without a digest."""
        return self.ref.partition("@")[0]

    @property
    def exact(self) -> str:
        """The reference by digest."""
        return f"{self.name}@{self.digest}"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A script for ``/bin/sh``; its results are the files in ``/spark-build/out/NAME``.

    It starts after the task ``after``, with that task's results.
    """

    name: str
    script: str
    after: str = ""


class TaskFailed(Exception):
    """A script exited non-zero; ``output`` is what the scripts printed."""

    def __init__(self, status: int, output: str) -> None:
        super().__init__(f"exit code {status}")
        self.status = status
        self.output = output
