"""The command line as a user's shell runs it: a process, its streams and its exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

from builder.__main__ import run
from builder.common.retry import RetryPolicy
from tests.documents import document_of, validated

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True)
class Ran:
    """A command that ended."""

    code: int
    out: str
    err: str
    words: tuple[str, ...] = ()

    @property
    def last(self) -> str:
        """The last line of stdout, which scripts read."""
        return self.out.rstrip("\n").rpartition("\n")[2]

    def json(self) -> Any:
        """Stdout, which must be one JSON document, as its schema has it, and nothing else."""
        document = json.loads(self.out)
        return validated(document_of(self.words), document) if self.words else document


def command(*words: str) -> list[str]:
    """The command line of spark-build under this interpreter."""
    return [sys.executable, "-m", "builder", *words]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what would colour or redirect an answer."""
    dropped = ("SPARK_BUILD_PATCHES", "SOURCE_DATE_EPOCH", "CLICOLOR_FORCE", "DOCKER_HOST")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "NO_COLOR": "1", **(extra or {})}


def spark_build(
    *words: str, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 300
) -> Ran:
    """Run a command to its end; a traceback is a failure whatever the exit code."""
    ended = subprocess.run(
        command(*words),
        cwd=cwd,
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    assert ended.returncode != 1, f"a bug of ours: {ended.stderr}"
    return Ran(ended.returncode, ended.stdout, ended.stderr, words)


def called(*words: str, cwd: Path, env: Mapping[str, str] | None = None) -> Ran:
    """The same in this process, which starts in no time; servers are asked again without pauses."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment(env), clear=True),
        mock.patch.dict(RetryPolicy.__init__.__kwdefaults__ or {}, {"backoff": 0.001}),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = run([*words])
    assert "Traceback" not in err.getvalue(), err.getvalue()
    assert code != 1, f"a bug of ours: {err.getvalue()}"
    return Ran(code, out.getvalue(), err.getvalue(), words)
