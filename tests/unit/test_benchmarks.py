"""The one command for all benchmarks: what it reports, and that its quick form has no figure."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from benchmarks import __main__ as command
from benchmarks.__main__ import Setting, Subject, document, machine_of, main, page, table
from benchmarks.measure import Sample
from benchmarks.meter import Run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def subject() -> Subject:
    found = Subject(title="Push <x>", about="a registry", missing={"crane": "not on this machine"})
    found.add("spark-build push", [Sample(1.0, 0.5), Sample(3.0, 0.7), Sample(2.0, 0.6)])
    run = Run(seconds=4.0, cpu=1.0, sent=10, received=2_500_000, memory=9)
    found.add("docker <pull>", [run])
    return found


MACHINE = machine_of([0.5, 0.7])


def test_a_row_has_the_median_the_range_and_the_ratio_to_ours() -> None:
    ours, other = table(subject())
    assert ours["seconds"] == "2.00 (1.00 to 3.00)"
    assert (ours["ratio"], ours["cpu"], ours["received"]) == ("1.00", "0.60", "")
    assert (other["ratio"], other["received"]) == ("2.00", "2.50 MB")


def test_the_page_has_a_plot_and_escapes_names() -> None:
    text = page([subject(), Subject(title="nothing ran", about="")], MACHINE)
    assert text.count("<svg") == 1
    assert "Push &lt;x&gt;" in text
    assert "<pull>" not in text
    assert "Not run: crane: not on this machine" in text
    assert "2.00 (1.00 to 3.00)" in text


def test_the_document_has_every_run() -> None:
    made = json.loads(json.dumps(document([subject()], MACHINE)))
    assert made["machine"]["load"] == [0.5, 0.7]
    (one,) = made["subjects"]
    assert [run["seconds"] for run in one["ways"]["spark-build push"]] == [1.0, 3.0, 2.0]
    assert one["missing"] == {"crane": "not on this machine"}


def good(_setting: Setting) -> Iterator[Subject]:
    yield subject()


def bad(_setting: Setting) -> Iterator[Subject]:
    yield subject()
    raise OSError("no registry here")


def test_quick_prints_no_figure_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "SUBJECTS", {"good": good})
    assert main(["--quick", "--only", "good", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "good: 2 ways ran\n" in said
    assert "not run: crane" in said
    assert not re.search(r"\d\.\d", said)
    assert not list(tmp_path.iterdir())
    assert main(["--only", "good", "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "benchmarks.html",
        "benchmarks.json",
    ]


def test_a_subject_that_fails_is_named_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "SUBJECTS", {"bad": bad, "good": good})
    assert main(["--quick", "--only", "bad,good", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "bad: failed: no registry here" in said.err
    assert "good: 2 ways ran" in said.out


def test_an_unknown_subject_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "start,nothing"])
    assert "no subject nothing" in capsys.readouterr().err
