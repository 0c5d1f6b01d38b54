"""Which wheels are kept, with package indexes that answer."""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from builder.applier.layers import WheelPin
from builder.applier.sources import Keeper, PipSources, extra_indexes
from builder.applier.values import EXIT_REMOTE, ApplyError
from tests.unit.applier.test_keeping import WHEEL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
PIN = WheelPin(**WHEEL.pin)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """A package index with one wheel; what it was asked for."""
    page = tmp_path / "index" / "a"
    page.mkdir(parents=True)
    (page / "index.html").write_text(f'<a href="{WHEEL.filename}#sha256=0">w</a>')
    (page / WHEEL.filename).write_bytes(WHEEL.data)
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, code: object = "-", size: object = "-") -> None:
            del code, size
            asked.append(self.path)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "index"))
    )
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()
    thread.join()


def test_wheels_of_an_index_are_kept(tmp_path: Path, index: tuple[str, list[str]]) -> None:
    url, asked = index
    first = PipSources(url, Keeper([tmp_path / "cache"]))
    assert first.member(PIN, "a/__init__.py") == b"N = 1\n"
    assert asked == ["/a/", f"/a/{WHEEL.filename}"]
    again = PipSources("http://127.0.0.1:9", Keeper([tmp_path / "cache"]))
    assert again.member(PIN, "a/__init__.py") == b"N = 1\n"
    assert len(asked) == 2


@pytest.mark.parametrize("name", ["PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL"])
def test_further_indexes_are_asked(
    tmp_path: Path, index: tuple[str, list[str]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has no such project; without the variable, that is the error."""
    url, _ = index
    for variable in ("PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", f"{url}/nothing")
    with pytest.raises(ApplyError, match="404") as caught:
        PipSources(None, Keeper([tmp_path])).members(PIN)
    assert caught.value.code == EXIT_REMOTE
    monkeypatch.setenv(name, f"{url}/none {'mine=' if name == 'UV_INDEX' else ''}{url}")
    assert len(extra_indexes()) == 2
    assert PipSources(None, Keeper([tmp_path])).member(PIN, "a/__init__.py") == b"N = 1\n"
