"""A layer as a patch that git applies to its project's repository, and as a pull request."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from builder.common.paths import data_dir
from builder.pipeline.layerexport import is_current
from tests.unit.fakes import vllm_files
from tests.wheels.fakeindex import FakeIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.unit.conftest import Called

    Run = Callable[..., Called]

PICK = "import os\n\n\ndef pick(names):\n    names = sorted(names)\n    return names[0]\n"

GONE = "unused = True\n" * 4
CUDA = "// a kernel\nint threads = 32;\n"
NEEDS = "\n".join(
    (
        'summary = "picks the last name"', 'description = "The first name is wrong."', "order = 50",
        'package = "{package}"', "", "[provenance]", 'origin = "own"',
        'bug = ["vllm-project/vllm#12"]', 'forwarded = "no"', 'applied-upstream = "no"',
        "last-update = 2026-01-01", "", "[[variant]]", 'name = "every"',
        'when = {{ "{package}" = ">=0.40.0rc0,<0.50.0rc0" }}', 'notes = ["seen in simulation"]', "",
    )
)  # fmt: skip
REPLACE = """
[[variant.op]]
op = "replace"
file = "{file}"
old = '''
{old}
'''
new = '''
{new}
'''
"""
OTHERS = """
[[variant.op]]
op = "copy"
from = "new.txt"
to = "vllm/new.txt"

[[variant.op]]
op = "diff"
file = "gone.patch"

[[variant.op]]
op = "env"
name = "VLLM_USE_FLASHINFER_MOE_FP4"
value = "1"
"""
DELETION = (
    "diff --git a/vllm/gone.py b/vllm/gone.py\ndeleted file mode 100644\n--- a/vllm/gone.py\n"
    "+++ /dev/null\n@@ -1,4 +0,0 @@\n" + "-unused = True\n" * 4
)
TEXT = REPLACE.format(
    file="vllm/pick.py", old="    return names[0]", new="    return names[-1]  # all"
)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIndex]:
    with FakeIndex() as running:
        for version, pick in (("0.40.0", PICK), ("0.41.0", PICK + "\n\nx = 1\n"), ("0.42.0", "\n")):
            running.add("vllm", version, vllm_files(version, pick=pick, gone=GONE))
        running.add("flashinfer-python", "0.41.0", {"flashinfer/data/csrc/a.cu": CUDA.encode()})
        monkeypatch.setenv("PIP_INDEX_URL", running.url)
        yield running


def write(home: Path, ops: str, package: str = "vllm") -> Path:
    folder = home / "layers" / "last"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "layer.toml").write_text(NEEDS.format(package=package) + ops)
    (folder / "new.txt").write_text("new, without a line feed")
    (folder / "gone.patch").write_text(DELETION)
    return folder


def export(run: Run, folder: Path, *words: str) -> Called:
    return run("layers", "export", "last", "--patches", folder.parent, *words)


def repository(home: Path, files: dict[str, str]) -> Path:
    """A repository with these files in one commit."""
    root = home / "repository"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "all")
    return root


def git(root: Path, *words: str | Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *map(str, words)], capture_output=True, check=False, text=True
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_git_applies_the_patch(spark_build: Run, index: FakeIndex, tmp_path: Path) -> None:
    done = export(spark_build, write(tmp_path, TEXT + OTHERS), "--json")
    assert done.code == 0, done.err
    assert "env VLLM_USE_FLASHINFER_MOE_FP4: no text, so the patch is without it" in done.err
    assert done.json["repository"] == "vllm-project/vllm"
    assert done.json["release"] == "0.41.0", "the newest that needs it"
    assert done.json["files"] == ["vllm/gone.py", "vllm/new.txt", "vllm/pick.py"]
    root = repository(tmp_path, {"vllm/pick.py": PICK + "\n\nx = 1\n", "vllm/gone.py": GONE})
    (tmp_path / "change.patch").write_text(done.json["text"])
    git(root, "apply", "--check", "--whitespace=error-all", tmp_path / "change.patch")
    git(root, "apply", "--index", tmp_path / "change.patch")
    assert git(root, "diff", "--cached", "--name-status").split() == [
        "D", "vllm/gone.py", "A", "vllm/new.txt", "M", "vllm/pick.py",
    ]  # fmt: skip
    assert (root / "vllm/new.txt").read_text() == "new, without a line feed"
    assert (root / "vllm/pick.py").read_text().splitlines()[5] == "    return names[-1]  # all"


def test_git_merges_it_into_a_later_commit(
    spark_build: Run, index: FakeIndex, tmp_path: Path
) -> None:
    """The patch names git's contents of the release, from which ``--3way`` starts."""
    done = export(spark_build, write(tmp_path, TEXT), "--release", "0.40.0")
    assert done.code == 0, done.err
    root = repository(tmp_path, {"vllm/pick.py": PICK})
    later = PICK.replace("    names = sorted", "    # of all\n    names = sorted")
    (root / "vllm/pick.py").write_text(later)
    git(root, "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qam", "later")
    (tmp_path / "change.patch").write_text(done.out)
    git(root, "apply", "--3way", tmp_path / "change.patch")
    assert (root / "vllm/pick.py").read_text() == later.replace("[0]", "[-1]  # all")


def test_paths_are_those_of_the_repository(
    spark_build: Run, index: FakeIndex, tmp_path: Path
) -> None:
    ops = REPLACE.format(
        file="flashinfer/data/csrc/a.cu", old="int threads = 32;", new="int threads = 64;"
    )
    done = export(spark_build, write(tmp_path, ops, "flashinfer-python"))
    assert done.code == 0, done.err
    root = repository(tmp_path, {"csrc/a.cu": CUDA})
    (tmp_path / "change.patch").write_text(done.out)
    git(root, "apply", tmp_path / "change.patch")
    assert (root / "csrc/a.cu").read_text() == CUDA.replace("32", "64")


def test_a_pull_request_has_the_parts_of_a_report(
    spark_build: Run, index: FakeIndex, tmp_path: Path
) -> None:
    folder = write(tmp_path, TEXT)
    done = export(spark_build, folder, "--format", "pr")
    assert done.code == 0, done.err
    heads = [line for line in done.out.splitlines() if line.startswith("#")]
    assert heads == [
        "# picks the last name", "## What", "## Evidence",
        "## How to reproduce, without a GPU", "## The patch",
    ]  # fmt: skip
    for words in ("The first name is wrong.", "- seen in simulation", "vllm-project/vllm#12",
                  "--base pypi:vllm==0.41.0", "+    return names[-1]  # all"):  # fmt: skip
        assert words in done.out
    page = "# Last\n\nSee [how](../../docs/lint.md#a) and [b](https://b.example/), [c](#last).\n"
    (folder / "upstream.md").write_text(page)
    done = export(spark_build, folder, "--format", "pr", "--repository", "https://h.example/a/b/")
    assert done.out.startswith(
        "# Last\n\nSee [how](https://h.example/a/b/blob/main/docs/lint.md#a) and "
        "[b](https://b.example/), [c](#last).\n\n## The patch\n"
    )


@pytest.mark.parametrize(
    ("ops", "package", "words", "error"),
    [
        (TEXT, "vllm", ["--format", "mail"], "--format mail is not one of patch, pr"),
        (TEXT, "vllm", ["--release", "0.42.0"], "no release needs layer last alone (vllm 0.42"),
        (TEXT, "toy", [], "changes toy, whose repository is not known; known are those of vllm,"),
        (OTHERS.rpartition("\n\n")[2], "vllm", [], "changes no text of vllm-project/vllm: its ops"),
    ],
)  # fmt: skip
def test_what_cannot_be_sent_is_refused(
    spark_build: Run, index: FakeIndex, tmp_path: Path, ops: str, package: str, words: list[str],
    error: str,
) -> None:  # fmt: skip
    done = export(spark_build, write(tmp_path, ops, package), *words)
    assert (done.code, done.out) == (2, "")
    assert error in done.err


def test_a_patch_names_its_layer(spark_build: Run, index: FakeIndex, tmp_path: Path) -> None:
    from builder.layers.layerfile import load_layer

    folder = write(tmp_path, TEXT)
    patch = export(spark_build, folder).out
    assert is_current(load_layer(folder), patch)
    folder = write(tmp_path, TEXT.replace("# all", "# of all"))
    assert not is_current(load_layer(folder), patch)
    assert not is_current(load_layer(data_dir("patches") / "ray"), patch)
