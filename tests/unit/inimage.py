"""The in-image verifier's modules, loaded as they are in an image: beside one another."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from builder.util.paths import package_file

FOLDER = package_file("runtime", "spark_verify.py").parent


def load(name: str) -> Any:
    """A module of ``builder/runtime`` by its own name."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)
