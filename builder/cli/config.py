"""``spark-build config show``: every effective setting, and where it comes from."""

from __future__ import annotations

import os

from builder.cli.show import print_json
from builder.index import pip_index_url
from builder.paths import cache_dir, data_dir

_VARIABLES = {
    "SPARK_BUILD_PATCHES": "more directories of layer folders",
    "SPARK_BUILD_CACHE": "where wheels, sandboxes and pages are kept",
    "SPARK_BUILD_DOCKER": "the docker client to build with",
    "SPARK_BUILD_TORCH": "version of the sandbox's CPU torch",
    "SPARK_BUILD_TORCH_INDEX": "package index with CPU builds of torch",
    "SPARK_BUILD_KEEP_CONTAINER": "do not remove containers (to look inside)",
    "SOURCE_DATE_EPOCH": "timestamp of everything in an image",
    "DOCKER_HOST": "the Docker Engine",
}


def show_command(json: bool) -> None:
    """Print settings as name, value, source."""
    index = pip_index_url()
    rows = [
        ("cache", str(cache_dir()), _source("SPARK_BUILD_CACHE", "the platform's default")),
        ("patches", str(data_dir("patches")), "spark-build itself"),
        ("index", "configured" if index else "default", "pip" if index else "pypi-simple"),
    ]
    for name, meaning in _VARIABLES.items():
        value = os.environ.get(name)
        source = "environment" if value is not None else f"not set ({meaning})"
        rows.append((name, value or "", source))
    if json:
        values = [{"name": n, "value": v, "source": s} for n, v, s in rows]
        print_json({"schema": 1, "settings": values})
        return
    for name, value, source in rows:
        print(f"{name:<28}{value:<44}  {source}")


def _source(variable: str, otherwise: str) -> str:
    return variable if os.environ.get(variable) else otherwise
