"""Fixtures: one engine, one registry and one base image for all the tests of a session."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from . import machine, support
from .support import PROFILE, Built, Cli, Done, tags

if TYPE_CHECKING:
    from collections.abc import Iterator

SKIPPED = "no real engine: "
#: What a warm run needs; without a limit every change of a layer adds gigabytes.
BUILD_CACHE = "3GB"


@contextmanager
def _talking(config: pytest.Config) -> Iterator[None]:
    """Let progress reach the terminal: a first start takes minutes."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        yield
    else:
        with capture.global_and_fixture_disabled():
            yield


def _required() -> bool:
    """Where a check gates something, a test that cannot run is a failure, never a pass."""
    return bool(os.environ.get("CI")) or os.environ.get("SPARK_BUILD_REQUIRE_ENGINE") == "1"


def _needs_this_machine(what: str) -> None:
    """Skip where this machine cannot run it, or fail if that is required."""
    reason = machine.why_not()
    if reason and _required():
        pytest.fail(f"{what}{reason}", pytrace=False)
    if reason:
        pytest.skip(f"{what}{reason}")


@pytest.fixture(scope="session")
def tools(pytestconfig: pytest.Config) -> machine.EngineTools:
    """The programs: docker, buildx, registry, skopeo."""
    _needs_this_machine(SKIPPED)
    with _talking(pytestconfig):
        return machine.ensure_engine()


@pytest.fixture(scope="session")
def engine(tools: machine.EngineTools, pytestconfig: pytest.Config) -> Iterator[machine.Engine]:
    """A private Docker Engine with buildx."""
    running = machine.Engine(tools)
    with _talking(pytestconfig):
        running.__enter__()
    try:
        _tidy(running)
        yield running
        _tidy(running)
        running.run("builder", "prune", "--force", f"--keep-storage={BUILD_CACHE}")
    finally:
        running.__exit__(None, None, None)


def _tidy(engine: machine.Engine) -> None:
    """Nothing but base images outlives a run; a killed one may have left some."""
    held = support.containers(engine)
    if held:
        engine.run("rm", "--force", *sorted(held))
    made = [name for name in tags(engine) if not name.startswith(machine.KEPT)]
    if made:
        engine.run("image", "rm", *made)


@pytest.fixture(scope="session")
def registry(tools: machine.EngineTools) -> Iterator[machine.Registry]:
    """An empty registry on the loopback interface."""
    with machine.Registry(tools) as running:
        yield running


@pytest.fixture(scope="session")
def base_image(engine: machine.Engine, pytestconfig: pytest.Config) -> str:
    """A base image with the real wheels, in the engine's store."""
    with _talking(pytestconfig):
        return machine.base_image(engine)


@pytest.fixture(scope="session")
def toolkit_image(engine: machine.Engine, pytestconfig: pytest.Config) -> str:
    """An image with nvcc and g++, in the engine's store."""
    with _talking(pytestconfig):
        return machine.toolkit_image(engine)


@pytest.fixture(scope="session")
def cli(engine: machine.Engine, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """The command line as a user of this engine has it."""
    return Cli(engine.env, tmp_path_factory.mktemp("cwd"))


@pytest.fixture(scope="session")
def built(cli: Cli, base_image: str) -> Done:
    """`spark-build image --json` on the base image, run once."""
    return cli("image", "--layers", PROFILE, "--base", base_image, "--json").ok()


@pytest.fixture(scope="session")
def patched(built: Done) -> str:
    """The image that it made."""
    return str(built.json["image"])


@pytest.fixture(scope="session")
def built_tree(engine: machine.Engine, patched: str) -> support.Tree:
    """Its site-packages."""
    return support.tree_in_image(engine, patched)


@pytest.fixture(scope="session")
def modded(engine: machine.Engine, base_image: str) -> Iterator[support.Modded]:
    """A container of the base image in which our mod has run once."""
    with support.mod_container(engine, base_image) as made:
        made.first = made.run(support.MOD)
        yield made


@pytest.fixture(scope="session")
def modded_tree(engine: machine.Engine, modded: support.Modded) -> support.Tree:
    """Its site-packages after that."""
    modded.first.ok()
    return support.tree_in_container(engine, modded.held)


@pytest.fixture
def mod_container(engine: machine.Engine, base_image: str) -> Iterator[support.Modded]:
    """A fresh container of the base image, with our mod copied in."""
    with support.mod_container(engine, base_image) as made:
        yield made


@pytest.fixture
def build(engine: machine.Engine) -> Iterator[Built]:
    """Makes images from Dockerfiles; they are removed after the test."""
    made = Built(engine)
    yield made
    made.remove()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the very end how much was not tested, and why: skips are easy to overlook."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [str(report.longrepr[-1]) for report in skipped if isinstance(report.longrepr, tuple)]
    ours = [reason for reason in reasons if SKIPPED in reason]
    if ours:
        text = f"{len(ours)} engine tests did NOT run: {ours[0].partition(SKIPPED)[2]}"
        terminalreporter.write_sep("!", text, red=True, bold=True)


@pytest.fixture(scope="session")
def root_for_runtimes() -> None:
    """Runtimes make devices and mount: it takes root, and Debian's packages."""
    _needs_this_machine("no runtime: ")
