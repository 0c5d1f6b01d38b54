"""What ``diagnose --json`` prints of one log and of several, and what its schema refuses."""

from __future__ import annotations

import io
from typing import Any

import pytest

from builder.common.document import plain
from builder.diagnose.report import Diagnosed, Entries, EntryRow, find_entry
from builder.diagnose.verdict import diagnose
from tests.documents import validated, validator

SELECTED = b"INFO 07-02 10:00:00 [x.py:1] Using MarlinLinear for NVFP4 GEMM\n"
FULL = b"OSError: [Errno 28] No space left on device\n"


def printed(*logs: bytes) -> dict[str, Any]:
    """The document of logs."""
    results = [diagnose(io.BytesIO(log)) for log in logs]
    if len(logs) > 1:
        results = [result.in_file(f"{n}.log") for n, result in enumerate(results)]
    return plain(Diagnosed.of(results))


def test_one_log_has_no_files() -> None:
    document = validated("diagnose", printed(SELECTED + FULL))
    assert "files" not in document
    assert document["dispatch"] == [{"kind": "nvfp4-linear", "kernel": "MarlinLinear", "line": 1}]
    (finding,) = document["findings"]
    assert (finding["id"], finding["file"], finding["more"]) == ("disk-full", "", [])
    assert finding["follows"] is False


def test_of_several_each_line_names_its_log() -> None:
    document = validated("diagnose", printed(SELECTED, FULL))
    assert [row["file"] for row in document["files"]] == ["0.log", "1.log"]
    assert [row["file"] for row in document["dispatch"]] == ["0.log"]
    assert [row["file"] for row in document["findings"]] == ["1.log"]
    assert document["verdict"]["sentence"].startswith("1 of 2 logs show a failure")


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": {"state": "fine", "sentence": "all is well"}},
        {"verdict": {"state": "ready"}},
        {"lines": -1},
        {"files": None},
        {"dispatch": [{"kind": "attention", "kernel": "", "line": 1}]},
        {"findings": [{"id": "disk-full", "severity": "error", "line": 1, "message": "full"}]},
    ],
    ids=str,
)
def test_anything_else_is_refused(change: dict[str, Any]) -> None:
    assert not validator("diagnose").is_valid({**printed(SELECTED), **change})


def test_an_entry_names_its_engine() -> None:
    document = plain(Entries(entries=(EntryRow.of(find_entry("disk-full")),)))
    (row,) = validated("diagnose-list", document)["entries"]
    assert row["engine"] == "any"
    for key, value in (("engine", "nginx"), ("sure", ""), ("severity", "fatal"), ("fixes", [{}])):
        broken = {**document, "entries": [{**row, key: value}]}
        assert not validator("diagnose-list").is_valid(broken), key
