"""The modules that run inside images."""

from __future__ import annotations

import importlib
from typing import Any


def load(name: str) -> Any:
    """A module of ``builder/probes``."""
    return importlib.import_module(f"builder.probes.{name}")
