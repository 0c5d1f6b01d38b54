"""An extension wheel under the plugin loader of a released vLLM, read from that vLLM's wheel."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from builder.common.paths import package_file
from builder.common.plan import Platform
from builder.common.wheels import RemoteWheel
from builder.compile.extensionwheel import WheelNames, wheel_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from builder.common.pypi import PackageIndex

ABOUT = {"name": "wheel", "vllm": "0.19.1", "torch": "2.10.0", "capabilities": [[12, 1]]}
LOADER = "vllm/plugins/__init__.py"
#: What the loader and the extension wheel ask of vLLM besides.
PLATFORMS = """
class current_platform:
    is_cuda = staticmethod(lambda: True)
    get_device_capability = staticmethod(lambda: {device})
"""


@pytest.fixture(params=["0.19.1", "0.21.0"])
def site(index: PackageIndex, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A site-packages with the release's plugin loader, and an extension wheel for another vLLM."""
    file = index.choose("vllm", request.param, Platform.parse("linux/arm64", "3.12"))
    files = {
        "vllm/__init__.py": b"",
        LOADER: RemoteWheel(file, index).read(LOADER),
        "torch.py": b"__version__ = '2.10.0'\n",
        "vllm-0.18.0.dist-info/METADATA": b"Name: vllm\nVersion: 0.18.0\n",
    }
    for path, data in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    names = WheelNames.of("sm120-family", "0.19.1", "0" * 12, "any")
    inside = {
        "__init__.py": package_file("probes", "wheel_loader.py").read_bytes(),
        "companion.json": json.dumps({**ABOUT, "library": "kernels.so"}).encode(),
    }
    wheel = tmp_path / "wheel.whl"
    wheel.write_bytes(wheel_bytes(names, inside, "vllm==0.19.1", "x"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def started(site: Path, device: tuple[int, int], plugins: list[str] | None) -> tuple[int, str]:
    """Exit code and standard error of a process that loads vLLM's general plugins."""
    (site / "vllm" / "platforms.py").write_text(PLATFORMS.format(device=device))
    (site / "vllm" / "envs.py").write_text(f"VLLM_PLUGINS = {plugins}\n")
    code = "from vllm.plugins import load_general_plugins; load_general_plugins()"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(site)}, cwd=site,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


def test_a_mismatch_stops_vllm_only_on_its_device(site: Path) -> None:
    code, said = started(site, (12, 1), None)
    assert code == 1
    assert "ExtensionWheelError: wheel was built for vllm 0.19.1, and 0.18.0 is installed" in said
    assert started(site, (9, 0), None) == (0, "")
    named = ["spark_build_companion_sm120_family"]
    assert started(site, (12, 1), named)[0] == 1


def test_a_plugin_list_without_it_disables_it(site: Path) -> None:
    """As documented: vLLM does not load what ``VLLM_PLUGINS`` does not name."""
    assert started(site, (12, 1), ["other"]) == (0, "")
