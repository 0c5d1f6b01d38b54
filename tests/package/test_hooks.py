"""The hooks of ``.pre-commit-config.yaml``, run by pre-commit in a clone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with the committed hooks, and this environment as its own."""
    folder = tmp_path / "clone"
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    for name in (".pre-commit-config.yaml", "pyproject.toml"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    (folder / ".venv").symlink_to(BIN.parent)
    return folder


def hook(clone: Path, name: str, text: str) -> subprocess.CompletedProcess[str]:
    """Run one hook on a new file."""
    (clone / "new.py").write_text(text)
    subprocess.run(["git", "add", "new.py", ".pre-commit-config.yaml"], cwd=clone, check=True)
    return subprocess.run(
        [str(BIN / "pre-commit"), "run", name, "--files", "new.py"],
        cwd=clone,
        env={**os.environ, "PRE_COMMIT_HOME": str(clone.parent / "kept")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("ruff-check", '"""Good."""\n', '"""Bad."""\n\nimport os\n'),
        ("ruff-format", "x = 1\n", "x=1\n"),
    ],
)
def test_a_hook_passes_and_fails(clone: Path, name: str, good: str, bad: str) -> None:
    passed = hook(clone, name, good)
    assert passed.returncode == 0, passed.stdout
    failed = hook(clone, name, bad)
    assert failed.returncode == 1, failed.stdout
    assert "Failed" in failed.stdout
