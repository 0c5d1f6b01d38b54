"""How often the layers of a base are read: once by a command that knows none of them, then never.

The bases have their packages where installers put them that are not in every image: in a folder of
``PYTHONPATH``, in a virtual environment, as hard links to the cache of ``uv``.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from builder.common.pypi import PackageIndex
from builder.common.reference import Ref
from builder.errors import Exit
from builder.images.bases.identify import identify
from builder.images.registry.client import Registry
from builder.images.registry.copy import copy_image
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import blobs
from builder.images.registry.reference import Options
from builder.images.subject import BaseRequest
from builder.proof.sandbox import lay_out
from tests.faultproxy import Always, Fault, FaultProxy
from tests.unit.fakes import dist_files, vllm_files
from tests.unit.imagefiles import Item, hardlink, packed, put_image, python_items, symlink, tar_of

from .conftest import QUICK

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.engine.machine import Registry as Running
    from tests.unit.caller import Call

CACHE = "root/.cache/uv/archive-v0"
FLASHINFER = dist_files(
    "flashinfer-python", "0.6.8", {"flashinfer/__init__.py": "F = 1\n", "flashinfer/a.cu": "x"}
)
OTHERS = dist_files("hooked", "1", {"hooked.pth": "import six\n", "hooked/__init__.py": "H = 1\n"})
VLLM = {**vllm_files(), "vllm-0.20.1.dist-info/direct_url.json": b"{}"}
#: A distribution that layers of users may change, of which nothing is kept beforehand.
TORCH = dist_files("torch", "2.9", {f"torch/m{n}.py": f"N = {n}\n" for n in range(7)})


@pytest.fixture
def proxy(registry: Running) -> Iterator[FaultProxy]:
    """The registry, and a list of what it was asked."""
    with FaultProxy(registry.address) as running:
        yield running


def linked(site: str, files: Mapping[str, bytes], archive: str) -> list[Item]:
    """An installed distribution, as ``uv`` leaves it where cache and packages are on one disk."""
    held = [Item(f"{CACHE}/{archive}/{path}", data) for path, data in sorted(files.items())]
    return held + [hardlink(f"{site}/{path}", f"{CACHE}/{archive}/{path}") for path in files]


def plain(site: str, files: Mapping[str, bytes]) -> list[Item]:
    return [Item(f"{site}/{path}", data) for path, data in sorted(files.items())]


def in_a_folder(*, uv: bool) -> tuple[list[list[Item]], dict[str, Any]]:
    """``pip install --target /srv/packages/site``, or that with ``uv``."""
    site = "srv/packages/site"
    parts = [VLLM, FLASHINFER, OTHERS]
    layers = [
        linked(site, files, f"a{number}") if uv else plain(site, files)
        for number, files in enumerate(parts)
    ]
    env = ["PATH=/opt/app/bin:/usr/bin", f"PYTHONPATH=/{site}"]
    return [python_items(), *layers], {"Env": env}


def in_an_environment(*, uv: bool) -> tuple[list[list[Item]], dict[str, Any]]:
    """``uv venv /opt/venv``, then ``uv pip install``."""
    site = "opt/venv/lib/python3.12/site-packages"
    made = [
        symlink("opt/venv/bin/python", "/opt/app/bin/python3"),
        Item("opt/venv/pyvenv.cfg", b"home = /opt/app/bin\n"),
        Item(f"{site}/_virtualenv.py", b"# uv\n"),
        Item(f"{site}/_virtualenv.pth", b"import _virtualenv"),
    ]
    everything = VLLM | FLASHINFER | OTHERS
    installed = linked(site, everything, "all") if uv else plain(site, everything)
    env = ["PATH=/opt/venv/bin:/usr/bin", "VIRTUAL_ENV=/opt/venv"]
    return [python_items(), made, installed], {"Env": env}


BASES = {
    "folder": in_a_folder(uv=False),
    "folder, uv": in_a_folder(uv=True),
    "environment": in_an_environment(uv=False),
    "environment, uv": in_an_environment(uv=True),
}


class Reads:
    """A base behind a proxy, and how often its layers were asked for."""

    def __init__(
        self, folder: Path, proxy: FaultProxy, layers: list[list[Item]], config: dict[str, Any]
    ) -> None:
        name = f"reads/{folder.name.strip('_').replace('_', '-')[-20:].strip('-')}"
        put_image(folder / "layout", *(packed(tar_of(*items)) for items in layers), config=config)
        there = Registry(proxy.address).repository(name)
        manifest = copy_image(LayoutDirectory(folder / "layout"), "", there, "1").manifest
        self._proxy = proxy
        self.base = [layer.digest for layer in blobs(manifest)[1:]]
        self.ref, self.out = f"{proxy.address}/{name}:1", f"{proxy.address}/{name}-out:1"

    def take(self) -> Counter[str]:
        """Requests for each layer's blob since the last time, by digest.

        Those for its last byte alone, which ask whether it is there, do not count.
        """
        whole = [s for s in self._proxy.log if s.method == "GET" and not s.part]
        asked = [s.path.rpartition("/")[2] for s in whole]
        self._proxy.reset()
        return Counter(digest for digest in asked if digest in self.base)


@pytest.mark.parametrize("kind", BASES)
def test_layers_are_read_once_and_then_cached(
    kind: str, call: Call, tmp_path: Path, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(tmp_path, proxy, *BASES[kind])
    build = ("image", "-l", "fix", "-b", f"docker://{reads.ref}", "--push", "-t", reads.out)
    commands = (
        build,
        ("plan", "-l", "fix", "-b", f"docker://{reads.ref}"),
        ("verify", f"docker://{reads.out}", "--level", "static,imports"),
    )
    for number, words in enumerate(commands):
        monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / f"cache {number}"))
        for expected in (Counter(reads.base), Counter[str]()):
            reads.take()
            done = call(*words)
            assert done.code == 0, done.err
            assert reads.take() == expected, words


@pytest.mark.parametrize("fault", [Fault.CUT_ANSWER, Fault.TRUNCATED, Fault.WRONG_BYTES])
def test_a_registry_that_dies_midway_leaves_nothing_wrong_in_the_cache(
    fault: Fault, call: Call, tmp_path: Path, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies at every request, one after another, and the cache stays as each left it."""
    monkeypatch.setattr(Options, "from_environment", lambda: QUICK)
    reads = Reads(tmp_path, proxy, *BASES["folder, uv"])
    commands = (
        ("plan", "-l", "fix", "-b", f"docker://{reads.ref}", "--json"),
        ("verify", f"docker://{reads.ref}", "--level", "static,imports", "--json"),
    )
    for number, words in enumerate(commands):
        monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / f"clean {number}"))
        reads.take()
        clean = call(*words)
        requests = len(proxy.log)
        monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / f"dying {number}"))
        codes = []
        for first in range(requests):
            proxy.reset(Always(fault, since=first))
            codes.append(call(*words).code)
        assert Exit.REMOTE in codes
        assert set(codes) <= {Exit.REMOTE, clean.code}
        proxy.reset()
        again = call(*words)
        assert (again.code, again.json) == (clean.code, clean.json)


@pytest.mark.parametrize("kind", BASES)
def test_files_for_a_dispatch_check_are_cached(
    kind: str, tmp_path: Path, proxy: FaultProxy
) -> None:
    reads = Reads(tmp_path, proxy, *BASES[kind])
    reads.take()
    base = identify(BaseRequest(ref=Ref(f"docker://{reads.ref}"), pins={}, index=PackageIndex()))
    laid = lay_out(base.tree)
    assert (laid / "vllm-0.20.1.dist-info/direct_url.json").read_bytes() == b"{}"
    assert (laid / "vllm/core.py").read_bytes() == VLLM["vllm/core.py"]
    assert reads.take() == Counter(reads.base)
    base.close()


def test_uncached_files_are_read_in_one_more_pass(tmp_path: Path, proxy: FaultProxy) -> None:
    """Of any number that is asked for, one after the other."""
    layers, config = in_a_folder(uv=True)
    layers.append(linked("srv/packages/site", TORCH, "torch"))
    reads = Reads(tmp_path, proxy, layers, config)
    request = BaseRequest(ref=Ref(f"docker://{reads.ref}"), pins={}, index=PackageIndex())
    base = identify(dataclasses.replace(request, tracked=(*request.tracked, "torch")))
    reads.take()
    for number in range(7):
        assert base.tree.read(f"torch/m{number}.py") == f"N = {number}\n".encode()
    assert reads.take() == {reads.base[-1]: 1}
    base.close()
