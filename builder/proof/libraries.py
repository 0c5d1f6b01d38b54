"""Libraries and compiled code that layers above the base put where a process loads them first.

The dynamic loader searches the folders of ``LD_LIBRARY_PATH`` before a package's own, then its
cache, then the system's folders (ld.so(8)).  vLLM, FlashInfer, torch and Triton load what they
compiled earlier from folders of their own.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import cached_property
from posixpath import basename, dirname, join, normpath
from typing import TYPE_CHECKING

from builder.errors import UsageError
from builder.images.rootfs.tar import DIR, FILE, SYMLINK

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from builder.images.rootfs.view import Entry, Rootfs

_LIBRARY = re.compile(r"[^/]+\.so(\.[0-9.]+)?")
#: Libraries of every process that runs Python.
_CORE = re.compile(
    r"(lib(c|m|pthread|dl|rt|util|resolv|nss_\w+)|ld-linux[\w.-]*|ld-musl[\w.-]*|libc\.musl[\w.-]*"
    r"|libpython3[\w.]*)(-[0-9.]+)?\.so(\.[0-9.]+)?"
)
#: The driver's, which a container gets from its host, and what NCCL loads if it is there.
_BY_NAME = re.compile(
    r"lib(cuda|nvidia-[\w-]+|nccl-(net|tuner|profiler|env)[\w-]*)\.so(\.[0-9.]+)?"
)
#: The folders in which the loader looks last.
SYSTEM = ("/lib", "/usr/lib", "/lib64", "/usr/lib64", "/usr/local/lib")
TRIPLETS = ("aarch64-linux-gnu", "x86_64-linux-gnu")
_CACHE, _CONF, _CONF_FOLDER = "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d"
#: Limit of a setting: real caches have less than a tenth.
_SETTING_BYTES = 2 << 20
#: Subfolders of one folder that are searched too, for variants of processors.
_VARIANTS = 100
#: Variables that name a library, a folder with some, or a file that makes a process load code.
_NAMING = (
    "VLLM_NCCL_SO_PATH", "VLLM_CUDART_SO_PATH", "VLLM_LOGGING_CONFIG_PATH", "TRITON_LIBCUDA_PATH",
    "TRITON_OVERRIDE_DIR", "FLASHINFER_CUBIN_DIR", "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN",
    "NCCL_PROFILER_PLUGIN", "CUDA_INJECTION64_PATH", "GCONV_PATH", "OPENSSL_CONF",
    "OPENSSL_MODULES", "OPENSSL_ENGINES", "TRITON_PLUGIN_DIRS", "TRITON_PLUGIN_PATHS",
)  # fmt: skip
#: Folders with code that was compiled earlier: the variable that moves each, and where it is.
_COMPILED = (
    ("VLLM_CACHE_ROOT", "{cache}/vllm"),
    ("", "{FLASHINFER_WORKSPACE_BASE}/.cache/flashinfer"),
    ("TORCHINDUCTOR_CACHE_DIR", "{tmp}/torchinductor_{user}"),
    ("TORCH_EXTENSIONS_DIR", "{cache}/torch_extensions"),
    ("", "{cache}/torch"),
    ("TRITON_CACHE_DIR", "{TRITON_HOME}/.triton/cache"),
    ("TRITON_OVERRIDE_DIR", "{TRITON_HOME}/.triton/override"),
    ("CUDA_CACHE_PATH", "{home}/.nv/ComputeCache"),
    ("DG_JIT_CACHE_DIR", "{home}/.deep_gemm"),
    ("CUTE_DSL_CACHE_DIR", "{tmp}/{user}/cutlass_python_cache"),
    ("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "{tmp}/{user}/flash_attention_cute_dsl_cache"),
    ("TILELANG_CACHE_DIR", "{home}/.tilelang/cache"),
    ("TVM_FFI_CACHE_DIR", "{cache}/tvm-ffi"),
)
#: What such a folder may have that is no code.
_NO_CODE = (".json", ".lock", ".txt", ".log", ".md", ".yaml")


@dataclass(frozen=True, kw_only=True)
class Loading:
    """What is known of an image, for the question what its processes load."""

    #: all files, as far as they are known
    disk: Rootfs
    #: the files of the layers above the base, and of those below; None if nothing is known of them
    upper: Rootfs
    lower: Rootfs | None
    env: Mapping[str, str]
    working_dir: str
    home: str
    user: str
    #: the root of the interpreter, which may have its own libpython
    prefix: str
    #: names of libraries in Python packages, and the paths of Debian's packages in these layers
    packaged: Collection[str]
    debian: Collection[str]
    #: how many layers are above the base
    own: int

    def wrong(self) -> Iterator[str]:
        """What these layers put in front of the base's or a package's, by path or variable."""
        yield from self._in_folders()
        yield from self._replaced()
        yield from self._in_cache()
        yield from (f"${name}" for name in self._variables(above=True))
        yield from (f"{folder}/" for folder in self.caches if self._has_code(self.upper, folder))

    def of_base(self) -> Iterator[str]:
        """Variables and folders of the same kind that lead to files of the base."""
        yield from (f"${name}" for name in self._variables(above=False))
        for folder in self.caches:
            if self.lower is not None and self._has_code(self.lower, folder):
                yield f"{folder}/"

    # -- libraries

    @cached_property
    def _system(self) -> list[str]:
        """The folders in which the loader looks last, and the interpreter's."""
        folders = [f"{self.prefix}/lib", *SYSTEM]
        folders += [f"{folder}/{name}" for folder in SYSTEM[:2] for name in TRIPLETS]
        return list(dict.fromkeys(filter(None, map(self.disk.realpath, folders))))

    def _searched(self) -> Iterator[str]:
        """The folders that a variable, or a setting of these layers, puts before the system's."""
        for name in re.split("[:;]", self.env.get("LD_LIBRARY_PATH", "")):
            if self.env.get("LD_LIBRARY_PATH"):
                yield join(self.working_dir, name)
        conf = [_CONF, *(f"{_CONF_FOLDER}/{name}" for name in self.upper.names(_CONF_FOLDER))]
        for path in conf:
            for line in (self._setting(path) or b"").decode("utf-8", "replace").splitlines():
                word = line.partition("#")[0].strip()
                if word.startswith("/"):
                    yield word

    def _setting(self, path: str) -> bytes | None:
        """A setting of the loader in these layers.

        Raises:
            UsageError: it is larger than any.
        """
        entry = self.upper.stat(path)
        if entry is None or entry.kind != FILE:
            return None
        if entry.row.size > _SETTING_BYTES:
            raise UsageError(f"{path} of the image has {entry.row.size} bytes")
        return self.upper.read(path)

    def _in_folders(self) -> Iterator[str]:
        if "$" in self.env.get("LD_LIBRARY_PATH", ""):
            yield "$LD_LIBRARY_PATH"
        for folder in dict.fromkeys(self._searched()):
            for path in self._files_in(normpath(folder)):
                if self._comes_first(path):
                    yield path

    def _files_in(self, folder: str) -> Iterator[str]:
        """The libraries in a folder and in its variants for processors."""
        names, folder = self.disk.names(folder), folder.rstrip("/")
        inside = [f"{folder}/{name}" for name in names if not _LIBRARY.fullmatch(name)]
        inside += [f"{folder}/glibc-hwcaps/{n}" for n in self.disk.names(f"{folder}/glibc-hwcaps")]
        for place in (folder, *inside[:_VARIANTS]):
            for name in names if place is folder else self.disk.names(place):
                if _LIBRARY.fullmatch(name):
                    yield f"{place}/{name}"

    def _comes_first(self, path: str) -> bool:
        """Whether a library in such a folder is loaded instead of another."""
        name, real = basename(path), self.disk.realpath(path)
        if real is None or self.disk.realpath(dirname(path)) in self._system:
            return False  # replaced files there are a question of their own
        if _CORE.fullmatch(name):
            return dirname(real) not in self._system
        return self._is_above(path) and self._hides(name)

    def _hides(self, name: str) -> bool:
        if name in self.packaged or self.lower is None or _BY_NAME.fullmatch(name):
            return True
        return any(self.disk.stat(f"{folder}/{name}") is not None for folder in self._system)

    def _replaced(self) -> Iterator[str]:
        """Libraries of the system that these layers replace."""
        for path, entry in self.upper.below("/").items():
            name = basename(path)
            if entry.kind == DIR or not _LIBRARY.fullmatch(name):
                continue
            if self._is_debian(f"/{path}") or self._is_empty(f"/{path}"):
                continue
            folder = self.disk.realpath(f"/{dirname(path)}") or ""
            if not any(f"{folder}/".startswith(f"{one}/") for one in self._system):
                continue
            is_loaded = _CORE.fullmatch(name) or _BY_NAME.fullmatch(name)
            if (is_loaded and "-packages/" not in path) or (
                folder in self._system and self._is_in_base(f"/{path}")
            ):
                yield f"/{path}"

    def _is_empty(self, path: str) -> bool:
        """Whether it has no bytes: builds with the driver mounted leave such files behind."""
        real = self.disk.stat(path)
        return real is not None and real.kind == FILE and not real.row.size

    def _is_in_base(self, path: str) -> bool:
        return self.lower is not None and self.lower.stat(path) is not None

    def _in_cache(self) -> Iterator[str]:
        """Libraries that a cache of these layers finds in another folder."""
        data = self._setting(_CACHE)
        if data is None:
            return
        listed = cached_libraries(data)
        if listed is None:
            yield _CACHE
            return
        for name, path in listed:
            real = self.disk.realpath(path)
            if real is None or dirname(real) in self._system:
                continue
            if _CORE.fullmatch(name) or (self._is_above(path) and self._hides(name)):
                yield _CACHE
                return

    def _is_debian(self, path: str) -> bool:
        """Whether dpkg lists a path; its lists may have ``/lib`` for what is in ``/usr/lib``."""
        return path in self.debian or path.removeprefix("/usr") in self.debian

    def _is_above(self, path: str) -> bool:
        if self._is_debian(self.disk.realpath(path) or path):
            return False
        entries: list[Entry | None] = [self.disk.stat(path)]
        parts = path.strip("/").split("/")
        steps = ["/" + "/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        links = [e for e in map(self.disk.lstat, steps) if e is not None and e.kind == SYMLINK]
        return any(e is not None and 0 <= e.layer < self.own for e in (*entries, *links))

    # -- variables and folders of compiled code

    def _variables(self, *, above: bool) -> Iterator[str]:
        for name in _NAMING:
            places = [path for path in self._led_to(self.env.get(name, "")) if self.disk.stat(path)]
            if places and above == any(map(self._has_files_above, places)):
                yield name

    def _led_to(self, value: str) -> list[str]:
        """Where a value may lead; the loader searches for a name without a slash."""
        if not value:
            return []
        folders = [] if "/" in value else [*self._searched(), *self._system]
        return [join(folder, value) for folder in (self.working_dir, *folders)]

    def _has_files_above(self, path: str) -> bool:
        entry = self.disk.stat(path)
        if entry is not None and entry.kind == DIR:
            return bool(self._below(self.upper, path))
        return self._is_above(path)

    @cached_property
    def caches(self) -> list[str]:
        """The folders in which programs look for what they compiled."""
        cache = self.env.get("XDG_CACHE_HOME") or f"{self.home.rstrip('/')}/.cache"
        names = ("LOGNAME", "USER", "LNAME", "USERNAME")  # as getpass.getuser
        words = {
            "home": self.home.rstrip("/"),
            "cache": cache,
            "user": next(filter(None, map(self.env.get, names)), self.user),
            "tmp": self.env.get("TMPDIR") or "/tmp",  # noqa: S108 - the image's
        }
        for name in ("FLASHINFER_WORKSPACE_BASE", "TRITON_HOME"):
            words[name] = self.env.get(name) or words["home"]
        folders = [self.env.get(name) or place.format(**words) for name, place in _COMPILED]
        return list(dict.fromkeys(normpath(join(self.working_dir, one)) for one in folders))

    def _has_code(self, files: Rootfs, folder: str) -> bool:
        return any(not path.endswith(_NO_CODE) for path in self._below(files, folder))

    def _below(self, files: Rootfs, folder: str) -> list[str]:
        real = self.disk.realpath(folder)
        below = {} if real is None else files.below(real)
        linked = self.upper.lstat(folder) if files is self.upper else None
        extra = [folder] if linked is not None and linked.kind == SYMLINK else []
        return [path for path, entry in below.items() if entry.kind != DIR] + extra


# --------------------------------------------------------------------------- the loader's own cache

_MAGIC = b"glibc-ld.so.cache1.1"
_HEAD = struct.Struct("<20sIIB3xI12x")
_ENTRY = struct.Struct("<iIIIQ")


def cached_libraries(data: bytes) -> list[tuple[str, str]] | None:
    """The names and paths in an ``ld.so.cache`` (glibc's ``dl-cache.h``); None if it is another."""
    start = data.find(_MAGIC)
    if start < 0 or len(data) < start + _HEAD.size:
        return None
    count = _HEAD.unpack_from(data, start)[1]
    end = start + _HEAD.size + count * _ENTRY.size
    if end > len(data):
        return None
    listed = []
    for number in range(count):
        _, key, value, _, _ = _ENTRY.unpack_from(data, start + _HEAD.size + number * _ENTRY.size)
        listed.append((_text(data, start + key), _text(data, start + value)))
    return listed


def _text(data: bytes, start: int) -> str:
    return data[start : data.find(b"\0", start)].decode("utf-8", "surrogateescape")
