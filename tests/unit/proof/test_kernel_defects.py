"""The page of kernels' defects says what the evidence says, all of it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import kernel_defects
from benchmarks.kernel_defects import EVIDENCE, PAGE, package_table, table
from builder.proof.recorded import kernel_versions, number_records

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

RECORDS = number_records(EVIDENCE)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not what verify --json prints"),
        ("[]", "is not what verify --json prints"),
        ('{"checks": []}', "is not what verify --json prints"),
        ('{"checks": [{"where": "here"}]}', "names no FlashInfer and CuTe DSL: 'here'"),
        (None, "has no vllm-*.json"),
    ],
)
def test_evidence_that_is_none_is_named(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "vllm-0.1.json").write_text(content)
    with pytest.raises(ValueError, match=re.escape(words)):
        number_records(tmp_path)


def test_a_page_without_a_place_for_the_table_is_named() -> None:
    with pytest.raises(ValueError, match="the page lacks <!--"):
        kernel_defects.page("# Other\n", "| table |\n")


def test_a_record_without_the_package_is_named() -> None:
    with pytest.raises(ValueError, match=r"vllm==0\.33\.0 has no check of the package b12x"):
        package_table([record for record in RECORDS if record["target"].endswith("0.33.0")])


def test_every_failure_of_the_package_is_a_known_defect() -> None:
    rows = PAGE.read_text("utf-8").partition("## The package b12x")[2].splitlines()
    (record,) = number_records(EVIDENCE, pattern="b12x-*.json")
    of_package = [c for c in record["checks"] if c["name"].startswith(kernel_defects.PACKAGE)]
    failed = [check for check in of_package if check["status"] == "fail"]
    assert failed
    for check in failed:
        name = check["name"].removeprefix(kernel_defects.PACKAGE)
        assert [row for row in rows if row.startswith(f"| {name}") and "barrier" in row], name


def test_a_kernel_that_a_release_lacks_has_no_result() -> None:
    where = "FlashInfer {} + CuTe DSL 4 of t"
    new = {"name": "new", "status": "pass", "where": where.format("0.2")}
    lacking = {"name": "new", "status": "not-run", "moot": True, "where": where.format("0.1")}
    nowhere = {**lacking, "name": "other", "where": where.format("0.2")}
    made = table([{"checks": [lacking]}, {"checks": [new, nowhere]}])
    assert made.splitlines()[3:] == ["| new |  | right |"]


#: How rows of defects begin, by a part of a check's name.
KINDS = {
    "1 token, narrow": "MoE, 1 token, narrow experts",
    "narrow": "MoE, few tokens, narrow experts",
    "MoE": "MoE",
    "experts": "MoE",
    "W4A16 GEMM": "W4A16 GEMM",
    "": "GEMM",
}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: str(record["target"]))
def test_every_failure_is_a_known_defect(record: Mapping[str, Any]) -> None:
    """By the kind of the kernel and the release."""
    rows = [
        row
        for row in PAGE.read_text("utf-8").partition("## Defects")[2].splitlines()
        if row.startswith("| ")
    ]
    flashinfer = kernel_versions(record)[0]
    failed = [check for check in record["checks"] if check["status"] == "fail"]
    assert failed
    for check in failed:
        kind = next(row for part, row in KINDS.items() if part in check["name"])
        hit = [row for row in rows if row.startswith(f"| {kind}")]
        assert any(flashinfer in row.split("|")[3] for row in hit), check["name"]


def test_a_changed_record_changes_the_table() -> None:
    changed = json.loads(json.dumps(RECORDS))
    check = next(c for c in changed[0]["checks"] if c["status"] == "fail")
    check["status"] = "pass"
    assert table(changed) != table(RECORDS)


def test_the_evidence_has_no_local_path() -> None:
    for path in EVIDENCE.iterdir():
        assert not re.search(r"(?<![\w.])/(?:root|home|tmp|work)/", path.read_text("utf-8")), path
