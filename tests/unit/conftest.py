"""Every test has a cache of its own and sees none of the developer's settings or credentials."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import re
import shutil
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from builder.__main__ import run
from builder.cli import nextcommand
from builder.cli.nextcommand import next_command
from builder.common.retry import RetryPolicy
from builder.images.engines import oci
from builder.images.registry.reference import Options
from builder.ptx.native import core
from tests.unit.caller import call
from tests.unit.fakes import vllm_files, write_tree
from tests.unit.hints import problem
from tests.unit.limits import LIMITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


__all__ = ["call"]

_NUMBERS = itertools.count()


#: A file system in memory, which makes and removes a folder in a hundredth of a disk's time.
_MEMORY = Path("/dev/shm")
#: Bytes that must be free there.  All unit tests together leave 420 MB; two workers, and spare.
_ROOM = 2 << 30


def pytest_collection_finish() -> None:
    """Compile the core of the PTX executor if it is not yet: a unit test starts no program."""
    core()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """Refuse programs, ports and pauses while a test's fixtures are made ..."""
    with LIMITS.hold():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """... and while it runs."""
    with LIMITS.hold():
        return (yield)


@pytest.fixture(scope="session")
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Where tests have their files: in memory if there is room; those of a failed run are kept."""
    if not _MEMORY.is_dir() or shutil.disk_usage(_MEMORY).free < _ROOM:
        yield tmp_path_factory.mktemp("folders")
        return
    mine = f"spark-build-tests-{os.getuid()}-"
    for kept in _MEMORY.glob(f"{mine}*"):
        if not Path("/proc", kept.name.split("-")[4]).exists():  # a process that has ended
            shutil.rmtree(kept, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f"{mine}{os.getpid()}-", dir=_MEMORY))
    yield made
    if not request.session.testsfailed:
        shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def toml_is_parsed_once() -> Iterator[None]:
    """Each test reads the catalogues anew; the parser, in Python, is slower than all the rest."""
    parse = tomllib.loads
    parsed: dict[str, bytes] = {}

    def loads(text: str, /, **options: Any) -> dict[str, Any]:
        if options or text not in parsed:
            result = parse(text, **options)
            if not options:
                parsed[text] = pickle.dumps(result)
            return result
        found: dict[str, Any] = pickle.loads(parsed[text])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tomllib, "loads", loads)
        yield


@pytest.fixture
def tmp_path(folders: Path, request: pytest.FixtureRequest) -> Path:
    """A folder of this test's own, as pytest's fixture of that name."""
    made = folders / f"{re.sub(r'[^0-9A-Za-z_]', '_', request.node.name)[:30]}{next(_NUMBERS)}"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch, folders: Path) -> None:
    """Keep the developer's variables and caches out."""
    for name in list(os.environ):
        if name.startswith(("SPARK_BUILD_", "VLLM_", "PIP_", "UV_")) or name == "DOCKER_HOST":
            monkeypatch.delenv(name)
    tokens = ("GITHUB_TOKEN", "GH_TOKEN", "GITHUB_API_URL", "GH_HOST")
    for name in ("SOURCE_DATE_EPOCH", "CLICOLOR_FORCE", "COLUMNS", "VIRTUAL_ENV", *tokens):
        monkeypatch.delenv(name, raising=False)
    own = str(folders / str(next(_NUMBERS)))  # made by those who need it
    monkeypatch.setenv("DOCKER_CONFIG", f"{own}/docker")
    monkeypatch.setenv("REGISTRY_AUTH_FILE", f"{own}/docker/none.json")
    monkeypatch.setenv("SPARK_BUILD_CACHE", f"{own}/cache")
    monkeypatch.setenv("SPARK_BUILD_SERVER_IDLE", "0")  # a process would outlive the test
    # the same files in a layer, in a fourth of the time
    monkeypatch.setattr(oci, "LEVEL", 1)
    # servers are tried again as often as for users, without their pauses
    for policy in (RetryPolicy, Options):
        monkeypatch.setitem(policy.__init__.__kwdefaults__ or {}, "backoff", 0.001)


@pytest.fixture(autouse=True)
def hints_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail on an error that suggests a command that the command line does not take."""

    def checked(hint: str, code: int) -> str:
        shown = next_command(hint, code)
        assert not problem(shown)
        return shown

    monkeypatch.setattr(nextcommand, "next_command", checked)


@dataclass(frozen=True)
class Called:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)


@pytest.fixture
def spark_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Called]:
    """Run a command in an empty directory, with real releases and a real forge around it."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def called(*words: object) -> Called:
        capsys.readouterr()
        code = run([str(word) for word in words])
        out, err = capsys.readouterr()
        assert "internal error" not in out + err, err
        return Called(code, out, err)

    return called


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A real site-packages directory with a small vLLM in it."""
    return write_tree(tmp_path / "site-packages", vllm_files())
