"""Where to compile, from ``--toolkit`` and ``--builder``."""

from __future__ import annotations

from builder.compile.executor import ToolkitChoice
from builder.images.engines.buildx import check_name
from builder.images.engines.containers import Containers


def toolkit_choice(image: str | None, builder: str | None) -> ToolkitChoice | None:
    """Where to compile, from ``--toolkit`` and ``--builder``; None means on this machine.

    Raises:
        UsageError: the builder is invalid.
    """
    if not image:
        return None
    return ToolkitChoice(image, Containers(check_name(builder) if builder else ""))
