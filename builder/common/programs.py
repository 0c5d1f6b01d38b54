"""Our programs that run where spark-build is not installed: in images, mods, other interpreters.

Each is one zip archive that Python runs (PEP 441): a module with a function ``main``, and the
modules of ours that it imports, found from its import statements.  It is not compressed, so
nothing is unpacked, its bytes depend on the sources alone, and ``unzip -p`` shows them.
"""

from __future__ import annotations

import ast
import io
import re
import zipfile
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from builder.applier.values import sha256_hex
from builder.common.paths import cache_dir, package_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_PACKAGE = (
    b"# Of spark-build, only what one program needs: its other packages are not in this file.\n"
)
_MAIN = "import sys\n\nfrom {module} import main\n\nsys.exit(main())\n"
#: What comes before it, if modules are in another archive of the same folder.
_BESIDE = """\
import os

import builder

folder = os.path.dirname(os.path.dirname(__file__))
builder.__path__.append(os.path.join(folder, "{name}", "builder"))

"""
#: The name of the applier's archive in images and mods.
BUNDLE = "spark_apply.pyz"
#: Where a program is in a container that runs it.
IN_CONTAINER = "/spark-build-program.pyz"
#: What only type checkers import.
_UNSEEN = re.compile(r"^if TYPE_CHECKING:\n(?:(?:[ \t].*)?\n)+", re.MULTILINE)
#: A statement that imports from our package, anywhere in a module.
_IMPORT = re.compile(
    r"^[ \t]*((?:from|import)[ \t]+builder\b(?:[^\n(]*\([^)]*\)|[^\n]*))", re.MULTILINE
)


@dataclass(frozen=True)
class Program:
    """A program, by the module whose ``main`` it runs; ``folder`` is another package than ours.

    With ``on_applier`` it lies in one folder with the applier's archive, and has no copy of what is
    in there.
    """

    module: str
    folder: Path | None = None
    on_applier: bool = False

    @property
    def name(self) -> str:
        """The last part of its module's name."""
        return self.module.rpartition(".")[2]

    @cached_property
    def sources(self) -> Mapping[str, bytes]:
        """The sources of its modules, by path in the archive, and of the packages they are in."""
        sources: dict[str, bytes] = {}
        pending = [self.module]
        while pending:
            path = self._path(pending.pop())
            if path not in sources:
                sources[path] = self._source(path).read_bytes()
                pending += self._imported(sources[path].decode())
        for path in list(sources):
            package = f"{path.rpartition('/')[0]}/__init__.py"
            sources[package] = self._source(package).read_bytes()
        if self.on_applier:
            sources = {k: data for k, data in sources.items() if k not in APPLIER.sources}
        sources["builder/__init__.py"] = _PACKAGE
        return dict(sorted(sources.items()))

    def _path(self, module: str) -> str:
        return f"{module.replace('.', '/')}.py"

    def _source(self, path: str) -> Path:
        return (self.folder or package_file()) / path.removeprefix("builder/")

    def _imported(self, text: str) -> Iterator[str]:
        """The modules of ours that a source imports when it runs."""
        for statement in _IMPORT.findall(_UNSEEN.sub("", text)):
            (node,) = ast.parse(statement).body
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                parent = str(node.module)
                if self._source(self._path(parent)).is_file():
                    yield parent
                else:
                    yield from (f"{parent}.{alias.name}" for alias in node.names)

    @cached_property
    def data(self) -> bytes:
        """The archive."""
        stream = io.BytesIO()
        main = (_BESIDE.format(name=BUNDLE) if self.on_applier else "") + _MAIN
        files = {**self.sources, "__main__.py": main.format(module=self.module).encode()}
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
            for name in sorted(files):
                member = zipfile.ZipInfo(name)  # of 1980, the earliest that the format has
                member.create_system, member.external_attr = 3, 0o100644 << 16
                archive.writestr(member, files[name])
        return stream.getvalue()

    @cached_property
    def digest(self) -> str:
        """The sha256 of the archive."""
        return sha256_hex(self.data)

    def file(self) -> Path:
        """The archive as a file of the cache, named by its content.

        Raises:
            OSError: the cache cannot be written.
        """
        from builder.common.files import write_atomically

        path = cache_dir() / "programs" / f"{self.name}-{self.digest[:24]}.pyz"
        if not path.is_file() or path.read_bytes() != self.data:
            write_atomically(path, self.data)
        return path


#: Judges and applies layers.
APPLIER = Program("builder.applier.commandline")
#: Asks a vLLM which kernels it selects.
DISPATCH = Program("builder.probes.dispatch_probe")
#: Has a target's FlashInfer and CuTe DSL compile their kernels.
CODEGEN = Program("builder.probes.codegen_probe")
#: Records what a target's host code launches.
LAUNCH = Program("builder.probes.launch_probe")
#: Has a vLLM build a whole model.
PREFLIGHT = Program("builder.probes.preflight_probe")
#: Lists the packages of an interpreter and their files.
IDENTIFY = Program("builder.probes.identify_probe")
#: Verifies an image from inside.
VERIFIER = Program("builder.probes.spark_verify", on_applier=True)
