"""Libraries without device code, with a cuobjdump that is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.common.machinecode import BadBinary, find_tool, images

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
