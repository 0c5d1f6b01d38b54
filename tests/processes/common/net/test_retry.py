"""Every client tries again by one rule, and names the host, the answer and the tries at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import requests

from builder.common.forge import ForgeClient, Site
from builder.common.net import Session, final_answer
from builder.common.pypi import PackageIndex, WheelFile
from builder.common.retry import NoAnswer, RequestFailed, Retries, RetryPolicy, retry_after
from builder.common.wheels import RemoteWheel
from builder.errors import RemoteError
from tests.unit.fakeregistry import FakeRegistry, Reply, serve

if TYPE_CHECKING:
    from collections.abc import Callable

FILE = "vllm-1.0-py3-none-any.whl"


@pytest.fixture
def waits() -> list[float]:
    """How long a client would have waited, without the waiting."""
    return []


# ------------------------------------------------------------------------- whoever uses the network


def index(server: FakeRegistry, policy: RetryPolicy) -> object:
    sessions = partial(Session, policy=policy)
    return PackageIndex(f"{server.url}/simple", sessions=sessions).wheels("vllm")


def wheel_of(server: FakeRegistry, policy: RetryPolicy, size: int) -> RemoteWheel:
    file = WheelFile(filename=FILE, url=f"{server.url}/{FILE}", sha256="0" * 64, size=size)
    return RemoteWheel(file, PackageIndex(sessions=partial(Session, policy=policy)))


def forge(server: FakeRegistry, policy: RetryPolicy) -> object:
    site = Site(api=server.url, host=server.address)
    return ForgeClient(site, policy=policy).get("/x", "application/json", "o/r#1")


def registry(server: FakeRegistry, policy: RetryPolicy) -> object:
    return server.repository(attempts=policy.attempts, pause=policy.pause).manifest("v1")


CLIENTS: dict[str, Callable[[FakeRegistry, RetryPolicy], object]] = {
    "index": index,
    "range of a wheel": lambda server, policy: wheel_of(server, policy, 60_000).members,
    "size of a wheel": lambda server, policy: wheel_of(server, policy, 0).size,
    "download of a wheel": lambda server, policy: wheel_of(server, policy, 60_000).download(),
    "forge": forge,
    "registry": registry,
}


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("status", [500, 503])
def test_a_server_that_always_fails_is_given_up(
    client: str, status: int, waits: list[float]
) -> None:
    with serve(Reply(status)) as server, pytest.raises(RemoteError) as caught:
        CLIENTS[client](server, RetryPolicy(pause=waits.append))
    for said in (server.address, f"answered {status}", f", {RetryPolicy().attempts} times"):
        assert said in str(caught.value)
    assert len(server.log) == RetryPolicy().attempts
    assert len(waits) == RetryPolicy().attempts - 1


@pytest.mark.parametrize("client", CLIENTS)
def test_what_a_server_refuses_is_asked_once(client: str, waits: list[float]) -> None:
    with serve(Reply(403)) as server, pytest.raises(RemoteError):
        CLIENTS[client](server, RetryPolicy(pause=waits.append))
    assert (len(server.log), waits) == (1, [])


@pytest.mark.parametrize("client", CLIENTS)
def test_a_wait_that_is_asked_for_is_kept_or_refused(client: str, waits: list[float]) -> None:
    asked = Reply(503, headers={"Retry-After": "3600"})
    with serve(asked) as server, pytest.raises(RemoteError, match="asks to wait 3600 s"):
        CLIENTS[client](server, RetryPolicy(pause=waits.append))
    assert (len(server.log), waits) == (1, [])
    once = Reply(503, headers={"Retry-After": "7"})
    with serve(once, Reply(403)) as server, pytest.raises(RemoteError):
        CLIENTS[client](server, RetryPolicy(pause=waits.append))
    assert (len(server.log), waits) == (2, [7.0])


def test_an_index_that_refuses_says_its_status() -> None:
    with serve(Reply(403)) as server, pytest.raises(RemoteError, match="answered 403") as caught:
        index(server, RetryPolicy())
    assert "times" not in str(caught.value)


def test_a_session_without_a_policy_asks_once() -> None:
    with serve(Reply(503)) as server:
        assert Session().get(server.url).status_code == 503
    assert len(server.log) == 1


def test_what_may_be_sent_once_only_is_sent_once(waits: list[float]) -> None:
    with serve(Reply(503)) as server:
        assert Session(policy=RetryPolicy(pause=waits.append)).post(server.url).status_code == 503
    assert (len(server.log), waits) == (1, [])


# ----------------------------------------------------------------------------------------- the rule


def tries(waits: list[float], said: list[str] | None = None, **policy: Any) -> Retries:
    say = (said if said is not None else []).append
    chosen = {"attempts": 3, "backoff": 1.0, "pause": waits.append, **policy}
    return Retries("h.test", "a thing", RetryPolicy(**chosen), say=say)


def test_pauses_double_and_are_never_the_same(waits: list[float]) -> None:
    said: list[str] = []
    retries = tries(waits, said)
    retries.failed("answered 502")
    retries.failed("answered 502")
    with pytest.raises(RemoteError, match=r"h\.test: a thing: answered 502, 3 times"):
        retries.failed("answered 502")
    assert 0.5 <= waits[0] <= 1.5
    assert 1.0 <= waits[1] <= 3.0
    assert said[0] == "  h.test: answered 502; trying again (1 of 2)"


def test_progress_gives_all_tries_back(waits: list[float]) -> None:
    retries = tries(waits, attempts=2)
    retries.failed("cut")
    retries.moved(1 << 20)
    retries.failed("cut")
    retries.moved((1 << 20) - 1)
    with pytest.raises(RemoteError, match="cut, 2 times"):
        retries.failed("cut")


def test_what_another_try_would_not_change_is_not_tried_again(waits: list[float]) -> None:
    with pytest.raises(NoAnswer, match="no such host") as caught:
        tries(waits).lost(RequestFailed("no such host", fatal=True, hint="check the name"))
    assert (caught.value.hint, waits) == ("check the name", [])


def test_the_time_of_all_tries_ends(waits: list[float]) -> None:
    retries = tries(waits, small_deadline=0.0)
    with pytest.raises(RemoteError, match="not done after 0 s, which is the limit"):
        retries.failed("answered 502")


@dataclass
class Answer:
    """What a server said."""

    status_code: int
    headers: dict[str, str] = field(default_factory=dict)


def test_a_body_that_breaks_off_is_asked_for_again(waits: list[float]) -> None:
    def ask() -> Answer:
        if not waits:
            raise requests.exceptions.ChunkedEncodingError
        return Answer(200)

    assert final_answer(ask, "http://h.test/x", tries(waits)).status_code == 200
    assert len(waits) == 1


@pytest.mark.parametrize(
    ("value", "seconds"), [("7", 7.0), (" 0 ", 0.0), ("", None), ("soon", None), ("-1", None)]
)
def test_what_a_server_asks_for(value: str, seconds: float | None) -> None:
    assert retry_after(Answer(429, {"Retry-After": value})) == seconds
    assert retry_after(Answer(500, {"Retry-After": value})) is None


def test_a_date_is_so_far_away() -> None:
    asked = retry_after(Answer(503, {"Retry-After": formatdate(time.time() + 1000, usegmt=True)}))
    assert asked is not None
    assert 900 < asked <= 1000
    assert retry_after(Answer(503, {"Retry-After": formatdate(0, usegmt=True)})) == 0.0


#: Ours may be years behind: a Spark's clock starts anywhere before it was set.
SERVERS_CLOCK = {"Date": "Thu, 01 Jan 2032 00:00:00 GMT"}
DATES = {
    "Thu, 01 Jan 2032 00:05:00 GMT": 300.0,
    "Thu, 01 Jan 2032 00:05:00 -0000": 300.0,
    "Thursday, 01-Jan-32 00:05:00 GMT": 300.0,
    "Thu Jan  1 00:05:00 2032": 300.0,
    "Wed, 31 Dec 2031 23:00:00 GMT": 0.0,
}


@pytest.mark.parametrize(("value", "seconds"), DATES.items())
def test_a_date_is_one_of_the_servers_clock(
    value: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All forms of RFC 9110, 5.6.7; none of them is one of the local time zone."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert retry_after(Answer(503, {**SERVERS_CLOCK, "Retry-After": value})) == seconds
    finally:
        monkeypatch.undo()
        time.tzset()


def test_digits_of_other_scripts_are_no_number() -> None:
    assert retry_after(Answer(429, {"Retry-After": "٣"})) is None
