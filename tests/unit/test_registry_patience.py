"""When the client tries again, how long it waits, whom it tells, and when it gives up."""

from __future__ import annotations

import socket
import time
from email.utils import formatdate
from typing import Any

import pytest

from builder.errors import RemoteError, UsageError
from builder.registry.client import Registry
from builder.registry.options import Options
from builder.registry.tls import trust

from .fakeregistry import QUICK, FakeRegistry, Reply, Request, serve


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the client would have waited, without the waiting."""
    seen: list[float] = []
    monkeypatch.setattr(
        "builder.registry.transport.Transport.wait", lambda _self, seconds: seen.append(seconds)
    )
    return seen


def has(fake: FakeRegistry, **options: Any) -> bool:
    return fake.repository(**options).has("sha256:" + "0" * 64)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_what_is_tried_again(status: int, waits: list[float]) -> None:
    with serve(Reply(status), Reply(status), Reply(200)) as fake:
        assert has(fake, backoff=1.0)
    assert 0.5 <= waits[0] <= 1.5
    assert 1.0 <= waits[1] <= 3.0


@pytest.mark.parametrize("status", [400, 403, 405, 409, 418, 501])
def test_what_is_not(status: int, waits: list[float]) -> None:
    with serve(Reply(status)) as fake, pytest.raises(RemoteError, match=f"answered {status}"):
        has(fake)
    assert len(fake.log) == 1
    assert waits == []


def test_it_gives_up(waits: list[float]) -> None:
    with serve(Reply(502)) as fake, pytest.raises(RemoteError, match="answered 502, 3 times"):
        has(fake)
    assert len(fake.log) == 3


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("dated", [False, True], ids=["seconds", "date"])
def test_the_registry_says_how_long(status: int, dated: bool, waits: list[float]) -> None:
    value = formatdate(time.time() + 30, usegmt=True) if dated else "30"
    with serve(Reply(status, headers={"Retry-After": value}), Reply(200)) as fake:
        assert has(fake)
    assert 28 <= waits[0] <= 30


def test_it_wants_too_long(waits: list[float]) -> None:
    reply = Reply(429, headers={"Retry-After": "3600"})
    with serve(reply) as fake, pytest.raises(RemoteError, match="asks to wait 3600 s"):
        has(fake)
    assert waits == []


@pytest.mark.parametrize("value", ["soon", "-1", "", "Mon, 99 Foo", "1e9", "9" * 400])
def test_it_says_nonsense(value: str, waits: list[float]) -> None:
    with serve(Reply(429, headers={"Retry-After": value}), Reply(200)) as fake:
        if value.isdecimal():
            with pytest.raises(RemoteError, match="asks to wait"):
                has(fake)
        else:
            assert has(fake)
            assert waits[0] < 1


def test_a_date_that_has_passed(waits: list[float]) -> None:
    value = formatdate(time.time() - 99, usegmt=True)
    with serve(Reply(503, headers={"Retry-After": value}), Reply(200)) as fake:
        assert has(fake)
    assert waits == [0.0]


def test_trouble_is_told_once(waits: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    replies = [Reply(502), Reply(200)] * 3
    with serve(*replies) as fake:
        repository = fake.repository()
        for number in range(3):
            assert repository.has(f"sha256:{number:064}")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"  {fake.address}: answered 502; trying again (1 of 2)\n"


def test_nobody_listens(waits: list[float]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(RemoteError, match="connection refused, 3 times"):
        Registry(address, QUICK).repository("a").has("sha256:" + "0" * 64)


def test_no_such_host(waits: list[float]) -> None:
    repository = Registry("registry.invalid", QUICK).repository("a")
    with pytest.raises(RemoteError, match=r"registry\.invalid.*(no host|does not resolve)"):
        repository.has("sha256:" + "0" * 64)


def test_a_server_that_does_not_speak_tls_is_not_spoken_to_in_the_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a registry on this machine may answer in plain http without being asked to."""
    with serve(Reply(200)) as fake:
        monkeypatch.setattr("builder.registry.transport.is_loopback", lambda _host: False)
        repository = Registry(fake.address, QUICK).repository("a")
        with pytest.raises(RemoteError, match="does not speak TLS") as caught:
            repository.has("sha256:" + "0" * 64)
    assert "SPARK_BUILD_PLAIN_HTTP=" in caught.value.hint
    assert fake.log == []


def test_plain_http_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(Reply(200)) as fake:
        monkeypatch.setattr("builder.registry.transport.is_loopback", lambda _host: False)
        monkeypatch.setenv("SPARK_BUILD_PLAIN_HTTP", f"other.example, {fake.address}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        assert Registry(fake.address).repository("a").has("sha256:" + "0" * 64)


def test_the_deadline() -> None:
    def slow(_request: Request) -> Reply:
        time.sleep(0.2)
        return Reply(502)

    with FakeRegistry(slow) as fake:
        with pytest.raises(RemoteError, match=r"not done after|no answer in time"):
            has(fake, deadline=0.5, attempts=99)
        assert len(fake.log) < 5


def test_a_proxy_is_used_but_not_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(Reply(200)) as proxy, serve(Reply(200)) as fake:
        monkeypatch.setenv("HTTP_PROXY", f"http://user:hidden@{proxy.address}")
        monkeypatch.setenv("http_proxy", f"http://user:hidden@{proxy.address}")
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        assert has(fake)
        assert proxy.log == []
        options = Options(plain_http=frozenset({"registry.example"}), attempts=1)
        assert Registry("registry.example", options).repository("a").has("sha256:" + "0" * 64)
    assert proxy.log[0].path.startswith("http://registry.example/v2/a/blobs/")


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"])
def test_a_bundle_that_is_not_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "/does/not/exist.pem")
    with pytest.raises(UsageError, match=f"{name} names /does/not/exist.pem"):
        trust("ghcr.io")


def test_a_certificate_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    folder = tmp_path / "certs.d" / "ghcr.io"
    folder.mkdir(parents=True)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (folder / "ca.crt").write_text("no certificate")
    with pytest.raises(UsageError, match=r"ca\.crt cannot be used as a certificate"):
        trust("ghcr.io")
    trust("other.example")


def test_what_is_counted() -> None:
    with serve(Reply(200, b"x" * 1000)) as fake:
        repository = fake.repository()
        repository.transport.fetch(f"{fake.url}/a", "a thing", limit=2000)
    traffic = repository.transport.traffic
    assert traffic.requests == 1
    assert 1000 < traffic.received < 1200
    assert 50 < traffic.sent < 300
