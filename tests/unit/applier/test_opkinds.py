"""Every op of a rendered layer becomes a value of its own class; others are refused."""

from __future__ import annotations

from typing import Any

import pytest

from builder.applier.failures import ApplyError
from builder.applier.opkinds import FORMS, Compile, Graft, Pull, Replace, Wheel, counts, read_op
from builder.applier.ops import Ops
from builder.layers.catalog import Catalog
from builder.layers.keys import OPS
from tests.unit.fakes import fake_base, make_layer, make_plan_of, vllm_files


def test_the_union_is_closed() -> None:
    """What a layer.toml may name, what is read, and what is judged are the same."""
    assert set(FORMS) == set(OPS)
    assert {name.removeprefix("op_") for name in dir(Ops) if name.startswith("op_")} == set(FORMS)


def test_every_shipped_op_is_read() -> None:
    catalog = Catalog.discover()
    layers = [catalog.layer(name) for name in catalog.folders]
    raw = [op for layer in layers for variant in layer["variants"] for op in variant["ops"]]
    assert len(raw) > 20
    for one in raw:
        op = read_op(one)
        assert (op.kind, bool(op.subject)) == (one["op"], True)
        assert dict(op.when) == one.get("if", {})


@pytest.mark.parametrize(
    ("raw", "op"),
    [
        (
            {"op": "replace", "file": "a.py", "old": "x", "new": "y", "if": {"vllm": ">=1"}},
            Replace("a.py", "x", "y", when={"vllm": ">=1"}),
        ),
        (
            {"op": "graft", "file": "a.py", "from": "vllm==1", "whole": True},
            Graft("a.py", "vllm==1", whole=True),
        ),
        (
            {"op": "wheel", "distribution": "lib", "version-of": "vllm", "wins-over": ["b"]},
            Wheel("lib", version_of="vllm"),
        ),
        (
            {"op": "compile", "source": "vllm", "arch": "12.1a", "change": {"name": "x"}},
            Compile("vllm", "12.1a", {"name": "x"}),
        ),
        ({"op": "pull", "pull": "o/r#1", "map": {"a/": "b/"}}, Pull("o/r#1", map={"a/": "b/"})),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_keys_become_fields(raw: dict[str, Any], op: object) -> None:
    assert read_op(raw) == op


def test_a_condition_tests_installed_versions() -> None:
    op = Replace("a.py", "x", "y", when={"vllm": ">=2"})
    assert counts(op, {"vllm": "2.0"})
    assert not counts(op, {"vllm": "1.0"})
    assert not counts(op, {})
    assert counts(Replace("a.py", "x", "y"), {})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"op": "rewrite", "file": "a.py"}, "unknown op 'rewrite' .known: replace, diff, "),
        ({"file": "a.py"}, "unknown op None .known: "),
        ({"op": "replace", "file": "a.py", "old": "x"}, "op replace: 'new' is missing"),
        ({"op": "graft", "file": "a.py"}, "op graft: 'from' is missing"),
    ],
)
def test_an_op_of_another_version_is_an_error(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ApplyError, match=message) as caught:
        make_plan_of(fake_base(vllm_files()), make_layer("fix", raw))
    assert caught.value.code == 2
