"""The files of mods: a folder and a zip hold the same."""

import io
import zipfile
from pathlib import Path

import pytest

from builder.errors import UsageError
from builder.layers.conversion import mod_files

HUNK = "@@ -1,4 +1,4 @@\n one\n two\n-three\n+drei\n four\n"
PATCH = f"--- a/vllm/x.py\n+++ b/vllm/x.py\n{HUNK}".encode()


def test_zip_and_folder_hold_the_same(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/run.sh").write_bytes(b"patch -p1 -d / < a.patch\n")
    (tmp_path / "m/a.patch").write_bytes(PATCH)
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in mod_files(tmp_path / "m").items():
            archive.writestr(name, content)
    (tmp_path / "m.zip").write_bytes(data.getvalue())
    assert mod_files(tmp_path / "m.zip") == mod_files(tmp_path / "m")


def test_a_folder_without_run_sh_is_not_a_mod(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a mod: it has no run\.sh"):
        mod_files(tmp_path)
