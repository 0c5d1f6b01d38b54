"""Mods that bring along what their layers pin, and mods as zip files."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from builder.pipeline.mods import mod_zip, stale_files, write_mod
from tests.unit.fakes import layer_text, vllm_files, write_tree
from tests.wheels.fakeindex import FakeIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.unit.conftest import Called

    Call = Callable[..., Called]

EXTRA = 'op = "wheel"\ndistribution = "extra"\nversion = "1.0"\n'
MODULE = b"N = 1\n"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIndex]:
    """A package index with a release and a wheel that layer ``fix`` pins."""
    with FakeIndex() as running:
        code = {path: data for path, data in vllm_files().items() if path.startswith("vllm/")}
        running.add("vllm", "0.20.1", code)
        name = running.add("extra", "1.0", {"extra/__init__.py": MODULE})
        pin = f"""\
[[wheel]]
distribution = "extra"
version = "1.0"
filename = "{name}"
sha256 = "{running.sha256(name)}"
size = {len(running.files[name])}
platform = "any"
python = "py3"
"""
        write_tree(
            tmp_path / "patches",
            {"fix/layer.toml": layer_text(EXTRA).encode(), "fix/pins.toml": pin.encode()},
        )
        monkeypatch.setenv("SPARK_BUILD_PATCHES", str(tmp_path / "patches"))
        monkeypatch.setenv("PIP_INDEX_URL", running.url)
        yield running


WORDS = ("mods", "export", "mine", "-l", "fix", "--in", "out")
VENDOR = (*WORDS, "--vendor", "0.20.1")


def start(mod: Path, site: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run a mod as a container that has no network does."""
    env = {
        "PATH": os.environ["PATH"], "PYTHONPATH": str(site), "VLLM_PYTHON": sys.executable,
        "VLLM_SITE_PACKAGES": str(site), "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "SPARK_BUILD_CACHE": str(cache), "TMPDIR": str(cache),
    }  # fmt: skip
    return subprocess.run(
        ["./run.sh"], cwd=mod, env=env, capture_output=True, text=True, check=False
    )


def test_a_vendored_mod_needs_no_network(
    spark_build: Call, index: FakeIndex, site: Path, tmp_path: Path
) -> None:
    assert spark_build(*VENDOR).code == 0
    mod = tmp_path / "work" / "out" / "mine"
    (wheel,) = (mod / "wheels").iterdir()
    assert wheel.read_bytes() == index.files[wheel.name]
    done = start(mod, site, tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert (site / "extra" / "__init__.py").read_bytes() == MODULE
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("how", ["without", "damaged"])
def test_without_its_wheel_it_needs_the_network(
    spark_build: Call, index: FakeIndex, site: Path, tmp_path: Path, how: str
) -> None:
    del index
    spark_build(*VENDOR)
    mod = tmp_path / "work" / "out" / "mine"
    (wheel,) = (mod / "wheels").iterdir()
    wheel.unlink() if how == "without" else wheel.write_bytes(b"damaged")
    done = start(mod, site, tmp_path / "cache")
    assert done.returncode == 8
    assert "error: cannot fetch extra-1.0" in done.stderr
    assert not (site / "extra").exists()


def test_a_check_compares_the_wheels_too(
    spark_build: Call, index: FakeIndex, tmp_path: Path
) -> None:
    del index
    spark_build(*VENDOR)
    assert spark_build(*VENDOR, "--check").code == 0
    plain = spark_build(*WORDS, "--check")
    assert (plain.code, "stale below out: mine/wheels" in plain.err) == (9, True)
    (wheel,) = (tmp_path / "work" / "out" / "mine" / "wheels").iterdir()
    wheel.write_bytes(b"damaged")
    checked = spark_build(*VENDOR, "--check")
    assert checked.code == 9
    assert f"mine/wheels/{wheel.name}" in checked.err
    again = shlex.join(["spark-build", *VENDOR])
    assert f"try: {again}\n" in checked.err
    spark_build(*WORDS)
    assert not wheel.parent.exists()
    assert spark_build(*VENDOR, "--check").code == 9


def test_a_zip_has_run_sh_at_its_root(spark_build: Call, index: FakeIndex, tmp_path: Path) -> None:
    del index
    assert spark_build(*VENDOR, "--zip").code == 0
    target = tmp_path / "work" / "out" / "mine.zip"
    first = target.read_bytes()
    with zipfile.ZipFile(target) as archive:
        members = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
    assert members["run.sh"] == 0o100755
    assert members["wheels/extra-1.0-py3-none-any.whl"] == 0o100644
    os.utime(target, (0, 0))
    assert spark_build(*VENDOR, "--zip").code == 0
    assert target.read_bytes() == first
    assert spark_build(*VENDOR, "--zip", "--check").code == 0
    assert spark_build(*WORDS, "--zip", "--check").code == 9
    target.write_bytes(first[:-1])
    assert spark_build(*VENDOR, "--zip", "--check").code == 9


def test_bytes_of_a_zip_do_not_depend_on_time_or_order(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"run.sh": (b"#!/bin/sh\n", 0o755), "layers.json": (b"{}\n", 0o644)}
    first = mod_zip(files)
    monkeypatch.setattr("time.time", lambda: 4e9)
    assert mod_zip(dict(reversed(files.items()))) == first
    assert zipfile.ZipFile(io.BytesIO(first)).testzip() is None


@pytest.mark.parametrize("words", [("--zip",), ("--vendor", "0.20.1")])
def test_a_directory_is_needed(spark_build: Call, words: tuple[str, ...]) -> None:
    done = spark_build("mods", "export", *words)
    assert done.code == 2
    assert "--in DIR" in done.err


def test_no_release_named(spark_build: Call, index: FakeIndex) -> None:
    del index
    done = spark_build(*WORDS, "--vendor", " , ")
    assert (done.code, "no vLLM release named" in done.err) == (2, True)


def test_a_release_that_the_profile_does_not_support(
    spark_build: Call, index: FakeIndex, tmp_path: Path
) -> None:
    index.add("vllm", "0.17.0", {"vllm/__init__.py": b""})
    name = "sm121-b12x-full-enable"
    done = spark_build("mods", "export", name, "--in", "out", "--vendor", "0.17.0")
    assert done.code == 2
    assert "b12x-full does not support vllm 0.17.0" in done.err
    assert not (tmp_path / "work" / "out").exists()


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    files = {"run.sh": (b"", 0o755), "wheels/a": (b"a", 0o644)}
    (tmp_path / "wheels").write_text("")
    assert stale_files(tmp_path, files) == ["run.sh", "wheels", "wheels/a"]
    write_mod(tmp_path, files)
    assert stale_files(tmp_path, files) == []
    (tmp_path / "wheels" / "old").write_text("")
    assert stale_files(tmp_path, files) == ["wheels/old"]


@pytest.mark.parametrize("name", ["../esc", "Bad Name", "/tmp/x"])
def test_name_of_a_mod_is_that_of_a_folder(spark_build: Call, tmp_path: Path, name: str) -> None:
    result = spark_build("mods", "export", name, "-l", "b12x-env", "--in", tmp_path / "out")
    assert result.code == 2
    assert "is not a layer name" in result.err
    assert not (tmp_path / "out").exists()


def test_unpinned_layer_is_not_exported(spark_build: Call, tmp_path: Path) -> None:
    write_tree(tmp_path / "L", {"m/layer.toml": layer_text(EXTRA).encode()})
    words = ("-l", "m", "--patches", tmp_path / "L", "--in", tmp_path / "out")
    result = spark_build("mods", "export", "my-mod", *words)
    assert result.code == 2
    assert "is not pinned" in result.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("selected", "said"),
    [
        ("b12x-full,marlin", "b12x-env and marlin-env contradict each other on a base with vllm"),
        ("cutlass-env,marlin-env", "marlin-env sets VLLM_NVFP4_GEMM_BACKEND=marlin"),
        ("b12x-full,vllm-marlin-fp8", ""),
    ],
)
def test_layers_that_contradict_each_other_are_no_mod(
    spark_build: Call, tmp_path: Path, selected: str, said: str
) -> None:
    result = spark_build("mods", "export", "my-mod", "-l", selected, "--in", tmp_path / "out")
    assert (result.code, said in result.err) == (2 if said else 0, True)
    assert (tmp_path / "out").exists() == (not said)
