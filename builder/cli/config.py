"""``spark-build config show``: every effective setting, and where it comes from."""

from __future__ import annotations

import os
from pathlib import Path

from builder.cli.show import print_json
from builder.index import pip_index_url
from builder.lock import lock_path
from builder.paths import cache_dir, data_dir

_VARIABLES = {
    "SPARK_BUILD_PATCHES": "more directories of layer folders",
    "SPARK_BUILD_CACHE": "where wheels, sandboxes and pages are kept",
    "SPARK_BUILD_DOCKER": "the docker client to build with",
    "SPARK_BUILD_TIME_LIMIT": "how long 'image' may take",
    "SPARK_BUILD_BUILDER": "the buildx builder or BuildKit daemon to build on",
    "SPARK_BUILD_NVCC": "the nvcc to compile with, or: wheels",
    "SPARK_BUILD_TORCH": "version of the sandbox's CPU torch",
    "SPARK_BUILD_TORCH_INDEX": "package index with CPU builds of torch",
    "SPARK_BUILD_REAL_EXTENSIONS": "1: sandboxes load vLLM's real operator library",
    "SPARK_BUILD_KEEP_CONTAINER": "do not remove containers (to look inside)",
    "SOURCE_DATE_EPOCH": "timestamp of everything in an image; stands in the plan",
    "SPARK_BUILD_LOCK": "the lock file, instead of the project's",
    "SPARK_BUILD_FORGE": "host or API address of the forge (default: GitHub)",
    "SPARK_BUILD_FORGE_CLONE": "local clones that answer for their repositories",
    "SPARK_BUILD_REGISTRY": "host that the registry's user name and password are for",
    "SPARK_BUILD_REGISTRY_USER": "user name for SPARK_BUILD_REGISTRY",
    "SPARK_BUILD_PLAIN_HTTP": "registries to speak plain http to",
    "DOCKER_HOST": "the Docker Engine",
}
#: Shown as set or not set, never with their value.
_SECRETS = {
    "SPARK_BUILD_REGISTRY_PASSWORD": "password or token for SPARK_BUILD_REGISTRY",
    "SPARK_BUILD_FORGE_TOKEN": "token for the forge that is set",
    "GITHUB_TOKEN": "token for GitHub",
    "GH_TOKEN": "token for GitHub",
}


def show_command(json: bool) -> None:
    """Print settings as name, value, source."""
    index = pip_index_url()
    lock = lock_path(Path.cwd())
    rows = [
        ("cache", str(cache_dir()), _source("SPARK_BUILD_CACHE", "the platform's default")),
        ("patches", str(data_dir("patches")), "spark-build itself"),
        ("index", "configured" if index else "default", "pip" if index else "pypi-simple"),
        ("lock", str(lock), "found" if lock.is_file() else "not there"),
    ]
    for name, meaning in _VARIABLES.items():
        value = os.environ.get(name)
        source = "environment" if value is not None else f"not set ({meaning})"
        rows.append((name, value or "", source))
    for name, meaning in _SECRETS.items():
        present = bool(os.environ.get(name))
        source = "environment" if present else f"not set ({meaning})"
        rows.append((name, "***" if present else "", source))
    if json:
        values = [{"name": n, "value": v, "source": s} for n, v, s in rows]
        print_json({"schema": 1, "settings": values})
        return
    for name, value, source in rows:
        print(f"{name:<28}{value:<44}  {source}")


def _source(variable: str, otherwise: str) -> str:
    return variable if os.environ.get(variable) else otherwise
