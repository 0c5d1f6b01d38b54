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
    from pathlib import Path

    import pytest

    from .machine import Engine


def list_of_arm64(engine: Engine, folder: Path) -> str:
    """A list of images, for linux/arm64 alone, as a pull of one platform leaves it."""
    (folder / "Dockerfile").write_text("FROM scratch\nLABEL for=arm64\nCOPY Dockerfile /\n")
    words = ["--platform=linux/arm64", "--provenance=true", "--network=none", "--quiet"]
    engine.run("buildx", "build", *words, "--output=type=image,name=for-arm64:1", folder)
    return "for-arm64:1"


def test_an_image_for_arm64_is_patched_on_any_machine(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers only add files, so that nothing has to run."""
    for name, value in engine.env.items():
        monkeypatch.setenv(name, value)
    tag = list_of_arm64(engine, tmp_path)
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
        for made in {"patched-arm64:1", tag} & set(tags(engine)):
            engine.run("image", "rm", made)
