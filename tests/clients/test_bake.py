"""buildx takes what ``spark-build bake`` writes, and refuses a broken file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.processes.pipeline.test_bake import bake, bases
from tests.unit.caller import call

from .programs import buildx
from .test_clients import run

if TYPE_CHECKING:
    import pytest

    from tests.unit.caller import Call

__all__ = ["bases", "call"]  # fixtures


def test_buildx_takes_the_targets(
    call: Call, bases: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = buildx()
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "cache"))
    done = bake(call, bases, "-o", "out")
    assert done.code == 0, done.err
    folder = Path("out").absolute()
    printed = run(program, "bake", "--print", home=folder)
    assert printed.returncode == 0, printed.stderr
    written = json.loads((folder / "docker-bake.json").read_bytes())
    assert json.loads(printed.stdout) == written, "every key is one that buildx knows"
    one = run(program, "bake", "--print", "fix-vllm-v2-0", home=folder)
    assert list(json.loads(one.stdout)["target"]) == ["fix-vllm-v2-0"]
    (folder / "docker-bake.json").write_text(json.dumps(written).replace("v1-0", "v1.0"))
    assert "Invalid name" in run(program, "bake", "--print", home=folder).stderr
