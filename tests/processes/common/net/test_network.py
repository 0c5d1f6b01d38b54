"""What is said of an address that gives no answer, and what needs none."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from builder.common.net import through
from builder.common.paths import cache_dir
from builder.common.pypi import PackageIndex, make_session
from builder.common.retry import resolved, shown
from builder.errors import RemoteError

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.common.net import Session
    from tests.unit.conftest import Called
    from tests.wheels.fakeindex import FakeIndex

    SparkBuild = Callable[..., Called]


NOBODY = "http://me:secret@127.0.0.1:9/simple"


@pytest.fixture(autouse=True)
def without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy of this machine's."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_index_and_host_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", NOBODY)
    with pytest.raises(RemoteError) as caught:
        PackageIndex().wheels("vllm")
    assert str(caught.value) == (
        "the package index did not answer for 'vllm': http://127.0.0.1:9/simple: "
        "127.0.0.1:9: connection refused, 5 times"
    )
    assert "spark-build" in caught.value.hint


def test_the_proxy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://index.example/simple")
    monkeypatch.setenv("http_proxy", "http://me:secret@127.0.0.1:9")
    with pytest.raises(RemoteError) as caught:
        PackageIndex().wheels("vllm")
    assert str(caught.value).endswith(
        "index.example: the proxy refused the connection (proxy: 127.0.0.1:9), 5 times"
    )
    assert "secret" not in f"{caught.value}{caught.value.hint}"


def test_without_a_proxy_none_is_named() -> None:
    assert through("https://index.example/simple") == ""
    assert shown("https://me:secret@index.example/simple?x=y") == "https://index.example/simple"


@pytest.mark.parametrize("html", [False, True], ids=["json", "html"])
def test_a_warm_cache_needs_no_network(wheels: FakeIndex, html: bool) -> None:
    """Also where the index does not say how large a wheel is."""
    from builder.common.plan import Platform
    from builder.common.wheels import RemoteWheel

    wheels.faults.html = html

    def read() -> tuple[int, int]:
        index = PackageIndex()
        file = index.choose("vllm", "1.0.0", Platform.parse("linux/arm64"))
        wheel = RemoteWheel(file, index)
        return wheel.size, len(wheel.members)

    there = read()
    assert there[0] > 0
    wheels.__exit__()
    assert read() == there


def test_pages_share_a_session(wheels: FakeIndex) -> None:
    """Each new one would read all certificates and greet the server again."""
    wheels.add("other", "1.0.0", {"other/__init__.py": b""})
    made: list[Session] = []

    def sessions() -> Session:
        made.append(make_session())
        return made[-1]

    index = PackageIndex(sessions=sessions)
    assert index.wheels("vllm")
    assert index.wheels("other")
    assert len(made) == 1


def test_a_cached_page_is_used_if_the_index_fails(
    wheels: FakeIndex, capsys: pytest.CaptureFixture[str]
) -> None:
    known = PackageIndex().wheels("vllm")
    (page,) = (cache_dir() / "index").rglob("vllm*.json")
    old = time.time() - 40 * 86400
    os.utime(page, (old, old))
    wheels.__exit__()
    assert PackageIndex().wheels("vllm") == known
    said = capsys.readouterr().err
    assert "warning: the package index did not answer" in said
    assert time.strftime("%Y-%m-%d", time.gmtime(old)) in said
    with pytest.raises(RemoteError):
        PackageIndex(refresh=True).wheels("vllm")


@pytest.mark.parametrize("location", ["http://[1/x", "http://host:port/x", "//[::1"])
def test_an_invalid_address_is_a_server_error(location: str) -> None:
    with pytest.raises(RemoteError, match=r"a redirect names .* which is not a valid address"):
        resolved("https://registry.test/v2/", location, "a redirect")
    assert resolved("https://registry.test/v2/", "a?b=1", "x") == "https://registry.test/v2/a?b=1"
