"""Every op of a rendered layer becomes a value of its own class; others are refused."""

from __future__ import annotations

from typing import Any

import pytest

from builder.applier.layers import (
    FORMS,
    Compile,
    Graft,
    Pull,
    Replace,
    TextChange,
    Wheel,
    counts,
    read_op,
)
from builder.applier.ops import Ops
from builder.applier.values import ApplyError
from builder.layers.catalog import Catalog
from builder.layers.layerfile import OPS
from tests.unit.fakes import (
    altered,
    fake_base,
    make_layer,
    make_plan_of,
    make_wheel,
    vllm_files,
)


def test_the_union_is_closed() -> None:
    """What a layer.toml may name, what is read, and what is judged are the same."""
    assert set(FORMS) == set(OPS)
    assert {name.removeprefix("op_") for name in dir(Ops) if name.startswith("op_")} == set(FORMS)


def test_every_shipped_op_is_read() -> None:
    catalog = Catalog.discover()
    layers = [catalog.layer(name) for name in catalog.folders]
    raw = [op for one in layers for v in one.rendered["variants"] for op in v["ops"]]
    assert len(raw) > 20
    for one, op in zip(raw, (op for layer in layers for op in layer.ops), strict=True):
        assert (op.kind, bool(op.subject)) == (one["op"], True)
        assert dict(op.when) == one.get("if", {})


CHANGE = {
    "name": "x", "files": [".cu"], "old": "a", "new": "b", "guard": "g",
    "applied-upstream": "0.22.0",
}  # fmt: skip


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
            {"op": "compile", "source": "vllm", "arch": "12.1a", "change": CHANGE},
            Compile("vllm", "12.1a", TextChange("x", [".cu"], "a", "b", "g", "0.22.0")),
        ),
        ({"op": "pull", "pull": "o/r#1", "map": {"a/": "b/"}}, Pull("o/r#1", map={"a/": "b/"})),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_keys_become_fields(raw: dict[str, Any], op: object) -> None:
    assert read_op(raw, "layer x") == op


def test_a_condition_tests_installed_versions() -> None:
    op = Replace("a.py", "x", "y", when={"vllm": ">=2"})
    assert counts(op, {"vllm": "2.0"})
    assert not counts(op, {"vllm": "1.0"})
    assert not counts(op, {})
    assert counts(Replace("a.py", "x", "y"), {})


REPLACE = {"op": "replace", "file": "a.py", "old": "x", "new": "y"}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"op": "rewrite", "file": "a.py"}, "unknown op 'rewrite' .known: replace, diff, "),
        ({"file": "a.py"}, "unknown op None .known: "),
        ({"op": "replace", "file": "a.py", "old": "x"}, "op replace: 'new' is missing"),
        ({"op": "graft", "file": "a.py"}, "op graft: 'from' is missing"),
        (1, "'ops' 1: unknown op 1"),
        ({"op": "remove", "distribution": 1}, "op remove: 'distribution' is not a text"),
        ({**REPLACE, "count": True}, "'count' is not a number"),
        ({**REPLACE, "if": ["vllm"]}, "'if' is not an object"),
        ({**REPLACE, "if": {"vllm": 1}}, "'if' holds what is not a text"),
        ({**REPLACE, "op": "graft", "from": "x", "names": "f"}, "'names' is not a list"),
        ({"op": "compile", "change": {"name": "x"}}, "'change': 'files' is missing"),
        ({"op": "diff", "diff": "", "pull": []}, "'pull' is not an object"),
    ],
)
def test_an_op_of_another_version_is_an_error(raw: Any, message: str) -> None:
    with pytest.raises(ApplyError, match=message) as caught:
        make_plan_of(fake_base(vllm_files()), make_layer("fix", raw))
    assert caught.value.code == 2


def test_a_pin_with_a_newer_key_is_refused() -> None:
    pin = make_wheel("lib", "1.0", {}).pin
    layer = make_layer("fix")
    assert altered(layer, pins={"wheel": [pin]}).pins.wheel
    said = r"^layer fix: 'pins': 'wheel' 1: unknown key 'mirror': a newer spark-build wrote it$"
    with pytest.raises(ApplyError, match=said) as refused:
        altered(layer, pins={"wheel": [{**pin, "mirror": "x"}]})
    assert (refused.value.code, refused.value.hint) == (2, "install a newer spark-build")
