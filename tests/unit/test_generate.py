"""What is generated is held against its source, and a page that lacks a row is named."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from builder.errors import Exit
from tests import generate
from tests.generate import GENERATED, ROOT, Generated, main, missing_rows, run

if TYPE_CHECKING:
    from pathlib import Path

PAGES = ("README.md", "docs", "mods", "tests/wheels/expected-states.toml")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The pages of this repository, to be changed."""
    for name in PAGES:
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
    return tmp_path


def changed_file(root: Path, name: str) -> Path:
    """A file of something generated."""
    path = min(root.glob(name))
    return min(path.rglob("run.sh")) if path.is_dir() else path


def spoil(path: Path, name: str) -> None:
    """Change what is generated in a file."""
    text = path.read_text("utf-8")
    mark = next(
        (line for line in text.splitlines() if line in ("<!-- rules -->", "<!-- models -->")), ""
    )
    if mark:
        path.write_text(text.replace(mark, f"{mark}\nmore", 1))
    elif name == "docs/kernel-defects.md":
        path.write_text(text.replace("| wrong values and race |", "| right |", 1))
    else:
        path.write_text(f"{text}\nmore\n")


def test_fresh_copies_are_fresh(copy: Path) -> None:
    stale, missing = run([], check=True, everything=False, root=copy)
    assert (stale, missing) == ([], list(missing_rows()))


@pytest.mark.parametrize("one", GENERATED, ids=lambda one: one.name)
def test_a_change_makes_it_stale_until_it_is_written(copy: Path, one: Generated) -> None:
    path = changed_file(copy, one.name)
    before = path.read_bytes()
    spoil(path, one.name)
    assert path.read_bytes() != before
    stale, _ = run([one.name], check=True, everything=False, root=copy)
    assert stale == [str(path.relative_to(copy))]
    run([one.name], check=False, everything=False, root=copy)
    assert path.read_bytes() == before


def test_a_mod_that_belongs_to_no_profile(copy: Path) -> None:
    (copy / "mods" / "toy").mkdir()
    stale, _ = run(["mods"], check=True, everything=False, root=copy)
    assert stale == ["mods/toy belongs to no profile"]


def test_a_report_that_belongs_to_no_layer(copy: Path) -> None:
    (copy / "docs/upstream/toy").mkdir()
    stale, _ = run(["docs/upstream/*/pull-request.md"], check=True, everything=False, root=copy)
    assert stale == ["docs/upstream/toy belongs to no layer with upstream.md"]


def test_a_patch_of_another_layer_is_named(copy: Path) -> None:
    patch = min((copy / "docs/upstream").glob("*/change.patch"))
    patch.write_text(patch.read_text("utf-8").replace(", ", ", 0", 1), "utf-8")
    (row,) = set(missing_rows(copy)) - set(missing_rows())
    assert row == f"{patch.relative_to(copy)} is not of the layer as it is"


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("README.md", "`marlin`"),
        ("docs/profiles.md", "`ray`"),
        ("docs/verification.md", "`numbers`"),
        ("tests/wheels/expected-states.toml", "[vllm.states.marlin-env]"),
    ],
)
def test_a_page_without_a_row_is_named(copy: Path, page: str, name: str) -> None:
    text = (copy / page).read_text("utf-8")
    (copy / page).write_text(text.replace(name, "other"))
    (row,) = set(missing_rows(copy)) - set(missing_rows())
    assert row.startswith(f"{page} has no ")
    assert name.strip("`[]").removeprefix("vllm.states.") in row


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["--list"]) == 0
    assert "docs/dispatch.md" in capsys.readouterr().out
    with pytest.raises(SystemExit) as refused:
        main(["toy"])
    assert refused.value.code == Exit.USAGE
    assert "unknown: toy; known: mods" in capsys.readouterr().err
    toy = Generated(name="toy", source="-", stale=lambda _: ["toy.md"], write=lambda _: None)
    monkeypatch.setattr(generate, "GENERATED", (toy,))
    assert main(["toy", "--check"]) == Exit.STALE
    assert capsys.readouterr().err == "error: stale: toy.md\n  try: python -m tests.generate\n"
    assert main(["toy"]) == 0
    assert capsys.readouterr().out == "written: toy.md\n"
