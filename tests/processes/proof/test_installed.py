"""Folders that real installers make of wheels that share files, and what runs in them."""

from __future__ import annotations

import os
import py_compile
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.common.console import console
from builder.common.paths import cache_dir
from builder.proof import installed, isolation
from builder.proof.installed import SEAL, drop_broken_compiled, is_sealed
from builder.proof.isolation import SandboxUnavailable, checked_output
from builder.proof.replies import ProbeReply
from builder.proof.sandbox import Requirements, Sandbox, ask_probe, soundly
from tests.wheels.fakeindex import FakeIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Enough shared files that an installer which lays wheels at the same time mixes them.
SHARED = 100
DSL, BASE, CU13 = (f"nvidia-cutlass-dsl{end}" for end in ("", "-libs-base", "-libs-cu13"))
PACKAGES = {DSL: "4.4.2", BASE: "4.4.2", CU13: "4.4.2"}


def wheel(text: str) -> dict[str, bytes]:
    shared = {f"nvidia_cutlass_dsl/f{n}.py": f"{text} {n}".encode() * 99 for n in range(SHARED)}
    return {**shared, f"nvidia_cutlass_dsl/only_{text}.py": b""}


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeIndex]:
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    with FakeIndex() as running:
        running.add(DSL, "4.4.2", {"nvidia_cutlass_dsl.pth": b""})
        running.add(BASE, "4.4.2", wheel("base"))
        running.add(CU13, "4.4.2", wheel("cu13"))
        monkeypatch.setenv("PIP_INDEX_URL", running.url)
        yield running


def without_uv(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(isolation, "uv", lambda: None)


def with_uv(_: pytest.MonkeyPatch) -> None:
    assert isolation.uv()


INSTALLERS = pytest.mark.parametrize("installer", [with_uv, without_uv])
#: An environment of one package with a program.
SMALL = Requirements(
    name="small", packages=("tool==1.0",), needs_dsl=True, pretend_triton=False, megabytes=0
)


@INSTALLERS
@pytest.mark.usefixtures("index")
def test_the_newest_cuda_has_the_shared_files_of_the_dsl(
    installer: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    installer(monkeypatch)
    folder = Sandbox(SMALL).dsl(PACKAGES)
    files = (folder / "nvidia_cutlass_dsl").glob("f*.py")
    assert [file.read_bytes()[:4] for file in files] == [b"cu13"] * SHARED
    assert (folder / "nvidia_cutlass_dsl" / "only_base.py").exists()
    assert is_sealed(folder)


@INSTALLERS
def test_a_package_with_a_program_is_installed_into_a_folder(
    installer: Callable[[pytest.MonkeyPatch], None],
    index: FakeIndex,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Of its program pip records a place where it is not."""
    installer(monkeypatch)
    name = index.add("tool", "1.0", {"tool.py": b"A = 1\n"})
    index.files[name] = with_program(index.files[name])
    installed.install(Path(sys.executable), ["tool==1.0"], tmp_path / "folder")
    assert (tmp_path / "folder" / "tool.py").read_bytes() == b"A = 1\n"


@INSTALLERS
def test_an_environment_is_made_again_where_a_file_is_missing(
    installer: Callable[[pytest.MonkeyPatch], None],
    index: FakeIndex,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installer(monkeypatch)
    name = index.add("tool", "1.0", {"tool.py": b"A = 1\n"})
    index.files[name] = with_program(index.files[name])
    warnings: list[str] = []
    monkeypatch.setattr(console, "warn", warnings.append)
    made = Sandbox(SMALL)
    made.prepare()
    assert isolation.call(isolation.Command((str(made.python), "-c", "import tool"))) == ""
    (program,) = (made.root / "bin").glob("tool")
    program.unlink()
    (made.root / SEAL).unlink()  # as an earlier version left it
    made.prepare()
    (said,) = warnings
    assert said == f"{made.root.name} in the cache is damaged, and made again: bin/tool is missing"
    assert program.exists()
    made.prepare()
    assert warnings == [said]


def test_an_environment_whose_python_was_removed_is_made_again(
    index: FakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.add("tool", "1.0", {"tool.py": b"A = 1\n"})
    warnings: list[str] = []
    monkeypatch.setattr(console, "warn", warnings.append)
    made = Sandbox(SMALL)
    made.prepare()
    made.python.unlink()
    made.python.symlink_to("/nonexistent/python")
    made.prepare()
    (said,) = warnings
    assert said.endswith("made again: its Python is gone: /nonexistent/python")
    assert isolation.call(isolation.Command((str(made.python), "-c", "import tool"))) == ""


def with_program(data: bytes) -> bytes:
    """The wheel with a program, which RECORD names from where the packages are."""
    import io
    import zipfile

    from builder.applier.receipts import record_row
    from builder.applier.values import sha256_hex

    script = b"#!python\nimport tool\n"
    path = "tool-1.0.data/scripts/tool"
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            text = old.read(name)
            if name.endswith("RECORD"):
                text = f"{record_row(path, sha256_hex(script), len(script))}\n".encode() + text
            new.writestr(name, text)
        new.writestr(path, script)
    return out.getvalue()


def test_a_killed_installer_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    monkeypatch.setattr(installed, "install_command", lambda *_: isolation.Command(words))
    with pytest.raises(SandboxUnavailable, match="ended by signal 9; Linux does this where"):
        Sandbox(SMALL).dsl(PACKAGES)
    assert list((cache_dir() / "sandbox").glob("dsl-*")) == []


# ---------------------------------------------------------------------------------- compiled files


def compiled(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "module.py").write_text("A = [1, 2, 3]\n")
    return Path(str(py_compile.compile(str(folder / "module.py"), doraise=True)))


@pytest.mark.parametrize("length", [17, 40])
def test_a_compiled_file_that_was_cut_off_is_removed(tmp_path: Path, length: int) -> None:
    good, bad = compiled(tmp_path / "good"), compiled(tmp_path / "bad")
    bad.write_bytes(bad.read_bytes()[:length])
    python = Path(sys.executable)
    assert drop_broken_compiled(python, [tmp_path]) == 1
    assert (good.exists(), bad.exists()) == (True, False)
    assert drop_broken_compiled(python, [tmp_path]) == 0


def test_an_answer_that_read_such_a_file_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(console, "warn", warnings.append)
    bad = compiled(tmp_path / "folder")
    bad.write_bytes(bad.read_bytes()[:40])
    python = tmp_path / "python"  # which answers with its own error
    code = "try:\n    import module\n    print('{}')\nexcept EOFError as e:\n"
    code += "    print('{\"simulated\": [\"' + str(e) + '\"]}')\n"
    (tmp_path / "probe.py").write_text(code)
    here = f"PYTHONPATH={tmp_path / 'folder'} {sys.executable}"
    python.write_text(
        f'#!/bin/sh\n[ $1 = -I ] && exec {sys.executable} "$@"\n{here} {tmp_path}/probe.py\n'
    )
    python.chmod(0o755)

    def ask() -> ProbeReply:
        return ask_probe(python, {"a": 1}, ProbeReply)

    assert ask().simulated == ("marshal data too short",)
    reply = soundly(ask, list, python, [tmp_path / "folder"], lambda one: bool(one.simulated))
    assert reply.simulated == ()
    assert warnings == ["verification asks again: 1 files that Python compiled were cut off"]


def test_what_is_damaged_each_time_is_not_believed(tmp_path: Path) -> None:
    def ask() -> str:
        path = compiled(tmp_path / "folder")
        path.write_bytes(path.read_bytes()[:40])
        return "refused"

    with pytest.raises(SandboxUnavailable, match="damaged again and again") as caught:
        soundly(ask, list, Path(sys.executable), [tmp_path / "folder"], bool)
    assert "disk is full" in caught.value.hint


# ----------------------------------------------------------------------- a program without a result


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("kill -9 $$", "was ended by signal 9; Linux does this where memory runs out"),
        ("kill -11 $$", "was ended by signal 11"),
        ("echo 'OSError: [Errno 28] No space left on device' >&2; exit 1",
         "ended with exit status 1: OSError: [Errno 28] No space left on device"),
    ],
)  # fmt: skip
def test_how_a_probe_ended_is_said(tmp_path: Path, script: str, said: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    with pytest.raises(SandboxUnavailable) as caught:
        ask_probe(python, {"script": script}, ProbeReply)
    assert str(caught.value) == f"dispatch_probe gave no result: it {said}"


def test_verbose_shows_what_a_probe_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    details: list[str] = []
    monkeypatch.setattr(console, "detail", details.append)
    assert checked_output(0, "{}", "Traceback\nEOFError: marshal data too short\n", "x") == "{}"
    assert details == ["  Traceback", "  EOFError: marshal data too short"]
