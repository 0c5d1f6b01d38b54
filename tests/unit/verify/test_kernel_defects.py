"""The page of kernels' defects says what the evidence says, all of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from packaging.version import Version

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "kernel-defects.md").read_text("utf-8")
FILES = sorted((DOCS / "evidence" / "numbers").glob("vllm-*.json"))
RECORDS = [json.loads(path.read_text("utf-8")) for path in FILES]


def cell(check: Mapping[str, str]) -> str:
    """One result in a few words."""
    if check["status"] != "fail":
        return {"pass": "right", "not-run": "not run"}[check["status"]]
    wrong = "wrong values" if check["seen"].startswith("wrong values") else ""
    race = "race" if "race, " in check["seen"] else ""
    return " and ".join(part for part in (wrong, race) if part) or "does not run"


def versions(record: Mapping[str, Any]) -> tuple[str, str]:
    """FlashInfer and CuTe DSL."""
    found = re.match(r"FlashInfer (\S+) \+ CuTe DSL (\S+) of", record["checks"][0]["where"])
    assert found, record["checks"][0]["where"]
    return found[1], found[2]


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """A row for each kernel, a column for each release."""
    made = sorted(records, key=lambda record: Version(versions(record)[0]))
    heads = ["FlashInfer", *(versions(record)[0] for record in made)]
    lines = [heads, ["---"] * len(heads), ["CuTe DSL", *(versions(record)[1] for record in made)]]
    names = dict.fromkeys(check["name"] for record in made for check in record["checks"])
    for name in names:
        by = [{check["name"]: check for check in record["checks"]} for record in made]
        lines.append([name, *(cell(found[name]) if name in found else "" for found in by)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def test_the_page_matches_the_evidence() -> None:
    shown = PAGE.partition("test_kernel_defects.py -->\n")[2].partition("<!-- end -->")[0]
    assert shown == table(RECORDS), table(RECORDS)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: str(record["target"]))
def test_every_failure_is_a_known_defect(record: Mapping[str, Any]) -> None:
    """By the kind of the kernel and the release."""
    rows = [row for row in PAGE.partition("## Defects")[2].splitlines() if row.startswith("| ")]
    flashinfer = versions(record)[0]
    failed = [check for check in record["checks"] if check["status"] == "fail"]
    assert failed
    for check in failed:
        kind = "MoE" if "MoE" in check["name"] else "GEMM"
        hit = [row for row in rows if row.startswith(f"| {kind}")]
        assert any(flashinfer in row.split("|")[3] for row in hit), check["name"]


def test_a_changed_record_changes_the_table() -> None:
    changed = json.loads(json.dumps(RECORDS))
    check = next(c for c in changed[0]["checks"] if c["status"] == "fail")
    check["status"] = "pass"
    assert table(changed) != table(RECORDS)


def test_the_evidence_has_no_local_path() -> None:
    for path in FILES:
        assert not re.search(r"(?<![\w.])/(?:root|home|tmp|work)/", path.read_text("utf-8")), path
