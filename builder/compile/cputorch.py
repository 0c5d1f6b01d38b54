"""Checks that the torch of a base is a CUDA build, as needed for the ABI check."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.compile.changes import image_of
from builder.errors import Exit, SparkBuildError
from builder.model.platform import Platform
from builder.pypi.wheels import RemoteWheel

if TYPE_CHECKING:
    from builder.applier.outcomes import Target
    from builder.pypi.index import PackageIndex


def refuse_cpu_torch(index: PackageIndex, torch: str, target: Target, release: str) -> None:
    """Refuse a torch without CUDA, against which an extension wheel cannot be checked.

    Raises:
        SparkBuildError: it is a CPU build (exit 10).
    """
    platform = Platform.parse(target.platform, target.python)
    wheel = RemoteWheel(index.choose("torch", torch, platform), index)
    if "torch/lib/libtorch_cuda.so" not in wheel.members:
        raise SparkBuildError(
            f"torch {torch} for {target.platform} on the package index is a CPU build, but "
            f"compiled code must be checked against the libraries of a CUDA build",
            Exit.NEEDS_REBUILD,
            hint=f"name the target image or environment: --base {image_of(release)}",
        )
