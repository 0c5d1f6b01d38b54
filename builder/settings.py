"""The environment variables of spark-build: names, values and meaning.

A command sees them as they were when it began: ``during_a_command`` reads them once. Outside of a
command, such as in a test of one function, the environment of the moment counts.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: The values that each running command began with, the latest last; a process has one, tests more.
_held: list[dict[str, str]] = []


def _now() -> Mapping[str, str]:
    current = _held[-1:]  # another thread's command may end meanwhile
    return current[0] if current else os.environ


class Variable(NamedTuple):
    """One environment variable."""

    name: str
    meaning: str
    secret: bool = False

    @property
    def value(self) -> str:
        """Its text, and an empty one where it is not set."""
        return _now().get(self.name, "")

    @property
    def is_set(self) -> bool:
        """Whether there is such a variable, empty or not."""
        return self.name in _now()


CACHE = Variable("SPARK_BUILD_CACHE", "cache directory (wheels, sandboxes, index pages)")
PATCHES = Variable("SPARK_BUILD_PATCHES", "more directories of layer folders")
LOCK = Variable("SPARK_BUILD_LOCK", "lock file to use instead of the project's")
TIME_LIMIT = Variable("SPARK_BUILD_TIME_LIMIT", "time limit of 'image'")
EPOCH = Variable("SOURCE_DATE_EPOCH", "time stamp of all files in an image; part of the plan")

DOCKER = Variable("SPARK_BUILD_DOCKER", "the docker client to build with")
DOCKER_HOST = Variable("DOCKER_HOST", "the Docker Engine")
BUILDER = Variable("SPARK_BUILD_BUILDER", "the buildx builder or BuildKit daemon to build on")
KEEP_CONTAINER = Variable("SPARK_BUILD_KEEP_CONTAINER", "if set, keep containers for inspection")

NVCC = Variable("SPARK_BUILD_NVCC", "the nvcc to compile with, or: wheels")
TORCH = Variable("SPARK_BUILD_TORCH", "torch version used for verification")
TORCH_INDEX = Variable("SPARK_BUILD_TORCH_INDEX", "package index with CPU builds of torch")
KEEP_LAUNCHES = Variable(
    "SPARK_BUILD_KEEP_LAUNCHES", "an empty directory to keep the launches of level numbers in"
)
LAUNCH_SECONDS = Variable(
    "SPARK_BUILD_LAUNCH_SECONDS",
    "seconds of processor time in which level numbers compiles and launches (default: 600)",
)
SERVER_IDLE = Variable(
    "SPARK_BUILD_SERVER_IDLE",
    "minutes that a process with an imported vLLM waits for questions (default: 10; 0: none)",
)
REAL_EXTENSIONS = Variable(
    "SPARK_BUILD_REAL_EXTENSIONS", "1: sandboxes load vLLM's real operator library"
)

REGISTRY = Variable("SPARK_BUILD_REGISTRY", "registry host for the user name and password")
REGISTRY_USER = Variable("SPARK_BUILD_REGISTRY_USER", "user name for SPARK_BUILD_REGISTRY")
REGISTRY_PASSWORD = Variable(
    "SPARK_BUILD_REGISTRY_PASSWORD", "password or token for SPARK_BUILD_REGISTRY", secret=True
)
PLAIN_HTTP = Variable("SPARK_BUILD_PLAIN_HTTP", "registries to reach over plain http")

FORGE = Variable("SPARK_BUILD_FORGE", "host or API address of the forge (default: GitHub)")
FORGE_CLONE = Variable("SPARK_BUILD_FORGE_CLONE", "local clones to use instead of the forge")
FORGE_TOKEN = Variable("SPARK_BUILD_FORGE_TOKEN", "token for SPARK_BUILD_FORGE", secret=True)
GITHUB_TOKEN = Variable("GITHUB_TOKEN", "token for GitHub", secret=True)
GH_TOKEN = Variable("GH_TOKEN", "token for GitHub", secret=True)
GITHUB_API_URL = Variable(
    "GITHUB_API_URL", "another server that may receive GITHUB_TOKEN and GH_TOKEN"
)
GH_HOST = Variable("GH_HOST", "another server that may receive GITHUB_TOKEN and GH_TOKEN")

VISUAL = Variable("VISUAL", "the editor that 'layers diff' opens, before EDITOR")
EDITOR = Variable("EDITOR", "the editor that 'layers diff' opens")

API_KEY = Variable("SPARK_BUILD_API_KEY", "key of the server that 'bench' measures", secret=True)

#: Read by ``bootstrap.py``, which cannot import this, and by the tests.
_OF_A_CHECKOUT = (
    Variable("SPARK_BUILD_VENV", "where bootstrap.py makes its environment (default: .venv)"),
    Variable("SPARK_BUILD_TEST_CACHE", "where tests keep their Docker Engine and base images"),
)

#: All of them, as ``config show`` prints them.
VARIABLES = (
    *(
        CACHE, PATCHES, LOCK, TIME_LIMIT, EPOCH, DOCKER, DOCKER_HOST, BUILDER, KEEP_CONTAINER,
        NVCC, TORCH, TORCH_INDEX, KEEP_LAUNCHES, LAUNCH_SECONDS, SERVER_IDLE, REAL_EXTENSIONS,
        REGISTRY, REGISTRY_USER, REGISTRY_PASSWORD, PLAIN_HTTP, FORGE, FORGE_CLONE, FORGE_TOKEN,
        GITHUB_TOKEN, GH_TOKEN, GITHUB_API_URL, GH_HOST, VISUAL, EDITOR, API_KEY,
    ),
    *_OF_A_CHECKOUT,
)  # fmt: skip

#: What spark-build hands to programs that it starts. Nobody else sets these.
HANDED_ON = frozenset(
    {
        "SPARK_BUILD_REQUEST",
        "SPARK_BUILD_GONE",
        "SPARK_BUILD_TRACKED",
        "SPARK_BUILD_AUDIT",
    }
)


@contextmanager
def during_a_command() -> Iterator[None]:
    """Read all variables now; until the block ends, these values count."""
    names = {variable.name for variable in VARIABLES}
    own = {name: text for name, text in os.environ.items() if name in names}
    _held.append(own)
    try:
        yield
    finally:
        _held[:] = [other for other in _held if other is not own]


def choose(variable: Variable, text: str) -> None:
    """Let an option of the running command say what a variable would say."""
    if not _held:
        raise RuntimeError(f"no command is running that could choose {variable.name}")
    _held[-1][variable.name] = text
