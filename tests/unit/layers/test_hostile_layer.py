"""A layer's folder of a stranger: odd values end with one short line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.applier.layers import Layer
from builder.applier.values import ApplyError
from tests.unit.caller import LAYER
from tests.unit.fakes import apply_to, copy_op, make_layer, replace_op, vllm_files, write_tree

if TYPE_CHECKING:
    from tests.unit.caller import Call


def put(text: str) -> None:
    write_tree(Path("own"), {"odd/layer.toml": text.encode()})
    write_tree(Path("site"), vllm_files())


@pytest.mark.parametrize(
    "number", ["0x" + "f" * 5000, "9" * 5000, "9223372036854775808", "-9223372036854775809"]
)
@pytest.mark.parametrize(
    "command", [("layers", "check", "odd"), ("plan", "-l", "odd", "-b", "dir:site")]
)
def test_a_number_that_toml_does_not_have(
    call: Call, number: str, command: tuple[str, ...]
) -> None:
    """One of 5,000 digits was an internal error when it was printed."""
    put(LAYER.replace("order = 50\n", f"order = {number}\n"))
    assert f"order = {number}" in Path("own/odd/layer.toml").read_text()
    done = call(*command, "--patches", "own")
    assert done.code == 2
    assert "odd/layer.toml: not valid TOML: " in done.err
    assert "twice" not in done.err
    assert "overwrite" not in done.err
    assert "internal error" not in done.err


def test_a_long_line_is_cut_in_the_message(site: Path) -> None:
    """The message had 4 MB."""
    with pytest.raises(ApplyError, match="not found") as caught:
        apply_to(site, make_layer("odd", replace_op("x" * 2_000_000, "y")))
    assert len(str(caught.value)) < 1000


def test_many_ops_are_counted_in_the_message(site: Path) -> None:
    ops = [replace_op("BACKEND = 'cutlass'", f"BACKEND = 'b{n}'") for n in range(200)]
    with pytest.raises(ApplyError) as caught:
        apply_to(site, make_layer("odd", *ops))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "path", [".spark-build/journal.json", ".spark-build/receipts/fix.json", ".spark-build"]
)
def test_a_layer_does_not_write_what_reverts_a_change(path: str) -> None:
    with pytest.raises(ApplyError, match="is in spark-build's own folder"):
        Layer.read(make_layer("odd", copy_op(path, b"[]")).rendered)
