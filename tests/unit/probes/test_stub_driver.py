"""The generated driver library: loaded by this machine's loader, read by another program."""

from __future__ import annotations

import io
import platform
import struct
import sys
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection, DynamicSegment
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from builder.probes.stub_driver import (
    FUNCTIONS,
    SONAME,
    TEXT_FUNCTION,
    UnknownMachineError,
    driver_functions,
    dsl_libraries,
    needed_libraries,
    shared_library,
    undefined_symbols,
    write_stub,
)

MACHINES = ("x86_64", "aarch64")
MANY = [f"cuFunctionNumber{number}" for number in range(500)]


def dynamic_of(data: bytes) -> DynamicSegment:
    segments = ELFFile(io.BytesIO(data)).iter_segments()
    return next(s for s in segments if isinstance(s, DynamicSegment))


def texts_of(dynamic: DynamicSegment | DynamicSection, tag: str) -> list[str]:
    """The strings of all entries with a tag; the reader names them after it."""
    named = tag.removeprefix("DT_").lower()
    return [vars(t)[named] for t in dynamic.iter_tags() if t.entry.d_tag == tag]


def symbols_of(data: bytes) -> list[str]:
    return [symbol.name for symbol in dynamic_of(data).iter_symbols() if symbol.name]


@pytest.mark.parametrize("machine", MACHINES)
def test_readelf_reads_it_correctly(machine: str) -> None:
    data = shared_library("libother.so.2", MANY, machine)
    elf = ELFFile(io.BytesIO(data))
    names = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
    assert (elf["e_type"], elf["e_machine"], elf.elfclass) == ("ET_DYN", names[machine], 64)
    dynamic = dynamic_of(data)
    assert texts_of(dynamic, "DT_SONAME") == ["libother.so.2"]
    assert symbols_of(data) == sorted(MANY)
    for symbol in dynamic.iter_symbols():
        assert not symbol.name or symbol["st_info"]["type"] == "STT_FUNC"


@pytest.mark.parametrize("machine", MACHINES)
def test_no_segment_is_writable_and_executable(machine: str) -> None:
    elf = ELFFile(io.BytesIO(shared_library(SONAME, FUNCTIONS, machine)))
    flags = [s["p_flags"] for s in elf.iter_segments() if s["p_type"] == "PT_LOAD"]
    assert flags == [4 | 1, 4 | 2]  # read and run, read and write
    for segment in elf.iter_segments():
        if segment["p_type"] == "PT_LOAD":  # in one page of memory as in one page of the file
            assert segment["p_vaddr"] % 0x10000 == segment["p_offset"] % 0x10000
        stack = segment["p_type"] == "PT_GNU_STACK"
        assert not stack or segment["p_flags"] == 4 | 2


@pytest.mark.parametrize(
    ("machine", "code"),
    [
        ("x86_64", "f30f1efa b822000000 c3"),  # endbr64; mov eax, 34; ret
        ("aarch64", "5f2403d5 40048052 c0035fd6"),  # bti c; mov w0, #34; ret
    ],
)
def test_the_code_matches_the_manuals(machine: str, code: str) -> None:
    data = shared_library(SONAME, ["cuInit"], machine)
    (symbol,) = (s for s in dynamic_of(data).iter_symbols() if s.name)
    start, size = symbol["st_value"], symbol["st_size"]
    assert data[start : start + size] == bytes.fromhex(code)


def test_the_same_names_give_the_same_bytes() -> None:
    forward, back = (shared_library(SONAME, names, "aarch64") for names in (MANY, MANY[::-1]))
    assert forward == back == shared_library(SONAME, MANY * 2, "aarch64")
    assert forward != shared_library(SONAME, MANY[1:], "aarch64")
    assert forward != shared_library(SONAME, MANY, "x86_64")


def test_an_unknown_architecture_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    with pytest.raises(UnknownMachineError, match="no stub can be made for s390x"):
        write_stub(str(tmp_path), [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cudaGetErrorString", True),
        ("cudaGetErrorName", True),
        ("cublasGetStatusString", True),
        ("nvrtcGetErrorString", True),
        ("ncclGetLastError", True),
        ("cuGetErrorString", False),  # the driver's gives a code, and the text by an argument
        ("cudaGetLastError", False),
        ("cudaGetDevice", False),
    ],
)
def test_functions_that_return_text_are_known(name: str, text: bool) -> None:
    assert bool(TEXT_FUNCTION.fullmatch(name)) is text


# -------------------------------------------------------------------------------------------- read


def module_with(undefined: list[str], needed: list[str], weak: list[str] | None = None) -> bytes:
    """An ELF file as far as it is read: sections for dynamic symbols, dynamic entries, strings."""
    strings = bytearray(b"\0")

    def place(text: str) -> int:
        strings.extend(text.encode() + b"\0")
        return len(strings) - len(text) - 1

    rows = [(name, 0x12, 0) for name in undefined] + [(name, 0x22, 0) for name in weak or []]
    rows += [("defined_here", 0x12, 5)]
    symbols = bytes(24) + b"".join(
        struct.pack("<IBBHQQ", place(name), info, 0, section, 0, 0) for name, info, section in rows
    )
    dynamic = b"".join(struct.pack("<QQ", 1, place(name)) for name in needed) + bytes(16)
    parts = [bytes(strings), symbols, dynamic]
    offsets = [64 + sum(map(len, parts[:i])) for i in range(3)]
    header = (
        b"\x7fELF\2\1\1"
        + bytes(9)
        + struct.pack("<HHIQQQ", 3, 62, 1, 0, 0, 64 + len(b"".join(parts)))
    )
    header += struct.pack("<IHHHHHH", 0, 64, 56, 0, 64, 4, 0)
    kinds = [(0, 0, 0, 0)]
    kinds += [(kind, offsets[i], len(parts[i]), 1) for i, kind in enumerate((3, 11, 6))]
    table = b"".join(
        struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, offset, size, link, 0, 0, 0)
        for kind, offset, size, link in kinds
    )
    return header + b"".join(parts) + table


def test_undefined_symbols_of_a_module_are_found(tmp_path: Path) -> None:
    path = tmp_path / "m.so"
    names = ["cuMemMap", "cudaMalloc", "cublasCreate", "PyList_New"]
    path.write_bytes(module_with(names, ["libcuda.so.1", "libc.so.6"], weak=["cuWeak"]))
    assert undefined_symbols(str(path)) == set(names)
    assert needed_libraries(str(path)) == ["libcuda.so.1", "libc.so.6"]
    assert driver_functions([str(path)]) == {"cuMemMap"}
    stub = write_stub(str(tmp_path), [str(path)])
    data = (tmp_path / SONAME).read_bytes()
    assert stub == str(tmp_path / SONAME)
    assert set(symbols_of(data)) == {*FUNCTIONS, "cuMemMap"}


def test_standard_library_modules_are_read_like_by_readelf() -> None:
    import _ctypes

    path = _ctypes.__file__
    assert path is not None
    elf = ELFFile(io.BytesIO(Path(path).read_bytes()))
    symbols, dynamic = elf.get_section_by_name(".dynsym"), elf.get_section_by_name(".dynamic")
    assert isinstance(symbols, SymbolTableSection)
    assert isinstance(dynamic, DynamicSection)
    wanted = {
        s.name
        for s in symbols.iter_symbols()
        if s.name and s["st_shndx"] == "SHN_UNDEF" and s["st_info"]["bind"] != "STB_WEAK"
    }
    needed = texts_of(dynamic, "DT_NEEDED")
    assert undefined_symbols(path) == wanted
    assert needed_libraries(path) == needed
    assert "PyObject_Call" in wanted


@pytest.mark.parametrize(
    "folder", ["lib", "cu13/lib", "dsl_packages/cutlass/_mlir/_mlir_libs"], ids=["4.4", "4.6", "IR"]
)
def test_dsl_libraries_that_need_the_driver_are_found(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those for 64-bit Arm do; those for x86-64 do not, and load without it."""
    place = tmp_path / "nvidia_cutlass_dsl" / folder
    place.mkdir(parents=True)
    (place / "libarm.so").write_bytes(module_with([], [SONAME, "libc.so.6"]))
    (place / "libx86.so").write_bytes(module_with([], ["libc.so.6"]))
    (place / "libdamaged.so").write_bytes(module_with([], [SONAME])[:-40])
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/nowhere"])
    assert dsl_libraries() == [str(place / "libarm.so")]


@pytest.mark.parametrize("data", [b"", b"#!/bin/sh\n", b"\x7fELF\1\1" + bytes(80)])
def test_other_files_need_no_driver(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.so"
    path.write_bytes(data)
    assert undefined_symbols(str(path)) == set()
    assert needed_libraries(str(path)) == []


@pytest.mark.parametrize("kept", [70, 100, 400])
def test_a_damaged_module_adds_nothing_to_the_stub(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "cut.so"
    path.write_bytes(module_with(["cuMemMap"] * 20, ["libcuda.so.1"])[:kept])
    write_stub(str(tmp_path), [str(path), str(tmp_path / "gone.so")])
    assert set(symbols_of((tmp_path / SONAME).read_bytes())) == set(FUNCTIONS)
