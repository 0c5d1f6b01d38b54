"""An extension wheel's parts: what registers operators, the wheel's bytes, and the loader in it."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import io
import json
import sys
import zipfile
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.files import write_atomically
from builder.compile.extensionwheel import WheelNames, wheel_bytes
from builder.compile.operators import (
    load_operators,
    operators_behind,
    registration_source,
    sibling_units,
)
from builder.compile.sources import Unit
from builder.errors import UsageError
from builder.probes import wheel_loader as loader

if TYPE_CHECKING:
    from pathlib import Path

KERNEL = Unit(path="csrc/x/c3x/scaled_mm_sm120_fp8.cu", extension="_C", gencodes=())
NAMES = WheelNames.of("sm120-family", "0.19.1+cu130", "abcdef0123456789", "linux_x86_64")
FILES = {"__init__.py": b"def load(): ...\n", "kernels.so": b"\x7fELF", "companion.json": b"{}"}

# ------------------------------------------------------------------------------------ registration


@pytest.mark.parametrize(("release", "abi"), [("0.19.1", "classic"), ("0.20.1", "stable")])
def test_an_operator_is_registered_as_its_release_does_it(release: str, abi: str) -> None:
    (operator,) = operators_behind([KERNEL], release)
    assert operator.abi == abi
    text = registration_source([operator], "spark-build/x/1")
    assert '#line 1 "spark-build/x/1"\n' in text
    form = "&cutlass_scaled_mm" if abi == "classic" else "TORCH_BOX(&cutlass_scaled_mm)"
    assert f'm.impl("cutlass_scaled_mm", {form});' in text
    assert "TORCH_LIBRARY_IMPL(_C, CUDA, m)" in text
    assert operator.declaration.strip() in text


@pytest.mark.parametrize(
    ("path", "release"),
    [("csrc/other.cu", "0.19.1"), (KERNEL.path, "0.22.1"), (KERNEL.path, "0.9")],
)
def test_a_unit_without_a_known_operator_is_refused(path: str, release: str) -> None:
    unit = Unit(path=path, extension="_C", gencodes=())
    with pytest.raises(UsageError, match="is unknown"):
        operators_behind([unit], release)


def test_each_connecting_unit_must_exist_once() -> None:
    operator = load_operators()[0]
    units = {
        suffix: Unit(path=f"csrc{suffix}", extension="_C", gencodes=()) for suffix in operator.units
    }
    units = {unit.path: unit for unit in units.values()}
    assert len(sibling_units(operator, units)) == len(operator.units)
    units.popitem()
    with pytest.raises(UsageError, match="this release compiles 0"):
        sibling_units(operator, units)


# ------------------------------------------------------------------------------------------- wheel


def test_the_same_content_gives_the_same_bytes() -> None:
    first = wheel_bytes(NAMES, FILES, "vllm==0.19.1", "x")
    assert first == wheel_bytes(NAMES, dict(reversed(FILES.items())), "vllm==0.19.1", "x")
    assert first != wheel_bytes(NAMES, {**FILES, "kernels.so": b"other"}, "vllm==0.19.1", "x")


def test_every_file_is_in_record_with_its_digest() -> None:
    with zipfile.ZipFile(io.BytesIO(wheel_bytes(NAMES, FILES, "vllm==0.19.1", "x"))) as archive:
        record = next(name for name in archive.namelist() if name.endswith("/RECORD"))
        rows = {row[0]: row[1:] for row in csv.reader(archive.read(record).decode().splitlines())}
        assert set(rows) == set(archive.namelist())
        for name in set(rows) - {record}:
            data = archive.read(name)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert rows[name] == [f"sha256={digest}", str(len(data))]
        assert rows[record] == ["", ""]


@pytest.mark.parametrize("below", ["x.whl", "folder/x.whl"])
def test_an_output_path_below_a_file_is_reported(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write"):
        write_atomically(tmp_path / "file" / below, b"")


# ------------------------------------------------------------------------------------------ loader

ABOUT = {
    "name": "wheel",
    "mark": "spark-build/x/1",
    "vllm": "0.19.1",
    "torch": "2.10.0",
    "capabilities": [[12, 1]],
    "modules": ["vllm._C"],
    "operators": [{"name": "_C::op", "key": "CUDA"}],
    "library": "kernels.so",
}
OLD = "name: _C::op\nCUDA: registered at /vllm/torch_bindings.cpp:19 :: () -> ()\n"
NEW = "name: _C::op\nCUDA: registered at spark-build/x/1:1 :: () -> ()\nCUDA (inactive): of vllm\n"


class World:
    """A torch and a vLLM as far as the loader asks them."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self.device: tuple[int, int] | None = (12, 1)
        self.vllm, self.dump, self.has = "0.19.1+cu130", OLD, True
        self.refuses = ""
        self.torch = SimpleNamespace(
            __version__="2.10.0+cu130",
            ops=SimpleNamespace(load_library=self._load),
            _C=SimpleNamespace(
                _dispatch_has_kernel_for_dispatch_key=lambda name, key: self.has,
                _dispatch_dump=lambda name: self.dump,
            ),
        )
        here: Any = ModuleType("vllm.platforms")
        here.current_platform = SimpleNamespace(
            is_cuda=lambda: self.device is not None,
            get_device_capability=lambda: self.device,
        )
        modules = {"torch": self.torch, "vllm.platforms": here, "vllm._C": ModuleType("vllm._C")}
        for name, module in {**modules, "vllm": ModuleType("vllm")}.items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(importlib.metadata, "version", lambda name: self.vllm)
        patch.setattr(loader, "_HERE", root)
        (root / "companion.json").write_text(json.dumps(ABOUT))
        loader.load.cache_clear()

    def _load(self, path: str) -> None:
        if self.refuses:
            raise OSError(self.refuses)
        self.loaded = path
        self.dump = NEW


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    return World(monkeypatch, tmp_path)


def test_on_its_device_it_is_loaded_once(world: World, tmp_path: Path) -> None:
    assert loader.load()
    assert world.loaded == str(tmp_path / "kernels.so")
    world.refuses = "a second time"
    assert loader.load()


@pytest.mark.parametrize("device", [None, (9, 0), (12, 0), (10, 3)])
def test_on_another_device_nothing_is_loaded(world: World, device: tuple[int, int] | None) -> None:
    world.device = device
    assert not loader.load()
    assert world.dump == OLD


def test_another_vllm_is_an_error(world: World) -> None:
    world.vllm = "0.19.0"
    with pytest.raises(
        loader.ExtensionWheelError, match=r"built for vllm 0\.19\.1, and 0\.19\.0 is"
    ):
        loader.load()


def test_another_torch_is_an_error(world: World) -> None:
    world.torch.__version__ = "2.11.0"
    with pytest.raises(loader.ExtensionWheelError, match=r"torch 2\.10\.0, and 2\.11\.0"):
        loader.load()


def test_a_missing_operator_is_an_error(world: World) -> None:
    world.has = False
    with pytest.raises(loader.ExtensionWheelError, match="nothing to replace"):
        loader.load()


def test_a_library_that_cannot_be_loaded_is_an_error(world: World) -> None:
    world.refuses = "undefined symbol: gone"
    with pytest.raises(loader.ExtensionWheelError, match="undefined symbol: gone"):
        loader.load()


def test_a_kernel_that_torch_does_not_use_is_an_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.torch.ops, "load_library", lambda path: None)
    with pytest.raises(loader.ExtensionWheelError, match="is still another kernel"):
        loader.load()
