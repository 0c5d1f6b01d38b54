"""`spark-build image` and `verify` on small images in real registries, without a Docker Engine."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from builder.images.registry.client import Registry
from builder.images.registry.copy import copy_image
from builder.images.registry.layout import LayoutDirectory
from tests.countproxy import CountProxy
from tests.faultproxy import Fault, FaultProxy
from tests.memoryregistry import MemoryRegistry
from tests.unit.imagefiles import SITE, Item, packed, put_index, put_vllm, tar_of
from tests.unit.startup import HEAVY, imported

from . import servers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from builder.images.registry.client import Repository
    from tests.engine import machine
    from tests.unit.caller import Call

#: More than manifests, configurations and our own small layers; less than the base's filler.
FEW_BYTES = 200_000
FILLER = 3_000_000
#: What a plan may ask of a registry when the lock and the cache know the base.
LOCKED_BYTES = 20_000


@pytest.fixture
def counted(registry: servers.DockerRegistry) -> Iterator[CountProxy]:
    with CountProxy(registry.address) as running:
        yield running


def repository(address: str, name: str) -> Repository:
    return Registry(address).repository(name)


def put_base(tmp_path: Path, address: str, name: str = "base/vllm") -> str:
    """A base of a few megabytes, other ones each time."""
    filler = packed(tar_of(Item("opt/filler", os.urandom(FILLER))))
    put_vllm(tmp_path / "layout", filler)
    copy_image(LayoutDirectory(tmp_path / "layout"), "", repository(address, name), "1")
    return f"{address}/{name}:1"


IMAGE = ("image", "-l", "fix")


def test_in_one_registry_the_base_is_mounted(
    call: Call, tmp_path: Path, counted: CountProxy
) -> None:
    base = put_base(tmp_path, counted.address)
    counted.take()
    assert call("plan", "-l", "fix", "-b", f"docker://{base}").code == 0
    sent, received = counted.take()
    assert FILLER < received < FILLER + FEW_BYTES
    tag = f"{counted.address}/out/vllm:1"
    done = call(*IMAGE, "-b", f"docker://{base}", "--push", "-t", tag, "--json")
    assert done.code == 0, done.err
    sent, received = counted.take()
    assert max(sent, received) < FEW_BYTES
    pushed = repository(counted.address, "out/vllm").manifest("1")
    assert pushed.digest == done.json["digest"]
    was = repository(counted.address, "base/vllm").manifest("1").json()["layers"]
    assert pushed.json()["layers"][: len(was)] == was


def test_a_push_imports_no_library_that_it_does_not_need(
    call: Call, tmp_path: Path, registry: servers.DockerRegistry
) -> None:
    del call  # for its layer
    base = put_base(tmp_path, registry.address, "base/imports")
    tag = f"{registry.address}/out/imports:1"
    words = (*IMAGE, "-b", f"docker://{base}", "--push", "-t", tag, "--no-verify")
    needed = {"requests", "urllib3", "packaging", "filelock"}
    assert imported(*words).isdisjoint(set(HEAVY) - needed)
    assert repository(registry.address, "out/imports").manifest("1").digest


def test_a_lock_saves_registry_requests(call: Call, tmp_path: Path, counted: CountProxy) -> None:
    """The manifest and the configuration are read again; that a layer is not, the bytes say."""
    base = f"docker://{put_base(tmp_path, counted.address, 'base/locked')}"
    assert call("plan", "-l", "fix", "-b", base, "--locked").code == 9
    counted.take()
    assert call("lock", "-l", "fix", "-b", base).code == 0
    assert counted.take()[1] > FILLER, "nobody had read the base before"
    assert call("plan", "-l", "fix", "-b", base, "--locked").code == 0
    assert sum(counted.take()) < LOCKED_BYTES
    tag = f"{counted.address}/out/locked:1"
    done = call(*IMAGE, "-b", base, "--locked", "--push", "-t", tag, "--no-verify")
    assert done.code == 0, done.err
    sent, received = counted.take()
    assert received < LOCKED_BYTES
    assert sent < FEW_BYTES, "our own layers"


def test_it_verifies_in_the_registry_by_name_and_digest(
    call: Call, tmp_path: Path, counted: CountProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = put_base(tmp_path, counted.address)
    tag = f"{counted.address}/out/verified:1"
    pinned = call(*IMAGE, "-b", f"docker://{base}", "--push", "-t", tag).out.strip()
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "another machine"))
    for name in (f"docker://{pinned}", tag):
        done = call("verify", name, "--level", "static,imports", "--json")
        assert done.code == 0, done.err
        assert done.json["passed"] is True
    assert call("verify", f"docker://{base}", "-l", "fix", "--level", "static").code == 5


def test_a_thin_layout_finds_its_base_in_the_registry(
    call: Call, tmp_path: Path, counted: CountProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = put_base(tmp_path, counted.address)
    done = call(*IMAGE, "-b", f"docker://{base}", "--thin", "--output", "oci:thin")
    assert done.code == 0, done.err
    assert sum(p.stat().st_size for p in (tmp_path / "work/thin").rglob("*")) < FEW_BYTES * 2
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "another machine"))
    counted.take()
    done = call("verify", "oci:thin", "--level", "static")
    assert done.code == 0, done.err
    assert counted.take()[1] > FILLER


def test_another_registry_gets_all_blobs(
    call: Call, tmp_path: Path, counted: CountProxy, second: servers.Crane
) -> None:
    base = put_base(tmp_path, counted.address)
    tag = f"{second.address}/far/vllm:1"
    done = call(*IMAGE, "-b", f"docker://{base}", "--push", "-t", tag, "--json")
    assert done.code == 0, done.err
    assert repository(second.address, "far/vllm").manifest("1").digest == done.json["digest"]
    pushed = done.json["digest"]
    local = call(*IMAGE, "-b", f"docker://{base}", "--output", "oci:same", "--json").json["digest"]
    assert local == pushed, "the same bytes wherever they go"


def test_skopeo_takes_it_and_finds_nothing_wrong(
    call: Call, tmp_path: Path, counted: CountProxy, programs: machine.Programs
) -> None:
    base = put_base(tmp_path, counted.address)
    tag = f"{counted.address}/out/skopeo:1"
    done = call(*IMAGE, "-b", f"docker://{base}", "--push", "-t", tag, "--json")
    words = ("copy", "-q", "--src-tls-verify=false", f"docker://{tag}")
    servers.skopeo(programs, *words, f"oci:{tmp_path}/copy:x")
    (entry,) = json.loads((tmp_path / "copy/index.json").read_text())["manifests"]
    assert entry["digest"] == done.json["digest"]
    call(*IMAGE, "-b", f"docker://{base}", "--output", "oci:out", "--no-verify")
    servers.skopeo(programs, "copy", "-q", "oci:out", f"oci:{tmp_path}/copy2:x")


def test_an_index_in_a_registry(
    call: Call, tmp_path: Path, counted: CountProxy, programs: machine.Programs
) -> None:
    raws = {a: put_vllm(tmp_path / "both", architecture=a, name=a) for a in ("amd64", "arm64")}
    put_index(tmp_path / "both", raws, name="all")
    target = repository(counted.address, "base/both")
    copy_image(LayoutDirectory(tmp_path / "both"), "all", target, "1")
    tag = f"{counted.address}/out/both:1"
    words = ("-b", f"docker://{counted.address}/base/both:1", "--all-platforms", "--push", "-t")
    done = call(*IMAGE, *words, tag, "--json")
    assert done.code == 0, done.err
    assert done.json["verify"]["passed"] is True
    shown = servers.skopeo(programs, "inspect", "--raw", "--tls-verify=false", f"docker://{tag}")
    assert [entry["platform"]["architecture"] for entry in shown["manifests"]] == list(raws)


# ------------------------------------------------------------------------------------- trouble


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little patience, so that faults take no time."""
    from builder.images.registry.reference import Options

    quick = Options(backoff=0.01, read_timeout=1.0, connect_timeout=5.0)
    monkeypatch.setattr(Options, "from_environment", classmethod(lambda _cls: quick))


@pytest.mark.parametrize(
    "fault",
    [Fault.CUT_BEFORE, Fault.CUT_ANSWER, Fault.ERROR_500, Fault.WRONG_BYTES, Fault.TRUNCATED],
    ids=lambda fault: fault.name,
)
@pytest.mark.usefixtures("patient")
def test_a_fault_on_any_request_ends_well_or_leaves_no_tag(
    call: Call, tmp_path: Path, registry: servers.DockerRegistry,
    monkeypatch: pytest.MonkeyPatch, fault: Fault,
) -> None:  # fmt: skip
    """Identification and push, a fresh cache each time; the second run finishes the job."""
    put_vllm(tmp_path / "layout")
    name = f"fault/{fault.name.lower().replace('_', '-')}"
    copy_image(LayoutDirectory(tmp_path / "layout"), "", repository(registry.address, name), "1")
    wanted = call(*IMAGE, "-b", f"docker://{registry.address}/{name}:1", "--dry-run").out
    with FaultProxy(registry.address) as proxy:
        base, number, outcomes = f"{proxy.address}/{name}:1", 0, set()
        while True:
            proxy.reset({number: fault})
            monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / f"cache-{number}"))
            tag = f"{proxy.address}/{name}-out:{number}"
            words = (*IMAGE, "-b", f"docker://{base}", "--push", "-t", tag, "--no-verify")
            done = call(*words)
            assert done.code in (0, 8), done.err
            assert "Traceback" not in done.err
            moved = repository(registry.address, f"{name}-out").digest_of(str(number))
            assert (moved is not None) == (done.code == 0)
            outcomes.add(done.code)
            if done.code:
                proxy.reset()
                assert call(*words).code == 0
            if len(proxy.log) <= number:
                break
            number += 1
    assert 0 in outcomes
    assert number > 8
    assert wanted


def test_a_corrupted_layer_is_refused_and_not_cached(
    call: Call, tmp_path: Path, registry: servers.DockerRegistry
) -> None:
    bad = packed(tar_of(Item("../../etc/cron.d/x", b"x"), Item(f"{SITE}/vllm/core.py", b"x")))
    put_vllm(tmp_path / "layout", bad)
    target = repository(registry.address, "bad/vllm")
    copy_image(LayoutDirectory(tmp_path / "layout"), "", target, "1")
    for _ in range(2):
        done = call("plan", "-l", "fix", "-b", f"docker://{registry.address}/bad/vllm:1")
        assert done.code == 8
        assert "leaves the root" in done.err


def test_missing_images(call: Call, registry: servers.DockerRegistry) -> None:
    cases: dict[str, Any] = {
        f"docker://{registry.address}/no/such:1": 8,
        f"docker://{registry.address}/no/such@sha256:{'0' * 64}": 8,
        "docker://127.0.0.1:1/x:1": 8,
        f"docker://{registry.address}/UPPER:1": 2,
        "docker://": 2,
    }
    for ref, code in cases.items():
        done = call("plan", "-l", "fix", "-b", ref)
        assert done.code == code, (ref, done.err)
        assert done.err.count("error:") == 1


def test_blobs_lost_by_a_registry_are_sent_again(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that is known of the image lies in the cache."""
    with MemoryRegistry() as memory:
        base = put_base(tmp_path, memory.address)
        tag = f"{memory.address}/out/vllm:1"
        push = (*IMAGE, "-b", f"docker://{base}", "--push", "-t", tag, "--no-verify")
        verify = ("verify", f"docker://{tag}", "--level", "static")
        assert call(*push).code == 0
        assert call(*verify).code == 0
        layers = repository(memory.address, "out/vllm").manifest("1").json()["layers"]
        theirs, ours = layers[0]["digest"], layers[-1]["digest"]
        memory.lose(ours)
        done = call(*verify)
        assert done.code == 8
        assert ours in done.err
        memory.lying.add(ours)  # and now it does not even know
        assert call(*verify).code == 8
        memory.lying.clear()
        assert call(*push).code == 0
        assert call(*verify).code == 0
        memory.lose(theirs)
        for words in (verify, push):
            done = call(*words)
            assert done.code == 8
            assert theirs in done.err
            assert "try:" in done.err
