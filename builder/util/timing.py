"""How long the steps of a run take."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def timed(timings: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds of a block that ends well to those of its step."""
    began = time.monotonic()
    yield
    timings[name] = timings.get(name, 0.0) + time.monotonic() - began
