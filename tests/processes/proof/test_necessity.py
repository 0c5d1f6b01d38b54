"""Necessity, checked in a virtual environment that is made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.common.programs import Program
from builder.proof import runners, sandbox
from builder.proof.replies import DispatchReply, DispatchRequest
from builder.proof.runners import BesidePython, InSandbox
from builder.proof.target import of_backup, without_layers
from tests.unit.fakes import (
    snapshot,
    vllm_files,
    write_tree,
)
from tests.unit.proof.test_necessity import PATCH, SET, SETTING, patched_directory

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

    from builder.applier.trees import Tree


#: In place of a probe: what an interpreter finds.
LOOK = """\
import json, os, sys
def main():
    request = json.load(sys.stdin)
    sys.path[:0] = request["paths"]
    for name, value in request.get("env", {}).items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    import importlib.util, vllm.core
    origin = importlib.util.find_spec("vllm.envs").origin
    found = {"core": vllm.core.BACKEND, "files": [vllm.core.__file__, origin]}
    found |= {"paths": sys.path, "setting": os.environ.get(request["choices"][0])}
    print(json.dumps({"real": [json.dumps(found)]}))
"""

#: A program with a sibling.
OWN = """\
import json
from builder.probes import sibling
def main():
    print(sibling.ANSWER)
"""


def test_an_environment_is_checked_with_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its interpreter and other packages, the settings and files of the question."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    write_tree(site, vllm_files())
    patched = patched_directory(site, PATCH, SET)
    origin = without_layers(patched, of_backup(site))
    (tmp_path / "probes").mkdir()
    (tmp_path / "probes" / "__init__.py").touch()
    (tmp_path / "probes" / "dispatch_probe.py").write_text(LOOK)
    program = Program("builder.probes.dispatch_probe", tmp_path)
    monkeypatch.setattr(runners, "DISPATCH", program)
    before = snapshot(site)

    def found(tree: Tree, env: Mapping[str, str]) -> Any:
        runner = BesidePython(
            base=patched,
            python=tmp_path / "venv" / "bin" / "python",
            sandbox=InSandbox(tree, patched.identity.packages),
        )
        reply = runner.on(tree, env).dispatch(DispatchRequest(choices=(SETTING,)))
        assert isinstance(reply, DispatchReply)
        return json.loads(reply.real[0])

    now = found(patched.tree, patched.identity.env)
    assert (now["core"], now["setting"]) == ("b12x", "marlin")
    then = found(origin.tree, origin.identity.env)
    assert (then["core"], then["setting"]) == ("cutlass", None), "the .pth sets it for every Python"
    for file in then["files"]:
        assert not file.startswith(str(site))
    assert str(site) not in then["paths"]
    assert snapshot(site) == before, "nothing is written there, not even compiled files"


def test_a_probe_in_an_environment_has_its_siblings_and_nothing_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("json.py").write_text("raise SystemExit('run')")
    (tmp_path / "probes").mkdir()
    (tmp_path / "probes" / "__init__.py").touch()
    (tmp_path / "probes" / "own.py").write_text(OWN)
    (tmp_path / "probes" / "sibling.py").write_text("ANSWER = '{}'")
    program = Program("builder.probes.own", tmp_path)
    asked: dict[str, object] = {}
    reply = sandbox.ask_probe(
        Path(sys.executable),
        asked,
        DispatchReply,
        program=program,
        instead_of=tmp_path / "elsewhere",
    )
    assert reply == DispatchReply()
