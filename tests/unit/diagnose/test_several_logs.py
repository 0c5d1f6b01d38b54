"""Logs of several ranks and nodes, the catalogue on the command line, and its check."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.cli.diagnose import diagnose
from builder.cli.documents import schema
from builder.common.console import console
from builder.diagnose import report
from builder.diagnose.entries import load_entries
from builder.errors import SparkBuildError, UsageError

if TYPE_CHECKING:
    from typing import Any

DOCS = Path(__file__).parents[3] / "docs"
START = "(APIServer pid=1) INFO 06-01 09:00:00 [a.py:1] vLLM API server version 0.31.0\n"
HEAD = START + (
    "(EngineCore pid=9) ERROR 06-01 10:05:00 [core.py:1] TimeoutError: RPC call to sample_tokens "
    "timed out.\n"
)
WORKER = START + (
    "(Worker_TP1 pid=3) ERROR 06-01 10:00:00 [w.py:1] Traceback (most recent call last):\n"
    '(Worker_TP1 pid=3) ERROR 06-01 10:00:00 [w.py:1]   File "/x/vllm/a.py", line 3, in f\n'
    "(Worker_TP1 pid=3) ERROR 06-01 10:00:00 [w.py:1] WombatError: no pouch\n"
)
READY = START + "(APIServer pid=1) INFO:     Application startup complete.\n"


def write(folder: Path, **logs: str) -> tuple[str, ...]:
    for name, text in logs.items():
        (folder / f"{name}.log").write_text(text)
    return tuple(str(folder / f"{name}.log") for name in logs)


def validated(name: str) -> dict[str, Any]:
    import jsonschema

    document: dict[str, Any] = json.loads(json.dumps(console.document))
    jsonschema.Draft202012Validator(schema(name)).validate(document)
    return document


def test_the_rank_that_failed_first_is_reported_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SparkBuildError, match="not-in-catalogue") as ended:
        diagnose(write(tmp_path, head=HEAD, worker=WORKER), None, json=False)
    assert ended.value.code == 5
    out = capsys.readouterr().out
    assert out.index("WombatError") < out.index("rpc-timeout")
    flat = " ".join(out.split())
    assert "2 of 2 logs show a failure. The first is" in flat
    assert "line 4 at 06-01 10:00:00" in flat
    assert "worker.log, line 4: WombatError: no pouch" in flat


def test_logs_are_ordered_by_time_not_by_argument(tmp_path: Path) -> None:
    later = WORKER.replace("06-01 10:00:00", "06-01 11:00:00").replace("WombatError", "LateError")
    with pytest.raises(SparkBuildError):
        diagnose(write(tmp_path, a=later, b=WORKER), None, json=True)
    document = validated("diagnose")
    assert [Path(f["file"]).name for f in document["files"]] == ["b.log", "a.log"]
    assert [f["quote"] for f in document["findings"]] == [
        "WombatError: no pouch",
        "LateError: no pouch",
    ]
    assert {Path(f["file"]).name for f in document["findings"]} == {"a.log", "b.log"}


def test_secondary_failures_alone_mean_that_a_log_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SparkBuildError):
        diagnose(write(tmp_path, a=HEAD, b=HEAD), None, json=False)
    assert "is not among them" in " ".join(capsys.readouterr().out.split())


def test_a_folder_and_an_archive_are_several_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, a=READY, b=READY)
    (tmp_path / "core").write_bytes(bytes(range(256)) * 20)
    (tmp_path / ".hidden").write_text(WORKER)
    diagnose((str(tmp_path),), None, json=False)
    assert "nothing wrong was found in 2 logs" in capsys.readouterr().out
    with zipfile.ZipFile(tmp_path / "job.zip", "w") as archive:
        archive.writestr("1_head.txt", HEAD)
        archive.writestr("2_worker.txt", WORKER)
    with pytest.raises(SparkBuildError):
        diagnose((str(tmp_path / "job.zip"),), None, json=False)
    assert "2_worker.txt, line 4" in " ".join(capsys.readouterr().out.split())


def test_a_server_that_is_not_ready_counts(tmp_path: Path) -> None:
    with pytest.raises(SparkBuildError, match="did not become ready"):
        diagnose(write(tmp_path, a=START, b=START), None, json=False)


# ------------------------------------------------------------------------------------ the catalogue


def test_every_example_of_the_catalogue_passes() -> None:
    assert report.failed_examples(report.entries_to_check(())) == []


def test_list_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    diagnose(("list",), None, json=False)
    assert len(capsys.readouterr().out.splitlines()) == len(load_entries())
    diagnose(("show", "disk-full"), None, json=False)
    out = capsys.readouterr().out
    assert "disk-full (error, any engine, certain)" in out
    assert "df -h" in out
    diagnose(("list",), None, json=True)
    assert len(validated("diagnose-list")["entries"]) == len(load_entries())
    diagnose(("show", "disk-full"), None, json=True)
    assert [e["id"] for e in validated("diagnose-list")["entries"]] == ["disk-full"]


def test_an_unknown_entry() -> None:
    with pytest.raises(UsageError, match="did you mean 'disk-full'"):
        diagnose(("show", "disk-ful"), None, json=False)
    with pytest.raises(UsageError, match="no entry named"):
        diagnose(("show",), None, json=False)
    with pytest.raises(UsageError, match="no entry at"):
        diagnose(("check", "/nowhere"), None, json=False)


ENTRY = """\
id = "wombat"
severity = "error"
patterns = ['''the wombat is loose''']
message = "It is."
[[fix]]
text = "catch it"
[[example]]
log = "ERROR: the wombat is loose"
fix = "catch"
[[example]]
log = "INFO: the wombat is here"
found = false
"""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (('is loose"', 'is tame"'), "it is not matched"),
        (('fix = "catch"', 'fix = "feed"'), "without 'feed'"),
        (('fix = "catch"', "line = 3"), "matched in line 1, not 3"),
        (("is here", "is loose"), "a near miss is matched"),
        (("found = false", ""), "it is not matched"),
        (
            ('log = "INFO: the wombat is here"\nfound = false', 'log = "the wombat is loose"'),
            "a near miss (found = false) is missing",
        ),
    ],
)
def test_the_check_finds_mistakes_in_an_entry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], why: str
) -> None:
    path = tmp_path / "wombat.toml"
    path.write_text(ENTRY)
    diagnose(("check", str(path)), None, json=False)
    assert "1 entries, 2 examples: all pass" in capsys.readouterr().out
    path.write_text(ENTRY.replace(*change))
    with pytest.raises(SparkBuildError, match="examples of") as ended:
        diagnose(("check", str(tmp_path)), None, json=False)
    assert ended.value.code == 5
    assert why in capsys.readouterr().out
