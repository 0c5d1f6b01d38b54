"""Files of an image that are in no RECORD and no receipt, and what Python does with them.

Some it runs at startup: ``.pth`` files with code (the ``site`` module executes lines that begin
with ``import``), ``sitecustomize``, ``usercustomize``, a replaced interpreter or command, plugins.
Some it imports instead of a recorded module, or as a new one.  Those that the base already had are
reported separately.
"""

from __future__ import annotations

import contextlib
import csv
import re
from configparser import ConfigParser, Error
from dataclasses import dataclass
from posixpath import join, normpath
from typing import TYPE_CHECKING, Protocol

from builder.applier.edits import ENV_PTH, env_pth
from builder.applier.receipts import env_of, kept_true, parse_record, receipt_path, receipts_of
from builder.applier.trees import distribution_of
from builder.errors import UsageError
from builder.images.engines.baked import SHARE
from builder.images.rootfs.tar import DIR, SYMLINK
from builder.images.rootfs.view import DEFAULT_PATH, interpreters
from builder.proof.earlier import Expected, Judge
from builder.proof.libraries import SYSTEM, TRIPLETS, Loading
from builder.proof.starts import homes_of, starts_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from builder.applier.trees import Distribution, Tree
    from builder.images.rootfs.view import Entry, InLayers, Interpreter, Rootfs
    from builder.proof.earlier import Earlier


# ----------------------------------------------------------------------- which file Python imports
#
# It follows CPython's ``importlib/_bootstrap_external.py``: ``FileFinder.find_spec`` for one folder
# of ``sys.path`` or of a package, ``SourceLoader.get_code`` for compiled files (PEP 3147, PEP 552).

#: Where compiled files of sources are (PEP 3147).
CACHE = "__pycache__"
#: The triplets of platforms in names of extension modules (``Python/dynload_shlib.c``).
_MACHINES = {"arm64": "aarch64", "amd64": "x86_64"}
#: Length of a compiled file's header, and the end of the magic number in it (PEP 552).
_HEADER, _MAGIC_END = 16, b"\r\n"
_HASHED, _FLAGS = 0b01, 0b11
_TAGGED = re.compile(r"(?P<stem>[^.]+)\.(?P<tag>[^.]+)(\.opt-[A-Za-z0-9]+)?\.pyc")


class Files(Protocol):
    """Folders and files by path; links count as what they lead to."""

    def children(self, directory: str) -> Collection[str]:
        """The names in a folder; none if it is not a folder."""


@dataclass(frozen=True, kw_only=True)
class Naming:
    """The names of files that one build of Python imports."""

    #: suffixes in the order in which the finder tries them
    suffixes: tuple[str, ...]
    #: the tags of compiled files: ``cpython-312``
    tags: tuple[str, ...]

    @classmethod
    def of(cls, version: str, platform: str) -> Naming:
        """For ``3.12`` and ``linux/arm64``, with a GIL or free-threaded."""
        number = version.replace(".", "")
        machine = _MACHINES.get(platform.split("/")[1], platform.split("/")[1])
        tags = (f"cpython-{number}", f"cpython-{number}t")
        libraries = ("gnu", "musl")
        native = [f".{tag}-{machine}-linux-{libc}.so" for tag in tags for libc in libraries]
        return cls(suffixes=(*native, ".abi3.so", ".so", ".py", ".pyc"), tags=tags)

    def stem(self, name: str) -> str:
        """The module name of a file; ``""`` if Python imports no such file."""
        for suffix in self.suffixes:
            stem = name.removesuffix(suffix)
            if stem != name and stem and "." not in stem:
                return stem
        return ""

    def compiled_from(self, name: str) -> str:
        """The module name of a file in ``__pycache__``; ``""`` if this Python ignores it."""
        match = _TAGGED.fullmatch(name)
        return match["stem"] if match and match["tag"] in self.tags else ""


def may_run(compiled: bytes, source: bytes | None) -> bool:
    """Whether Python may run a compiled file in ``__pycache__`` instead of this source.

    Its time stamp is not compared, and neither is the hash of a source: a file of the same size, or
    with a hash, counts.  Only what every Python ignores is harmless.
    """
    if len(compiled) < _HEADER or compiled[2:4] != _MAGIC_END:
        return False
    flags = int.from_bytes(compiled[4:8], "little")
    if flags & ~_FLAGS:
        return False
    size = int.from_bytes(compiled[12:16], "little")
    return bool(flags & _HASHED) or source is None or size == len(source) & 0xFFFFFFFF


def is_unchecked(compiled: bytes) -> bool:
    """Whether Python runs a compiled file without a look at its source (PEP 552)."""
    return may_run(compiled, None) and int.from_bytes(compiled[4:8], "little") == _HASHED


@dataclass(frozen=True)
class Shadow:
    """A file that Python runs instead of another; a folder (a namespace) ends with ``/``."""

    path: str
    hides: str

    def __str__(self) -> str:
        return f"{self.path} instead of {self.hides}"


@dataclass(frozen=True)
class Finder:
    """Finds modules in the folders of a tree."""

    files: Files
    naming: Naming

    def candidates(self, folder: str, stem: str) -> list[str]:
        """Every file that could be a module, in Python's order: the first one is imported.

        A folder without ``__init__`` (a namespace) comes last, and ends with ``/``.
        """
        names = set(self.files.children(folder))
        path = _join(folder, stem)
        inside = set(self.files.children(path)) if stem in names else set()
        package = self._present(path, "__init__", inside) if inside else []
        candidates = [*package, *self._present(folder, stem, names)]
        return [*candidates, f"{path}/"] if inside and not package else candidates

    def _present(self, folder: str, stem: str, names: Collection[str]) -> list[str]:
        named = [f"{stem}{suffix}" for suffix in self.naming.suffixes if f"{stem}{suffix}" in names]
        return [path for name in named if not self.files.children(path := _join(folder, name))]

    def contested(self, folder: str) -> Iterator[list[str]]:
        """The candidates of every module in a folder that has several."""
        names = set(self.files.children(folder))
        stems = {self.naming.stem(name) for name in names} - {""}
        for stem in sorted(stems):
            candidates = self.candidates(folder, stem)
            if len(candidates) > 1:
                yield candidates

    def compiled(self, path: str) -> list[str]:
        """The files in ``__pycache__`` that this Python looks for beside a source."""
        folder, _, name = path.rpartition("/")
        stem, cache = name.removesuffix(".py"), _join(folder, CACHE)
        if stem == name:
            return []
        names = sorted(self.files.children(cache))
        return [f"{cache}/{one}" for one in names if self.naming.compiled_from(one) == stem]


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def folders_below(tree: Tree, tops: Collection[str]) -> Iterator[str]:
    """These folders of a tree, and every folder below them, without compiled files."""
    pending = sorted(tops)
    while pending:
        folder = pending.pop()
        names = [name for name in tree.children(folder) if name != CACHE]
        if names:
            yield folder
            pending.extend(f"{folder}/{name}" for name in names)


def changed_packages(tree: Tree) -> set[str]:
    """The folders and modules of site-packages in which layers changed files."""
    paths = {path for receipt in receipts_of(tree) for path in receipt.files}
    tops = {path.partition("/")[0] for path in paths}
    return {top for top in tops if not top.endswith((".dist-info", ".pth"))}


# -------------------------------------------------------------------------------- unrecorded files

#: a bare name is a link to a package
_CUSTOMIZE = re.compile(
    r"(?:site|user)customize(?:(?:/__init__)?\.(?:[^/]*\.)?(?:py|pyc|so))?", re.ASCII
)
_DPKG = "/var/lib/dpkg/info"
#: The command that an image runs; distributions' own are compared with their RECORD.
_COMMAND, _PYTHONS = "vllm", ("python3", "python")
_ELSEWHERE = ("PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONPYCACHEPREFIX")
_LD_PRELOAD = "/etc/ld.so.preload"
_LINKS = 40
#: Limit of the parts of a variable that lists folders.
_FOLDERS = 500
#: Bytes of a script's first line that Linux reads (``BINPRM_BUF_SIZE``).
_SHEBANG = 256
_ENTRY_POINTS = re.compile(r"[^/]+\.(?:dist|egg)-info/entry_points\.txt")
#: Groups of entry points that are loaded at startup: vLLM's (``vllm/plugins/__init__.py``), torch's
#: (``torch/__init__.py``) and Triton's (``triton/backends/__init__.py``).
_PLUGINS = re.compile(r"(?:vllm|torch|triton)\..+")
_CODE = re.compile(r"import[ \t]")
#: ``uv venv`` and virtualenv write it beside ``_virtualenv.py``, and record neither.
_OF_VIRTUALENV = {"_virtualenv.pth": "import _virtualenv"}


@dataclass(frozen=True, kw_only=True)
class Unrecorded:
    """Paths below site-packages; absolute ones are elsewhere."""

    #: run at every start of Python or of vLLM, and added by our layers or later
    hooks: tuple[str, ...] = ()
    #: the same, but from the base, or part of a virtual environment
    of_base: tuple[str, ...] = ()
    #: what Python runs instead of a recorded module
    shadows: tuple[Shadow, ...] = ()
    #: recorded files that layers above the base replaced, and code that they added to a package
    #: that layers change
    changed: tuple[str, ...] = ()
    #: everything else; a folder without recorded files is listed once, with a ``/``
    files: tuple[str, ...] = ()


def find_unrecorded(opened: InLayers, site: str, tree: Tree) -> Unrecorded:
    """Search the image, or only the layers above a locked base.

    ``tree`` is its identified site-packages.
    """
    _refuse_crowded(opened.image.config.env)
    above = opened.view.above
    own = above if above is not None else _ours(opened.view, site, tree)
    with contextlib.closing(opened.above(own or 0)) as upper:
        view = opened.view if above is None else upper
        files = _InSite(view, site, tree)
        python = _interpreter_of(opened, site)
        naming = Naming.of(python.version, f"linux/{opened.image.config.architecture}")
        search = _Search(files, naming, own, tree)
        for path, entry in view.below(site).items():
            if entry.kind != DIR:
                search.see(path, entry)
        config = opened.image.config
        start = _Start(view, python, config.env)
        expected = Expected(
            python=python, site=site, changed=search.packages, recorded=files.modules(naming)
        )
        earlier = _earlier(opened, expected, naming, own)
        shadows = [*search.shadows, *(Shadow(e.path, e.hides) for e in earlier if _hides(e))]
        led = [e.path for e in earlier if not e.hides and not e.of_base]
        loaded, theirs = _loaded(opened, expected, files, own)
        unchecked, compiled = _compiled_library(upper, start)
        hooks = [*search.hooks, *_elsewhere(upper, site, start), *_settings(config.env), *led]
        hooks += unchecked
        of_base = [*search.of_base, *(e.path for e in earlier if e.of_base), *theirs]
        return Unrecorded(
            hooks=_texts(list(dict.fromkeys([*hooks, *loaded]))),
            of_base=_texts(list(dict.fromkeys(of_base))),
            shadows=tuple(dict.fromkeys(Shadow(*_texts([s.path, s.hides])) for s in shadows)),
            changed=_texts(search.changed),
            files=_texts(
                sorted({*compiled, *(_shortest(path, files.folders) for path in search.files)})
            ),
        )


def _refuse_crowded(env: Mapping[str, str]) -> None:
    """Refuse lists of folders that nobody has, and that would take hours to search.

    Raises:
        UsageError: a variable has such a list.
    """
    for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "LD_AUDIT"):
        count = len(re.split("[:; ]", env.get(name, "")))
        if count > _FOLDERS:
            raise UsageError(f"${name} of the image has {count} parts")


def _hides(found: Earlier) -> bool:
    return bool(found.hides) and not found.of_base


def _earlier(
    opened: InLayers, expected: Expected, naming: Naming, own: int | None
) -> list[Earlier]:
    """What any start of the image finds earlier on ``sys.path`` than the recorded files."""
    with contextlib.closing(opened.known()) as disk:
        judge = Judge(
            disk=disk,
            expected=expected,
            is_above=lambda entry: own is not None and 0 <= entry.layer < own,
            candidates=Finder(_Absolute(disk), naming).candidates,
            stem=naming.stem,
        )
        found = judge.judge(starts_of(disk, opened.image.config, expected.python))
        return list(dict.fromkeys(found))


def _loaded(
    opened: InLayers, expected: Expected, files: _InSite, own: int | None
) -> tuple[list[str], list[str]]:
    """Libraries and compiled code that are loaded first: of the layers above the base; its own."""
    config = opened.image.config
    wrong: list[str] = []
    of_base: list[str] = []
    with (
        contextlib.closing(opened.known()) as disk,
        contextlib.closing(opened.above(own or 0)) as upper,
        contextlib.closing(opened.below(own or 0)) as lower,
    ):
        for home in homes_of(disk, config):
            loading = Loading(
                disk=disk,
                upper=upper,
                lower=lower if opened.view.above is None else None,
                env=config.env,
                working_dir=config.working_directory,
                home=home,
                user=config.user.partition(":")[0] or "root",
                prefix=expected.python.stdlib[0].rpartition("/lib/")[0],
                packaged=files.libraries(),
                debian=_packaged(upper, set()),
                own=own or 0,
            )
            wrong += loading.wrong()
            of_base += loading.of_base()
    return wrong, of_base


def _interpreter_of(opened: InLayers, site: str) -> Interpreter:
    """The interpreter that imports from site-packages, as identification chose it."""
    config, view = opened.image.config, opened.view
    for python in interpreters(view, config.env, config.working_directory):
        if any(view.realpath(folder) == site for folder in python.path):
            return python
    raise UsageError(f"no interpreter of the image imports from {site}")


class _Search:
    """Sorts the files of site-packages by what Python does with them."""

    def __init__(self, files: _InSite, naming: Naming, own: int | None, tree: Tree) -> None:
        self._in_site, self._naming, self._own = files, naming, own
        self.packages = changed_packages(tree)
        receipts = receipts_of(tree)
        records = kept_true(receipts)
        self._planned = {path for receipt in receipts for path in receipt.files} | records
        #: what belongs to the packages that layers change, and to no other
        self._closed = self.packages | {path.partition("/")[0] for path in records}
        self._names = {dist.name for path in records if (dist := _dist_of(path))}
        self._finder = Finder(files, naming)
        self.hooks: list[str] = []
        self.of_base: list[str] = []
        self.shadows: list[Shadow] = []
        self.changed: list[str] = []
        self.files: list[str] = []

    def see(self, path: str, entry: Entry) -> None:
        """Sort one file."""
        of_base = self._own is not None and entry.layer >= self._own
        if CACHE in path.split("/"):
            if not of_base:
                self._see_compiled(path, entry)
        elif self._in_site.explained(path, entry):
            if not of_base and (self._in_site.differs(path, entry) or self._is_later(path)):
                self.changed.append(path)
        elif self._in_site.is_hook(path):
            is_known = of_base or self._in_site.of_virtualenv(path)
            (self.of_base if is_known else self.hooks).append(path)
        else:
            self._see_module(path, entry, of_base=of_base)

    def _is_later(self, path: str) -> bool:
        """Whether it is a file of a package that layers change, and of no layer.

        Its RECORD, or a second one of the same distribution, may have been changed with it.
        """
        dist = _dist_of(path)
        again = dist is not None and dist.name in self._names
        return path not in self._planned and (path.partition("/")[0] in self._closed or again)

    def _see_module(self, path: str, entry: Entry, *, of_base: bool) -> None:
        shadow = self._shadow(path, entry)
        package = path.partition("/")[0]
        if shadow is not None and not (of_base and package not in self.packages):
            self.shadows.append(shadow)
        elif not of_base and self._is_later(path) and self._counts(path, entry):
            self.changed.append(path)
        else:
            self.files.append(path)

    def _counts(self, path: str, entry: Entry) -> bool:
        return self._imports(path, entry) or _dist_of(path) is not None

    def _imports(self, path: str, entry: Entry) -> bool:
        """Whether Python may import it: a module, or a link to a package."""
        name = path.rpartition("/")[2]
        return bool(self._naming.stem(name)) or (entry.kind == SYMLINK and "." not in name)

    def _shadow(self, path: str, entry: Entry) -> Shadow | None:
        if not self._imports(path, entry):
            return None
        folder, _, name = path.rpartition("/")
        stem = self._naming.stem(name) or name
        places = [(folder, stem)]
        if stem == "__init__" and folder:
            above, _, package = folder.rpartition("/")
            places.append((above, package))
        for place in places:
            first, *others = self._finder.candidates(*place) or [path]
            hidden = [one for one in others if self._in_site.lists(one)]
            if hidden and not self._in_site.lists(first):
                return Shadow(first, hidden[0])
        return None

    def _see_compiled(self, path: str, entry: Entry) -> None:
        """A compiled file that came after its source, whose bytes Python may run instead of it."""
        cache, _, name = path.rpartition("/")
        stem = self._naming.compiled_from(name)
        folder = cache.rpartition("/")[0]
        source = f"{folder}/{stem}.py" if folder else f"{stem}.py"
        if not stem or self._in_site.is_as_recorded(path, entry):
            return
        if not self._in_site.came_after(entry, source):
            return
        if not may_run(self._in_site.read(path) or b"", self._in_site.read(source)):
            return
        is_ours = path.partition("/")[0] in self.packages
        if is_ours or is_unchecked(self._in_site.read(path) or b""):
            self.shadows.append(Shadow(path, source))
        else:
            self.files.append(path)


def _dist_of(path: str) -> Distribution | None:
    """The distribution that a file of a ``.dist-info`` describes."""
    return distribution_of(path.partition("/")[0])


def _texts(paths: list[str]) -> tuple[str, ...]:
    """File names that can be printed and written as JSON, because names need not be UTF-8."""
    return tuple(
        path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        for path in paths
    )


def _ours(view: Rootfs, site: str, tree: Tree) -> int | None:
    """Number of layers from the top to the lowest that has files of ours; None if none has."""
    paths = [f"{site}/{receipt_path(r.layer)}" for r in receipts_of(tree)]
    lowest = view.lowest([*paths, f"{SHARE}/plan.json"])
    return None if lowest is None else lowest + 1


class _InSite:
    """The RECORDs and receipts of one site-packages."""

    def __init__(self, view: Rootfs, site: str, tree: Tree) -> None:
        self._view, self._site = view, site
        self._claims: dict[str, set[str | None]] = {}
        for dist in tree.distributions().values():
            self._claim(dist.info_dir, tree.read(f"{dist.info_dir}/RECORD"))
        for name in view.names(site):
            if distribution_of(name) is not None:
                self._claim(name, view.read(f"{site}/{name}/RECORD"))
        receipts = receipts_of(tree)
        for receipt in receipts:
            self._claims.setdefault(receipt_path(receipt.layer), set()).add(None)
            for path, entry in receipt.files.items():
                if entry.after is not None:
                    self._claims.setdefault(path, set()).add(entry.after)
        self._settings = env_pth(env_of(tree)) if receipts else None
        #: folders with recorded files
        self.folders = {
            "/".join(parts[:depth])
            for parts in (path.split("/") for path in self._claims)
            for depth in range(1, len(parts))
        }
        self._tree = tree
        self._named: dict[str, set[str]] = {}
        for path in (*self._claims, *self.folders):
            above, _, name = path.rpartition("/")
            self._named.setdefault(above, set()).add(name)

    def _claim(self, info: str, record: bytes | None) -> None:
        with contextlib.suppress(ValueError, csv.Error):  # a damaged one explains nothing
            for row in parse_record(record or b""):
                self._claims.setdefault(row.path, set()).add(row.sha256)
            self._claims.setdefault(f"{info}/RECORD", set()).add(None)

    def explained(self, path: str, entry: Entry) -> bool:
        """Whether a RECORD or a receipt lists it; a hook must also match its sha256."""
        claims = self._claims.get(path)
        if path == ENV_PTH:
            return self._view.read(f"{self._site}/{path}") == self._settings
        if claims is None or not _may_be_hook(path):
            return claims is not None
        real = self._view.stat(f"{self._site}/{path}") or entry
        return None in claims or real.row.sha256 in claims

    def modules(self, naming: Naming) -> set[str]:
        """The top-level modules that RECORDs and receipts list."""
        names = self._named.get("", set())
        return {stem for name in names if (stem := naming.stem(name) or name).isidentifier()}

    def libraries(self) -> set[str]:
        """The names of shared libraries that RECORDs and receipts list."""
        names = (path.rpartition("/")[2] for path in self._claims)
        return {name for name in names if ".so" in name}

    def lists(self, path: str) -> bool:
        """Whether a RECORD or a receipt lists a file, or a file in a folder (with a ``/``)."""
        return path.rstrip("/") in self.folders if path.endswith("/") else path in self._claims

    def is_as_recorded(self, path: str, entry: Entry) -> bool:
        """Whether a RECORD or a receipt has the sha256 of its bytes."""
        claims = self._claims.get(path, set())
        return bool(claims - {None}) and not self.differs(path, entry)

    def differs(self, path: str, entry: Entry) -> bool:
        """Whether RECORDs and receipts have only other bytes than these."""
        claims = self._claims.get(path, {None})
        real = self._view.stat(f"{self._site}/{path}") or entry
        return None not in claims and real.row.sha256 not in claims

    def came_after(self, entry: Entry, source: str) -> bool:
        """Whether an entry is from a higher layer than its source."""
        other = self._view.lstat(f"{self._site}/{source}")
        return other is None or entry.layer < other.layer

    def read(self, path: str) -> bytes | None:
        """The bytes of a file of site-packages, also of one in a locked base."""
        data = self._view.read(f"{self._site}/{path}")
        return self._tree.read(path) if data is None else data

    def children(self, directory: str) -> set[str]:
        """The names in a folder of site-packages, recorded or not."""
        where = f"{self._site}/{directory}".rstrip("/")
        children = self._named.get(directory, set())
        return children | set(self._view.names(where))

    def is_hook(self, path: str) -> bool:
        """Whether Python, or vLLM, runs it at startup."""
        if _ENTRY_POINTS.fullmatch(path):
            return _has_plugins(self._view.read(f"{self._site}/{path}"))
        if not path.endswith(".pth"):
            return _may_be_hook(path)
        return "/" not in path and _has_code(self._lines(path))

    def of_virtualenv(self, path: str) -> bool:
        """Whether it is the hook of a tool that creates virtual environments."""
        return self._lines(path) == [_OF_VIRTUALENV.get(path)]

    def _lines(self, path: str) -> list[str]:
        return _lines_of(self._view, f"{self._site}/{path}")


def _lines_of(view: Rootfs, path: str) -> list[str]:
    try:
        data = view.read(path) or b""
    except UsageError:  # a form that is not read here may hold anything
        return ["import "]
    return data.decode("utf-8-sig", "replace").splitlines()  # as site.addpackage does


def _has_code(lines: list[str]) -> bool:
    return any(map(_CODE.match, lines))


def _may_be_hook(path: str) -> bool:
    """Whether Python may run a path below a folder of ``sys.path`` at startup."""
    return ("/" not in path and path.endswith(".pth")) or bool(_CUSTOMIZE.fullmatch(path))


def _has_plugins(data: bytes | None) -> bool:
    """Whether entry points have code that vLLM or torch loads at every start."""
    parser = ConfigParser(delimiters=("=",), interpolation=None, strict=False)
    try:
        parser.read_string((data or b"").decode("utf-8", "replace"))
    except Error:
        return True  # other readers may find some in it
    return any(map(_PLUGINS.fullmatch, map(str.strip, parser.sections())))


class _Start:
    """What runs when the image's Python starts, besides site-packages."""

    def __init__(
        self,
        view: Rootfs,
        python: Interpreter,
        env: Mapping[str, str],
    ) -> None:
        self._view = view
        self._stdlib = python.stdlib[1:]
        search = [f for f in env.get("PATH", DEFAULT_PATH).split(":") if f.startswith("/")]
        scripts = [f"{folder.rstrip('/')}/{_COMMAND}" for folder in search]
        pythons = [f"{folder.rstrip('/')}/{name}" for folder in search for name in _PYTHONS]
        named = filter(None, (_shebang(view.read(script)) for script in scripts))
        started = (*scripts, *pythons, python.command, *named)
        self._exact = {path for command in started for path in self._links(command)}
        self._exact |= set(_preloaded(env, view))
        root = python.environment
        self._exact |= {f"{root}/pyvenv.cfg"} if root else set()
        folders = {path.rpartition("/")[0] for path in self._exact}
        self._configured = {f"{folder}/pyvenv.cfg" for folder in folders}
        self._configured |= {f"{folder.rpartition('/')[0]}/pyvenv.cfg" for folder in folders}

    def _links(self, path: str) -> set[str]:
        """A path, and every path that its links lead through."""
        links: set[str] = set()
        while path not in links and len(links) < _LINKS:
            links.add(path)
            folder = self._view.realpath(path.rpartition("/")[0] or "/")
            if folder is not None:
                path = f"{folder.rstrip('/')}/{path.rpartition('/')[2]}"
                links.add(path)
            entry = self._view.lstat(path)
            if entry is None or entry.kind != SYMLINK:
                break
            path = normpath(join(path.rpartition("/")[0], entry.row.link))
        return links

    def is_compiled_library(self, path: str) -> bool:
        """Whether it is a compiled file of the standard library, or of a package in it."""
        inside = any(path.startswith(f"{lib}/") for lib in self._stdlib)
        return inside and "-packages/" not in path and path.endswith(".pyc")

    def runs(self, path: str) -> bool:
        """Whether an absolute path is a program or setting of every start, or its code."""
        if path in self._exact or path in self._configured or path == _LD_PRELOAD:
            return True
        folder, _, name = path.rpartition("/")
        inside = any(f"{folder}/".startswith(f"{lib}/") for lib in self._stdlib)
        return inside and "-packages/" not in path and name.endswith((".py", ".so", ".pth"))


class _Absolute:
    """The folders of an image, by absolute path."""

    def __init__(self, view: Rootfs) -> None:
        self._view = view

    def children(self, directory: str) -> list[str]:
        return self._view.names(directory or "/")


def _shebang(script: bytes | None) -> str:
    """The program that runs a script."""
    first = (script or b"")[:_SHEBANG].partition(b"\n")[0].decode("utf-8", "replace")
    words = first.removeprefix("#!").split() if first.startswith("#!") else []
    return words[0] if words and words[0].startswith("/") else ""


def _preloaded(env: Mapping[str, str], view: Rootfs) -> Iterator[str]:
    """The libraries that the dynamic loader puts into every process (ld.so(8)).

    A name without a slash is searched for; each place where it may be found counts.
    """
    text = f"{env.get('LD_PRELOAD', '')} {env.get('LD_AUDIT', '')}"
    named = (view.read(_LD_PRELOAD) or b"").decode("utf-8", "replace")
    folders = [*env.get("LD_LIBRARY_PATH", "").split(":"), *SYSTEM]
    folders += [f"{folder}/{name}" for folder in SYSTEM for name in TRIPLETS]
    for name in filter(None, re.split(r"[\s:]+", f"{text} {named}")):
        if "/" in name:
            yield name
        else:
            yield from (f"{folder}/{name}" for folder in folders if folder.startswith("/"))


def _settings(env: Mapping[str, str]) -> Iterator[str]:
    """Variables that make Python read its own files, or compiled ones, from another place."""
    yield from (f"${name}" for name in _ELSEWHERE if env.get(name))
    for name in ("LD_PRELOAD", "LD_AUDIT"):
        words = filter(None, re.split(r"[\s:]+", env.get(name, "")))
        if any("$" in word or ("/" in word and not word.startswith("/")) for word in words):
            yield f"${name}"


def _elsewhere(upper: Rootfs, site: str, start: _Start) -> list[str]:
    """Hooks that layers above the base add to another folder that may be on ``sys.path``."""
    paths = []
    for path, entry in upper.below("/").items():
        if entry.kind == DIR or f"/{path}".startswith(f"{site}/"):
            continue
        folder, _, name = f"/{path}".rpartition("/")
        if name == "__init__.py":
            name = f"{folder.rpartition('/')[2]}/{name}"
        settings = name.endswith(".pth") and folder.endswith(("/site-packages", "/dist-packages"))
        code = settings and _has_code(_lines_of(upper, f"/{path}"))
        inside = f"{folder.rpartition('/')[2]}/{name}"
        plugs = _ENTRY_POINTS.fullmatch(inside) and _has_plugins(upper.read(f"/{path}"))
        if code or plugs or _CUSTOMIZE.fullmatch(name) or start.runs(f"/{path}"):
            paths.append(f"/{path}")
    folders = {path.rpartition("/")[0] for path in paths}
    folders |= {folder.rpartition("/")[0] for folder in folders}
    packaged = _packaged(upper, folders) if paths else set()
    return [path for path in paths if path not in packaged]


def _compiled_library(upper: Rootfs, start: _Start) -> tuple[list[str], set[str]]:
    """Compiled files of the standard library that layers above the base add.

    Python runs those without a check whatever their source says.  Of the others, which any start of
    Python may leave, the folders are returned.
    """
    paths = [f"/{path}" for path in upper.below("/") if start.is_compiled_library(f"/{path}")]
    upper.fetch(paths)
    unchecked = [path for path in paths if is_unchecked(upper.read(path) or b"")]
    return unchecked, {f"{path.rpartition('/')[0]}/" for path in paths if path not in unchecked}


def _packaged(upper: Rootfs, folders: set[str]) -> set[str]:
    """Files of packages in these layers: Debian's, and those in some folders."""
    lists = [f"{_DPKG}/{name}" for name in upper.names(_DPKG) if name.endswith(".list")]
    upper.fetch(lists)
    known = {
        line.decode("utf-8", "replace")
        for path in lists
        for line in (upper.read(path) or b"").splitlines()
    }
    for folder in folders:
        for name in upper.names(folder):
            record = upper.read(f"{folder}/{name}/RECORD") if distribution_of(name) else None
            with contextlib.suppress(ValueError, csv.Error):
                known.update(f"{folder}/{row.path}" for row in parse_record(record or b""))
    return known


def _shortest(path: str, recorded: set[str]) -> str:
    """The uppermost folder of a path without recorded files, else the path."""
    parts = path.split("/")
    for depth in range(1, len(parts)):
        folder = "/".join(parts[:depth])
        if folder not in recorded:
            return f"{folder}/"
    return path
