"""Room on disks: needs add up by disk, and too little ends a command before anything is written."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.diskspace import Need, check_room
from builder.common.paths import cache_dir
from builder.errors import BuildFailed
from builder.images.engines.docker import engine_needs, pull_needs
from builder.images.engines.model import BuildRequest
from builder.images.engines.oci import OciEngine
from builder.images.registry.copy import Location, Locations
from builder.images.registry.layout import LayoutDirectory
from builder.proof.sandbox import Sandbox, requirements_for, sandbox_needs
from tests.unit.fakes import (
    copy_op,
    every_base_is,
    fake_base,
    layer_text,
    make_layer,
    make_plan_of,
    vllm_files,
)
from tests.unit.imagefiles import put_image

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.conftest import Called

LARGE = 1 << 60


def need(place: Path, size: int, what: str = "things") -> Need:
    return Need(place, size, what, "make room")


# ---------------------------------------------------------------------------------------- adding up


def test_enough_disk_space(tmp_path: Path) -> None:
    check_room([need(tmp_path, 10), need(tmp_path / "not" / "yet" / "there", 10)])
    check_room([])


def test_needs_on_one_disk_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
    check_room([need(tmp_path, 60), need(tmp_path / "a", 40)])
    with pytest.raises(BuildFailed) as caught:
        check_room([need(tmp_path / "a" / "b", 60, "one"), need(tmp_path, 41, "two")])
    assert caught.value.code == 7
    assert str(caught.value) == (
        f"not enough room on the disk of {tmp_path}/a/b: 101 B are needed, 100 B are free:\n"
        f"  {tmp_path}/a/b: 60 B for one\n  {tmp_path}: 41 B for two"
    )


# ------------------------------------------------------------------------------ what needs how much


def plan_with(size: int) -> Any:
    base = fake_base(vllm_files(), "pypi")
    return make_plan_of(base, make_layer("big", copy_op("vllm/big.txt", b"x" * size)))


def test_a_layout_needs_room_where_it_goes(tmp_path: Path) -> None:
    request = BuildRequest(plan=plan_with(5_000_000), tag="x:1", output=tmp_path / "out")
    (found,) = OciEngine().needs(request)
    assert found.place == tmp_path / "out"
    assert 5_000_000 < found.bytes < 13_000_000, "the file, and the layer that carries it along"


def test_a_push_needs_room_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/somewhere")
    request = BuildRequest(plan=plan_with(1000), tag="x:1", push=True)
    assert [str(found.place) for found in OciEngine().needs(request)] == ["/somewhere"]


class Engine:
    """As much of a Docker client as is asked."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def info(self) -> dict[str, str]:
        return {"DockerRootDir": str(self.root)}


def test_a_local_engine_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client: Any = Engine(tmp_path)
    assert [n.place for n in engine_needs(client, 1, "x")] == [tmp_path]
    assert not engine_needs(Engine(tmp_path / "elsewhere"), 1, "x")  # type: ignore[arg-type]
    monkeypatch.setenv("DOCKER_HOST", "tcp://far:2375")
    assert not engine_needs(client, 1, "x")


def test_a_pull_needs_twice_the_transferred_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = Engine(tmp_path)
    assert not pull_needs(client, "127.0.0.1:9/no/thing:1", None), "the engine may know a way"
    put_image(tmp_path / "image", os.urandom(10_000), os.urandom(20_000), name="1")
    location = Location(image=LayoutDirectory(tmp_path / "image"), reference="1")
    monkeypatch.setattr(Locations, "open", lambda *_: location)
    (found,) = pull_needs(client, "host/a/b:1", None)
    assert found.bytes == 2 * 30_000
    assert "host/a/b:1" in found.what


def test_a_sandbox_counts_until_it_exists() -> None:
    base = fake_base(vllm_files(), "pypi")
    packages = {"vllm": "0.20.1", "torch": "2.11.0"}
    torch = cache_dir() / "sandbox/torch-2.11.0-0123456789ab"
    environment, unpacked = sandbox_needs(packages, base.tree)
    assert environment.bytes > 300_000_000
    assert unpacked.bytes > 1_000_000_000
    sandbox = Sandbox(requirements_for("0.20.1"))
    sandbox.root.mkdir(parents=True)
    (sandbox.root / "complete").touch()
    assert sandbox_needs(packages, base.tree) == [unpacked]
    torch.with_name(f"{torch.name}.1-2.0.part").mkdir()  # as it is unpacked
    assert sandbox_needs(packages, base.tree) == [unpacked]
    torch.mkdir()
    assert sandbox_needs(packages, base.tree) == []


# ---------------------------------------------------------------------------------- on a real disk

LAYER = layer_text(
    'op = "copy"\nfrom = "large.bin"\nto = "vllm/large.bin"\n',
    when=">=0.20.0",
    summary="a large file",
)


@pytest.fixture
def big(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark_build: Callable[..., Called]
) -> Callable[..., Called]:
    """The command line, with a layer that adds a megabyte to a vLLM in memory."""
    (tmp_path / "patches" / "fix").mkdir(parents=True)
    (tmp_path / "patches" / "fix" / "layer.toml").write_text(LAYER)
    (tmp_path / "patches" / "fix" / "large.bin").write_bytes(os.urandom(1_000_000))
    monkeypatch.setenv("SPARK_BUILD_PATCHES", str(tmp_path / "patches"))
    base = fake_base(vllm_files(), "pypi")
    every_base_is(monkeypatch, base)
    return spark_build
