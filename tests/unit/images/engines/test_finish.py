"""``finish``: what a copy into an image cannot do, and the check that the copy was right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.applier.applying import finish
from builder.applier.commandline import main
from builder.applier.receipts import STATE_DIR
from builder.applier.trees import DirTree
from builder.applier.values import ApplyError
from tests.unit.fakes import (
    BACKEND,
    copy_op,
    dist_files,
    fake_base,
    make_layer,
    make_plan_of,
    replace_op,
    vllm_files,
    write_tree,
)

if TYPE_CHECKING:
    from pathlib import Path

    from builder.applier.layers import Layer

FILES = vllm_files() | dist_files("lib", "1", {"lib/__init__.py": "", "lib/sub/x.py": ""})
LAYERS = [
    make_layer("fix", BACKEND, copy_op("vllm/new.py", b"N = 1\n")),
    make_layer("clean", {"op": "remove", "distribution": "lib"}),
]


def image(root: Path, *layers: Layer) -> Path:
    """A base onto which a plan's files were copied; a copy adds and overwrites, no more."""
    write_tree(root, FILES)
    plan = make_plan_of(fake_base(FILES), *(layers or LAYERS))
    copied = {path: content.read() for path, content in plan.changes.items() if content}
    return write_tree(root, copied)


def test_removes_files_that_receipts_list_as_removed(tmp_path: Path) -> None:
    root = image(tmp_path)
    assert (root / "lib/sub/x.py").exists()
    removed = finish(root)
    assert {"lib/__init__.py", "lib/sub/x.py", "lib-1.dist-info/RECORD"} <= set(removed)
    assert not (root / "lib").exists()
    assert not (root / "lib-1.dist-info").exists()
    assert (root / "vllm/new.py").read_bytes() == b"N = 1\n"


def test_removes_compiled_files_of_changed_modules(tmp_path: Path) -> None:
    root = image(tmp_path)
    stale, fresh = (f"vllm/__pycache__/{name}.cpython-312.pyc" for name in ("core", "envs"))
    write_tree(root, {stale: b"", fresh: b""})
    assert stale in finish(root)
    assert (root / fresh).exists()


def test_a_second_run_does_nothing(tmp_path: Path) -> None:
    root = image(tmp_path)
    finish(root)
    assert finish(root) == []


def test_the_last_layer_determines_the_expected_file(tmp_path: Path) -> None:
    second = make_layer("second", replace_op("'b12x'", "'b12x'  # second"))
    assert finish(image(tmp_path, LAYERS[0], second)) == []


@pytest.mark.parametrize(
    ("path", "data"), [("vllm/core.py", b"something else\n"), ("vllm/new.py", None)]
)
def test_a_failed_copy_is_refused(tmp_path: Path, path: str, data: bytes | None) -> None:
    root = image(tmp_path)
    if data is None:
        (root / path).unlink()
    else:
        (root / path).write_bytes(data)
    with pytest.raises(ApplyError, match=f"1 files do not match their receipts: {path}"):
        finish(root)


def test_a_missing_copy_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_tree(tmp_path, FILES)
    assert main(["finish", "--root", str(root)]) == 2
    assert "has no receipts" in capsys.readouterr().err


def test_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = image(tmp_path)
    assert main(["finish", "--root", str(root)]) == 0
    assert "4 files removed" in capsys.readouterr().err
    assert sorted(DirTree(root).children(STATE_DIR)) == ["receipts"]


def test_a_finished_copy_has_the_files_of_the_plan(tmp_path: Path) -> None:
    """Applying in place and copying into an image must not differ."""
    root = image(tmp_path)
    finish(root)
    plan = make_plan_of(fake_base(FILES), *LAYERS)
    expected = dict(FILES)
    for path, content in plan.changes.items():
        expected.pop(path, None)
        if content is not None:
            expected[path] = content.read()
    found = {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    assert found == expected
