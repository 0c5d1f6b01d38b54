"""Kept layers: taken where all is the same, made anew where anything differs or is damaged."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tarfile
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.trees import Content
from builder.common.paths import cache_dir
from builder.images.engines import oci
from builder.images.engines.model import BuildRequest, BuiltImage
from builder.images.engines.oci import LayerInputs, OciEngine, layer_key, layout_digest
from builder.images.rootfs.tar import Owners
from tests.unit.fakes import (
    copy_op,
    dist_files,
    fake_base,
    make_layer,
    make_plan_of,
    replace_op,
    vllm_files,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from builder.common.plan import BuildPlan

FIX = replace_op("BACKEND = 'cutlass'", "BACKEND = 'b12x'")
FILES = vllm_files() | dist_files("lib", "1", {"lib/__init__.py": ""})


def plan_of(
    *, number: int = 1, new: str = "b12x", files: Mapping[str, bytes] = FILES, **base: Any
) -> BuildPlan:
    """Two layers: ``fix`` changes a file of vLLM's, ``more`` adds one."""
    fix = replace_op("BACKEND = 'cutlass'", f"BACKEND = '{new}'")
    more = copy_op("vllm/more.py", f"N = {number}\n".encode())
    plan = make_plan_of(fake_base(dict(files)), make_layer("fix", fix), make_layer("more", more))
    return dataclasses.replace(plan, base=dataclasses.replace(plan.base, **base))


def build(target: Path, plan: BuildPlan) -> BuiltImage:
    return OciEngine().build(BuildRequest(plan=plan, tag="x:1", output=target))


def cached(built: BuiltImage) -> dict[str, bool]:
    return {name: value for (_, name), value in built.cached.items()}


def test_an_unchanged_layer_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(tmp_path / "a", plan_of())
    assert cached(first) == {"fix": False, "more": False, "spark-build": False}
    monkeypatch.setattr(oci, "tar_layer", lambda *_: pytest.fail("made again"))
    again = build(tmp_path / "b", plan_of())
    assert cached(again) == {"fix": True, "more": True, "spark-build": True}
    assert again.digest == first.digest == layout_digest(tmp_path / "b")
    blobs = [{p.name: p.read_bytes() for p in (tmp_path / n).rglob("sha256/*")} for n in "ab"]
    assert blobs[0] == blobs[1]


def test_a_changed_layer_keeps_the_others_cached(tmp_path: Path) -> None:
    build(tmp_path / "a", plan_of())
    other = build(tmp_path / "b", plan_of(new="marlin"))
    assert cached(other) == {"fix": False, "more": True, "spark-build": False}


def test_a_layer_without_the_cache_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(tmp_path / "a", plan_of())
    build(tmp_path / "b", plan_of(number=2))
    taken = build(tmp_path / "c", plan_of())
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "empty"))
    alone = build(tmp_path / "d", plan_of())
    assert cached(alone)["fix"] is False
    assert first.digest == taken.digest == alone.digest


def key_of(plan: BuildPlan, name: str = "fix", epoch: int = 1, owners: Owners | None = None) -> str:
    (decision,) = (d for d in plan.needed if d.name == name)
    files = {f"/{path}": content for path, content in decision.changes.items()}
    return layer_key(LayerInputs.of(plan, [name]), files, epoch, owners or Owners())


def test_the_key_depends_on_every_input_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    first = key_of(plan_of())
    assert key_of(plan_of()) == first
    assert key_of(plan_of(number=2)) == first, "another layer is nothing to it"
    platform = dataclasses.replace(plan_of().base.platform, architecture="amd64")
    grown = FILES | dist_files("vllm", "0.20.1", {
        "vllm/__init__.py": "", "vllm/envs.py": FILES["vllm/envs.py"],
        "vllm/core.py": FILES["vllm/core.py"] + b"# more\n",
    })  # fmt: skip
    others = {
        "input of an op": key_of(plan_of(new="marlin")),
        "file before": key_of(plan_of(files=grown)),
        "time": key_of(plan_of(), epoch=2),
        "platform": key_of(plan_of(platform=platform)),
        "owner of a file": key_of(
            plan_of(), owners=Owners(files={"/vllm/core.py": (0o600, 7, 8)})
        ),
        "mode of a folder": key_of(plan_of(), owners=Owners(folder=lambda _: (0o700, 0, 0))),
    }  # fmt: skip
    monkeypatch.setattr(oci, "LEVEL", 9)
    others["compression"] = key_of(plan_of())
    monkeypatch.undo()
    monkeypatch.setattr(zlib, "ZLIB_RUNTIME_VERSION", "9.9")
    others["zlib"] = key_of(plan_of())
    assert len({first, *others.values()}) == len(others) + 1


def test_the_key_reads_no_content() -> None:
    content = Content(sha256="0" * 64, size=3, load=lambda: pytest.fail("it was read"))
    assert layer_key(LayerInputs("linux/arm64", ("x",), ()), {"/a/b": content}, 1, Owners())


def entry(name: str) -> Path:
    """The file of the one kept layer that holds a path."""
    for folder in (cache_dir() / "blobs").iterdir():
        with tarfile.open(folder / "layer") as tar:
            if any(member.endswith(name) for member in tar.getnames()):
                return folder
    raise AssertionError(name)


@pytest.mark.parametrize("how", ["flipped", "cut", "record", "elsewhere", "no-json", "no-record"])
def test_a_damaged_layer_is_detected_and_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    first = build(tmp_path / "a", plan_of())
    folder = entry("vllm/core.py")
    layer, record = folder / "layer", folder / "record.json"
    data = layer.read_bytes()
    if how == "flipped":
        layer.write_bytes(data[:30] + bytes([data[30] ^ 1]) + data[31:])
    elif how == "cut":
        layer.write_bytes(data[:-5])
    elif how == "record":
        known = json.loads(record.read_text())
        record.write_text(json.dumps({**known, "diff_id": f"sha256:{'0' * 64}"}))
    elif how == "elsewhere":
        other = entry("vllm/more.py")
        for name in ("layer", "record.json"):
            (folder / name).write_bytes((other / name).read_bytes())
    elif how == "no-json":
        record.write_text("[]")
    else:
        record.unlink()
    capsys.readouterr()
    again = build(tmp_path / "b", plan_of())
    assert cached(again) == {"fix": False, "more": True, "spark-build": True}
    assert again.digest == first.digest
    assert ("a cached layer is damaged" in capsys.readouterr().err) == (how != "no-record")
    assert cached(build(tmp_path / "c", plan_of()))["fix"] is True


def test_a_full_cache_disk_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oci, "MOST_BYTES", 10)
    build(tmp_path / "a", plan_of())
    assert not list((cache_dir() / "blobs").iterdir())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(oci, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(shutil, "copyfile", full)
    build(tmp_path / "b", plan_of())
    assert not list((cache_dir() / "blobs").iterdir())


def test_the_least_recently_used_is_removed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "a", plan_of())
    sizes = [(p / "layer").stat().st_size for p in (cache_dir() / "blobs").iterdir()]
    monkeypatch.setattr(oci, "MOST_BYTES", sum(sizes) + 600)
    for number in range(2, 6):
        build(tmp_path / str(number), plan_of(number=number))
    assert sum(p.stat().st_size for p in (cache_dir() / "blobs").glob("*/layer")) < sum(sizes) + 600
    assert cached(build(tmp_path / "z", plan_of(number=5)))["more"] is True
    assert cached(build(tmp_path / "y", plan_of(number=2)))["more"] is False
