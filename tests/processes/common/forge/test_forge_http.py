"""One GET: limits, redirects, errors, and the token, which goes to one host only."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import pytest

from builder.common.console import console
from builder.common.forge import ForgeClient, ForgeMissing, ForgeTooLarge, site
from builder.common.net import Session
from builder.common.retry import NoAnswer, RetryPolicy
from builder.errors import RemoteError
from tests.forge import API, Fault, LocalForge

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.processes.pullworld import World

TOKEN = "token-that-nobody-may-see"
PATH = "/repos/vllm-project/vllm/pulls/1"


@pytest.fixture
def pauses() -> list[float]:
    """Seconds that the client would have waited."""
    return []


def client_of(pauses: list[float], session: Session | None = None) -> ForgeClient:
    """A client that does not really wait."""
    return ForgeClient(site(), session, RetryPolicy(pause=pauses.append))


@pytest.fixture
def client(forge: LocalForge, pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> ForgeClient:
    """A client with a token, which does not really wait."""
    monkeypatch.setenv("SPARK_BUILD_FORGE_TOKEN", TOKEN)
    return client_of(pauses)


@pytest.fixture
def elsewhere(world: World) -> Iterator[LocalForge]:
    """Another server."""
    with world.forge() as running:
        yield running


def get(client: ForgeClient) -> bytes:
    return client.get(PATH, "application/json", "o/r#1")


def tokens(forge: LocalForge) -> list[str]:
    return [headers.get("Authorization", "") for _, headers in forge.requests]


def test_an_answer(client: ForgeClient, forge: LocalForge) -> None:
    assert b'"number": 1' in get(client)
    assert tokens(forge) == [f"Bearer {TOKEN}"]


# ------------------------------------------------------------------------------------ rate limits


def limited(**headers: str) -> Fault:
    body = b'{"message": "API rate limit exceeded for 127.0.0.1."}'
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Fault(PATH, 403, named, body)


class TestRateLimit:
    def test_a_used_up_limit_says_when_to_try_again(
        self, client: ForgeClient, forge: LocalForge, pauses: list[float]
    ) -> None:
        reset = int(time.time()) + 1800
        fault = limited(X_RateLimit_Remaining="0", X_RateLimit_Reset=str(reset))
        forge.faults.append(fault)
        with pytest.raises(RemoteError) as caught:
            get(client)
        assert caught.value.code == 8
        assert time.strftime("%H:%M", time.gmtime(reset)) in str(caught.value)
        assert "(in 30 min)" in str(caught.value)
        assert (len(forge.requests), pauses) == (1, [])

    def test_without_a_token_the_hint_suggests_one(
        self, forge: LocalForge, pauses: list[float]
    ) -> None:
        forge.faults.append(limited(Retry_After="600"))
        with pytest.raises(RemoteError) as caught:
            get(client_of(pauses))
        assert "SPARK_BUILD_FORGE_TOKEN" in caught.value.hint
        assert "(in 10 min)" in str(caught.value)

    @pytest.mark.parametrize("status", [403, 429])
    def test_a_short_wait_is_waited_once(
        self, client: ForgeClient, forge: LocalForge, pauses: list[float], status: int
    ) -> None:
        forge.faults.append(Fault(PATH, status, {"Retry-After": "2"}, times=1))
        assert b'"number": 1' in get(client)
        assert pauses == [2.0]

    def test_a_short_wait_is_not_repeated(
        self, client: ForgeClient, forge: LocalForge, pauses: list[float]
    ) -> None:
        forge.faults.append(Fault(PATH, 429, {"Retry-After": "2"}))
        with pytest.raises(RemoteError, match="rate limit"):
            get(client)
        assert (len(forge.requests), pauses) == (2, [2.0])

    def test_a_limit_without_a_time_waits_a_minute(
        self, client: ForgeClient, forge: LocalForge
    ) -> None:
        body = b'{"message": "You have exceeded a secondary rate limit."}'
        forge.faults.append(Fault(PATH, 403, {}, body))
        with pytest.raises(RemoteError, match=r"\(in 1 min\)"):
            get(client)

    def test_the_clock_of_the_server_is_used(self, client: ForgeClient, forge: LocalForge) -> None:
        headers = {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "1767225900"}
        forge.faults.append(Fault(PATH, 403, {**headers, "Date": "Thu, 01 Jan 2026 00:00:00 GMT"}))
        with pytest.raises(RemoteError, match=r"\(in 5 min\)"):
            get(client)

    @pytest.mark.parametrize("status", [403, 429])
    def test_a_date_is_read_like_a_number(
        self, client: ForgeClient, forge: LocalForge, status: int
    ) -> None:
        headers = {"Retry-After": "Thu, 01 Jan 2026 00:20:00 GMT"}
        clock = {"Date": "Thu, 01 Jan 2026 00:00:00 GMT"}
        forge.faults.append(Fault(PATH, status, {**headers, **clock}))
        with pytest.raises(RemoteError, match=r"\(in 20 min\)"):
            get(client)


# ---------------------------------------------------------------------------------- other answers

ANSWERS = {
    401: (RemoteError, "refuses the token in SPARK_BUILD_FORGE_TOKEN"),
    403: (RemoteError, "answered 403"),
    404: (ForgeMissing, "it is private and the token in SPARK_BUILD_FORGE_TOKEN"),
    406: (ForgeTooLarge, "the diff is larger than 127.0.0.1 can return"),
    410: (ForgeMissing, "o/r#1 is not on"),
    418: (RemoteError, "answered 418"),
    422: (ForgeMissing, "o/r#1 is not on"),
    451: (RemoteError, "answered 451"),
}


@pytest.mark.parametrize("status", ANSWERS)
def test_a_refusal(client: ForgeClient, forge: LocalForge, status: int) -> None:
    kind, message = ANSWERS[status]
    forge.faults.append(Fault(PATH, status, body=b'{"message": "Their own\\u001b[31m words"}'))
    with pytest.raises(kind, match=message) as caught:
        get(client)
    assert caught.value.code == 8
    assert "(Their own [31m words)" in str(caught.value)
    assert len(forge.requests) == 1


def test_a_diff_that_is_too_large_suggests_a_clone(client: ForgeClient, forge: LocalForge) -> None:
    forge.faults.append(Fault(PATH, 406))
    with pytest.raises(ForgeTooLarge) as caught:
        get(client)
    assert "--forge-clone" in caught.value.hint


@pytest.mark.parametrize("times", [1, 2])
def test_a_temporary_failure_is_retried(
    client: ForgeClient, forge: LocalForge, pauses: list[float], times: int
) -> None:
    forge.faults.append(Fault(PATH, 502, times=times))
    assert b'"number": 1' in get(client)
    assert len(pauses) == times


def test_a_permanent_failure_is_an_error(client: ForgeClient, forge: LocalForge) -> None:
    forge.faults.append(Fault(PATH, 500))
    with pytest.raises(RemoteError, match=r"127\.0\.0\.1:\d+: o/r#1: answered 500.*, 5 times"):
        get(client)
    assert len(forge.requests) == 5


def test_a_timeout(forge: LocalForge, pauses: list[float]) -> None:
    client = client_of(pauses, Session(window=0.1))
    forge.faults.append(Fault(PATH, 200, delay=0.4))
    with pytest.raises(NoAnswer, match=r"o/r#1: no answer in time.*, 5 times"):
        get(client)


def test_connection_refused(monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("SPARK_BUILD_FORGE", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(NoAnswer, match=r"127\.0\.0\.1:\d+: o/r#1: connection refused, 5 times"):
            get(client_of(pauses))
    assert len(pauses) == 4


def test_an_endless_response_is_cut_off(client: ForgeClient, forge: LocalForge) -> None:
    forge.faults.append(Fault(PATH, 200, body=b"x" * (2 << 20)))
    with pytest.raises(RemoteError, match="larger than 1 MiB"):
        client.get(PATH, "text/plain", "a diff", limit=1 << 20)
    assert len(client.get(PATH, "text/plain", "a diff")) == 2 << 20


# ---------------------------------------------------------------------------- redirects and tokens


#: What no client can connect to, each refused at another place of the libraries.
NO_ADDRESSES = [
    "http://h:99999",
    "http://127.0.0.1:99999",
    "http://h:-1/",
    "http://h:port/",
    "http://[",
    "http://[::1",
    "http://[::g]/",
    "//[",
    "http://",
    "http:///x",
    "http://a..b/",
    "http://.a/",
    f"http://{'a' * 70}.test/",
    "http://\xff\xfe/",
    "http://a%00b/",
    "http://a b/",
    "http://u:p@[/",
    "ftp://h/",
    "javascript:x",
    "x" * 20_000,
]


class TestRedirects:
    def test_within_the_host_is_followed_with_the_token(
        self, client: ForgeClient, forge: LocalForge
    ) -> None:
        forge.former.add("vllm-project/vllm-old")
        path = "/repos/vllm-project/vllm-old/pulls/1"
        assert b'"number": 1' in client.get(path, "application/json", "o/r#1")
        assert tokens(forge) == [f"Bearer {TOKEN}"] * 2

    def test_to_another_host_is_followed_without_the_token(
        self, client: ForgeClient, forge: LocalForge, elsewhere: LocalForge
    ) -> None:
        """Another port is another host: nothing is known about who answers there."""
        forge.faults.append(Fault(PATH, 302, {"Location": f"{elsewhere.root}{API}{PATH}"}))
        assert b'"number": 1' in get(client)
        assert (tokens(forge), tokens(elsewhere)) == ([f"Bearer {TOKEN}"], [""])
        assert "X-GitHub-Api-Version" not in elsewhere.requests[0][1]

    def test_and_back_again_is_followed_with_the_token(
        self, client: ForgeClient, forge: LocalForge, elsewhere: LocalForge
    ) -> None:
        forge.faults.append(Fault(PATH, 302, {"Location": f"{elsewhere.root}/there"}, times=1))
        elsewhere.faults.append(Fault("/there", 302, {"Location": f"{forge.root}{API}{PATH}"}))
        assert b'"number": 1' in get(client)
        assert (len(tokens(forge)), tokens(elsewhere)) == (2, [""])

    def test_in_a_circle_is_an_error(self, client: ForgeClient, forge: LocalForge) -> None:
        forge.faults.append(Fault(PATH, 301, {"Location": f"{forge.root}{API}{PATH}"}))
        with pytest.raises(RemoteError, match="redirects more than 5 times"):
            get(client)

    @pytest.mark.parametrize("location", ["file:///etc/passwd", *NO_ADDRESSES])
    def test_to_no_web_address_is_refused(
        self, client: ForgeClient, forge: LocalForge, location: str
    ) -> None:
        """``requests`` looks at it too, although it is told to follow none."""
        forge.faults.append(Fault(PATH, 302, {"Location": location}))
        with pytest.raises(RemoteError) as caught:
            get(client)
        assert "\n" not in str(caught.value)


class TestToken:
    def test_is_in_no_message_and_no_log(
        self,
        client: ForgeClient,
        forge: LocalForge,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Not even where the server repeats it."""
        monkeypatch.setattr(console, "verbose", True)
        body = f'{{"message": "bad credentials: {TOKEN}"}}'.encode()
        for status in (401, 403, 404, 500):
            forge.faults[:] = [Fault(PATH, status, body=body)]
            with pytest.raises(RemoteError) as caught:
                get(client)
            assert TOKEN not in str(caught.value) + caught.value.hint + repr(caught.value)
            assert "bad credentials: ***" in str(caught.value)
        shown = capsys.readouterr()
        assert "forge: GET 127.0.0.1/api/v3/repos" in shown.err
        assert TOKEN not in shown.out + shown.err

    def test_from_netrc_is_not_used(
        self, forge: LocalForge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
        get(ForgeClient(site()))
        assert tokens(forge) == [""]
