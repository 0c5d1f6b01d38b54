"""Random folders, variables and password files in which a real interpreter starts.

Each case is a small root: interpreters, virtual environments, standard libraries, settings beside
them, ``.pth`` files.  A real CPython starts in it (``chroot``) and prints its ``sys.path``; for the
same files, packed as a layer, ``builder.proof.searchpath`` computes it.

By hand, for another interpreter or more cases (as root)::

    .venv/bin/python -m tests.processes.proof.startingtrees --cases 1000 --python python3.13

``--root`` names a folder with an unpacked Debian, if its interpreter is not installed.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import json
import os
import posixpath
import random
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from builder.proof.searchpath import Build, SearchPath, Start, search_path
from builder.proof.starts import homes
from tests.unit.imagefiles import Item, folder, packed, symlink, tar_of, view_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Of the standard library, what a start needs, and a ``-m``.
_MODULES = (
    "abc codecs genericpath io os posixpath site stat _collections_abc _sitebuiltins "
    "runpy pkgutil functools types keyword operator reprlib weakref _weakrefset "
    "contextlib warnings typing collections encodings importlib enum re linecache "
    "tokenize token zipimport copyreg _py_warnings annotationlib ast "
)
_PROBE = "import sys; print('PATH', repr(sys.path))"
#: What was compiled into an interpreter, and its files.
_DESCRIBE = """\
import importlib, json, os, sys, sysconfig
made = importlib.import_module(sysconfig._get_sysconfigdata_name()).build_time_vars
files = [os.path.realpath(sys.executable), os.path.realpath(os.path.dirname(os.__file__))]
version = "%d.%d" % sys.version_info[:2]
print(json.dumps([*files, version, made["prefix"], made.get("VPATH") or ""]))
"""
_NEWUSER = 0x10000000


@dataclass(frozen=True, kw_only=True)
class Real:
    """A CPython of this machine."""

    binary: Path
    stdlib: Path
    version: str
    prefix: str
    sources: str
    libraries: tuple[tuple[str, Path], ...]

    @classmethod
    def of(cls, python: str, root: str = "/") -> Real:
        """An installed one, or one that was unpacked below a root with its libraries."""
        if root == "/":
            out = subprocess.run([python, "-Ic", _DESCRIBE], capture_output=True, check=True).stdout
            binary, stdlib, version, prefix, sources = json.loads(out)
            listed = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True)
            names = re.findall(r"(/\S+) \(0x", listed.stdout)
            libraries = [(name, Path(name).resolve()) for name in names]
        else:
            binary = f"{root}{python}"
            version = python.rpartition("python")[2]
            stdlib, prefix, sources = f"{root}/usr/lib/python{version}", "/usr", ".."
            found = [*Path(root, "usr/lib/x86_64-linux-gnu").glob("*.so*")]
            libraries = [(f"/usr/lib/x86_64-linux-gnu/{p.name}", p.resolve()) for p in found]
            loader = next(p for p in found if p.name.startswith("ld-linux"))
            libraries.append((f"/lib64/{loader.name}", loader.resolve()))
        return cls(
            binary=Path(binary),
            stdlib=Path(stdlib),
            version=version,
            prefix=prefix,
            sources=sources,
            libraries=tuple(libraries),
        )

    def copied(self, place: Path) -> Real:
        """A copy of what cases take from it, in the file system where they are made."""
        (place / "stdlib").mkdir(parents=True)
        (place / "libraries").mkdir()
        for module in _MODULES.split():
            _library(self.stdlib, place / "stdlib", module)
        libraries = []
        for number, (name, library) in enumerate(self.libraries):
            copy = place / "libraries" / str(number)
            shutil.copy2(library, copy)
            libraries.append((name, copy))
        shutil.copy2(self.binary, place / "python")
        return replace(
            self,
            binary=place / "python",
            stdlib=place / "stdlib",
            libraries=tuple(libraries),
        )

    @property
    def build(self) -> Build:
        """What is known of it from its files."""
        return Build(version=self.version, prefix=self.prefix, sources=self.sources)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Files, and one start among them."""

    items: tuple[Item, ...]
    stdlibs: tuple[str, ...]
    start: Start
    #: the file that the kernel executes
    executed: str
    #: the words behind the interpreter
    words: tuple[str, ...]


class _Drawing:
    """Draws one case."""

    def __init__(self, real: Real, seed: str) -> None:
        self._draw, self._version = random.Random(seed), real.version
        hides = b'startswith(".")' in (real.stdlib / "site.py").read_bytes()
        self._names = ("a.pth", "b.pth", "d.PTH", "e.pth" if hides else ".c.pth")
        self._items: dict[str, Item] = {}
        self._name = f"python{real.version}"
        self._stdlibs: list[str] = []

    def _maybe(self, chance: float) -> bool:
        return self._draw.random() < chance

    def _add(self, *items: Item) -> None:
        for item in items:
            is_below_link = any(
                item.name.startswith(f"{name}/") and (one.link or one.type == b"0")
                for name, one in self._items.items()
            )
            has_below = any(name.startswith(f"{item.name}/") for name in self._items)
            if item.name in self._items or is_below_link or has_below:
                continue
            self._items[item.name] = item

    def _place(self) -> str:
        return self._draw.choice(
            ("usr", "usr/local", "opt/app", "opt/app/inner", "srv", "home/me/.local", "work")
        )

    def _lib(self, prefix: str, chance: float = 0.9) -> None:
        lib = "lib64" if self._maybe(0.05) else "lib"
        path = f"{prefix}/{lib}/{self._name}"
        if self._maybe(chance) and path not in self._stdlibs:
            self._stdlibs.append(path)
        if self._maybe(0.85):
            self._add(Item(f"{path}/lib-dynload/README", b""))

    def _packages(self, prefix: str) -> None:
        version = self._draw.choice((f"{self._name}", "python3", self._name))
        kind = self._draw.choice(("site-packages", "dist-packages", "site-packages"))
        lib = self._draw.choice(("lib", "lib", "local/lib", "lib64"))
        path = f"{prefix}/{lib}/{version}/{kind}"
        self._add(Item(f"{path}/module.py", b""))
        for name in self._draw.sample(self._names, self._draw.randint(0, 2)):
            lines = [self._line() for _ in range(self._draw.randint(0, 4))]
            start = self._draw.choice((b"", b"", b"", b"\xef\xbb\xbf"))
            self._add(Item(f"{path}/{name}", start + "\n".join(lines).encode()))

    def _line(self) -> str:
        place = self._place()
        return self._draw.choice(
            (f"/{place}", "..", "../../..", "# none", "", "import sys", f" /{place}", f"/{place}  ",
             "module.py", "missing", f"/{place}/bin", "import\tsys", f"/{place}\r", "./../x/..")
        )  # fmt: skip

    def _interpreter(self, prefix: str) -> str:
        place = f"{prefix}/bin"
        self._add(Item(f"{place}/{self._name}", b"ELF", mode=0o755))
        if self._maybe(0.3):
            self._add(symlink("etc/alternatives/python3", f"/{place}/{self._name}"))
            self._add(symlink(f"{place}/python3", "/etc/alternatives/python3"))
        else:
            self._add(symlink(f"{place}/python3", self._name))
        return place

    def _venv(self, home: str) -> str:
        root = self._draw.choice(("opt/venv", "work/.venv", "srv/env"))
        link = self._draw.choice((f"/{home}/{self._name}", f"/{home}/python3"))
        self._add(symlink(f"{root}/bin/python3", link), symlink(f"{root}/bin/python", "python3"))
        self._config(root, home)
        self._packages(root)
        return f"{root}/bin"

    def _config(self, folder: str, home: str) -> None:
        lines = [f"home = /{home}"] if self._maybe(0.8) else [f"Home=/{self._place()}/bin"]
        shares = self._draw.choice(("true", "false", "TRUE", "no"))
        lines += [f"include-system-site-packages = {shares}"] if self._maybe(0.8) else []
        lines += ["version = 3", "x"] if self._maybe(0.3) else []
        self._add(Item(f"{folder}/pyvenv.cfg", "\n".join(lines).encode()))

    def _around(self, prefix: str, home: str) -> None:
        """What may lie beside an interpreter, and changes where it looks."""
        places = (home, prefix, self._place())
        if self._maybe(0.15):
            data = self._draw.choice((b"build/lib", b"", b"../lib\n", b"/srv"))
            self._add(Item(f"{self._draw.choice(places)}/pybuilddir.txt", data))
        if self._maybe(0.1):
            self._add(Item(f"{self._draw.choice(places)}/Modules/Setup.local", b""))
        if self._maybe(0.15):
            short = self._version.replace(".", "")
            name = f"{self._draw.choice(places)}/lib/python{short}.zip"
            self._add(folder(name) if self._maybe(0.3) else Item(name, b""))
        if self._maybe(0.08):
            data = f"/{self._place()}\nimport site\n".encode()
            self._add(
                Item(f"{home}/{self._draw.choice((self._name, 'python', 'python3'))}._pth", data)
            )
        if self._maybe(0.1):
            self._config(self._draw.choice(places), self._draw.choice(places))
        if self._maybe(0.15):
            self._lib(self._draw.choice((home, f"{home}/lib", self._place())))
        if self._maybe(0.1):
            self._add(Item(f"{self._draw.choice(('usr', prefix))}/Lib/os.py", b""))

    def _variables(self, folders: Sequence[str]) -> dict[str, str]:
        draw = self._draw
        env = {"PATH": ":".join(f"/{one}" for one in folders)}
        if self._maybe(0.1):
            env["PATH"] = draw.choice(
                (f"/missing:{env['PATH']}", f"{env['PATH']}:", "", "/usr/bin")
            )
        if self._maybe(0.75):
            env["HOME"] = draw.choice(("/root", "/home/me", f"/{self._place()}", "/", "/home/me/"))
        if self._maybe(0.4):
            one, two = f"/{self._place()}", f"/{self._place()}"
            words = (
                "",
                ".",
                "x",
                one,
                f"{two}/",
                "../y",
                "/missing",
                "./z",
                f"{one}/../srv",
                "//srv",
            )
            env["PYTHONPATH"] = ":".join(draw.choice(words) for _ in range(draw.randint(1, 3)))
        if self._maybe(0.2):
            env["PYTHONUSERBASE"] = draw.choice(
                (f"/{self._place()}", "base", "~/x", "", "/root/.local")
            )
        if self._maybe(0.08):
            env["PYTHONNOUSERSITE"] = draw.choice(("1", "", "x"))
        if self._maybe(0.08):
            env["PYTHONSAFEPATH"] = draw.choice(("1", ""))
        if self._maybe(0.12):
            one, two = self._place(), self._place()
            env["PYTHONHOME"] = draw.choice((f"/{one}", f"/{one}:/{two}", "", f"{one}"))
        if self._maybe(0.05):
            env["PYTHONPLATLIBDIR"] = draw.choice(("lib64", "lib", "x"))
        return env

    def _users(self, env: dict[str, str]) -> None:
        """As a runtime does, HOME comes from the password file if the image has none."""
        home = self._draw.choice(("/root", "/home/me", f"/{self._place()}", "/"))
        lines = ["# users", "bad", f"me:x:0:0::{home}:/bin/sh", "root:x:0:0:r:/srv:/bin/sh"]
        if self._maybe(0.2):
            lines = lines[:2]
        data = "\n".join(lines).encode()
        self._items["etc/passwd"] = Item("etc/passwd", data)
        if not env.get("HOME"):
            env["HOME"] = homes(env, "", data)[0]

    def case(self) -> Case:
        """A whole case."""
        prefix = self._draw.choice(("usr", "usr/local", "opt/app", "opt/app"))
        home = self._interpreter(prefix)
        self._lib(prefix, 0.97)
        folders = [home]
        if self._maybe(0.2):
            other = self._place()
            folders.append(self._interpreter(other))
            self._lib(other)
        if self._maybe(0.4):
            folders.insert(0, self._venv(home))
        self._around(prefix, home)
        for _ in range(self._draw.randint(0, 4)):
            self._packages(
                self._draw.choice((prefix, self._place(), "root/.local", "home/me/.local"))
            )
        env = self._variables(folders)
        self._users(env)
        here = self._draw.choice(("/", "/work", "/srv", f"/{home}", f"/{self._place()}"))
        return self._start(folders, env, here)

    def _start(self, folders: Sequence[str], env: dict[str, str], here: str) -> Case:
        used = self._draw.choice(folders)
        names = [self._name, "python3"] if f"{used}/{self._name}" in self._items else ["python3"]
        name = self._draw.choice(names)
        executed = called = f"/{used}/{name}"
        if self._maybe(0.4):
            called = name  # found on PATH
            places = [p for p in env["PATH"].split(":") if f"{p}/{name}".strip("/") in self._items]
            executed = f"{places[0]}/{name}" if places else executed
        elif self._maybe(0.2):
            called = os.path.relpath(executed, here)
        flags = [f"-{one}" for one in "EIPsS" if self._maybe(0.06)]
        if "-P" in flags and self._version == "3.10":
            flags.remove("-P")
        script, end = "", ["-c", _PROBE]
        kind = self._draw.random()
        if kind < 0.4:
            script = self._draw.choice(("/srv/tool", f"/{used}/tool", "tool", "/work/sub/tool"))
            path = posixpath.normpath(posixpath.join(here, script)).strip("/")
            if self._maybe(0.3):
                self._add(
                    Item("opt/tools/real.py", _PROBE.encode()), symlink(path, "/opt/tools/real.py")
                )
            else:
                self._add(Item(path, _PROBE.encode()))
            end = [script]
        elif kind < 0.5:
            self._add(Item(f"{here.strip('/') or 'srv'}/probe.py", _PROBE.encode()))
            end = ["-m", "probe"]
        if here != "/":
            self._add(folder(here.strip("/")))
        start = Start(
            called=called, options=(*flags, *end), script=script, env=env, working_dir=here
        )
        items = [self._items[name] for name in sorted(self._items)]
        return Case(
            items=tuple(items), stdlibs=tuple(self._stdlibs), start=start, executed=executed,
            words=(*flags, *end),
        )  # fmt: skip


def cases(real: Real, seed: int, count: int) -> Iterator[Case]:
    """Cases that depend on the seed and the version alone."""
    for number in range(count):
        yield _Drawing(real, f"{seed} {number} {real.version}").case()


# ----------------------------------------------------------------------------------- both answers


class Dumped(list[str]):
    """The path that ``getpath`` gave to an interpreter that cannot start with it."""


def can_enter(scratch: Path) -> bool:
    """Whether this user may start a program in another root."""
    done = subprocess.run([sys.executable, "-c", _ENTER, scratch], capture_output=True, check=False)
    return done.returncode == 0


#: Goes into another root; who is not root needs a user namespace.
_ENTER = f"""\
import ctypes, os, sys
if os.geteuid() != 0 and ctypes.CDLL(None).unshare({_NEWUSER}) != 0:
    sys.exit(1)
os.chroot(sys.argv[1])
"""


def answered(real: Real, case: Case, root: Path) -> list[str] | None:
    """What the real interpreter prints in a root that is made for it; None if it cannot start.

    One that cannot start prints the path that ``getpath`` gave, in a form of its own.
    """
    _make(real, case, root)
    here = case.start.working_dir

    def enter() -> None:
        if os.geteuid() != 0 and ctypes.CDLL(None).unshare(_NEWUSER) != 0:
            raise PermissionError("no user namespace")
        os.chroot(root)
        os.chdir(here)

    done = subprocess.run(
        [case.start.called, *case.words],
        executable=case.executed,
        env=dict(case.start.env),
        preexec_fn=enter,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("PATH ")]
    if not lines:
        if os.environ.get("WHY") and "configuration" not in done.stderr:
            print(done.stderr[-900:])
        return dumped(done.stderr) if "Python path configuration:" in done.stderr else None
    found: list[str] = ast.literal_eval(lines[-1][5:])
    return [one or here for one in found]


def dumped(text: str) -> Dumped:
    """The path in the message of an interpreter that finds no ``encodings``."""
    inside = re.search(r"sys\.path = \[\n(.*?)\n\s*\]", text, re.DOTALL)
    lines = inside[1].splitlines() if inside else []
    return Dumped(ast.literal_eval(line.strip().rstrip(",")) for line in lines)


def _make(real: Real, case: Case, root: Path) -> None:
    for place in case.stdlibs:
        target = root / place
        target.mkdir(parents=True, exist_ok=True)
        for module in _MODULES.split():
            _library(real.stdlib, target, module)
    for name, library in real.libraries:
        (root / name[1:]).parent.mkdir(parents=True, exist_ok=True)
        _link(library, root / name[1:])
    for item in case.items:
        path = root / item.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if item.link:
            path.symlink_to(item.link)
        elif item.data == b"ELF":
            _link(real.binary, path)
        elif item.type == folder("x").type:
            path.mkdir(exist_ok=True)
        elif not path.exists():
            path.write_bytes(item.data)


#: The encodings that a start may need.
_ENCODINGS = {"__init__.py", "aliases.py", "ascii.py", "latin_1.py", "utf_8.py"}


def _left_out(place: str, names: list[str]) -> set[str]:
    """What no start needs of a package of the standard library."""
    kept = _ENCODINGS if place.endswith("encodings") else set(names)
    return set(names) - kept | {"__pycache__", "resources", "metadata"}


def _library(stdlib: Path, target: Path, module: str) -> None:
    file, package = stdlib / f"{module}.py", stdlib / module
    if file.is_file():
        _link(file, target / file.name)
    if package.is_dir():
        shutil.copytree(package, target / module, copy_function=_link, ignore=_left_out)


def _link(source: Path | str, target: Path | str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def computed(real: Real, case: Case, place: Path) -> SearchPath:
    """The same, from the files as a layer."""
    site = (real.stdlib / "site.py").read_bytes()
    library = [
        Item(f"{place}/{name}", data)
        for place in case.stdlibs
        for name, data in (("os.py", b""), ("site.py", site))
    ]
    libraries = [Item(name[1:], b"") for name, _ in real.libraries]
    view = view_of(place, packed(tar_of(*_once([*case.items, *library, *libraries]))))
    try:
        return search_path(view, case.start, real.build)
    finally:
        view.close()


def _once(items: Sequence[Item]) -> list[Item]:
    return list({item.name: item for item in items}.values())


def compare(real: Real, case: Case, scratch: Path) -> tuple[str, list[str], list[str] | None]:
    """``same``, ``differs`` or ``no start``, with both answers."""
    theirs: list[str] | None = None
    ours: list[str] = []
    try:
        theirs = answered(real, case, scratch / "root")
        if theirs is not None:
            found = computed(real, case, scratch / "layout")
            ours = list(found.configured if isinstance(theirs, Dumped) else found.folders)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if theirs is None:
        return "no start", ours, theirs
    kind = "getpath only" if isinstance(theirs, Dumped) else "same"
    return (kind if ours == theirs else "differs"), ours, theirs


def main() -> int:
    """Compare many cases, and print those that differ."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--root", default="/")
    parser.add_argument("--show", type=int, default=5)
    given = parser.parse_args()
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as place:
        real = Real.of(given.python, given.root).copied(Path(place, "real"))
        for number, case in enumerate(cases(real, given.seed, given.cases)):
            result, ours, theirs = compare(real, case, Path(place, str(number)))
            counts[result] = counts.get(result, 0) + 1
            if result == "differs" and counts[result] <= given.show:
                print(number, case.start, case.executed, case.stdlibs)
                print("  files:", [(i.name, i.link or i.data[:60]) for i in case.items])
                print("  ours:  ", ours)
                print("  theirs:", theirs)
    print(real.version, given.seed, counts)
    return int("differs" in counts)


if __name__ == "__main__":
    raise SystemExit(main())
