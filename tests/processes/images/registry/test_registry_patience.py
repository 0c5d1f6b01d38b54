"""When the client tries again, how long it waits, whom it tells, and when it gives up."""

from __future__ import annotations

import io
import socket
import time
from dataclasses import replace
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

import pytest

from builder.__main__ import run
from builder.common.net import trust
from builder.errors import RemoteError, UsageError
from builder.images.registry import transport
from builder.images.registry.client import Registry
from builder.images.registry.model import Descriptor, sha256_digest
from builder.images.registry.reference import Options
from tests.unit.fakeregistry import QUICK, FakeRegistry, Reply, Request, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def waits() -> list[float]:
    """How long the client would have waited, without the waiting."""
    return []


def has(fake: FakeRegistry, **options: Any) -> bool:
    return fake.repository(**options).has("sha256:" + "0" * 64)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_retried_errors(status: int, waits: list[float]) -> None:
    with serve(Reply(status), Reply(status), Reply(200)) as fake:
        assert has(fake, pause=waits.append, backoff=1.0)
    assert 0.5 <= waits[0] <= 1.5
    assert 1.0 <= waits[1] <= 3.0


@pytest.mark.parametrize("status", [400, 403, 405, 409, 418, 501])
def test_errors_that_are_not_retried(status: int, waits: list[float]) -> None:
    with serve(Reply(status)) as fake, pytest.raises(RemoteError, match=f"answered {status}"):
        has(fake, pause=waits.append)
    assert len(fake.log) == 1
    assert waits == []


def test_retries_are_limited(waits: list[float]) -> None:
    with serve(Reply(502)) as fake, pytest.raises(RemoteError, match="answered 502, 3 times"):
        has(fake, pause=waits.append)
    assert len(fake.log) == 3


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("dated", [False, True], ids=["seconds", "date"])
def test_retry_after_is_respected(status: int, dated: bool, waits: list[float]) -> None:
    value = formatdate(time.time() + 30, usegmt=True) if dated else "30"
    with serve(Reply(status, headers={"Retry-After": value}), Reply(200)) as fake:
        assert has(fake, pause=waits.append)
    assert 28 <= waits[0] <= 30


def test_retry_after_is_too_long(waits: list[float]) -> None:
    reply = Reply(429, headers={"Retry-After": "3600"})
    with serve(reply) as fake, pytest.raises(RemoteError, match="asks to wait 3600 s"):
        has(fake, pause=waits.append)
    assert waits == []


@pytest.mark.parametrize("value", ["soon", "-1", "", "Mon, 99 Foo", "1e9", "9" * 400])
def test_retry_after_is_malformed(value: str, waits: list[float]) -> None:
    with serve(Reply(429, headers={"Retry-After": value}), Reply(200)) as fake:
        if value.isdecimal():
            with pytest.raises(RemoteError, match="asks to wait"):
                has(fake, pause=waits.append)
        else:
            assert has(fake, pause=waits.append)
            assert waits[0] < 1


def test_retry_after_is_in_the_past(waits: list[float]) -> None:
    value = formatdate(time.time() - 99, usegmt=True)
    with serve(Reply(503, headers={"Retry-After": value}), Reply(200)) as fake:
        assert has(fake, pause=waits.append)
    assert waits == [0.0]


def test_each_problem_is_reported_once(
    waits: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    replies = [Reply(502), Reply(200)] * 3
    with serve(*replies) as fake:
        repository = fake.repository(pause=waits.append)
        for number in range(3):
            assert repository.has(f"sha256:{number:064}")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"  {fake.address}: answered 502; trying again (1 of 2)\n"


def test_connection_refused(waits: list[float]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(RemoteError, match="connection refused, 3 times"):
        Registry(address, replace(QUICK, pause=waits.append)).repository("a").has(
            "sha256:" + "0" * 64
        )


def test_no_such_host(waits: list[float]) -> None:
    repository = Registry("registry.invalid", replace(QUICK, pause=waits.append)).repository("a")
    with pytest.raises(RemoteError, match=r"registry\.invalid.*(unknown host|does not resolve)"):
        repository.has("sha256:" + "0" * 64)


def test_no_fallback_to_plain_http(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a registry on this machine may answer in plain http without being asked to."""
    with serve(Reply(200)) as fake:
        monkeypatch.setattr(transport, "is_loopback", lambda _host: False)
        repository = Registry(fake.address, QUICK).repository("a")
        with pytest.raises(RemoteError, match="the TLS handshake failed") as caught:
            repository.has("sha256:" + "0" * 64)
    assert "--plain-http " in caught.value.hint
    assert fake.log == []


def test_plain_http_if_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(Reply(200)) as fake:
        monkeypatch.setattr(transport, "is_loopback", lambda _host: False)
        monkeypatch.setenv("SPARK_BUILD_PLAIN_HTTP", f"other.example, {fake.address}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        assert Registry(fake.address).repository("a").has("sha256:" + "0" * 64)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeRegistry, str]]:
    """A registry without TLS under the name of another machine."""
    real = socket.getaddrinfo

    def found(host: Any, *words: Any, **more: Any) -> Any:
        return real("127.0.0.1" if host == "registry.example" else host, *words, **more)

    monkeypatch.setattr("socket.getaddrinfo", found)
    monkeypatch.setenv("NO_PROXY", "registry.example")
    monkeypatch.delenv("SPARK_BUILD_PLAIN_HTTP", raising=False)
    with serve(*[Reply(200, b'{"tags": []}')] * 9) as fake:
        yield fake, f"registry.example:{fake.address.partition(':')[2]}"


def test_plain_http_applies_to_one_command(
    elsewhere: tuple[FakeRegistry, str], capsys: pytest.CaptureFixture[str]
) -> None:
    fake, host = elsewhere
    for _ in range(2):
        assert run(["tags", f"{host}/a"]) == 8
        assert f"--plain-http {host}" in capsys.readouterr().err
        assert run(["tags", f"{host}/a", "--plain-http", "other.example"]) == 8
        assert fake.log == [], "not a word in the open"
        assert run(["tags", f"{host}/a", "--plain-http", "x.example", "--plain-http", host]) == 0
        assert fake.log
        fake.log.clear()


@pytest.mark.parametrize("command", [
    "plan -b docker://{}/a", "image -b docker://{}/a", "lock -b docker://{}/a",
    "verify docker://{}/a", "publish docker://{}/a@sha256:" + "0" * 64 + " --to {}/b",
    "tags {}/a", "sign {}/a", "verify-signature {}/a --key k", "rebuild docker://{}/a",
    "distribute docker://{}/a node",
])  # fmt: skip
def test_every_command_that_uses_registries_has_plain_http(
    command: str, elsewhere: tuple[FakeRegistry, str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fake, host = elsewhere
    monkeypatch.chdir(tmp_path)
    words = command.replace("{}", host).split()
    words += ["-l", "marlin"] if words[0] in ("plan", "image", "lock") else []
    assert run(words) == 8
    assert fake.log == []
    run([*words, "--plain-http", host])
    assert fake.log


@pytest.mark.parametrize("host", ["http://registry.example", "registry.example/a", "a:99999"])
def test_plain_http_needs_a_host(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tags", "registry.example/a", "--plain-http", host]) == 2
    assert f"--plain-http {host}" in capsys.readouterr().err


def test_the_deadline() -> None:
    def slow(_request: Request) -> Reply:
        time.sleep(0.06)
        return Reply(502)

    with FakeRegistry(slow) as fake:
        with pytest.raises(RemoteError, match=r"not done after|no answer in time"):
            has(fake, deadline=0.15, attempts=99)
        assert len(fake.log) < 5


def test_the_deadline_applies_to_each_task() -> None:
    """A client that lives longer than the deadline goes on; a blob that drips does not."""
    data = b"x" * 40
    blob = Descriptor(media_type="a/b", digest=sha256_digest(data), size=len(data))
    with serve(*[Reply(200)] * 4, Reply(200, data)) as fake:
        repository = fake.repository(deadline=0.3)
        for _ in range(4):
            assert repository.has(blob.digest)
            time.sleep(0.1)
        with repository.open(blob) as stream:
            assert stream.read(2)
            time.sleep(0.35)
            with pytest.raises(RemoteError, match=r"blob sha256:\w+: not done after 0 s") as caught:
                stream.read()
    assert "run the same command again" in caught.value.hint


def slow_uploads() -> Callable[[Request], Reply]:
    """A registry that takes a tenth of a second for each piece."""
    stored = 0

    def slow(request: Request) -> Reply:
        nonlocal stored
        if request.method == "HEAD":
            return Reply(404)
        headers = {"Location": "/v2/a/blobs/uploads/1"}
        if request.method == "POST":
            return Reply(202, headers=headers)
        time.sleep(0.1)
        stored += len(request.body)
        headers["Range"] = f"0-{stored - 1}"
        return Reply(201 if request.method == "PUT" else 202, headers=headers)

    return slow


def test_an_upload_has_its_own_deadline() -> None:
    data = b"0123456789" * 2
    blob = Descriptor(media_type="a/b", digest=sha256_digest(data), size=len(data))
    with FakeRegistry(slow_uploads()) as fake:
        repository = fake.repository(deadline=0.25)
        with pytest.raises(RemoteError, match=r"upload of sha256:\w+: not done after"):
            repository.put_blob(blob, io.BytesIO(data))
    with FakeRegistry(slow_uploads()) as fake:
        fake.repository(deadline=5.0).put_blob(blob, io.BytesIO(data))
        assert fake.log[-1].method == "PUT"


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
def test_a_missing_certificate_bundle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "/does/not/exist.pem")
    with pytest.raises(UsageError, match=f"{name} names /does/not/exist.pem"):
        trust("ghcr.io")


def test_an_invalid_certificate(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    folder = tmp_path / "certs.d" / "ghcr.io"
    folder.mkdir(parents=True)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (folder / "ca.crt").write_text("no certificate")
    with pytest.raises(UsageError, match=r"ca\.crt cannot be used as a certificate"):
        trust("ghcr.io")
    trust("other.example")


def test_transfer_counters() -> None:
    with serve(Reply(200, b"x" * 1000)) as fake:
        repository = fake.repository()
        repository.transport.fetch(f"{fake.url}/a", "a thing", limit=2000)
    traffic = repository.transport.traffic
    assert traffic.requests == 1
    assert 1000 < traffic.received < 1200
    assert 50 < traffic.sent < 300
