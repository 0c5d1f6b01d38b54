"""Registries for the tests of a session; skopeo, to hear what others think of our images."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from builder.images.registry.copy import Locations
from builder.images.registry.reference import Options
from tests.engine import cache, machine
from tests.faultproxy import FaultProxy
from tests.unit.caller import call

from . import servers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["call"]

#: Impatient, and in small pieces, so that a layer of 150 kB takes three.
QUICK = Options(backoff=0.01, read_timeout=1.0, connect_timeout=5.0, chunk=64 << 10, settle=0.0)


@pytest.fixture(scope="session")
def programs() -> machine.Programs:
    """docker-registry and skopeo."""
    reason = servers.why_not()
    if reason is None:
        return servers.programs()
    if os.environ.get("CI") or os.environ.get("SPARK_BUILD_REQUIRE_ENGINE") == "1":
        pytest.fail(f"no real registry: {reason}", pytrace=False)
    pytest.skip(f"no real registry: {reason}")


@pytest.fixture(scope="session")
def registry(programs: machine.Programs) -> Iterator[servers.DockerRegistry]:
    """Open to everybody, plain http."""
    with servers.DockerRegistry(programs) as running:
        yield running


@pytest.fixture(scope="session")
def second() -> Iterator[servers.Crane]:
    """Another implementation, where Debian's testing suite can be reached."""
    tools = servers.CranePrograms()
    try:
        tools.program("crane")
    except cache.MachineError as error:
        pytest.skip(f"no second registry: {str(error).splitlines()[0]}")
    with servers.Crane(tools) as running:
        yield running


@pytest.fixture(scope="session")
def proxy(registry: servers.DockerRegistry) -> Iterator[FaultProxy]:
    """The open registry, behind a bad line."""
    with FaultProxy(registry.address) as running:
        yield running


@pytest.fixture(autouse=True)
def _nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No credential of whoever runs the tests is used, and none of the machine's proxies."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "cache"))
    for name in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "SPARK_BUILD_REGISTRY_USER",
                 "SPARK_BUILD_REGISTRY_PASSWORD", "SPARK_BUILD_PLAIN_HTTP"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def locations() -> Iterator[Locations]:
    """Impatient."""
    with Locations(QUICK) as opened:
        yield opened
