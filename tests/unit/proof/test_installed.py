"""Folders that an installer makes: who gets a shared path, what is checked, what is made again."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.console import console
from builder.common.paths import cache_dir
from builder.proof import installed
from builder.proof.installed import (
    SEAL,
    MadeFolder,
    damage,
    install,
    is_sealed,
    recorded,
    seal,
)
from builder.proof.isolation import Command, SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: Two distributions that share two files with different contents, and one file that is the same.
WHEELS: Mapping[str, Mapping[str, bytes]] = {
    "libs-base==1.0": {"lib/a.py": b"base", "lib/b.py": b"base", "lib/same.py": b"s", "base": b"1"},
    "libs-cu13==1.0": {"lib/a.py": b"cu13", "lib/b.py": b"cu13", "lib/same.py": b"s", "cu13": b"2"},
}
PACKAGES = tuple(WHEELS)
PYTHON = Path("/python")


def lay(package: str, into: Path) -> None:
    """Install one of them."""
    info = f"{package.replace('-', '_').replace('==', '-')}.dist-info"
    rows = [f"{info}/RECORD,,"]
    for path, data in WHEELS[package].items():
        raw = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={raw},{len(data)}")
        (into / path).parent.mkdir(parents=True, exist_ok=True)
        (into / path).write_bytes(data)
    (into / info).mkdir(parents=True, exist_ok=True)
    (into / info / "RECORD").write_text("\n".join(rows))


class Installer:
    """Lays wheels in the order that a test wants, and then damages the result."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[list[str]] = []
        self.order: Callable[[Sequence[str]], Sequence[str]] = lambda packages: packages
        #: after each run: its number, counted from 1, and the folder
        self.spoil: Callable[[int, Path], None] = lambda *_: None
        patch.setattr(installed, "install_command", self.command)
        patch.setattr(installed, "call", lambda _: "")

    def command(
        self, _python: Path, packages: Sequence[str], into: Path, *, fresh: bool = False
    ) -> Command:
        self.asked.append([*packages, *(["without its cache"] if fresh else [])])
        for package in self.order(packages):
            lay(package, into)
        self.spoil(len(self.asked), into)
        return Command(())


@pytest.fixture
def installer(monkeypatch: pytest.MonkeyPatch) -> Installer:
    return Installer(monkeypatch)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the user is told."""
    said: list[str] = []
    monkeypatch.setattr(console, "warn", said.append)
    return said


def dsl(**changes: Any) -> MadeFolder:
    """A folder of both."""
    made = MadeFolder(
        folder=cache_dir() / "sandbox" / "dsl-0123456789ab",
        make=lambda into: install(PYTHON, PACKAGES, into),
        expected=lambda folder: recorded(folder, PACKAGES),
    )
    return made if not changes else MadeFolder(**{**vars(made), **changes})


def contents(folder: Path) -> dict[str, bytes]:
    return {path: (folder / path).read_bytes() for path in ("lib/a.py", "lib/b.py", "base", "cu13")}


RIGHT = {"lib/a.py": b"cu13", "lib/b.py": b"cu13", "base": b"1", "cu13": b"2"}


# ---------------------------------------------------------------------------------- shared files


def mixed(_: int, folder: Path) -> None:
    """As two threads of an installer leave it: a file of each."""
    if (folder / "base").exists() and (folder / "cu13").exists():
        (folder / "lib" / "a.py").write_bytes(b"cu13")
        (folder / "lib" / "b.py").write_bytes(b"base")


@pytest.mark.parametrize("order", [list, lambda packages: packages[::-1]])
def test_the_last_of_the_list_gets_a_shared_path(installer: Installer, order: Any) -> None:
    installer.order = order
    assert contents(dsl().ensure()) == RIGHT


def test_a_mixed_folder_is_put_in_order(installer: Installer) -> None:
    installer.spoil = mixed
    assert contents(dsl().ensure()) == RIGHT
    assert installer.asked == [list(PACKAGES), ["libs-cu13==1.0"]]


def test_a_file_linked_with_the_installers_cache_is_not_written(
    installer: Installer, tmp_path: Path
) -> None:
    def linked(number: int, folder: Path) -> None:
        if number == 1:
            (folder / "lib" / "b.py").unlink()
            (tmp_path / "kept").write_bytes(b"base")
            os.link(tmp_path / "kept", folder / "lib" / "b.py")

    installer.spoil = linked
    assert contents(dsl().ensure()) == RIGHT
    assert (tmp_path / "kept").read_bytes() == b"base"


def cut_off(_: int, folder: Path) -> None:
    (folder / "cu13").write_bytes(b"")


def without_a_file(_: int, folder: Path) -> None:
    (folder / "cu13").unlink(missing_ok=True)


def without_a_record(_: int, folder: Path) -> None:
    (folder / "libs_cu13-1.0.dist-info" / "RECORD").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut_off, "cu13 is not what RECORD says"),
        (without_a_file, "cu13 is missing"),
        (without_a_record, "libs_cu13-1.0.dist-info/RECORD is missing"),
    ],
)
def test_what_an_installer_leaves_half_done_is_not_taken(
    installer: Installer, spoil: Callable[[int, Path], None], said: str
) -> None:
    installer.spoil = spoil
    with pytest.raises(SandboxUnavailable, match=said):
        dsl().ensure()
    assert list((cache_dir() / "sandbox").iterdir()) == []


def test_what_is_damaged_in_the_installers_cache_is_fetched_anew(installer: Installer) -> None:
    fresh = ["libs-cu13==1.0", "without its cache"]
    installer.spoil = lambda number, into: cut_off(number, into) if number < 3 else None
    assert contents(dsl().ensure()) == RIGHT
    assert installer.asked == [list(PACKAGES), ["libs-cu13==1.0"], fresh]


def test_a_file_that_was_cut_off_once_is_installed_again(installer: Installer) -> None:
    installer.spoil = lambda number, folder: cut_off(number, folder) if number == 1 else None
    assert contents(dsl().ensure()) == RIGHT


# ------------------------------------------------------------------------------------ made folders

NOT_THAT = "lib/b.py is not what RECORD says"


def answer(kind: str) -> Path:
    file = cache_dir() / kind / f"{'0' * 64}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{}")
    return file


def poisoned(folder: Path) -> None:
    """What an earlier spark-build left: mixed, without a seal."""
    for package in PACKAGES:
        lay(package, folder)
    mixed(0, folder)


def test_a_mixed_folder_of_an_earlier_version_is_made_again_with_its_answers_forgotten(
    installer: Installer, warnings: list[str]
) -> None:
    made = dsl(answers=("dispatch",))
    poisoned(made.folder)
    wrong, other = answer("dispatch"), answer("codegen")
    assert contents(made.ensure()) == RIGHT
    assert warnings == [
        "dsl-0123456789ab in the cache is damaged, and made again: lib/b.py is not what RECORD says"
    ]
    assert not wrong.exists()
    assert other.exists()
    made.ensure()
    assert len(warnings) == len(installer.asked) == 1


def test_a_right_folder_of_an_earlier_version_stays(
    installer: Installer, warnings: list[str]
) -> None:
    made = dsl()
    for package in PACKAGES:
        lay(package, made.folder)
    kept = answer("dispatch")
    assert contents(made.ensure()) == RIGHT
    assert is_sealed(made.folder)
    assert kept.exists()
    assert (installer.asked, warnings) == ([], [])


def test_an_empty_folder_is_none(installer: Installer, warnings: list[str]) -> None:
    made = dsl()
    made.folder.mkdir(parents=True)
    assert contents(made.ensure()) == RIGHT
    assert len(warnings) == 1


def test_a_failed_making_leaves_nothing_and_is_done_again(installer: Installer) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    installer.spoil = full
    with pytest.raises(OSError, match="No space"):
        dsl().ensure()
    assert list((cache_dir() / "sandbox").iterdir()) == []
    installer.spoil = lambda *_: None
    assert contents(dsl().ensure()) == RIGHT


# ------------------------------------------------------------------------------- checked once more


def written(path: Path) -> None:
    path.write_bytes(b"xxxx")


def written_with_its_old_time(path: Path) -> None:
    info = path.stat()
    path.write_bytes(b"x" * info.st_size)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "whole", "said"),
    [
        (written, False, "lib/a.py has changed"),
        (written, True, "lib/a.py has changed"),
        (Path.unlink, False, "lib/a.py: No such file"),
        (written_with_its_old_time, False, ""),
        (written_with_its_old_time, True, "lib/a.py has changed"),
    ],
)
@pytest.mark.usefixtures("installer")
def test_damage_is_found_and_mended(
    warnings: list[str], change: Callable[[Path], None], whole: bool, said: str
) -> None:
    folder = dsl().ensure()
    assert damage([folder], whole=whole) == ""
    change(folder / "lib" / "a.py")
    wrong = damage([folder], whole=whole)
    if not said:
        assert wrong == ""
        return
    assert wrong.startswith(f"dsl-0123456789ab: {said}")
    kept = answer("preflight")
    assert contents(dsl().ensure()) == RIGHT
    assert said in warnings[0]
    assert not kept.exists()
    assert damage([folder], whole=True) == ""


@pytest.mark.usefixtures("installer")
def test_a_file_that_no_record_has_is_checked_too(warnings: list[str]) -> None:
    """As a stand-in for a library of CUDA."""
    made = dsl()
    folder = made.ensure()
    (folder / "stand-in.so").write_bytes(b"1")
    seal(folder, {})
    (folder / "stand-in.so").write_bytes(b"2")
    assert "stand-in.so has changed" in damage([folder], whole=False)
    assert not (made.ensure() / "stand-in.so").exists()
    assert len(warnings) == 1


@pytest.mark.usefixtures("installer")
def test_a_new_time_alone_is_no_damage() -> None:
    """As a copied cache has it."""
    folder = dsl().ensure()
    os.utime(folder / "lib" / "a.py", (1, 1))
    assert damage([folder], whole=False) == ""


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "\xff"])
@pytest.mark.usefixtures("installer", "warnings")
def test_a_damaged_seal_is_damage(text: str) -> None:
    folder = dsl().ensure()
    (folder / SEAL).write_text(text, "latin-1")
    assert damage([folder], whole=False)
    assert damage([dsl().ensure()], whole=False) == ""


def test_a_folder_that_is_gone_is_damage(tmp_path: Path) -> None:
    assert damage([tmp_path / "gone"], whole=True) == "gone: it is gone"
