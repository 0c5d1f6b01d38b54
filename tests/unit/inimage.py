"""The in-image verifier's modules, loaded as they are in an image: beside one another."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from builder.common.paths import package_file

FOLDER = package_file("probes", "spark_verify.py").parent


def load(name: str) -> Any:
    """A module of ``builder/probes`` by its own name."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)
