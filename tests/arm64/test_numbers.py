"""The parts of level ``numbers`` on 64-bit Arm: generated libraries, the executor, a launch."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import pytest

from builder.probes.stub_driver import NO_DEVICE, REFUSAL, SONAME, TEXT, shared_library
from tests.processes.probes import test_launch_host as launch_host
from tests.processes.probes import test_stub_driver as stub_driver
from tests.unit.probes.test_stub_driver import MANY

from .debian import HOME, SOURCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .debian import Debian

MACHINE = "aarch64"
PYTHON = f"{HOME}/venv/bin/python"
#: The tests of the executor against a GPU's recorded bits; what runs them.
RECORDED = "tests/unit/ptx/test_ptx_device.py"
PYTEST = f"{HOME}/pytest"


@pytest.fixture(scope="module")
def written(debian: Debian) -> Iterator[Callable[[str, bytes], str]]:
    """Writes a file into the system, and gives its path there."""
    paths = []

    def write(name: str, data: bytes) -> str:
        path = debian.root / "tmp" / name
        paths.append(path)
        path.write_bytes(data)
        return f"/tmp/{name}"

    yield write
    for path in paths:
        path.unlink(missing_ok=True)


def said(debian: Debian, program: str, *arguments: str) -> str:
    done = debian.run("python3", "-I", "-c", program, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_function_of_the_driver_returns_an_error(
    debian: Debian, written: Callable[[str, bytes], str]
) -> None:
    path = written(SONAME, shared_library(SONAME, MANY, MACHINE))
    lines = said(debian, stub_driver.CALLER, path, *MANY).splitlines()
    assert lines == [str([REFUSAL] * len(MANY)), "True", "False"]


def test_symbols_have_the_requested_versions(
    debian: Debian, written: Callable[[str, bytes], str]
) -> None:
    names = ["cudaMalloc", "cudaGetErrorString", "nvshmem_init", "plain"]
    versions = dict.fromkeys(names[:2], "libcudart.so.13") | {"nvshmem_init": "NVSHMEM"}
    library = shared_library("libcudart.so.13", names, MACHINE, versions, NO_DEVICE)
    lines = said(debian, stub_driver.VERSIONS, written("libcudart.so.13", library)).splitlines()
    text = TEXT.rstrip(b"\0").decode()
    assert lines == ["[True, True, False, False]", str(NO_DEVICE), text, str(NO_DEVICE)]


def test_a_library_for_another_machine_does_not_load(
    debian: Debian, written: Callable[[str, bytes], str]
) -> None:
    path = written("other.so", shared_library("other.so", ["cuInit"], "x86_64"))
    done = debian.run("python3", "-c", f"import ctypes; ctypes.CDLL({path!r})")
    assert "OSError" in done.stderr


def test_each_function_calls_its_own_callback(
    debian: Debian, written: Callable[[str, bytes], str]
) -> None:
    ask = partial(said, debian)
    folder, path = SOURCE, written("calls.so", b"")
    names = ["two", *(f"function_{n}" for n in range(300))]
    wanted = [2008 if name == "two" else len(name) * 100 + 7 for name in names]
    assert json.loads(ask(launch_host.CALLER, path, folder, json.dumps(names))) == wanted
    assert json.loads(ask(launch_host.ARGUMENTS, path, folder)) == launch_host.ARRIVED
    spoiled = ask(launch_host.ARGUMENTS, path, folder, launch_host.SPOILS[MACHINE])
    assert json.loads(spoiled) != launch_host.ARRIVED


@pytest.mark.usefixtures("made")
def test_the_executor_gives_the_bits_of_a_gpu(debian: Debian) -> None:
    words = ["-m", "pip", "install", "--quiet", "--upgrade", "--target", PYTEST]
    done = debian.run(PYTHON, *words, f"pytest=={pytest.__version__}")
    assert done.returncode == 0, done.stderr
    run = f"cd {SOURCE} && PYTHONPATH={PYTEST} exec {PYTHON} -W error::RuntimeWarning -m pytest"
    options = f"--noconftest -p no:cacheprovider -q {RECORDED}"
    done = debian.run("sh", "-c", f"{run} {options}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


#: Level ``numbers`` of an image with one of its kernels alone: the others take minutes each here.
ONE_KERNEL = f"""
import sys
sys.path.insert(0, {SOURCE!r})
from dataclasses import replace
from builder.__main__ import run
from builder.proof import kernels
(one,) = (one for one in kernels.LAUNCHED if one.name == "b12x GEMM, 1 token")
request = {{**one.request, "shapes": [[1, 128, 128]]}}
kernels.LAUNCHED = (replace(one, request=request),)
kernels.TIMEOUT = 86400.0
sys.exit(run(["verify", "oci:{HOME}/out", "--level", "numbers", "--json"]))
"""


@pytest.mark.usefixtures("made")
def test_a_released_kernel_is_launched_and_its_values_are_right(debian: Debian) -> None:
    """FlashInfer's own host code, compiled by the CuTe DSL for Arm, calls the generated library."""
    done = debian.run(PYTHON, "-W", "error::RuntimeWarning", "-c", ONE_KERNEL)
    checks = json.loads(done.stdout)["checks"]
    (check,) = (check for check in checks if check["name"] == "b12x GEMM, 1 token")
    assert check["status"] == "pass", done.stdout + done.stderr
    assert check["seen"].startswith("384 values right, in 1 launch and 3 schedules each; no race")
    assert any("its functions record launches" in words for words in check["simulated"])
