"""Habits that are wrong wherever they are: in tests, and in docstrings."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
BUILDER = ROOT / "builder"
#: A path in a string is not found when a module moves.
PATCH = re.compile(r"""setattr\(\s*["'](builder|tests)\.[\w.]+""")
#: How long something took depends on what else the machine does: count what was done instead.
DURATION = re.compile(r"assert\b[^\n]*\b(monotonic|perf_counter|process_time|time)\(\) - \w+ <")

#: "Raises: UsageError: that." sends the reader back to the sentence above.
EMPTY = re.compile(
    r"^ +\w+: (?:that|this|so|it (?:does|has|is)(?: not| one| none| neither)?|it failed|"
    r"they (?:are|do|cannot|differ)(?: not)?|no such \w+)[.;]",
    re.MULTILINE,
)
#: A function, method or class that a docstring refers to.
REFERENCE = re.compile(r":(?:func|meth|class):`~?([\w.]+)`")
#: A name of ours in a docstring or a page.
DOTTED = re.compile(r"(?:`|\"|-m )(builder(?:\.\w+)+)")

#: Fields of SLSA's provenance, which docs/publishing.md names.
SLSA = {"builder.id", "builder.version"}


def uses(habit: re.Pattern[str]) -> set[str]:
    return {
        f"{path.relative_to(TESTS)}: {match[0]}"
        for path in TESTS.rglob("*.py")
        if path != Path(__file__)
        for match in habit.finditer(path.read_text("utf-8"))
    }


def test_no_test_patches_a_path_in_a_string() -> None:
    assert not uses(PATCH), "import the module, or give the function a parameter"


def test_no_test_asserts_a_duration() -> None:
    assert not uses(DURATION), "assert what was done or left undone, not how long it took"


def test_the_habits_are_recognised() -> None:
    path = '"builder.common.room.free"'
    assert PATCH.search(f"monkeypatch.setattr(\n    {path}, 1)")
    assert not PATCH.search('monkeypatch.setattr(room, "free", 1)')
    assert DURATION.search("    assert time.monotonic() - began < 30")
    assert not DURATION.search("    assert time.monotonic() < deadline  # a hang ends here")


def test_what_is_raised_is_said() -> None:
    empty = {
        f"{path.relative_to(ROOT)}: {match[0].strip()}"
        for path in BUILDER.rglob("*.py")
        for match in EMPTY.finditer(path.read_text("utf-8"))
    }
    assert not empty, "name the condition"
    assert EMPTY.search("    Raises:\n        UsageError: that.\n")
    assert EMPTY.search("        UsageError: they do not.\n")
    assert not EMPTY.search("        UsageError: that reference is malformed.\n")


def test_what_docstrings_refer_to_exists() -> None:
    texts = {path: path.read_text("utf-8") for path in BUILDER.rglob("*.py")}
    known = set(re.findall(r"\b(?:def|class) (\w+)", "\n".join(texts.values())))
    assert "check_destination" in known
    gone = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in texts.items()
        for name in REFERENCE.findall(text)
        if name.rpartition(".")[2] not in known
    }
    assert not gone
    assert REFERENCE.findall("as for :func:`check_place`.") == ["check_place"]


def exists(dotted: str) -> bool:
    """Whether a dotted name is a module of ours, or something that its text defines."""
    *words, name = dotted.split(".")
    place = ROOT.joinpath(*words)
    if (place / name).is_dir() or (place / f"{name}.py").is_file():
        return True
    files = [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
    if files:
        defined = re.compile(
            rf"^(?:def|class) {name}\b|^{name}\b.*=|import .*\b{name}\b", re.MULTILINE
        )
        return any(defined.search(file.read_text("utf-8")) for file in files)
    return len(words) > 2 and exists(".".join(words))


def test_names_in_prose_exist() -> None:
    """Imports are checked by Python; this is for docstrings, comments and pages."""
    files = [*BUILDER.rglob("*.py"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]
    gone = {
        f"{path.relative_to(ROOT)}: {dotted}"
        for path in files
        if path.name != "CHANGELOG.md"
        for dotted in DOTTED.findall(path.read_text("utf-8"))
        if dotted not in SLSA and not exists(dotted)
    }
    assert not gone
    assert exists("builder.errors.UsageError")
    assert not exists("builder.errors.NoSuchError")
    assert not exists("builder.nowhere.to_go")
