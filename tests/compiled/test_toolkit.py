"""``build_extension_wheel`` gives the same bytes in and outside containers.

Needs ``nvcc``; where there is none this is not run, and says so.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.applier.trees import DirTree
from builder.common.document import plain
from builder.compile.executor import ImageCompilers, find_nvcc
from builder.compile.extensionwheel import build_extension_wheel
from builder.compile.link import InstalledLibraries, toolkit_libraries
from tests.documents import validated
from tests.processes.compile.test_toolkit import Here, contained, containers  # noqa: F401 - a fixture

from .test_extension_wheel_whole import objects, request_of  # noqa: F401 - fixtures

if TYPE_CHECKING:
    from builder.compile.extensionwheel import WheelRequest

pytestmark = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="NOT RUN: no nvcc, so nothing is compiled here"
)


def test_the_same_wheel_as_here(
    request_of: WheelRequest,  # noqa: F811
    containers: Here,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Scripts, folders and names are those of a container; the compilers are this machine's."""
    local = build_extension_wheel(request_of, tmp_path / "local")
    nvcc, cuda = find_nvcc()
    versions = plain(local.report.companion.compilers)
    toolkit = ImageCompilers(nvcc=str(nvcc), cuda=cuda, versions=versions, library_headers=False)
    libraries = toolkit_libraries(nvcc)
    container = replace(contained(containers, libraries), toolkit=toolkit)
    there = replace(
        request_of,
        tools=replace(
            request_of.tools, compiler=replace(request_of.tools.compiler, container=container)
        ),
        base=InstalledLibraries(DirTree(tmp_path / "site"), libraries),
    )
    made = build_extension_wheel(there, tmp_path / "there")
    assert made.path.read_bytes() == local.path.read_bytes()
    assert validated("compile-wheel", plain(made.report))["peak_memory_gb"] is None
    ran = len(containers.ran)
    assert [tasks for tasks in containers.ran if tasks[0] != "link"] == [
        ["unit0"], ["unit0"], ["unit0", "unit1"],
    ]  # fmt: skip
    containers.away = True
    again = build_extension_wheel(there, tmp_path / "again")
    assert again.path.read_bytes() == local.path.read_bytes()
    assert {tasks[0] for tasks in containers.ran[ran:]} == {"link"}, "objects are kept"
    (headers,) = request_of.tools.includes
    newer = Path(shutil.copytree(headers, tmp_path / "newer"))
    ran = len(containers.ran)
    build_extension_wheel(
        replace(there, tools=replace(there.tools, includes=(newer,))), tmp_path / "n"
    )
    assert ["unit0"] in containers.ran[ran:], "other headers may give other objects"
