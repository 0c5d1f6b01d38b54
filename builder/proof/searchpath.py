"""The ``sys.path`` of an interpreter in an image, as CPython itself builds it.

CPython works it out in two steps, and both are Python code: ``getpath``, which every interpreter
since 3.11 has compiled in, and the module ``site``.  Here this machine's own copies run on the
files and variables of an image, as CPython's test of ``getpath`` does.  No code of the image runs:
lines of ``.pth`` files that Python would execute are only collected.  The one part that
distributions change is which folders of a prefix have packages; that follows the image's ``site``.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import io
import os
import posixpath
import re
import stat
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

from builder.errors import SparkBuildError, UsageError
from builder.images.rootfs.tar import DIR, FILE, SYMLINK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from builder.images.rootfs.view import Entry

#: Limit of a file that ``getpath`` reads (``Modules/getpath.c``), and of links that it follows.
_LINES_BYTES, _LINKS = 32 << 10, 40
#: Limit of a ``.pth`` file: real ones have a few lines.
_PTH_BYTES = 64 << 10


class Disk(Protocol):
    """The files of an image, by absolute path."""

    def stat(self, path: str) -> Entry | None:
        """What a path leads to, links followed."""

    def lstat(self, path: str) -> Entry | None:
        """What is at a path itself."""

    def realpath(self, path: str) -> str | None:
        """A path with every link followed, or None when nothing is there."""

    def names(self, directory: str) -> list[str]:
        """Names in a directory; empty if it is not one."""

    def read_known(self, path: str) -> bytes | None:
        """The bytes of a file, or None."""


class _Watched:
    """A disk that keeps what failed on this machine, which says nothing about the image."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.failed: Exception | None = None

    def __getattr__(self, name: str) -> Callable[[str], Any]:
        ask = getattr(self._disk, name)

        def asked(path: str) -> Any:
            try:
                return ask(path)
            except Exception as error:
                self.failed = error
                raise

        return asked


class NotFollowed(Exception):
    """CPython's own code does not come to an end on these files."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """One way in which a container starts Python."""

    #: how the interpreter is called, and its options
    called: str
    options: tuple[str, ...] = ()
    #: the script; ``""`` for ``-m``, whose first folder is the working folder
    script: str = ""
    env: Mapping[str, str]
    working_dir: str = "/"
    #: what is started, for people
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Build:
    """What was compiled into an interpreter."""

    #: ``3.12``
    version: str
    prefix: str = "/usr/local"
    #: ``lib`` or ``lib64``
    lib: str = "lib"
    #: where its sources were, from where it was built (``VPATH``)
    sources: str = ".."


@dataclass(frozen=True, kw_only=True)
class SearchPath:
    """What CPython computes at a start."""

    #: ``sys.path``, absolute
    folders: tuple[str, ...]
    #: the first: that of the script, or the working folder; ``""`` with ``-I`` and ``-P``
    first: str
    #: folders from variables
    named: tuple[str, ...]
    executable: str
    #: the folder of the standard library
    stdlib: str
    #: the file that makes CPython believe that it was not installed, or ``""``
    not_installed: str = ""
    #: what ``getpath`` alone gave, before ``site``
    configured: tuple[str, ...] = ()
    #: the lines of ``.pth`` files that run
    code: tuple[str, ...] = ()


def search_path(disk: Disk, start: Start, build: Build) -> SearchPath:
    """The search path of one start.

    Raises:
        NotFollowed: that code fails on these files.
        UsageError: this machine's Python does not give its own code.
    """
    options = Options.of(start.options)
    env = {} if options.ignores_env else dict(start.env)
    files = _Watched(disk)
    try:
        found = _getpath(files, start, build, env)
        folders, code = _site(files, start, build, env, found, options)
    except (SparkBuildError, NotFollowed, MemoryError):
        raise
    except Exception as error:
        if files.failed is not None:
            raise files.failed from error
        raise NotFollowed(f"{type(error).__name__}: {error}") from error
    if files.failed is not None:  # which site took for a file that is not there
        raise files.failed
    first = "" if options.is_safe(build, env) else _first(disk, start)
    here = start.working_dir
    named = [posixpath.join(here, p) for p in env.get("PYTHONPATH", "").split(":")]
    config = found["config"]
    return SearchPath(
        folders=tuple([first, *folders] if first else folders),
        first=first,
        named=tuple(map(posixpath.normpath, named)) if env.get("PYTHONPATH") else (),
        executable=config["executable"] or "",
        stdlib=config["stdlib_dir"] or "",
        not_installed=_not_installed(disk, found),
        configured=tuple(config["module_search_paths"]),
        code=code,
    )


def _first(disk: Disk, start: Start) -> str:
    """``sys.path[0]``: ``Python/sysmodule.c`` has it in C (``_PyPathConfig_ComputeSysPath0``)."""
    if not start.script:
        return start.working_dir
    script = posixpath.join(start.working_dir, start.script)
    return (disk.realpath(script) or posixpath.normpath(script)).rpartition("/")[0] or "/"


def _not_installed(disk: Disk, found: Mapping[str, Any]) -> str:
    if not found["config"].get("_is_python_build"):
        return ""
    folder = found.get("real_executable_dir") or ""
    names = ("pybuilddir.txt", "Modules/Setup.local")
    paths = [posixpath.join(folder, name) for name in names]
    return next((path for path in paths if disk.stat(path)), folder)


# ------------------------------------------------------------------------------------ its options


#: The release of Python 3 that brought ``PYTHONSAFEPATH``.
_SAFE_PATH = 11
#: Options of ``python`` with a value.
_VALUED = "WX"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``python`` that matter for ``sys.path``."""

    flags: frozenset[str]
    #: the words behind the options: a script and its arguments; none with ``-m`` and ``-c``
    rest: tuple[str, ...] = ()

    @classmethod
    def of(cls, words: tuple[str, ...]) -> Options:
        """Parse the words behind ``python``, as ``Python/getopt.c`` does."""
        flags: set[str] = set()
        pending = list(words)
        while pending and pending[0].startswith("-") and pending[0] not in ("-", "--"):
            word = pending.pop(0)
            if word.startswith("--"):
                del pending[: word == "--check-hash-based-pycs"]
                continue
            letters = word[1:]
            for number, letter in enumerate(letters, 1):
                flags.add(letter)
                if letter in "mc":
                    return cls(flags=frozenset(flags))
                if letter in _VALUED:
                    del pending[: number == len(letters)]
                    break
        return cls(flags=frozenset(flags), rest=tuple(pending))

    @property
    def ignores_env(self) -> bool:
        """``-E`` or ``-I``."""
        return bool(self.flags & {"E", "I"})

    def is_safe(self, build: Build, env: Mapping[str, str]) -> bool:
        """Whether there is no first folder: ``-I``, and since 3.11 ``-P`` and its variable."""
        knows = int(build.version.split(".")[1]) >= _SAFE_PATH
        safe = "P" in self.flags or bool(env.get("PYTHONSAFEPATH"))
        return "I" in self.flags or (knows and safe)


# ---------------------------------------------------------------------------------------- getpath


@cache
def _code_of_getpath() -> CodeType:
    """The code of ``getpath`` in this interpreter; CPython gives it to its own test like this."""
    try:
        give = ctypes.pythonapi._Py_Get_Getpath_CodeObject
    except AttributeError:
        raise UsageError("this Python does not give the code of its getpath") from None
    give.restype = ctypes.py_object
    code: CodeType = give()
    return code


def _getpath(disk: Disk, start: Start, build: Build, env: Mapping[str, str]) -> dict[str, Any]:
    """Run ``getpath``; returns its variables."""
    major, minor = map(int, build.version.split("."))
    config: dict[str, Any] = dict.fromkeys(
        ("home", "platlibdir", "program_name", "prefix", "exec_prefix", "base_prefix",
         "base_exec_prefix", "executable", "base_executable", "stdlib_dir", "platstdlib_dir",
         "module_search_paths", "argv")
    )  # fmt: skip
    config |= {
        "module_search_paths_set": 0,
        "pythonpath_env": env.get("PYTHONPATH") or None,
        "orig_argv": [start.called],
        "isolated": 0,
        "use_environment": 1,
        "use_site": 1,
    }
    if env.get("PYTHONPLATLIBDIR"):
        config["platlibdir"] = env["PYTHONPLATLIBDIR"]
    variables: dict[str, Any] = {
        "config": config,
        "os_name": "posix",
        "PREFIX": build.prefix,
        "EXEC_PREFIX": build.prefix,
        "PYTHONPATH": "",
        "VPATH": build.sources,
        "PLATLIBDIR": build.lib,
        "PYDEBUGEXT": "",
        "ABI_THREAD": "",
        "VERSION_MAJOR": major,
        "VERSION_MINOR": minor,
        "PYWINVER": None,
        "EXE_SUFFIX": None,
        "WITH_NEXT_FRAMEWORK": 0,
        "ENV_PATH": start.env.get("PATH", ""),
        "ENV_PYTHONHOME": env.get("PYTHONHOME", ""),
        "ENV_PYTHONEXECUTABLE": "",
        "ENV___PYVENV_LAUNCHER__": "",
        **dict.fromkeys(
            ("argv0", "py_setpath", "real_executable", "executable_dir", "library"), ""
        ),
        **dict.fromkeys(("winreg", "build_prefix", "venv_prefix"), None),
        **_functions(disk, start.working_dir),
    }
    exec(_code_of_getpath(), variables)  # noqa: S102 - this interpreter's own code
    return variables


def _functions(disk: Disk, here: str) -> dict[str, Callable[..., Any]]:
    """What ``Modules/getpath.c`` gives to ``getpath``."""

    def joinpath(*parts: str) -> str:
        joined = posixpath.join(*parts)
        return posixpath.normpath(joined) if joined else ""

    def kind(path: str) -> str:
        entry = disk.stat(posixpath.join(here, path)) if path else None
        return "" if entry is None else entry.kind

    def isxfile(path: str) -> bool:
        entry = disk.stat(posixpath.join(here, path)) if path else None
        return entry is not None and entry.executable

    def readlines(path: str) -> list[str]:
        data = disk.read_known(posixpath.join(here, path)) if kind(path) == FILE else None
        if data is None:
            raise FileNotFoundError(path)
        if len(data) >= _LINES_BYTES:
            raise NotFollowed(f"{path} is larger than 32 KiB")
        text = data.decode("utf-8", "surrogateescape").partition("\0")[0]
        return [line for line in re.split("[\r\n]", text) if line]

    return {
        "abspath": partial(_from, here),
        "basename": lambda path: path.rpartition("/")[2],
        "dirname": lambda path: path.rpartition("/")[0],
        "hassuffix": lambda path, suffix: path.endswith(suffix),
        "isabs": lambda path: path.startswith("/"),
        "isdir": lambda path: kind(path) == DIR,
        "isfile": lambda path: kind(path) == FILE,
        "ismodule": lambda path: FILE in (kind(path), kind(f"{path}c")),
        "isxfile": isxfile,
        "joinpath": joinpath,
        "readlines": readlines,
        "realpath": partial(_last_link, disk, here),
        "warn": lambda _message: None,
    }


def _from(here: str, path: str) -> str:
    if path.startswith("/"):
        return posixpath.normpath(path)
    return f"{here}/{path.removeprefix('./')}" if path not in ("", ".") else here


def _last_link(disk: Disk, here: str, path: str) -> str:
    """Only the last part of a path is followed, as ``getpath_realpath`` does."""
    for _ in range(_LINKS):
        entry = disk.lstat(posixpath.join(here, path)) if path else None
        if entry is None or entry.kind != SYMLINK:
            return path
        link = entry.row.link
        path = link if link.startswith("/") else posixpath.join(path.rpartition("/")[0], link)
        path = posixpath.normpath(path)
    raise OSError(errno.ELOOP, path)


# ------------------------------------------------------------------------------------------- site


@cache
def _code_of_site() -> CodeType:
    path = Path(os.__file__).with_name("site.py")
    try:
        return compile(path.read_bytes(), "<site>", "exec")
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"this Python's site cannot be read: {error}") from error


#: What ``site.main`` does besides ``sys.path``.
_BESIDE = ("abs_paths", "setquit", "setcopyright", "sethelper", "enablerlcompleter",
           "register_readline", "execsitecustomize", "execusercustomize")  # fmt: skip


def _site(
    disk: Disk,
    start: Start,
    build: Build,
    env: Mapping[str, str],
    found: Mapping[str, Any],
    options: Options,
) -> tuple[list[str], tuple[str, ...]]:
    """Run ``site.main``; returns ``sys.path``, and the lines that it would execute."""
    fake_sys = _fake_sys(build, found["config"], env, options)
    if "S" in options.flags:
        return fake_sys.path, ()
    code: list[str] = []
    modules = {
        "sys": fake_sys,
        "os": _fake_os(disk, start),
        "io": SimpleNamespace(
            open_code=lambda path: io.BytesIO(_bytes(disk, start, path)),
            TextIOWrapper=io.TextIOWrapper,
            text_encoding=io.text_encoding,
        ),
        "builtins": SimpleNamespace(),
        "_sitebuiltins": SimpleNamespace(),
        "stat": stat,
        "errno": errno,
        "locale": SimpleNamespace(getencoding=lambda: "utf-8"),
        "traceback": SimpleNamespace(format_exception=lambda *_: ()),
        "warnings": SimpleNamespace(warn=lambda *_, **__: None),
    }
    modules["_io"] = modules["io"]

    def imported(name: str, *_: Any) -> Any:
        if name not in modules:
            raise UsageError(f"this Python's site imports {name}")
        return modules[name]

    def opened(path: str, **_: Any) -> io.StringIO:
        text = _bytes(disk, start, path).decode("utf-8")
        return io.StringIO(text, newline=None)

    allowed = {
        **vars(builtins),
        "__import__": imported,
        "exec": lambda line, *_: code.append(line),
        "open": opened,
        "print": lambda *_, **__: None,
    }
    names: dict[str, Any] = {"__builtins__": allowed, "__name__": "site"}
    exec(_code_of_site(), names)  # noqa: S102 - this interpreter's own module
    names |= dict.fromkeys(_BESIDE, lambda: None)
    module = _content(disk, f"{found['config']['stdlib_dir']}/site.py") or b""
    debian = b"dist-packages" in module
    names["getsitepackages"] = partial(_packages_of, names, fake_sys, build.version, debian=debian)
    names["main"]()
    return fake_sys.path, tuple(code)


def _packages_of(
    names: Mapping[str, Any],
    fake_sys: Any,
    version: str,
    prefixes: list[str] | None = None,
    *,
    debian: bool,
) -> list[str]:
    """``site.getsitepackages``, the function that Debian changes."""
    folders: list[str] = []
    python = f"python{version}"
    in_venv = fake_sys.base_prefix != fake_sys.prefix
    libs = list(dict.fromkeys((fake_sys.platlibdir, "lib")))
    for prefix in dict.fromkeys(names["PREFIXES"] if prefixes is None else prefixes):
        if not prefix:
            continue
        if debian:
            own = [f"lib/{python}/site-packages"] if in_venv else []
            own += [f"local/lib/{python}/dist-packages", "lib/python3/dist-packages"]
            own += [f"{lib}/{python}/dist-packages" for lib in libs]
        else:
            own = [f"{lib}/{python}/site-packages" for lib in libs]
        folders += [posixpath.join(prefix, folder) for folder in own]
    return folders


def _content(disk: Disk, path: str) -> bytes | None:
    entry = disk.stat(path)
    return disk.read_known(path) if entry is not None and entry.kind == FILE else None


def _bytes(disk: Disk, start: Start, path: str) -> bytes:
    data = _content(disk, posixpath.join(start.working_dir, path))
    if data is None:
        raise FileNotFoundError(errno.ENOENT, "", path)
    if len(data) > _PTH_BYTES:
        raise NotFollowed(f"{path} has {len(data)} bytes")
    return data


def _fake_sys(
    build: Build, config: Mapping[str, Any], env: Mapping[str, str], options: Options
) -> SimpleNamespace:
    major, minor = map(int, build.version.split("."))
    no_user = bool(options.flags & {"s", "I"}) or bool(env.get("PYTHONNOUSERSITE"))
    return SimpleNamespace(
        path=list(config["module_search_paths"]),
        prefix=config["prefix"],
        exec_prefix=config["exec_prefix"],
        base_prefix=config["base_prefix"] or config["prefix"],
        base_exec_prefix=config["base_exec_prefix"] or config["exec_prefix"],
        executable=config["executable"],
        _base_executable=config["base_executable"],
        platlibdir=config["platlibdir"] or build.lib,
        flags=SimpleNamespace(no_user_site=no_user, no_site=1, isolated=0, verbose=0,
                              ignore_environment=0),
        version_info=(major, minor, 0, "final", 0),
        abiflags="",
        platform="linux",
        implementation=SimpleNamespace(name="cpython"),
        modules={},
        stderr=io.StringIO(),
        _framework="",
    )  # fmt: skip


class _Shown(str):
    """A file name that no ``site`` leaves out because it starts with a dot.

    Some releases of every version read such ``.pth`` files; this machine's must not decide.
    """

    __slots__ = ()

    def startswith(self, *_: Any) -> bool:
        return False


def _fake_os(disk: Disk, start: Start) -> SimpleNamespace:
    here, env = start.working_dir, start.env

    def kind(path: str) -> str:
        entry = disk.stat(posixpath.join(here, path)) if path else None
        return "" if entry is None else entry.kind

    def listdir(path: str) -> list[str]:
        if kind(path) != DIR:
            raise NotADirectoryError(errno.ENOTDIR, "", path)
        return [_Shown(name) for name in disk.names(posixpath.join(here, path))]

    def lstat(path: str) -> SimpleNamespace:
        if disk.lstat(posixpath.join(here, path)) is None:
            raise FileNotFoundError(errno.ENOENT, "", path)
        return SimpleNamespace()

    def expanduser(path: str) -> str:
        home = env.get("HOME", "").rstrip("/")
        return (home + path[1:] or "/") if path.startswith("~/") or path == "~" else path

    shown = {**vars(posixpath)}
    path = SimpleNamespace(
        **{name: shown[name] for name in ("join", "normcase", "dirname", "basename", "split",
                                          "splitext", "isabs")},
        abspath=lambda path: posixpath.normpath(posixpath.join(here, path)),
        exists=lambda path: bool(kind(path)),
        isdir=lambda path: kind(path) == DIR,
        isfile=lambda path: kind(path) == FILE,
        expanduser=expanduser,
    )  # fmt: skip
    return SimpleNamespace(
        path=path, environ=dict(env), getenv=env.get, name="posix", sep="/", pathsep=":",
        pardir="..", curdir=".", listdir=listdir, lstat=lstat,
        **dict.fromkeys(("getuid", "geteuid", "getgid", "getegid"), lambda: 0),
    )  # fmt: skip
