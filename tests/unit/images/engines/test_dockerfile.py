"""What the BuildKit engine would build, as text: held against files in ``golden/``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.trees import Content
from builder.applier.values import ApplyError
from builder.common.programs import VERIFIER
from builder.common.reference import Ref
from builder.errors import BuildFailed, UsageError
from builder.images.engines import baked, metadata
from builder.images.engines.buildkit import BuildkitEngine, write_context
from builder.images.engines.maker import applier_bundle
from builder.images.engines.oci import overlay_recipe
from tests.unit.fakes import (
    BACKEND,
    copy_op,
    dist_files,
    env_op,
    fake_base,
    make_layer,
    make_plan_of,
    vllm_files,
)

if TYPE_CHECKING:
    from builder.applier.layers import Layer

GOLDEN = Path(__file__).parents[2] / "golden"
FILES = vllm_files() | dist_files("lib", "1", {"lib/x.py": ""})
DIGEST = "sha256:" + "ab" * 32
FIX = make_layer("fix", BACKEND, copy_op("vllm/new.py", b"N = 1\n"))
CLEAN = make_layer("clean", {"op": "remove", "distribution": "lib"})
SET = make_layer("set", env_op("VLLM_NVFP4_GEMM_BACKEND", "marlin"))


def render(*layers: Layer, kind: str = "image", links: bool = True, **base: Any) -> str:
    """The Dockerfile, without asking a Docker Engine what it can."""
    ref = "vllm/vllm-openai:v0.20.1" if kind == "image" else "pypi:vllm==0.20.1"
    plan = make_plan_of(fake_base(FILES, kind, ref=ref, digest=DIGEST, **base), *layers)
    engine = BuildkitEngine()
    vars(engine)["_links"] = links
    return engine.render(plan).replace(plan.digest, "sha256:PLAN")


CASES: dict[str, tuple[list[Layer], dict[str, Any]]] = {
    "image": ([FIX, SET], {}),
    "image-removing": ([FIX, CLEAN, SET], {"user": "vllm"}),
    "image-old-engine": ([FIX, CLEAN], {"links": False}),
    "overlay": ([FIX, CLEAN, SET], {"kind": "pypi"}),
}


def case(name: str) -> str:
    layers, how = CASES[name]
    return render(*layers, **how)


@pytest.mark.parametrize("name", CASES)
def test_dockerfile(name: str) -> None:
    """``GOLDEN=write pytest ...`` writes the files anew."""
    path = GOLDEN / f"{name}.Dockerfile"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(case(name))
    assert case(name) == path.read_text()


def instructions(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"{word} ")]


def test_each_layer_is_one_copy_and_metadata_another() -> None:
    assert len(instructions(case("image"), "COPY")) == 3


def test_a_step_runs_only_if_files_must_be_removed() -> None:
    assert instructions(case("image"), "RUN") == []
    assert len(instructions(case("image-removing"), "RUN")) == 1
    assert instructions(case("overlay"), "RUN") == []


def test_the_user_of_the_base_is_restored() -> None:
    assert instructions(case("image-removing"), "USER") == ["USER root", "USER vllm"]
    assert instructions(case("image"), "USER") == []


def test_the_base_is_named_by_digest() -> None:
    assert instructions(case("image"), "FROM") == [f"FROM vllm/vllm-openai:v0.20.1@{DIGEST}"]
    assert instructions(case("overlay"), "FROM") == ["FROM scratch"]


def dockerfile_value(line: str) -> str:
    """A double-quoted value as a Dockerfile reads it: a backslash keeps the next character."""
    quoted = line.partition("=")[2]
    assert (quoted[0], quoted[-1]) == ('"', '"')
    value, rest = "", iter(quoted[1:-1])
    for character in rest:
        assert character not in ('"', "$"), f"ends or expands in {line}"
        value += next(rest) if character == "\\" else character
    return value


@pytest.mark.parametrize(
    "value",
    [
        "plain",
        'say "x"',
        "back\\slash",
        "it's",
        "a&b",
        "<a>",
        "$HOME/x",
        "é",
        '{"a": 1}',
        "a: b",
        "${X} $(id) `id`",
        "\\",
        "\\\\n",
        "# no",
        "{{ x }}",
        "{% x %}",
        '"',
    ],
)
@pytest.mark.parametrize("how", ["buildkit", "overlay"])
def test_values_reach_the_image_unchanged(how: str, value: str) -> None:
    layer = make_layer("set", env_op("BACKEND", value, reader="vllm/core.py"))
    if how == "buildkit":
        text = render(layer)
    else:
        text = overlay_recipe(make_plan_of(fake_base(FILES), layer), Ref("oci:out"))
    (line,) = instructions(text, "ENV")
    assert dockerfile_value(line) == value


@pytest.mark.parametrize("value", ["a\nUSER root", "\n"])
def test_a_value_is_no_instruction(value: str) -> None:
    layer = make_layer("set", env_op("BACKEND", value, reader="vllm/core.py"))
    plan = make_plan_of(fake_base(FILES), layer)
    with pytest.raises(UsageError, match="a value with a line break"):
        render(layer)
    with pytest.raises(UsageError, match="a value with a line break"):
        overlay_recipe(plan, Ref("oci:out"))


def test_a_value_with_a_zero_byte_is_refused_with_its_layer() -> None:
    op = env_op("BACKEND", "a\0b", reader="vllm/core.py")
    with pytest.raises(ApplyError, match="the value of BACKEND has a zero byte"):
        make_plan_of(fake_base(FILES), make_layer("set", op))


# ------------------------------------------------------------------------------------ the context


def test_the_context_holds_fixed_modes_and_times(tmp_path: Path) -> None:
    files = {
        "/usr/bin/tool": Content.of(b"#!/bin/sh\n", 0o755),
        "/usr/lib/a.py": Content.of(b"a"),
        "/usr/lib/gone.py": None,
    }
    assert write_context(tmp_path / "layer", files, 1_000) == 11
    found = {
        path.relative_to(tmp_path / "layer").as_posix(): path.stat()
        for path in (tmp_path / "layer").rglob("*")
    }
    assert {info.st_mtime for info in found.values()} == {1_000}
    assert {name: info.st_mode & 0o777 for name, info in found.items()} == {
        "usr": 0o755,
        "usr/bin": 0o755,
        "usr/bin/tool": 0o755,
        "usr/lib": 0o755,
        "usr/lib/a.py": 0o644,
    }


def test_a_full_disk_is_reported_and_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(BuildFailed, match="No space left on device") as caught:
        write_context(tmp_path / "layer", {"/a": Content.of(b"a")}, 0)
    assert caught.value.code == 7
    assert list(tmp_path.iterdir()) == []


def test_metadata_in_the_image() -> None:
    plan = make_plan_of(fake_base(FILES), FIX, SET)
    files = metadata.baked_files(plan)
    assert files["/usr/local/bin/spark-verify"].mode == 0o755
    assert plan.digest.encode() in files[f"{baked.SHARE}/plan.json"].read()
    assert b'vllm_version: "0.20.1"\n' in files["/workspace/build-metadata.yaml"].read()
    assert files[f"{baked.SHARE}/spark_verify.pyz"].read() == VERIFIER.data
    assert files[f"{baked.SHARE}/spark_apply.pyz"].read() == applier_bundle()
    assert b"Apache License" in files[f"{baked.SHARE}/LICENSE"].read()
    assert b"vLLM" in files[f"{baked.SHARE}/NOTICE"].read()
