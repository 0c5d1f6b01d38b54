"""Commands of a new distribution, started in a patched image's files."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from builder.images.engines import metadata
from tests.unit.images.engines.test_commands import MODULE, POINTS, commands, planned

if TYPE_CHECKING:
    from pathlib import Path


def test_a_new_distribution_has_its_commands(tmp_path: Path) -> None:
    plan = planned(POINTS, interpreter=sys.executable)
    assert commands(plan) == [f"/usr/local/bin/{n}" for n in ("Second", "spark-verify", "tool")]
    content = metadata.baked_files(plan)["/usr/local/bin/tool"]
    assert content.mode == 0o755
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "cli.py").write_text(MODULE)
    script = tmp_path / "script"
    script.write_bytes(content.read())
    script.chmod(0o755)
    done = subprocess.run([script, "a", "b"], env={"PYTHONPATH": str(tmp_path)}, check=False)
    assert done.returncode == 3
