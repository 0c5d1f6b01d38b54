"""Libraries without device code, with a cuobjdump that is started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from builder.common.machinecode import (
    BadBinary,
    BadCubin,
    ToolMissing,
    disassemble,
    find_tool,
    images,
)

if TYPE_CHECKING:
    from pathlib import Path


def real_tool() -> None:
    """Fail without ``cuobjdump``: it is in the extra that tests are run with."""
    find_tool("cuobjdump")


def test_a_library_without_device_code_has_no_images(tmp_path: Path) -> None:
    real_tool()
    file = tmp_path / "host.so"
    file.write_bytes(b"\x7fELF\x02\x01\x01" + b"\0" * 57)
    assert images(file) == []


def test_a_file_that_is_not_a_library_is_named(tmp_path: Path) -> None:
    real_tool()
    file = tmp_path / "text.so"
    file.write_text("not a library")
    with pytest.raises(BadBinary, match=r"cuobjdump cannot read text\.so: cuobjdump fatal"):
        images(file)


@pytest.mark.parametrize(
    ("script", "error", "said"),
    [
        ("kill -9 $$", ToolMissing, "was ended by signal 9; Linux does this"),
        ("echo No space left on device >&2; exit 1", ToolMissing, "cannot run: No space left"),
        ("kill -11 $$", (BadBinary, BadCubin), "cannot read|refuses"),
    ],
)
def test_what_stops_a_tool_is_no_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, error: Any, said: str
) -> None:
    for name in ("cuobjdump", "nvdisasm"):
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(error, match=said):
        images(tmp_path / "cuobjdump")
    with pytest.raises(error, match=said):
        disassemble(b"cubin")
