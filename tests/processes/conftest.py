"""What the unit tests have, and a forge and a package index on the loopback interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.processes.pullworld import World, make_world
from tests.unit.conftest import (
    call,
    folders,
    hints_parse,
    isolated,
    site,
    spark_build,
    tmp_path,
    toml_is_parsed_once,
)
from tests.wheels.fakeindex import FakeIndex

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.forge import LocalForge

__all__ = [
    "call",
    "folders",
    "hints_parse",
    "isolated",
    "site",
    "spark_build",
    "tmp_path",
    "toml_is_parsed_once",
]


@pytest.fixture(name="world", scope="session")
def the_world(folders: Path) -> World:
    """A repository with releases and pull requests; nobody changes its branches."""
    return make_world(folders / "world")


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
