"""Every fault at every request: it ends well or in a clear error, and a second run finishes.

From one repository to another, where a run has three times the requests, each has half the faults.

Between the two runs nothing may be wrong: no tag has moved, and what is stored is whole.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from builder.errors import RemoteError, SparkBuildError
from builder.images.registry.copy import Locations, copy_image
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import blobs
from tests.faultproxy import Always, Fault, FaultProxy

from . import images
from .conftest import QUICK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: Faults that a client gets over by itself, on whatever request they fall.
CUTS = (Fault.CUT_BEFORE, Fault.CUT_REQUEST, Fault.CUT_AFTER, Fault.CUT_ANSWER)
CURED = (*CUTS, Fault.SLOW, Fault.BUSY, Fault.ERROR_500, Fault.ERROR_502)
#: The same, but each costs a second.
LONG = (Fault.STALL, Fault.BUSY_FOR_A_SECOND)
#: Bytes that are not what they should be: for some requests there is no cure.
WRONG = (Fault.WRONG_BYTES, Fault.WRONG_BYTES_SENT, Fault.TRUNCATED)
_NUMBERS = itertools.count()


def fresh() -> str:
    """A repository that nobody has seen."""
    return f"faults/{next(_NUMBERS)}"


def stored(address: str, name: str) -> str | None:
    """What the tag points to; asked without the proxy, and with every blob below it read."""
    with Locations(QUICK) as locations:
        repository = locations.registry(address).repository(name)
        digest = repository.digest_of("v1")
        for blob in blobs(repository.manifest(digest)) if digest else ():
            with repository.open(blob) as stream:
                stream.read()
        return digest


def outcome(run: Callable[[], object]) -> SparkBuildError | None:
    """The error that a run ends in; any other exception is one too many."""
    try:
        run()
    except SparkBuildError as error:
        return error
    return None


def push(layout: Path, proxy: FaultProxy, name: str) -> None:
    """With one transfer at a time, so that requests come in the same order every time."""
    with Locations(QUICK) as locations:
        target = locations.registry(proxy.address).repository(name)
        copy_image(LayoutDirectory(layout), "v1", target, "v1", jobs=1)


def pull(proxy: FaultProxy, name: str, layout: Path) -> None:
    """The way back."""
    with Locations(QUICK) as locations:
        source = locations.registry(proxy.address).repository(name)
        copy_image(source, "v1", LayoutDirectory(layout), "v1", jobs=1)


def within(proxy: FaultProxy, name: str, other: str) -> None:
    """From one repository to another behind the same line."""
    with Locations(QUICK) as locations:
        registry = locations.registry(proxy.address)
        copy_image(registry.repository(name), "v1", registry.repository(other), "v1", jobs=1)


def requests_of(proxy: FaultProxy, run: Callable[[], object]) -> int:
    """How many there are when nothing happens."""
    proxy.reset()
    run()
    return len(proxy.log)


def steps(fault: Fault, count: int) -> range:
    """Every request, or every third for what takes long."""
    return range(0, count, 3 if fault in LONG else 1)


def half(fault: Fault, count: int) -> range:
    """Every other request: odd ones for one half of the faults, even ones for the other."""
    return range([*Fault].index(fault) % 2, count, 2)


def lines(*faults: Fault) -> pytest.MarkDecorator:
    """Each fault on the line to Debian's registry; cuts also on the line to the second one."""
    pairs = [(which, fault) for which in ("registry", "second") for fault in faults]
    kept = [pair for pair in pairs if pair[0] == "registry" or pair[1] in CUTS]
    ids = [f"{which}-{fault.name}" for which, fault in kept]
    return pytest.mark.parametrize(("line", "fault"), kept, indirect=["line"], ids=ids)


@pytest.fixture
def line(request: pytest.FixtureRequest) -> Iterator[FaultProxy]:
    """A bad line to one of the implementations."""
    server = request.getfixturevalue(request.param)
    with FaultProxy(server.address, stall=1.3, slow=0.05) as proxy:
        yield proxy


@lines(*CURED, *LONG)
def test_a_push_recovers(line: FaultProxy, fault: Fault, tmp_path: Path) -> None:
    seed = fresh()
    made = images.image(tmp_path / "from", seed)
    count = requests_of(line, lambda: push(tmp_path / "from", line, fresh()))
    assert count >= 11
    for number in steps(fault, count):
        # blobs of its own: an implementation may share them between repositories
        made = images.image(tmp_path / f"from{number}", f"{seed}-{number}")
        name = fresh()
        line.reset({number: fault})
        push(tmp_path / f"from{number}", line, name)
        assert [seen.fault for seen in line.log].count(fault) == 1
        assert stored(line.upstream, name) == made.digest


@lines(*WRONG)
def test_a_push_of_wrong_bytes(line: FaultProxy, fault: Fault, tmp_path: Path) -> None:
    seed = fresh()
    images.image(tmp_path / "from", seed)
    count = requests_of(line, lambda: push(tmp_path / "from", line, fresh()))
    for number in range(count):
        made = images.image(tmp_path / f"from{number}", f"{seed}-{number}")
        name = fresh()
        line.reset({number: fault})
        error = outcome(lambda n=name, i=number: push(tmp_path / f"from{i}", line, n))  # type: ignore[misc]
        assert stored(line.upstream, name) == (None if error else made.digest)
        line.reset()
        push(tmp_path / f"from{number}", line, name)
        assert stored(line.upstream, name) == made.digest


@lines(*CURED, *LONG, *WRONG)
def test_a_pull(line: FaultProxy, fault: Fault, tmp_path: Path) -> None:
    name = fresh()
    made = images.image(tmp_path / "from", name)
    line.reset()
    push(tmp_path / "from", line, name)
    count = requests_of(line, lambda: pull(line, name, tmp_path / "plain"))
    assert count >= 4
    for number in steps(fault, count):
        to = tmp_path / f"to{number}"
        line.reset({number: fault})
        error = outcome(lambda t=to: pull(line, name, t))  # type: ignore[misc]
        if fault in WRONG:
            assert (error is None) == (fault is Fault.WRONG_BYTES_SENT)
        else:
            assert error is None
        if error is not None:
            assert isinstance(error, RemoteError)
            assert not (to / "index.json").exists()
            line.reset()
            pull(line, name, to)
        assert images.check(to) == made.digest
        assert not list(to.rglob("*.part"))


@pytest.mark.parametrize("mounts", [True, False], ids=["mounted", "streamed"])
@lines(*CUTS, Fault.ERROR_502, *WRONG)
def test_between_repositories(line: FaultProxy, fault: Fault, mounts: bool, tmp_path: Path) -> None:
    line.mounts = mounts
    seed = fresh()
    name = fresh()
    line.reset()
    images.image(tmp_path / "from", seed)
    push(tmp_path / "from", line, name)
    count = requests_of(line, lambda: within(line, name, fresh()))
    for number in half(fault, count):
        made = images.image(tmp_path / f"from{number}", f"{seed}-{number}")
        name, other = fresh(), fresh()
        line.reset()
        push(tmp_path / f"from{number}", line, name)
        line.reset({number: fault})
        error = outcome(lambda n=name, o=other: within(line, n, o))  # type: ignore[misc]
        if fault not in WRONG:
            assert error is None
        assert stored(line.upstream, other) == (None if error else made.digest)
        line.reset()
        within(line, name, other)
        assert stored(line.upstream, other) == made.digest


@lines(Fault.ERROR_500, Fault.ERROR_502)
def test_a_registry_that_fails_at_every_mount_gets_the_blobs(
    line: FaultProxy, fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = images.image(tmp_path / "from", fresh())
    name, other = fresh(), fresh()
    line.reset()
    push(tmp_path / "from", line, name)
    line.reset()
    monkeypatch.setattr(line, "by_path", lambda _, path: fault if "mount=" in path else None)
    within(line, name, other)
    assert stored(line.upstream, other) == made.digest
    assert sum(seen.fault is fault for seen in line.log) == QUICK.attempts, "not for each blob"


@lines(Fault.CUT_AFTER, Fault.BUSY)
def test_a_transfer_that_does_not_end(line: FaultProxy, fault: Fault, tmp_path: Path) -> None:
    """The line is lost for good at some request: an error that says so, and no tag."""
    seed = fresh()
    images.image(tmp_path / "from", seed)
    count = requests_of(line, lambda: push(tmp_path / "from", line, fresh()))
    for number in range(count):
        made = images.image(tmp_path / f"from{number}", f"{seed}-{number}")
        name = fresh()
        line.reset(Always(fault, since=number))
        error = outcome(lambda n=name, i=number: push(tmp_path / f"from{i}", line, n))  # type: ignore[misc]
        assert isinstance(error, RemoteError)
        assert "5 times" in str(error)
        assert error.hint
        # the last request names the tag: when only its answers are lost, it has been done
        done = fault is Fault.CUT_AFTER and number == count - 1
        assert stored(line.upstream, name) == (made.digest if done else None)
        line.reset()
        push(tmp_path / f"from{number}", line, name)
        assert stored(line.upstream, name) == made.digest


def test_output_is_short(
    proxy: FaultProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However often a line is cut, that is said once; the registry's wish to wait is honoured."""
    images.image(tmp_path / "from", "talk")
    proxy.reset(dict.fromkeys((0, 5, 12), Fault.CUT_AFTER))
    push(tmp_path / "from", proxy, fresh())
    said = [line for line in capsys.readouterr().err.splitlines() if "trying again" in line]
    assert said == [f"  {proxy.address}: connection cut; trying again (1 of 4)"]
    proxy.reset({0: Fault.BUSY_FOR_A_SECOND})
    began = time.monotonic()
    push(tmp_path / "from", proxy, fresh())
    assert time.monotonic() - began >= 1
    assert "answered 429; trying again" in capsys.readouterr().err


_COPY = """
import sys
from builder.common.reference import Ref
from builder.images.registry.copy import copy_image
from builder.images.registry.copy import Locations
with Locations() as locations:
    source, target = (locations.open(Ref(text)) for text in sys.argv[1:3])
    copy_image(source.image, source.reference, target.image, target.reference)
"""


def test_a_full_disk(proxy: FaultProxy, tmp_path: Path) -> None:
    """The reader may write no file larger than 100 kB; the image has one of 150 kB."""
    name = fresh()
    made = images.image(tmp_path / "from", name)
    proxy.reset()
    push(tmp_path / "from", proxy, name)
    to = tmp_path / "to"
    limited = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n" + _COPY
    )
    words = [sys.executable, "-c", limited, f"{proxy.address}/{name}:v1", f"oci:{to}:v1"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "UsageError: cannot write" in done.stderr
    assert "File too large; no partial output was left" in done.stderr
    assert not (to / "index.json").exists()
    assert not list(to.rglob("*.part"))
    pull(proxy, name, to)
    assert images.check(to) == made.digest


def test_an_interruption(proxy: FaultProxy, tmp_path: Path) -> None:
    """Ctrl-C ends waits, too, and leaves nothing half-written."""
    name = fresh()
    images.image(tmp_path / "from", name)
    proxy.reset()
    push(tmp_path / "from", proxy, name)
    proxy.reset(Always(Fault.BUSY_FOR_LONG, since=3))
    words = [sys.executable, "-c", _COPY, f"{proxy.address}/{name}:v1", f"oci:{tmp_path}/to:v1"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        while not any(seen.status == 429 for seen in proxy.log):
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=600)
    assert "KeyboardInterrupt" in said
    assert not (tmp_path / "to" / "index.json").exists()
    assert not list((tmp_path / "to").rglob("*.part"))


def test_memory_does_not_grow_with_the_image(proxy: FaultProxy, tmp_path: Path) -> None:
    """Two layers of 1 MB, two of 96 MB; to the registry and back."""
    counted = _COPY + (
        "import re\nfrom pathlib import Path\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
    )
    peaks: dict[int, list[int]] = {}
    for size in (1 << 20, 96 << 20):
        images.image(tmp_path / f"{size}", fresh(), sizes=(size, size + 1))
        name = f"{proxy.upstream}/{fresh()}:v1"
        steps = ((f"oci:{tmp_path}/{size}:v1", name), (name, f"oci:{tmp_path}/{size}-back:v1"))
        for source, target in steps:
            words = [sys.executable, "-c", counted, source, target]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            peaks.setdefault(size, []).append(int(done.stdout) // 1024)
        images.check(tmp_path / f"{size}-back")
    for small, large in zip(*peaks.values(), strict=True):
        assert large - small < 120, f"peak memory in MiB: {peaks}"
