"""The audit script, started without vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.unit.probes.test_audit_model import audit_model


def test_without_vllm_it_says_so(tmp_path: Path) -> None:
    script = Path(str(audit_model.__file__))
    words = [sys.executable, "-I", str(script), "me/toy"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {sys.executable} has no vLLM: run this where vLLM runs\n"
