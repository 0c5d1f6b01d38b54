"""What a layer's own text shows that it will fail by."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.layers.catalog import Catalog
from builder.layers.layerfile import load_layer, open_ended
from builder.pipeline.checking import findings

if TYPE_CHECKING:
    from pathlib import Path

GOOD = """\
summary = "one"
order = 50
package = "vllm"

[provenance]
origin = "own"
bug = ["vllm-project/vllm#1"]
forwarded = "no"
applied-upstream = "no"
last-update = 2026-01-01

[[upstream]]
when = { "vllm" = ">=0.21.0rc0" }
since = "vLLM 0.21.0"
reason = "it is fixed"
probe = [{ file = "vllm/x.py", contains = "    return second_of(names)" }]

[[variant]]
name = "first"
when = { "vllm" = ">=0.20.0rc0,<0.21.0rc0" }

[[variant.op]]
op = "replace"
file = "vllm/x.py"
old = "    names = sorted(names)\\n    return first_of(names)\\n"
new = "    return second_of(names)\\n"
"""
SECOND = """
[[variant.op]]
op = "replace"
file = "vllm/x.py"
old = "    return second_of(names)\\n"
new = "    return third_of(names)\\n"
"""


def rules(tmp_path: Path, text: str) -> list[str]:
    folder = tmp_path / "a-layer"
    folder.mkdir()
    (folder / "layer.toml").write_text(text)
    return [finding.rule for finding in findings(load_layer(folder), open_ended(folder))]


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("", "", None),
        ('origin = "own"', 'origin = " "', "provenance"),
        ("last-update = 2026-01-01", "last-update = 2199-01-01", "provenance"),
        ("vllm-project/vllm#1", "a thread in a forum", "provenance"),
        ("    names = sorted(names)\\n    return first_of(names)", "first", "context"),
        (",<0.21.0rc0", "", "range"),
        ("<0.21.0rc0", "<0.99.0rc0", "range"),
        (",<0.21.0rc0", ",!=0.20.1", "range"),
        ("order = 50", 'order = 50\nopen-ended = "why"', "range"),
        ('contains = "    return second_of(names)"', 'contains = "names = sorted("', "probe"),
        ('contains = "    return second_of(names)"', 'lacks = "third"', None),
    ],
)
def test_each_rule(tmp_path: Path, old: str, new: str, rule: str | None) -> None:
    assert old in GOOD
    assert rules(tmp_path, GOOD.replace(old, new)) == ([rule] if rule else [])


def test_a_reason_allows_a_range_without_an_end(tmp_path: Path) -> None:
    text = GOOD.replace(",<0.21.0rc0", "").replace("order", 'open-ended = "why"\norder')
    assert rules(tmp_path, text) == []


def test_an_anchor_in_the_new_text_of_another_op(tmp_path: Path) -> None:
    assert rules(tmp_path, GOOD + SECOND) == ["anchor"]


def test_shipped_layers_have_no_weakness() -> None:
    catalog = Catalog.discover()
    found = [
        str(f)
        for name, folder in catalog.folders.items()
        for f in findings(catalog.layer(name), open_ended(folder))
    ]
    assert found == []
