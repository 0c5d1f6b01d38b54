"""The compiled extension of a base, and the libraries that it needs.

A library has 1 MB to 1 GB and may be in a wheel on the index, so each is read once; the
facts are cached by its sha256.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from builder.compile.abi import DRIVER, SYSTEM, AbiBase
from builder.errors import UsageError
from builder.machinecode.elf import ElfFacts, read_elf
from builder.machinecode.modules import on_disk
from builder.pypi.index import write_atomically
from builder.util.documents import read
from builder.util.paths import cache_dir

if TYPE_CHECKING:
    from collections.abc import Iterable

    from builder.applier.trees import Tree

#: Version of the records in the cache.
_SCHEMA = 1
#: Small libraries first: large ones are read only for symbols that these lack.
_ORDER = ("libc10.so", "libc10_cuda.so", "libcudart.so", "libtorch.so", "libtorch_cpu.so")
#: Distributions with the libraries of a base of released wheels.
DISTRIBUTIONS = (
    "vllm", "torch", "cuda-toolkit", "nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12",
)  # fmt: skip


class InstalledLibraries:
    """The extension modules and shared libraries below a site-packages."""

    def __init__(self, tree: Tree, toolkit: Path | None = None) -> None:
        """Read a tree.

        Args:
            tree: site-packages with vLLM and torch.
            toolkit: a folder with the CUDA runtime, for bases without it.
        """
        self._tree = tree
        self._toolkit = toolkit
        self._read: dict[str, ElfFacts] = {}
        self.stand_ins: dict[str, str] = {}

    def version(self, distribution: str) -> str:
        """The installed version of a distribution, without its local part (``+cu130``).

        Raises:
            UsageError: it is not installed.
        """
        found = self._tree.distributions().get(distribution)
        if found is None:
            raise UsageError(f"the base has no {distribution}")
        return found.version.partition("+")[0]

    def wheel_platform(self) -> str:
        """The platform tag of vLLM's wheel: ``manylinux_2_31_aarch64``.

        Raises:
            UsageError: its ``WHEEL`` file has none.
        """
        found = self._tree.distributions().get("vllm")
        data = self._tree.read(f"{found.info_dir}/WHEEL") if found else None
        tag = re.search(rb"^Tag: \S+-(\w+)\s*$", data or b"", re.MULTILINE)
        if tag is None:
            raise UsageError("the base's vllm has no wheel tag, so its platform is unknown")
        return tag[1].decode()

    def facts(self, path: str) -> ElfFacts:
        """The symbols and versions that a library of the tree requires and provides.

        Raises:
            UsageError: it does not exist, or it cannot be read.
            RemoteError: a wheel on the index cannot be read.
        """
        if path not in self._read:
            digest = self._tree.digest(path)
            if digest is None:
                raise UsageError(f"the base has no {path}")
            self._read[path] = self._cached(digest, path)
        return self._read[path]

    def _cached(self, digest: str, path: str) -> ElfFacts:
        kept = cache_dir() / "elf" / f"{digest}-{_SCHEMA}.json"
        with contextlib.suppress(OSError, ValueError):
            return read(json.loads(kept.read_bytes()), ElfFacts)
        with tempfile.TemporaryDirectory(prefix="spark-build-") as scratch:
            made = read_elf(on_disk(self._tree, path, Path(scratch)))
        row = {**asdict(made), "exported": sorted(made.exported)}
        write_atomically(kept, json.dumps(row).encode())
        return made

    def library(self, soname: str) -> ElfFacts | None:
        """A library by its soname, or None."""
        for path in self._places(soname):
            if self._tree.digest(path) is not None:
                return self.facts(path)
        if soname.startswith("libcudart.so.") and self._toolkit is not None:
            file = self._toolkit / soname
            if file.is_file():
                self.stand_ins[soname] = str(file)
                return read_elf(file)
        return None

    def _places(self, soname: str) -> Iterable[str]:
        yield f"torch/lib/{soname}"
        for part in self._tree.children("nvidia"):
            yield f"nvidia/{part}/lib/{soname}"

    def held_against(self, module: str, symbols: Iterable[str]) -> AbiBase:
        """The base for an ABI check of these symbols.

        Args:
            module: the extension that the wheel extends, such as ``vllm/_C.abi3.so``.
            symbols: undefined symbols of the extension wheel.
        """
        extension = self.facts(module)
        libraries: dict[str, ElfFacts] = {}
        missing: list[str] = []
        open_symbols = set(symbols)
        for soname in sorted(extension.needed, key=_rank):
            if SYSTEM.fullmatch(soname) or soname == DRIVER:
                continue
            if _rank(soname)[0] == len(_ORDER) and not open_symbols:
                break
            facts = self.library(soname)
            if facts is None:
                missing.append(soname)
            else:
                libraries[soname] = facts
                open_symbols -= facts.exported
        return AbiBase(
            extension=extension,
            libraries=libraries,
            stand_ins=dict(self.stand_ins),
            missing=tuple(missing) if open_symbols else (),
        )

    def file(self, path: str, scratch: Path) -> Path:
        """A file of the tree on disk: in place, or copied to ``scratch``.

        Raises:
            RemoteError: a wheel on the index cannot be read.
        """
        return on_disk(self._tree, path, scratch)

    def module(self, pattern: str) -> str:
        """The path of an extension module: ``vllm/_C.abi3.so`` for ``vllm/_C``.

        Raises:
            UsageError: the base has none.
        """
        folder, _, stem = pattern.rpartition("/")
        for name in self._tree.children(folder):
            if PurePosixPath(name).name.partition(".")[0] == stem and name.endswith(".so"):
                return f"{folder}/{name}"
        raise UsageError(
            f"the base has no extension {pattern}: is vllm installed there, with its compiled code?"
        )


def _rank(soname: str) -> tuple[int, str]:
    place = next((i for i, name in enumerate(_ORDER) if soname.startswith(name)), len(_ORDER))
    return place, soname
