"""Which tests are near to a change."""

from __future__ import annotations

import grimp
import pytest

from tests.changed import module_of, near_tests, nearest


@pytest.fixture
def graph() -> grimp.ImportGraph:
    """locks <- cache <- command <- page, each with its test."""
    graph = grimp.ImportGraph()
    chain = ["locks", "cache", "command", "page"]
    for importer, imported in zip(chain[1:], chain, strict=False):
        graph.add_import(importer=importer, imported=imported)
    for name in chain:
        graph.add_import(importer=f"tests.test_{name}", imported=name)
    return graph


def test_two_steps_and_no_more(graph: grimp.ImportGraph) -> None:
    names = nearest(graph, ["locks"])
    assert names == ["locks", "cache", "tests.test_locks", "command", "tests.test_cache"]
    assert nearest(graph, ["gone"]) == []


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("tests/unit/test_changed.py", "tests/unit/test_changed.py"),
        ("docs/layers.md", "tests/unit/test_docs.py"),
        ("docs/registry_push.svg", "tests/browser/test_chart.py"),
    ],
)
def test_files_that_are_no_module_count(path: str, near: str) -> None:
    graph = grimp.ImportGraph()
    graph.add_module(module_of("tests/unit/test_changed.py"))
    assert near in near_tests(graph, [path])
    assert near not in near_tests(graph, [])


def test_a_package_is_named_without_its_file() -> None:
    assert module_of("builder/ptx/__init__.py") == "builder.ptx"
    assert module_of("builder/errors.py") == "builder.errors"
