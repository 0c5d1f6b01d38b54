"""A released vLLM in the dispatch sandbox, with the few packages more that whole layers import."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.applier.trees import versions
from builder.common.cache import locked
from builder.common.paths import cache_dir
from builder.common.programs import VERIFIER
from builder.proof.isolation import call, install_command
from builder.proof.sandbox import Sandbox, lay_out, make, requirements_for, wanted_torch
from tests.engine import cache

from .support import snapshot, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .support import Planned

HARNESS = Path(__file__).parent / "harness"
#: In place of the folder's name in what is cached.
ROOT = "@root@"
#: Cached runs of harnesses; one has 10 to 300 kB.
KEPT = 400
#: What vLLM's layers and models import beyond what selection does; any recent version serves.
EXTRA = ("compressed-tensors==0.20.0", "einops==0.8.2", "llguidance==1.9.1", "loguru==0.7.3")


@dataclass(frozen=True)
class Release:
    """One release's Python files and an interpreter that can run them."""

    version: str
    python: Path
    paths: list[str]
    torch: str

    def simulation(self, **env: str) -> dict[str, Any]:
        """The request by which a harness prepares it."""
        base = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        base["FLASHINFER_DISABLE_VERSION_CHECK"] = "1"
        return {
            "paths": self.paths,
            "env": {**base, **env},
            "pretend_nvcc": True,
            "pretend_triton": True,
        }

    def run(
        self, script: str, *words: str, given: object = None, root: Path | None = None
    ) -> list[dict[str, Any]]:
        """Run a harness; gives its lines of JSON.

        What it prints, and writes below ``root``, is cached by all that it is made of and given.

        Raises:
            AssertionError: it failed; the message ends with what it said.
        """
        programs = [path.read_text() for path in sorted(HARNESS.glob("*.py"))]
        before = snapshot(root) if root else {}
        asked = json.dumps([script, words, given, before, self.paths, self.torch, str(self.python)])
        key = cache.key(*programs, VERIFIER.digest, _nameless(asked, root))
        kept = cache.entry(f"harness/{key}", partial(self._ask, script, words, given, root))
        os.utime(kept)
        for old in sorted(kept.parent.iterdir(), key=lambda one: one.stat().st_mtime)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        for path in (kept / "written").rglob("*"):
            if root and path.is_file():
                text = path.read_text("utf-8").replace(ROOT, str(root))
                (root / path.relative_to(kept / "written")).write_text(text, "utf-8")
        said = (kept / "said").read_text("utf-8").replace(ROOT, str(root))
        return [json.loads(line) for line in said.splitlines()]

    def _ask(
        self, script: str, words: Sequence[str], given: object, root: Path | None, kept: Path
    ) -> None:
        """Run it, and fill a folder of the cache."""
        before = snapshot(root) if root else {}
        command = [str(self.python), str(HARNESS / script), str(VERIFIER.file()), *words]
        keep = ("PATH", "HOME", "LANG", "TMPDIR")
        answer = subprocess.run(
            command,
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=600,
            # torch is imported before the request's paths count
            env={"PYTHONPATH": self.torch}
            | {name: os.environ[name] for name in keep if name in os.environ},
            check=False,
        )
        assert answer.returncode == 0, answer.stderr[-3000:]
        write(kept, "said", _nameless(answer.stdout, root).encode())
        for path, digest in snapshot(root).items() if root else ():
            if before.get(path) != digest and not path.endswith(".pyc"):
                text = _nameless(Path(str(root), path).read_text("utf-8"), root)
                write(kept / "written", path, text.encode())


def _nameless(text: str, root: Path | None) -> str:
    """A text without the folder's name."""
    return text.replace(str(root), ROOT) if root else text


def release_of(planned: Planned) -> Release:
    """The release of a plan, as the plan leaves it."""
    from builder.applier.trees import OverlayTree

    tree = OverlayTree(planned.base.tree)
    tree.update(planned.plan.changes)
    packages = {**planned.base.identity.packages, **versions(tree)}
    made = make(requirements_for(packages["vllm"]), wanted_torch(tree, packages), packages)
    torch = str(made.torch.folder)
    paths = [lay_out(tree), extra(made.sandbox), made.sandbox.dsl(packages)]
    return Release(packages["vllm"], made.sandbox.python, [*map(str, paths), torch], torch)


def extra(sandbox: Sandbox) -> Path:
    """EXTRA, installed beside the sandbox once."""
    folder = cache_dir() / "sandbox" / f"{sandbox.root.name}-layers"
    with locked(str(folder)):
        if not folder.exists():
            partial = folder.with_suffix(".part")
            shutil.rmtree(partial, ignore_errors=True)
            call(install_command(sandbox.python, EXTRA, partial))
            partial.rename(folder)
    return folder
