"""An image without one of its layers exists nowhere: each time it is put together anew."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from builder.applier.trees import Content, OverlayTree
from builder.common.plan import BaseIdentity, Platform
from builder.common.programs import Program
from builder.images.subject import Subject
from builder.proof import runners
from builder.proof.replies import DispatchReply, DispatchRequest
from builder.proof.runners import InContainer
from tests.unit.fakes import MemoryTree

from . import base, support

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .machine import Engine
    from .support import Cli

IMAGE = "marlin:necessity"

#: In place of a probe: what a process in the container finds.
LOOK = """\
import json, os, sys
def main():
    request = json.load(sys.stdin)
    for name, value in request.get("env", {}).items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    held = {p: open(p).read() if os.path.exists(p) else None for p in request["choices"]}
    print(json.dumps({"real": [json.dumps({"held": held, "env": dict(os.environ)})]}))
"""


@pytest.fixture
def marlin(cli: Cli, engine: Engine, base_image: str) -> Iterator[str]:
    """An image with a variable, a flag, and one line of Python."""
    words = ("--layers", "marlin", "--base", base_image, "--tag", IMAGE, "--no-verify")
    cli("image", *words).ok()
    yield IMAGE
    engine.run("image", "rm", IMAGE)


def test_an_image_is_checked_without_its_layer(cli: Cli, engine: Engine, marlin: str) -> None:
    before = support.containers(engine)
    words = ("--prove-necessary", "--level", "static,dispatch", "--json")
    done = cli("verify", marlin, *words).ok()
    assert done.json["target"] == marlin
    verdicts = {v["layer"]: v for v in done.json["necessity"]}
    assert verdicts.pop("vllm-marlin-fp8")["necessary"] is False, "it takes level device to see it"
    (verdict,) = verdicts.values()
    assert (verdict["layer"], verdict["necessary"]) == ("marlin-env", True)
    assert (verdict["level"], verdict["check"]) == ("dispatch", "nvfp4-linear")
    assert "FlashInferCutlassNvFp4LinearKernel" in verdict["seen"], "the image's ENV is gone too"
    assert verdict["also"] == ["nvfp4-moe", "fp8-linear"]
    assert support.containers(engine) == before


def test_replacement_files_cover_those_of_the_image(
    engine: Engine, base_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changed, new and removed ones; the image has no trace of it afterwards."""
    (tmp_path / "probes").mkdir()
    (tmp_path / "probes" / "__init__.py").touch()
    (tmp_path / "probes" / "dispatch_probe.py").write_text(LOOK)
    program = Program("builder.probes.dispatch_probe", tmp_path)
    monkeypatch.setattr(runners, "DISPATCH", program)
    for name in ("DOCKER_HOST", "PATH"):
        monkeypatch.setenv(name, engine.env[name])
    identity = BaseIdentity(
        kind="image",
        ref=base_image,
        digest="",
        platform=Platform(),
        site_packages=base.SITE,
        packages={},
        env={"LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"},
    )
    changed, new, gone = (f"vllm/{name}.py" for name in ("version", "brand_new", "envs"))
    tree = OverlayTree(MemoryTree({changed: b"", gone: b""}))
    tree.update({changed: Content.of(b"# other\n"), new: Content.of(b"# new\n"), gone: None})
    look = {path: f"{base.SITE}/{path}" for path in (changed, new, gone)}
    runner = InContainer(base=Subject(identity, tree), name=base_image)
    request = DispatchRequest(choices=tuple(look.values()), env={"OURS": "1"})
    reply = runner.on(tree, {"LANG": "C.UTF-8"}).dispatch(request)
    assert isinstance(reply, DispatchReply)
    seen = json.loads(reply.real[0])
    assert list(seen["held"].values()) == ["# other\n", "# new\n", None]
    assert (seen["env"]["OURS"], seen["env"]["LANG"]) == ("1", "C.UTF-8")
    assert "PYTHONUNBUFFERED" not in seen["env"]

    after = support.script(engine, base_image, f"wc -c {' '.join(look.values())} 2>&1 || true")
    assert f"{look[new]}: No such file" in after
    assert f" {look[gone]}\n" in after
    assert f" {len('# other' + chr(10))} {look[changed]}\n" not in after
