"""Whatever a server does slowly, or not at all, nobody waits for it without end."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from builder.common import net
from builder.common.forge import ForgeClient, Site
from builder.common.net import Session
from builder.common.pypi import PackageIndex, WheelFile
from builder.common.retry import RetryPolicy
from builder.common.shutdown import end_waits, ended, pause
from builder.common.wheels import RemoteWheel
from builder.errors import RemoteError
from builder.images.registry.client import Registry, Repository
from builder.images.registry.model import Descriptor, sha256_digest
from builder.images.registry.reference import Options
from tests.dripping import ENOUGH, Dripping
from tests.unit.imagefiles import put_image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.dripping import Phase

WINDOW = 0.1
QUICK = RetryPolicy(attempts=2, backoff=0.001)
#: More than the socket buffers of both ends take in, so that one who does not read is noticed.
BLOB = b"y" * (12 << 20)
DESCRIPTOR = Descriptor(
    digest=sha256_digest(BLOB),
    size=len(BLOB),
    media_type="application/vnd.oci.image.layer.v1.tar+gzip",
)
READING: tuple[Phase, ...] = ("accept", "answer", "headers", "body", "error")
UPLOADING: tuple[Phase, ...] = ("answer", "headers", "error", "upload")
STARTED = {r"POST ": b"HTTP/1.1 202 Accepted\r\nLocation: /u/1\r\nContent-Length: 0\r\n\r\n"}


@pytest.fixture(autouse=True)
def another_run() -> Iterator[None]:
    yield
    ended.clear()


def repository(server: Dripping, **changes: Any) -> Repository:
    wanted = {
        "plain_http": frozenset({server.address}),
        "attempts": 2,
        "backoff": 0.001,
        "read_timeout": WINDOW,
        "connect_timeout": WINDOW,
        **changes,
    }
    return Registry(server.address, Options(**wanted)).repository("a/b")


def read_blob(server: Dripping) -> None:
    with repository(server).open(DESCRIPTOR) as stream:
        stream.read()


def page(server: Dripping) -> None:
    url = f"http://{server.address}/simple"
    PackageIndex(url, sessions=lambda: Session(WINDOW, QUICK)).wheels("vllm")


def wheel(server: Dripping) -> RemoteWheel:
    file = WheelFile(
        filename="vllm-1.0-py3-none-any.whl",
        url=f"http://{server.address}/w",
        sha256="0" * 64,
        size=60_000,
    )
    return RemoteWheel(file, PackageIndex(sessions=lambda: Session(WINDOW, QUICK)))


def forge(server: Dripping) -> None:
    site = Site(api=f"http://{server.address}", host=server.address)
    client = ForgeClient(site, Session(window=WINDOW), QUICK)
    client.get("/x", "application/json", "a pull request")


READS: dict[str, Callable[[Dripping], object]] = {
    "manifest": lambda server: repository(server).manifest("v1"),
    "blob": read_blob,
    "tags": lambda server: repository(server).tags(),
    "page": page,
    "wheel": lambda server: wheel(server).members,
    "download": lambda server: wheel(server).download(),
    "forge": forge,
}


def not_refused(
    work: Callable[[Dripping], object], phases: tuple[Phase, ...], **options: Any
) -> dict[Phase, BaseException | None]:
    """Kinds of slow servers that do not end the work with an error about the server.

    It meets all of them at once, as most of it is waiting.
    """

    def meet(phase: Phase) -> None:
        with Dripping(phase, **options) as server:
            work(server)

    with ThreadPoolExecutor(len(phases)) as pool:
        tried = {phase: pool.submit(meet, phase) for phase in phases}
    errors = {phase: one.exception() for phase, one in tried.items()}
    return {phase: error for phase, error in errors.items() if not isinstance(error, RemoteError)}


@pytest.mark.parametrize("read", READS)
def test_reading_ends(read: str) -> None:
    """A byte comes before any limit on one read is over, so that only a limit on all ends it."""
    assert not_refused(READS[read], READING) == {}


@pytest.mark.parametrize("read", READS)
def test_interim_responses_end(read: str) -> None:
    """The standard library reads them for as long as they come."""
    with Dripping("interim") as server:
        with pytest.raises(RemoteError, match="more than 1 MiB"):
            READS[read](server)
        assert server.interim < ENOUGH


def test_a_small_document_has_a_time_limit() -> None:
    """However fast its bytes come: a minimum speed lets 4 MiB take an hour."""
    with Dripping("steady", body=b" " * (4 << 20)) as server:
        wanted = repository(server, small_deadline=0.3, read_timeout=0.3)
        with pytest.raises(RemoteError, match=r"which is the limit|no answer in time"):
            wanted.manifest("v1")


def test_a_large_blob_has_another() -> None:
    """The limit of small documents does not hold for it."""
    headers = {r"GET /v2/a/b/manifests": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"}
    with Dripping("steady", body=BLOB[: 2 << 20], ready=headers) as server:
        blob = replace(DESCRIPTOR, digest=sha256_digest(BLOB[: 2 << 20]), size=2 << 20)
        with repository(server, small_deadline=0.3, read_timeout=5.0).open(blob) as stream:
            assert len(stream.read()) == 2 << 20


def test_an_upload_ends() -> None:
    def put(server: Dripping) -> None:
        repository(server).put_blob(DESCRIPTOR, io.BytesIO(BLOB))

    assert not_refused(put, UPLOADING, ready=STARTED) == {}


def test_work_that_does_not_fail_is_seen() -> None:
    assert not_refused(lambda server: server.reached, ("answer",)) == {"answer": None}


def interrupt(server: Dripping, work: Callable[[], object]) -> list[BaseException]:
    """Do something in a thread, and end the run when the server has it waiting."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert server.reached.wait(600)
    end_waits()
    thread.join(10)
    assert not thread.is_alive()
    return errors


@pytest.mark.parametrize("phase", READING)
def test_the_end_of_a_run_ends_reading(phase: Phase) -> None:
    """With the limits that users have."""
    with Dripping(phase) as server:
        patient = repository(server, read_timeout=60.0, connect_timeout=60.0, attempts=5)
        (error,) = interrupt(server, lambda: patient.manifest("v1"))
    assert isinstance(error, RemoteError)


@pytest.mark.parametrize("phase", UPLOADING)
def test_the_end_of_a_run_ends_an_upload(phase: Phase) -> None:
    with Dripping(phase, ready=STARTED) as server:
        patient = repository(server, read_timeout=60.0, connect_timeout=60.0, attempts=5)
        (error,) = interrupt(server, lambda: patient.put_blob(DESCRIPTOR, io.BytesIO(BLOB)))
    assert isinstance(error, RemoteError)


def test_the_end_of_a_run_ends_a_pause() -> None:
    end_waits()
    with pytest.raises(RemoteError, match="interrupted"):
        pause(60)


def test_an_endless_name_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's resolver can be interrupted by nothing."""
    silence = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: silence.wait(60) and [])
    with pytest.raises(TimeoutError):
        net.connect("registry.example", 443, 0.1)
    end_waits()
    with pytest.raises(RemoteError, match="interrupted"):
        net.connect("registry.example", 443, 60)
    silence.set()


@pytest.mark.parametrize(("speed", "whole"), [(1.1, True), (0.9, False)])
def test_a_slow_but_moving_transfer_continues(speed: float, whole: bool) -> None:
    """A large body may take many windows, if each moves enough bytes."""
    now = [0.0]
    size, window, read = 4 * net.STEP, 60.0, 0
    ours, theirs = socket.socketpair()
    with theirs, net.PlainSocket(fileno=ours.detach()) as paced:
        paced.paces = [net.MinimumSpeed(window, lambda: now[0])]
        buffer = bytearray(1 << 10)
        with pytest.raises(net.TooSlow) if not whole else contextlib.nullcontext():
            while read < size:
                theirs.send(bytes(len(buffer)))
                read += paced.recv_into(buffer)
                now[0] += window * len(buffer) / (net.STEP * speed)
    assert (read == size) is whole
    assert not whole or now[0] > 3 * window


#: A command that pushes an image to a registry, or reads from there.
WORK = """
    import sys
    from pathlib import Path
    import builder.cli.config
    from builder.__main__ import main
    from builder.common.shutdown import time_limit
    from builder.images.registry.copy import copy_image
    from builder.images.registry.layout import LayoutDirectory
    from builder.images.registry.copy import Locations

    address, layout, limit = sys.argv[1:]

    def work():
        with time_limit(float(limit), "8s"), Locations() as locations:
            place = locations.registry(address).repository("a/b")
            if layout:
                copy_image(LayoutDirectory(Path(layout)), "v1", place, "v1")
            else:
                place.manifest("v1")

    builder.cli.config.cache_dir = work
    sys.argv[1:] = ["config", "show"]
    main()
"""
ABSENT = {**STARTED, r"HEAD ": b"HTTP/1.1 404 Not Found\r\n\r\n"}


@pytest.mark.parametrize(
    ("phase", "push", "end", "code"),
    [
        ("headers", False, signal.SIGINT, 130),
        ("error", False, signal.SIGHUP, 129),
        ("answer", True, None, 7),
        ("upload", True, signal.SIGTERM, 143),
    ],
)
def test_a_signal_or_a_time_limit_ends_the_program(
    phase: Phase, push: bool, end: signal.Signals | None, code: int, tmp_path: Path
) -> None:
    """Not after the minute that a read may take."""
    layout = ""
    if push:
        layout = str(tmp_path / "layout")
        put_image(tmp_path / "layout", BLOB, name="v1")
    with Dripping(phase, ready=ABSENT) as server:
        words = [server.address, layout, "30" if end else "0.5"]
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WORK), *words],
            env={**os.environ, "SPARK_BUILD_PLAIN_HTTP": server.address},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.reached.wait(600)
            if end:
                process.send_signal(end)
            _, err = process.communicate(timeout=600)
        finally:
            process.kill()
    assert process.returncode == code, err
    assert "no partial output" in err
