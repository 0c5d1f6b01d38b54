"""A base for another platform than this machine's, in a real Docker Engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.images.engines.buildkit import BuildkitEngine
from builder.images.engines.model import BuildRequest
from tests.unit.fakes import (
    BACKEND,
    copy_op,
    fake_base,
    make_layer,
    make_plan_of,
    vllm_files,
)

from . import support
from .support import tags

if TYPE_CHECKING:
    import pytest

    from .machine import Engine
    from .support import Built


def test_an_image_for_arm64_is_patched_on_any_machine(
    engine: Engine, build: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers only add files, so that nothing has to run."""
    for name, value in engine.env.items():
        monkeypatch.setenv(name, value)
    text = "FROM scratch\nLABEL for=arm64\n"
    tag = build("for-arm64:1", text, "--platform=linux/arm64")
    digest = str(support.inspect(engine, tag)["Id"])
    base = fake_base(vllm_files(), "image", ref=tag, digest=digest)
    plan = make_plan_of(base, make_layer("fix", BACKEND, copy_op("vllm/new.py", b"N = 1\n")))
    assert plan.base.platform.oci == "linux/arm64"
    try:
        BuildkitEngine().build(BuildRequest(plan=plan, tag="patched-arm64:1"))
        seen = support.inspect(engine, "patched-arm64:1")
        assert (seen["Os"], seen["Architecture"]) == ("linux", "arm64")
        assert seen["Config"]["Labels"]["for"] == "arm64"
    finally:
        if "patched-arm64:1" in tags(engine):
            engine.run("image", "rm", "patched-arm64:1")
