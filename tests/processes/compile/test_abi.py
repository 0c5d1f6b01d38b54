"""Libraries held against each other: real ones, made here, each wrong in one way."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from builder.applier.trees import DirTree
from builder.common.machinecode import ElfFacts, read_elf
from builder.compile.executor import LocalExecutor
from builder.compile.link import (
    AbiBase,
    InstalledLibraries,
    check_abi,
    older_versions,
    shim_source,
    too_new,
)
from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="NOT RUN: no g++ here")

#: A C++ library of the future, by the name of today's.
FUTURE = "GLIBCXX_9.9 { future; };"


class Workshop:
    """Makes shared libraries of a few lines of C."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def make(self, path: str, text: str, *words: str | Path, soname: str = "") -> Path:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        source = target.with_suffix(".c")
        source.write_text(text)
        name = soname or target.name
        command = ["gcc", "-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{name}", str(source)]
        subprocess.run([*command, *map(str, words), "-o", str(target)], check=True)
        source.unlink()
        return target

    def library(self, text: str, *words: str | Path) -> ElfFacts:
        return read_elf(self.make("wheel.so", text, *words))


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


@pytest.fixture
def base(workshop: Workshop) -> InstalledLibraries:
    """A site-packages with vLLM's extension and one library of torch's that it needs."""
    offers = "int offered(void){return 1;} void *getDeviceProperties;"
    torch = workshop.make("site/torch/lib/libc10.so", offers)
    text = "int offered(void); int cuThing(void); int both(void){return offered() + cuThing();}"
    driver = workshop.make("libcuda.so.1", "int cuThing(void){return 0;} int cuOther(void){}")
    workshop.make("site/vllm/_C.abi3.so", text, torch, driver)
    return InstalledLibraries(DirTree(workshop.root / "site"))


def against(base: InstalledLibraries, facts: ElfFacts) -> AbiBase:
    return base.abi_base(base.module("vllm/_C"), facts.undefined)


def faults(
    base: InstalledLibraries, facts: ElfFacts, *, own_runtime: bool = False
) -> Sequence[str]:
    return check_abi(facts, against(base, facts), own_runtime=own_runtime).faults


def test_symbols_that_the_extension_uses_too_are_allowed(
    workshop: Workshop, base: InstalledLibraries
) -> None:
    facts = workshop.library(
        "int offered(void); int cuThing(void); int f(void){return offered() + cuThing();}",
        workshop.root / "site/torch/lib/libc10.so", workshop.root / "libcuda.so.1",
    )  # fmt: skip
    proof = check_abi(facts, against(base, facts))
    assert proof.faults == ()
    assert proof.symbols == {"libc10.so": 1, "libcuda.so.1": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int nobody_has(void); int f(void){return nobody_has();}", "it uses nobody_has, which no"),
        ("int cuOther(void); int f(void){return cuOther();}", "it uses cuOther, which no library"),
        (
            "int PyList_New(int); int f(void){return PyList_New(0);}",
            "it uses PyList_New of CPython",
        ),
    ],
)
def test_an_undefined_symbol_is_named(
    workshop: Workshop, base: InstalledLibraries, text: str, said: str
) -> None:
    (fault,) = faults(base, workshop.library(text))
    assert fault.startswith(said)


def test_a_library_that_the_base_does_not_need_is_named(
    workshop: Workshop, base: InstalledLibraries
) -> None:
    extra = workshop.make("libextra.so.3", "int extra(void){return 1;}")
    found = faults(base, workshop.library("int extra(void); int f(void){return extra();}", extra))
    assert found[0] == "it needs libextra.so.3, which the base's extension does not need"


def test_a_version_that_is_too_new_is_named(workshop: Workshop, base: InstalledLibraries) -> None:
    script = workshop.root / "versions"
    script.write_text(FUTURE)
    text = "int future(void){return 1;}"
    option = f"-Wl,--version-script={script}"
    newer = workshop.make("libstdc++.so.6", text, option)
    found = faults(base, workshop.library("int future(void); int f(void){return future();}", newer))
    assert "it needs libstdc++.so.6, which the base's extension does not need" in found
    assert any(row.startswith("it needs GLIBCXX_9.9 of libstdc++.so.6; the base ") for row in found)


def test_another_architecture_is_named(workshop: Workshop, base: InstalledLibraries) -> None:
    facts = replace(workshop.library("int f(void){return 1;}"), machine="riscv")
    assert faults(base, facts)[0].startswith("it is for riscv, the base is for ")


def test_a_static_runtime_shares_no_structures(
    workshop: Workshop, base: InstalledLibraries
) -> None:
    symbol = "_ZN2at4cuda26getCurrentDevicePropertiesEv"
    facts = workshop.library(f"int {symbol}(void); int f(void){{return {symbol}();}}")
    (fault,) = faults(base, facts, own_runtime=True)
    assert "cudaDeviceProp" in fault


def test_an_older_symbol_version_is_used(workshop: Workshop, base: InstalledLibraries) -> None:
    """``dlsym`` moved into libc with glibc 2.34; the older one is still there, and works."""
    text = 'void *dlsym(void*, char*); void *f(void){return dlsym(0, "printf");}'
    facts = workshop.library(text)
    held = against(base, facts)
    limited = replace(
        held, extension=replace(held.extension, versions={"libc.so.6": ("GLIBC_2.28",)})
    )
    new = too_new(facts, limited)
    if not new:
        pytest.skip("NOT RUN: this machine's glibc is older than 2.34")
    older = older_versions(new, limited, LocalExecutor().c_library)
    assert set(older) == {"dlsym"}
    shim = workshop.root / "shim.s"
    shim.write_text(shim_source(older, facts.machine))
    built = workshop.make("wheel.so", text, shim, "-Wl,--wrap=dlsym")
    assert too_new(read_elf(built), limited) == {}
    code = "import ctypes, sys; f = ctypes.CDLL(sys.argv[1]).f; f.restype = ctypes.c_void_p; "
    done = subprocess.run([sys.executable, "-c", f"{code}assert f()", str(built)], check=False)
    assert done.returncode == 0


def test_a_library_that_the_base_lacks_is_named(
    workshop: Workshop, base: InstalledLibraries
) -> None:
    """As on arm64, where the index has CPU builds of torch alone for some releases."""
    facts = workshop.library("int offered(void); int f(void){return offered();}")
    (workshop.root / "site/torch/lib/libc10.so").unlink()
    first, second = faults(base, facts)
    assert first.startswith("the base lacks libc10.so, which its own extension needs")
    assert second.startswith("it uses offered, which no library")


def test_a_file_that_is_not_a_library_is_named(tmp_path: Path) -> None:
    file = tmp_path / "text.so"
    file.write_text("nothing of the kind")
    with pytest.raises(UsageError, match="not a shared library"):
        read_elf(file)


def test_a_base_without_the_extension_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no extension vllm/_C"):
        InstalledLibraries(DirTree(tmp_path)).module("vllm/_C")


@pytest.mark.parametrize(
    "record", [b"{", b"{}", b"[]", b'{"machine": 1}'], ids=["cut", "empty", "list", "number"]
)
def test_a_cached_record_of_another_format_is_made_again(
    record: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "cache"))
    Workshop(tmp_path / "site").make("a.so", "int f(void) { return 1; }")
    tree = DirTree(tmp_path / "site")
    made = InstalledLibraries(tree).facts("a.so")
    assert "f" in made.exported
    (kept,) = (tmp_path / "cache" / "elf").iterdir()
    whole = kept.read_bytes()
    assert InstalledLibraries(tree).facts("a.so") == made, "as it was kept"
    kept.write_bytes(record)
    assert InstalledLibraries(tree).facts("a.so") == made
    assert kept.read_bytes() == whole
