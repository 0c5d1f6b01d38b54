"""A mod whose layers.json was edited: refused in one line, and nothing is written outside."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from builder.applier.receipts import STATE_DIR
from builder.applier.values import say
from tests.unit.applier.test_store import FIX, applier_here, bundle
from tests.unit.fakes import snapshot


def edited(site: Path, ops: list[dict[str, Any]] | None = None, **changes: Any) -> str:
    """The words of a bundle after an edit."""
    path = site.parent / "edited.json"
    whole = json.loads(Path(bundle(site, FIX)).read_text())
    layer = copy.deepcopy(whole["layers"][0]) | changes
    if ops is not None:
        layer["variants"][0]["ops"] = ops
    path.write_text(json.dumps(whole | {"layers": [layer]}))
    return str(path)


@pytest.mark.parametrize(
    "name",
    ["../../victim", "../../../../victim", "a/b", "/victim", "..", "", "a\0b", "a\nb", "\x1b[2J"],
)
def test_the_name_of_a_layer_is_the_name_of_a_file(site: Path, name: str) -> None:
    """Its receipt was written where the name led, and no revert found it."""
    before = snapshot(site.parent)
    layers = edited(site, name=name)
    done = applier_here("apply", "--root", str(site), "--layers", layers)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert {path for path in snapshot(site.parent) if "json" not in path} == set(before)
    assert not (site / STATE_DIR).exists()


@pytest.mark.parametrize(
    "op",
    [
        {"op": "env", "name": "A", "value": "x\0y", "reader": "vllm/core.py"},
        {"op": "replace", "file": "vllm/core.py", "old": "BACKEND", "new": "\ud800", "count": 1},
        {"op": "copy", "to": ".spark-build/journal.json", "data": "W10=", "from": "x"},
    ],
)
def test_an_op_that_nobody_could_want(site: Path, op: dict[str, Any]) -> None:
    before = snapshot(site)
    done = applier_here("apply", "--root", str(site), "--layers", edited(site, [op]))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert snapshot(site) == before


def test_what_a_mod_says_commands_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    say("  needed  x\n::error::a\n  ::set-output name=a::b ##[error]c\x1b[2J\x9b1A\r\u202e\ud800")
    assert capsys.readouterr().err == (
        "  needed  x\n| ::error::a\n  | ::set-output name=a::b ## [error]c"
        "\\x1b[2J\\x9b1A\\x0d\\x202e\\xd800\n"
    )
