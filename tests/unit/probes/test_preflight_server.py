"""``preflight_server``: a release checks its server's flags, in a file that is not run."""

from __future__ import annotations

import argparse
import importlib.util
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.inimage import load

if TYPE_CHECKING:
    from pathlib import Path

server = load("preflight_server")

#: As releases have it, beside what must not run: imports of packages that are not here.
TEXT = """
import none_such
from none_such import other
from json import dumps as shown, loads


raise RuntimeError("the module is run")


def validate_api_server_args(args):
    if args.tool_call_parser != "known":
        raise KeyError(shown(args.tool_call_parser))
"""


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a release's server, found by the last of the names."""
    file = tmp_path / "vllm/entrypoints/api_server.py"
    file.parent.mkdir(parents=True)
    file.write_text(TEXT)

    def find(name: str) -> Any:
        if name == server.SERVERS[0]:
            raise ModuleNotFoundError(name)
        return SimpleNamespace(origin=str(file)) if name == server.SERVERS[-1] else None

    monkeypatch.setattr(importlib.util, "find_spec", find)
    return file


def checked(flags: Any = lambda _args: None, **given: object) -> str:
    args = argparse.Namespace(**{"tool_call_parser": "known", "chat_template": "/x", **given})
    return str(server.check(args, SimpleNamespace(**{server.FLAGS: flags})))


@pytest.mark.usefixtures("release")
def test_a_parser_that_a_release_does_not_have() -> None:
    assert checked() == ""
    with pytest.raises(KeyError, match='"other"'):
        checked(tool_call_parser="other")
    assert checked(tool_call_parser="other", tool_parser_plugin="own.py") == "", "it may be there"


@pytest.mark.usefixtures("release")
def test_files_are_on_the_machine_of_the_server() -> None:
    seen = []
    assert checked(lambda args: seen.append(args.chat_template)) == ""
    assert seen == [None]


@pytest.mark.usefixtures("release")
def test_an_error_that_is_not_the_releases_is_said() -> None:
    def fails(_args: object) -> None:
        raise TypeError("a stand-in")

    assert checked(fails) == "validate_parsed_serve_args: TypeError: a stand-in"


def test_a_server_that_imports_what_is_not_here_is_not_asked(release: Path) -> None:
    release.write_text(
        TEXT.replace("shown, loads", "loads").replace("import other", "import shown")
    )
    assert "ModuleNotFoundError: No module named 'none_such'" in checked(tool_call_parser="other")


def test_a_release_without_the_check_is_not_asked(release: Path) -> None:
    release.write_text("def other(): pass\n")
    assert checked() == "validate_api_server_args: LookupError: this release has it elsewhere"
