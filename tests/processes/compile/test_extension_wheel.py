"""The extension wheel, installed by pip."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from builder.compile.extensionwheel import WheelNames, wheel_bytes
from tests.unit.compile.test_extension_wheel import FILES, NAMES

if TYPE_CHECKING:
    from pathlib import Path


def test_pip_installs_it_and_vllm_finds_the_plugin(tmp_path: Path) -> None:
    wheel = tmp_path / NAMES.filename.replace("linux_x86_64", "any")
    names = WheelNames(package=NAMES.package, version=NAMES.version, platform="any")
    wheel.write_bytes(wheel_bytes(names, FILES, "vllm==0.19.1", "x"))
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True)
    code = (
        "from importlib.metadata import entry_points, requires; "
        "(point,) = entry_points(group='vllm.general_plugins'); point.load()(); "
        f"print(point.name, requires('{NAMES.project}'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(site)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout == "spark_build_companion_sm120_family ['vllm==0.19.1']\n"
