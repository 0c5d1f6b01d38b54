"""What a probe leaves in the folder for temporary files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.proof.isolation import SandboxUnavailable
from builder.proof.replies import ProbeReply
from builder.proof.sandbox import ask_probe

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("ends", ["echo '{\"simulated\": [\"'$TMPDIR'\"]}'", "exit 1", "sleep 30"])
def test_probe_folder_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """As torch and the CuTe DSL leave their caches."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    python = tmp_path / "python"
    mess = 'mkdir -p "$TMPDIR/torchinductor_root/a" && touch "$TMPDIR/torchinductor_root/a/b"'
    python.write_text(f"#!/bin/sh\n{mess}\n{ends}\n")
    python.chmod(0o755)
    if "echo" in ends:
        (folder,) = ask_probe(python, {"ends": ends}, ProbeReply).simulated
        assert folder.startswith(f"{temporary}/")
    else:
        with pytest.raises(SandboxUnavailable):
            ask_probe(python, {"ends": ends}, ProbeReply, timeout=1)
    assert list(temporary.iterdir()) == []
