"""Runs that are killed (``kill -9``) as they read, write and push; what the next one removes.

A command stops at a request that a proxy does not answer; what lies about then is looked at before
and after the kill, and after another command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.images.registry.client import Registry
from builder.images.registry.copy import copy_image
from builder.images.registry.layout import LayoutDirectory
from tests.faultproxy import Fault, FaultProxy
from tests.unit.caller import LAYER
from tests.unit.fakes import write_tree
from tests.unit.imagefiles import Item, packed, put_vllm, tar_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .servers import DockerRegistry

ROOT = Path(__file__).parents[2]


@pytest.fixture
def line(registry: DockerRegistry) -> Iterator[FaultProxy]:
    with FaultProxy(registry.address) as running:
        running.stall = 30.0
        yield running


class Machine:
    """A user's folders, and a base in a registry behind a line that may stall."""

    def __init__(self, folder: Path, line: FaultProxy, registry: DockerRegistry) -> None:
        self.folder, self.line = folder, line
        name = f"litter/{folder.name.strip('_').replace('_', '-')[-20:].strip('-')}"
        write_tree(folder / "patches", {"fix/layer.toml": LAYER.encode()})
        for below in ("tmp", "work"):
            (folder / below).mkdir()
        put_vllm(folder / "base", packed(tar_of(Item("opt/filler", os.urandom(300_000)))))
        there = Registry(registry.address).repository(f"{name}/base")
        copy_image(LayoutDirectory(folder / "base"), "", there, "1")
        self.base = ("-l", "fix", "-b", f"docker://{line.address}/{name}/base:1")
        self.tag = f"{line.address}/{name}/out:1"
        assert registry._data is not None
        self.uploads = registry._data / f"docker/registry/v2/repositories/{name}/out/_uploads"
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("SPARK_BUILD_")},
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(folder / "tmp"),
            "SPARK_BUILD_CACHE": str(folder / "kept"),
            "SPARK_BUILD_PATCHES": str(folder / "patches"),
            "DOCKER_HOST": "unix:///nonexistent/docker.sock",
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "builder", *words],
            cwd=self.folder / "work",
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str) -> None:
        process = self.start(*words)
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 0, said

    def start_until(self, stall: Callable[[str, str], bool], *words: str) -> subprocess.Popen[str]:
        """A command that hangs at the first request of this kind."""
        self.line.reset()
        self.line.by_path = lambda method, path: Fault.STALL if stall(method, path) else None
        process = self.start(*words)
        while not any(seen.fault is Fault.STALL for seen in self.line.log):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
        return process

    def kill(self, process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=600)
        self.line.by_path = lambda _method, _path: None

    def litter(self) -> set[str]:
        """What is neither finished nor empty, by the kind of its place."""
        places = {
            "temporary": (self.folder / "tmp").glob("*"),
            "notes": (self.folder / "kept/locks/runs").glob("*"),
            "cache": (self.folder / "kept").rglob("*.part"),
            "layout": (p for p in (self.folder / "work").rglob("*") if p.name.startswith(".")),
            "uploads": self.uploads.glob("*/data"),  # hash states the registry leaves itself
        }
        return {name for name, found in places.items() if any(found)}


@pytest.fixture
def machine(tmp_path: Path, line: FaultProxy, registry: DockerRegistry) -> Machine:
    return Machine(tmp_path, line, registry)


def is_blob(method: str, path: str) -> bool:
    return method == "GET" and "/blobs/sha256:" in path


def large(machine: Machine) -> Callable[[str, str], bool]:
    """Requests for the layer that is only read for a layout."""
    blobs = (machine.folder / "base/blobs/sha256").iterdir()
    name = max(blobs, key=lambda path: path.stat().st_size).name
    return lambda method, path: method == "GET" and path.endswith(name)


def test_while_a_layer_is_read(machine: Machine) -> None:
    process = machine.start_until(large(machine), "plan", *machine.base)
    there = {"temporary", "notes", "cache"}
    assert machine.litter() == there
    machine.run("cache", "show")
    assert machine.litter() == there, "the run is alive"
    machine.kill(process)
    assert machine.litter() == there
    machine.run("cache", "show")
    assert machine.litter() == set()
    machine.run("plan", *machine.base)
    assert machine.litter() == set()


def test_while_a_layout_is_written(machine: Machine) -> None:
    machine.run("plan", *machine.base)
    words = ("image", *machine.base, "--output", "oci:out", "--no-verify")
    process = machine.start_until(large(machine), *words)
    there = {"temporary", "notes", "layout"}
    assert machine.litter() == there
    machine.run("cache", "show")
    assert machine.litter() == there, "the run is alive"
    machine.kill(process)
    machine.run("cache", "show")
    assert machine.litter() == set()
    assert not any((machine.folder / "work").iterdir())
    machine.run(*words)
    assert machine.litter() == set()


def test_while_something_is_uploaded(machine: Machine) -> None:
    def is_upload(method: str, path: str) -> bool:
        return method == "PUT" and "/blobs/uploads/" in path

    words = ("image", *machine.base, "--push", "-t", machine.tag, "--no-verify")
    process = machine.start_until(is_upload, *words)
    assert {"temporary", "notes", "uploads"} <= machine.litter()
    other = ("image", *machine.base, "--single-layer", "--push", "-t", machine.tag, "--no-verify")
    machine.line.by_path = lambda _method, _path: None
    machine.run(*other)
    assert {"temporary", "notes", "uploads"} <= machine.litter(), "the run is alive"
    machine.kill(process)
    machine.run("cache", "show")
    assert machine.litter() == {"notes", "uploads"}, "the registry is not asked without need"
    machine.run(*words)
    assert machine.litter() == set()


def test_while_manifests_are_pushed(machine: Machine) -> None:
    words = ("image", *machine.base, "--push", "-t", machine.tag, "--no-verify")
    process = machine.start_until(lambda m, path: m == "PUT" and "/manifests/" in path, *words)
    assert machine.litter() >= {"temporary"}
    machine.kill(process)
    machine.run(*words)
    assert machine.litter() == set()
