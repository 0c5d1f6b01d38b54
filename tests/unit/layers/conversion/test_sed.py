import pytest

from builder.layers.conversion import Replacement, read_sed


@pytest.mark.parametrize(
    ("script", "old", "new"),
    [
        ("s/a == b:/a in (b, c):/", "a == b:", "a in (b, c):"),
        ("s|x/y|z|g", "x/y", "z"),
        (r"s/a\/b/c/", "a/b", "c"),
        ("s/Arch.sm_120a/Arch.sm_121a/", "Arch.sm_120a", "Arch.sm_121a"),
        (r"s/one/one\ntwo/", "one", "one\ntwo"),
    ],
)
def test_literal_substitution_is_read(script: str, old: str, new: str) -> None:
    read = read_sed(["sed", "-i", script, "f.py"])
    assert read.replacements == (Replacement(old=old, new=new),)
    assert read.files == ("f.py",)
    assert not read.problem


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["-i", r"s/^\(\s*\)a/\1b/", "f"], "regular expression"),
        (["-i", "s/[ab]/c/", "f"], "regular expression"),
        (["-Ei", "s/a+/c/", "f"], "regular expression"),
        (["-i", "s/a/[&]/", "f"], "refers to what was matched"),
        (["-i", "/text/d", "f"], "not a plain s/old/new/"),
        (["-i", "s/a/b/3", "f"], "not a plain s/old/new/"),
        (["s/a/b/", "f"], "changes no file"),
        (["--follow-symlinks", "-i", "s/a/b/", "f"], "option"),
    ],
)
def test_anything_else_says_why(words: list[str], why: str) -> None:
    assert why in read_sed(["sed", *words]).problem


def test_plus_is_literal_without_extended_expressions() -> None:
    assert read_sed(["sed", "-i", "s/a+/b/", "f"]).replacements[0].old == "a+"
