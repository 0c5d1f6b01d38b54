"""What is read from a release's source is what its own parser says, made without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from builder.serving.interface import ServeInterface, read_interface

from .sandboxed import release_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from .support import Planner

    Truth = Callable[[str], tuple[ServeInterface, dict[str, Any]]]

#: The oldest and the newest, both sides of the moved parser, and one of each torch between.
RELEASES = ("0.17.1", "0.20.1", "0.24.0", "0.28.0", "0.33.0")
#: The values of these depend on the machine, or are too many to name: none are checked.
UNCHECKED = {"--mm-processor-device", "--collect-detailed-traces"}
TAKES = {None: "one", "?": "optional", "+": "many", "*": "many", 0: "nothing"}


@pytest.fixture(scope="module")
def truth(planned: Planner) -> Truth:
    """A release as it is read, and as it says of itself; each asked once."""
    made: dict[str, tuple[ServeInterface, dict[str, Any]]] = {}

    def ask(release: str) -> tuple[ServeInterface, dict[str, Any]]:
        if release not in made:
            plan = planned(f"pypi:vllm=={release}", "marlin")
            running = release_of(plan)
            (said,) = running.run("arguments.py", given=running.simulation())
            made[release] = (read_interface(plan.base.tree.read, release), said)
        return made[release]

    return ask


@pytest.mark.parametrize("release", RELEASES)
def test_flags(truth: Truth, release: str) -> None:
    read, said = truth(release)
    theirs = {frozenset(flag["names"]): flag for flag in said["flags"]}
    del theirs[frozenset({"-h", "--help"})]
    ours = {frozenset(flag.names): flag for flag in read.flags}
    assert ours.keys() == theirs.keys()
    unchecked: set[str] = set()
    for names, flag in theirs.items():
        assert ours[names].takes == TAKES.get(flag["nargs"], flag["nargs"]), names
        choices = tuple(sorted(c for c in flag["choices"] or () if c != "None"))
        if ours[names].choices != choices:
            unchecked |= names
    assert unchecked <= UNCHECKED


@pytest.mark.parametrize("release", RELEASES)
def test_variables_and_parsers(truth: Truth, release: str) -> None:
    read, said = truth(release)
    assert list(read.variables) == said["variables"]
    assert list(read.reasoning_parsers) == said["reasoning"]
    assert list(read.tool_parsers) == said["tools"]
