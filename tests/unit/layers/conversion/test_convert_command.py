"""``layers new --from-patch``, ``--from-series``, ``--from-mod``: layers that plan and apply."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from builder.layers.layerfile import load_layer

Call = Callable[..., Any]
CORE = "BACKEND = 'cutlass'\n\n\ndef run():\n    return BACKEND\n"


def diff(old: str, new: str, path: str = "vllm/core.py") -> str:
    """A diff of ``core.py`` whose first line changes."""
    rest = " \n \n def run():\n     return BACKEND\n"
    head = f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1,5 +1,5 @@\n"
    return f"{head}-BACKEND = '{old}'\n+BACKEND = '{new}'\n{rest}"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The directory that commands run in."""
    return tmp_path / "work"


@pytest.fixture
def series(work: Path) -> Path:
    """Two patches of the same line, in the order of a ``series`` file."""
    folder = work / "patches"
    folder.mkdir(parents=True)
    (folder / "series").write_text("# first\n01-First.patch\n\n02-second.patch -p1\n")
    (folder / "01-First.patch").write_text(diff("cutlass", "marlin"))
    (folder / "02-second.patch").write_text(diff("marlin", "b12x"))
    return folder


def states(result: Any) -> dict[str, str]:
    return {row["name"]: row["state"] for row in result.json["layers"]}


def test_a_patch_file_becomes_a_layer_that_applies(
    spark_build: Call, work: Path, site: Path
) -> None:
    (work / "fix.patch").write_text(f"Subject: [PATCH 1/2] Use it\n\n{diff('cutlass', 'b12x')}")
    made = spark_build("layers", "new", "fix", "--from-patch", "fix.patch", "--in", "L")
    assert (made.code, made.out) == (0, "L/fix\n")
    assert load_layer(work / "L/fix").summary == "Use it"
    assert spark_build("apply", site, "-l", "fix", "--patches", "L").code == 0
    assert (site / "vllm/core.py").read_text() == CORE.replace("cutlass", "b12x")


def test_dropped_files_are_said(spark_build: Call, work: Path) -> None:
    (work / "fix.patch").write_text(diff("a", "b") + diff("a", "b", "tests/t.py"))
    made = spark_build("layers", "new", "fix", "--from-patch", "fix.patch", "--json")
    assert made.json["dropped"] == ["tests/t.py (a test)"]
    assert "left out       tests/t.py (a test)" in made.err
    assert "# left out: tests/t.py (a test)" in (work / "fix/layer.toml").read_text()


def test_a_series_becomes_layers_in_order(
    spark_build: Call, work: Path, series: Path, site: Path
) -> None:
    made = spark_build("layers", "new", "q", "--from-series", series, "--in", "L", "--json")
    names = ["q-01-first", "q-02-second"]
    assert made.json["series"] == names
    second = load_layer(work / "L/q-02-second")
    assert (second.after, second.series) == (["q-01-first"], "q")
    words = ("-l", ",".join(names), "--patches", "L")
    assert states(spark_build("plan", "-b", f"dir:{site}", *words, "--json")) == {
        "q-01-first": "needed",
        "q-02-second": "needed",
    }
    assert spark_build("apply", site, *words).code == 0
    assert (site / "vllm/core.py").read_text() == CORE.replace("cutlass", "b12x")


def test_the_part_of_a_series_that_a_release_has_is_applied(
    spark_build: Call, series: Path, site: Path
) -> None:
    spark_build("layers", "new", "q", "--from-series", series, "--in", "L")
    (site / "vllm/core.py").write_text(CORE.replace("cutlass", "marlin"))
    words = ("-l", "q-01-first,q-02-second", "--patches", "L", "--json")
    plan = spark_build("plan", "-b", f"dir:{site}", *words)
    assert states(plan) == {"q-01-first": "applied", "q-02-second": "needed"}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--from-patch", "none.patch"], "cannot read none.patch"),
        (["--from-patch", "text"], "text: it is not a unified diff"),
        (["--from-patch", "test.patch"], "changes no file of an installed package"),
        (["--from-patch", "short.patch"], "less than 3 lines of context"),
        (["--from-series", "."], "cannot read series"),
        (["--from-mod", "."], "is not a mod"),
        (["--from-patch", "fix.patch", "--base", "dir:x"], "--base is for --from-mod"),
        (["--from-patch", "text", "--from-mod", "empty"], "cannot be combined"),
        (["--from-patch", "fix.patch", "--from-patch", "more/fix.patch"], "two patches are called"),
        (["--from-patch", "fix.patch", "--from-patch", "fi.patch"], "flashinfer-python and vllm"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(
    spark_build: Call, work: Path, words: list[str], why: str
) -> None:
    (work / "text").write_text("hello\n")
    (work / "fix.patch").write_text(diff("a", "b"))
    (work / "fi.patch").write_text(diff("a", "b", "flashinfer/x.py"))
    (work / "test.patch").write_text(diff("a", "b", "tests/t.py") + diff("a", "b", "vllm/a.md"))
    short = "--- a/vllm/core.py\n+++ b/vllm/core.py\n@@ -1,1 +1,1 @@\n-a\n+b\n"
    (work / "short.patch").write_text(short)
    for name in ("more", "empty"):
        (work / name).mkdir()
    (work / "more/fix.patch").write_text(diff("a", "b"))
    (work / "empty/run.sh").write_text("ldconfig\n")
    made = spark_build("layers", "new", "x", "--in", "L", *words)
    assert made.code == 2
    assert why in made.err
    assert not list((work / "L").glob("*"))


def test_compiled_sources_of_a_patch_need_a_rebuild(
    spark_build: Call, work: Path, site: Path
) -> None:
    (work / "fix.patch").write_text(diff("a", "b", "csrc/k.cu"))
    made = spark_build(
        "layers", "new", "k", "--from-patch", "fix.patch", "--project", "vllm-project/vllm"
    )
    assert made.code == 0, made.err
    plan = spark_build("plan", "-b", f"dir:{site}", "-l", "k", "--patches", ".", "--json")
    assert states(plan) == {"k": "needs-rebuild"}
