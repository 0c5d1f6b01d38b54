"""Commands of distributions that layers install: an image has them, as after pip."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.images.engines import metadata
from tests.unit.fakes import Table, dist_files, fake_base, make_layer, make_plan_of, make_wheel
from tests.unit.fakes import vllm_files as files_of_vllm

if TYPE_CHECKING:
    from builder.common.plan import BuildPlan

MODULE = """import sys

class Cli:
    @staticmethod
    def main():
        return len(sys.argv)
"""
POINTS = """[console_scripts]
tool = tool.cli:Cli.main [extra]
Second=tool.cli:Cli.main
../bad = tool.cli:Cli.main
worse = tool.cli

[gui_scripts]
window = tool.cli:main
"""


def planned(points: str | None, installed: str = "", interpreter: str = "python3") -> BuildPlan:
    files = {"tool/__init__.py": "", "tool/cli.py": MODULE}
    if points is not None:
        files["tool-2.0.dist-info/entry_points.txt"] = points
    wheel = make_wheel("tool", "2.0", files)
    op: Table = {"op": "wheel", "distribution": "tool", "version": "2.0"}
    held = dist_files("tool", installed, {"tool/__init__.py": ""}) if installed else {}
    base = fake_base({**files_of_vllm(), **held}, interpreter=interpreter)
    return make_plan_of(base, make_layer("tool", op, wheels=[wheel]), wheels=[wheel])


def commands(plan: BuildPlan) -> list[str]:
    found = metadata.baked_files(plan)
    return [path for path in found if path.startswith("/usr/local/bin/")]


@pytest.mark.parametrize("points", [None, "", "[gui_scripts]\na = b:c\n", "no section = x\n"])
def test_a_distribution_without_commands(points: str | None) -> None:
    assert commands(planned(points)) == ["/usr/local/bin/spark-verify"]


def test_a_command_of_the_base_stays() -> None:
    assert commands(planned(POINTS, installed="1.0")) == ["/usr/local/bin/spark-verify"]
