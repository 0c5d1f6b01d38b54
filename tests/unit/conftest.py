"""Every test has a cache of its own and sees none of the developer's settings or credentials."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from builder.__main__ import run
from builder.net.retry import RetryPolicy
from builder.registry.options import Options
from tests.unit.caller import call
from tests.unit.fakes import vllm_files, write_tree
from tests.unit.pullworld import World, make_world
from tests.wheels.fakeindex import FakeIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.forge import LocalForge


__all__ = ["call"]

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each test has its cache: pytest looks through all its folders to make one more."""
    return tmp_path_factory.mktemp("homes")


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch, homes: Path) -> None:
    """Keep the developer's variables and caches out."""
    for name in list(os.environ):
        if name.startswith(("SPARK_BUILD_", "VLLM_", "PIP_", "UV_")) or name == "DOCKER_HOST":
            monkeypatch.delenv(name)
    tokens = ("GITHUB_TOKEN", "GH_TOKEN", "GITHUB_API_URL", "GH_HOST")
    for name in ("SOURCE_DATE_EPOCH", "CLICOLOR_FORCE", "COLUMNS", "VIRTUAL_ENV", *tokens):
        monkeypatch.delenv(name, raising=False)
    own = homes / str(next(_NUMBERS))
    nobody = own / "docker"
    nobody.mkdir(parents=True)
    monkeypatch.setenv("DOCKER_CONFIG", str(nobody))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(nobody / "none.json"))
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(own / "cache"))
    # the same files in a layer, in a fourth of the time
    monkeypatch.setattr("builder.engines.layertar.LEVEL", 1)
    # servers are tried again as often as for users, without their pauses
    for policy in (RetryPolicy, Options):
        monkeypatch.setitem(policy.__init__.__kwdefaults__ or {}, "backoff", 0.001)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A repository with releases and pull requests; nobody changes its branches."""
    return make_world(tmp_path_factory.mktemp("world") / "vllm")


@pytest.fixture
def forge(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalForge]:
    """The forge of that repository, set as the one that is asked."""
    with world.forge() as running:
        monkeypatch.setenv("SPARK_BUILD_FORGE", running.root)
        yield running


@pytest.fixture
def wheels(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIndex]:
    """A package index with the repository's releases, set as pip's."""
    with FakeIndex() as running:
        world.publish(running)
        monkeypatch.setenv("PIP_INDEX_URL", running.url)
        yield running


@dataclass(frozen=True)
class Called:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)


@pytest.fixture
def spark_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Called]:
    """Run a command in an empty directory, with real releases and a real forge around it."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def called(*words: object) -> Called:
        capsys.readouterr()
        code = run([str(word) for word in words])
        out, err = capsys.readouterr()
        assert "internal error" not in out + err, err
        return Called(code, out, err)

    return called


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A real site-packages directory with a small vLLM in it."""
    return write_tree(tmp_path / "site-packages", vllm_files())
