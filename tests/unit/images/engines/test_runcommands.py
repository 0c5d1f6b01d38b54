"""The "Run it" block: what a new owner types, for each thing that can be built."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.reference import Ref
from builder.errors import UsageError
from builder.images.engines import oci
from builder.images.engines.model import BuildRequest, BuiltImage
from builder.images.engines.oci import OciEngine, write_dockerfile
from builder.images.engines.runcommands import run_commands, serve_line
from tests.unit.fakes import BACKEND, env_op, fake_base, make_layer, make_plan_of, vllm_files

if TYPE_CHECKING:
    from pathlib import Path

    from builder.common.plan import BuildPlan

DIGEST = "sha256:" + "a" * 64
NAME = "spark-build/test:0.20.1-abc"


def plan_of(kind: str = "image", variant: dict[str, Any] | None = None) -> BuildPlan:
    ops = (BACKEND, env_op("VLLM_NVFP4_GEMM_BACKEND", "marlin"))
    flags: dict[str, Any] = {"serve-flags": ["--linear-backend", "marlin"]} | (variant or {})
    return make_plan_of(fake_base(vllm_files(), kind), make_layer("fix", *ops, variant=flags))


def built(ref: str, **more: Any) -> BuiltImage:
    return BuiltImage(ref=Ref(ref), digest=DIGEST, added_bytes=1, engine="oci", **more)


def words_after(command: str, option: str) -> list[str]:
    words = shlex.split(command)
    return words[words.index(option) + 1 :]


def test_the_flags_match_the_release() -> None:
    assert serve_line(plan_of()) == "vllm serve MODEL --linear-backend marlin"
    assert serve_line(plan_of(variant={"serve-flags": []})) == "vllm serve MODEL"


def test_an_image_in_a_docker_engine_runs_by_its_name() -> None:
    found = run_commands(plan_of(), built(NAME))
    assert found.block.before == ()
    assert words_after(found.block.command, "--entrypoint") == [
        *("vllm", NAME, "serve", "MODEL", "--linear-backend", "marlin")
    ]
    assert "--gpus all" in found.block.command
    assert found.block.env == {"VLLM_NVFP4_GEMM_BACKEND": "marlin"}
    assert "The image sets: VLLM_NVFP4_GEMM_BACKEND=marlin" in found.text()


def test_a_pushed_image_runs_by_its_digest() -> None:
    made = built("h.example/me/x:1", target=Ref(f"docker://h.example/me/x:1@{DIGEST}"))
    found = run_commands(plan_of(), made)
    assert words_after(found.block.command, "vllm")[0] == f"h.example/me/x:1@{DIGEST}"


def test_an_image_in_a_layout_is_copied_to_the_spark_first() -> None:
    found = run_commands(
        plan_of(), built("oci:my out", name=NAME, target=Ref(f"oci:my out@{DIGEST}"))
    )
    assert shlex.split(found.block.before[0]) == [
        *("spark-build", "distribute", f"oci:my out@{DIGEST}", "SPARK", "--tag", NAME)
    ]
    assert words_after(found.block.command, "vllm")[0] == NAME
    assert "oci:" not in found.block.command, "Docker knows no layouts"


def test_the_image_of_an_overlay_has_the_name_that_was_given() -> None:
    layout = built("oci:out", name="vllm-spark", target=Ref(f"oci:out@{DIGEST}"))
    found = run_commands(plan_of("pypi"), layout, name="vllm-spark")
    (build,) = found.block.before
    assert words_after(build, "-t")[0] == "vllm-spark"
    assert words_after(found.block.command, "vllm")[0] == "vllm-spark"
    (build,) = run_commands(plan_of("pypi"), layout).block.before
    assert words_after(build, "-t")[0] == "spark-build/test:0.20.1"
    pushed = built("h.example/me/x:1", target=Ref(f"docker://h.example/me/x:1@{DIGEST}"))
    (build,) = run_commands(plan_of("pypi"), pushed, name="h.example/me/x:1").block.before
    assert words_after(build, "-t")[0] == "spark-build/test:0.20.1", "that is the overlay's name"


def test_moe_models_need_more_flags() -> None:
    found = run_commands(
        plan_of(variant={"moe-serve-flags": ["--moe-backend", "marlin"]}), built(NAME)
    )
    assert found.block.moe_flags == ("--moe-backend", "marlin")
    assert "add --moe-backend marlin" in found.text()
    assert "MoE" not in run_commands(plan_of(), built(NAME)).text()


@pytest.mark.parametrize("name", [NAME, "me/a:1"])
def test_an_overlay_becomes_an_image_first(tmp_path: Path, name: str) -> None:
    plan, out = plan_of("pypi"), tmp_path / "my out"
    made = OciEngine().build(BuildRequest(plan=plan, tag=name, output=out))
    path = write_dockerfile(plan, made)
    assert path == tmp_path / "my out.Dockerfile"
    found = run_commands(plan, made, path)
    (build,) = found.block.before
    words = shlex.split(build)
    context = f"overlay=oci-layout://{out}:overlay@{made.digest}"
    assert words[words.index("--build-context") + 1] == context
    assert words[words.index("--platform") + 1] == "linux/arm64"
    assert words[-1] == f"<{path}"
    assert words[words.index("-t") + 1] == words_after(found.block.command, "vllm")[0]
    assert "overlay: it has only the changed files" in found.text()
    assert "COPY --from=overlay / /" in path.read_text()
    assert found.block.dockerfile == str(path)


def test_an_overlay_in_a_docker_engine_or_registry_shows_its_dockerfile() -> None:
    plan = plan_of("pypi")
    for ref, target, source in (
        (NAME, "", NAME),
        ("h.example/o:1", f"docker://h.example/o:1@{DIGEST}", f"h.example/o:1@{DIGEST}"),
    ):
        made = built(ref, target=Ref(target) if target else None)
        assert write_dockerfile(plan, made) is None
        assert f"    COPY --from={source} / /" in run_commands(plan, made).text().splitlines()


def test_no_foreign_file_is_overwritten(tmp_path: Path) -> None:
    plan, out = plan_of("pypi"), tmp_path / "out"
    theirs = tmp_path / "out.Dockerfile"
    theirs.write_text("FROM scratch\n")
    other = BuildRequest(plan=plan, tag="me/a:1", output=out)
    made = OciEngine().build(other)
    first = write_dockerfile(plan, made)
    assert theirs.read_text() == "FROM scratch\n"
    assert first == tmp_path / f"out-{made.digest[7:19]}.Dockerfile"
    assert write_dockerfile(plan, made) == first
    assert {path.name for path in tmp_path.iterdir()} == {"out", theirs.name, first.name}
    theirs.write_bytes(b"\xff")
    assert write_dockerfile(plan, made) == first


def test_an_unwritable_dockerfile_is_printed_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_path: Path, _data: bytes) -> None:
        raise UsageError("cannot write out.Dockerfile: No space left on device")

    plan = plan_of("pypi")
    made = OciEngine().build(BuildRequest(plan=plan, tag="me/a:1", output=tmp_path / "out"))
    monkeypatch.setattr(oci, "write_atomically", full)
    assert write_dockerfile(plan, made) is None
    assert "cannot write out.Dockerfile" in capsys.readouterr().err
    assert "    COPY --from=overlay / /" in run_commands(plan, made).text().splitlines()
