"""The normal form of diffs that git itself writes."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from builder.applier.diff import parse_diff
from builder.common.diffs import normalise, read_sections

if TYPE_CHECKING:
    from pathlib import Path

    from tests.processes.pullworld import World


@pytest.mark.parametrize("name", ["café.py", "with space.py", "größe/ein wort.py"])
def test_unusual_names_as_git_writes_them(tmp_path: Path, name: str) -> None:
    """Quoted or not, and with the tab that git puts behind a name with a space."""

    def git(*words: str) -> bytes:
        return subprocess.run(
            ["git", "-C", tmp_path, *words], capture_output=True, check=True
        ).stdout

    git("init", "-q")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("one\ntwo\nthree\n")
    git("add", "-A")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "x")
    (tmp_path / name).write_text("one\n2\nthree\n")
    for quoting in ("true", "false"):
        (section,) = read_sections(git("-c", f"core.quotePath={quoting}", "diff"))
        assert section.path == name
        assert parse_diff(section.render().decode())[0].path == name


def test_every_pull_request_of_a_real_repository_is_stable(world: World) -> None:
    """git's own output, read back from its normal form: the same bytes, and the same files."""
    for pull in world.pulls.values():
        base = world.repository.git("merge-base", "main", pull.head)
        listed = world.repository.git("diff", "--name-only", "-M", base, pull.head).splitlines()
        normal = normalise(world.repository.run("diff", "-M", base, pull.head))
        assert normalise(normal) == normal
        assert [section.path for section in read_sections(normal)] == sorted(listed)
        plumbing = world.repository.run(
            "diff-tree", "-r", "-p", "-M", "--full-index", base, pull.head
        )
        assert normalise(plumbing) == normal
