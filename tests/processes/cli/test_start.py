"""A start imports only what its command needs: seen in a process of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.cli.commands import COMMANDS, GROUPS
from tests.unit.cli.test_start import plan  # noqa: F401 - a fixture
from tests.unit.startup import HEAVY, imported

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.conftest import Called
    from tests.wheels.fakeindex import FakeIndex


@pytest.mark.parametrize(
    "words",
    ["--help", "--version", "image --help", "layers --help", "schema plan", "-q schema plan"],
)
def test_heavy_modules_are_not_imported(words: str) -> None:
    loaded = imported(*words.split())
    assert "builder.cli.root" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_a_command_does_not_import_the_options_of_others() -> None:
    loaded = imported("plan", "--help")
    modules = {f"builder.cli.{entry.module}" for entry in (*COMMANDS, *GROUPS)}
    assert modules & loaded == {"builder.cli.build"}
    assert not modules & imported("--help")


@pytest.mark.parametrize("name", [entry.name for entry in (*COMMANDS, *GROUPS)])
def test_help_of_a_command_imports_only_options(name: str) -> None:
    loaded = imported(name, "--help")
    assert loaded.isdisjoint({*HEAVY, "msgspec"})


def test_a_warm_plan_needs_no_network(
    wheels: FakeIndex, spark_build: Callable[..., Called], plan: tuple[str, ...]
) -> None:
    cold = spark_build(*plan, "--json")
    assert cold.code == 0, cold.err
    assert wheels.requests, "the index is asked once"
    wheels.requests.clear()
    assert spark_build(*plan, "--json").out == cold.out
    assert wheels.requests == []
    # the index module reads wheels' file names with packaging; nothing else of the list is needed
    loaded = imported(*plan)
    assert loaded.isdisjoint(set(HEAVY) - {"packaging"})
    assert loaded.isdisjoint({"ssl", "sqlite3"}), "of requests to a forge, of images' layers"
    # only a layer that is compiled looks at machine code, only one from a pull request at a forge
    unused = {"common.machinecode", "common.forge", "compile.sources", "diagnose.entries"}
    assert loaded.isdisjoint(f"builder.{name}" for name in unused)
    assert wheels.requests == []
