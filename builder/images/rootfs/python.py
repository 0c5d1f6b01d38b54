"""Finds the interpreter of an image that has vLLM, and its package directories, from files only.

It follows CPython's start-up (``Modules/getpath.py`` and ``site.py``, and Debian's version of the
latter), with the image's environment.  Nothing is assumed about a version or a path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from builder.images.rootfs.view import Rootfs

#: PATH that a runtime sets if the image has none (default of containerd and Docker).
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NAME = re.compile(r"python(3\.\d+)t?")


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """One interpreter: its command, its version (``3.12``), and its ``sys.path``."""

    command: str
    version: str
    path: tuple[str, ...]
    #: the folders of the standard library, which come after ``PYTHONPATH``; the first is an archive
    stdlib: tuple[str, ...] = ()
    #: the root of its virtual environment, or ``""``
    environment: str = ""


def interpreters(
    view: Rootfs, env: Mapping[str, str], working_dir: str = "/"
) -> Iterator[Interpreter]:
    """Interpreters in the same order as in ``bases/image.py``."""
    seen = set()
    for command in _commands(view, env):
        found = None if command in seen else _interpreter(view, command, env, working_dir)
        seen.add(command)
        if found is not None:
            yield found


def _commands(view: Rootfs, env: Mapping[str, str]) -> Iterator[str]:
    if env.get("VIRTUAL_ENV"):
        yield f"{env['VIRTUAL_ENV'].rstrip('/')}/bin/python"
    for name in ("python3", "python"):
        for folder in env.get("PATH", DEFAULT_PATH).split(":"):
            entry = view.stat(f"{folder}/{name}") if folder.startswith("/") else None
            if entry is not None and entry.executable:
                yield f"{folder.rstrip('/')}/{name}"
                break
    yield from ("/opt/venv/bin/python3", "/usr/local/bin/python3", "/usr/bin/python3")


def _interpreter(
    view: Rootfs, command: str, env: Mapping[str, str], working_dir: str
) -> Interpreter | None:
    entry, real = view.stat(command), view.realpath(command)
    if entry is None or real is None or not entry.executable:
        return None
    named = _NAME.fullmatch(real.rpartition("/")[2])
    home = _home(view, real, named[1] if named else None)
    if home is None:
        return None
    prefix, version, lib = home
    stdlib = (
        f"{prefix}/lib/python{version.replace('.', '')}.zip",
        f"{prefix}/{lib}/python{version}",
        f"{prefix}/{lib}/python{version}/lib-dynload",
    )
    system = _site_packages(view, prefix, version)
    venv = _venv(view, command)
    first = [working_dir or "/", *_listed(env.get("PYTHONPATH", ""), working_dir)]
    if venv is None:
        user = f"{env.get('HOME', '/root')}/.local/lib/python{version}/site-packages"
        own = [] if env.get("PYTHONNOUSERSITE") else [user]
        path = (*first, *own, *system)
        return Interpreter(command=real, version=version, path=path, stdlib=stdlib)
    root, shares = venv
    own = [f"{root}/{lib}/python{version}/site-packages" for lib in ("lib", "lib64")]
    path = (*first, *own, *(system if shares else ()))
    return Interpreter(command=command, version=version, path=path, stdlib=stdlib, environment=root)


def _listed(text: str, working_dir: str) -> list[str]:
    """The directories of a ``PYTHONPATH``."""
    folders = [folder for folder in text.split(":") if folder]
    return [f if f.startswith("/") else f"{working_dir.rstrip('/')}/{f}" for f in folders]


def _home(view: Rootfs, real: str, version: str | None) -> tuple[str, str, str] | None:
    """Prefix, version, and ``lib`` or ``lib64``: the prefix holds ``lib/python3.X/os.py``."""
    folder = real.rpartition("/")[0]
    while folder:
        folder = folder.rpartition("/")[0]
        for lib in ("lib", "lib64"):
            names = [f"python{version}"] if version else view.names(f"{folder}/{lib}")
            for name in names:
                match = _NAME.fullmatch(name)
                if match and view.stat(f"{folder}/{lib}/{name}/os.py") is not None:
                    return folder, match[1], lib
    return None


def _site_packages(view: Rootfs, prefix: str, version: str) -> list[str]:
    """Package directories of an interpreter outside a virtual environment; Debian's differ."""
    for lib in ("lib", "lib64"):
        site = view.read(f"{prefix}/{lib}/python{version}/site.py")
        if site is not None and b"dist-packages" in site:
            return [
                f"{prefix}/local/lib/python{version}/dist-packages",
                f"{prefix}/lib/python3/dist-packages",
                f"{prefix}/lib/python{version}/dist-packages",
            ]
    return [f"{prefix}/{lib}/python{version}/site-packages" for lib in ("lib", "lib64")]


def _venv(view: Rootfs, command: str) -> tuple[str, bool] | None:
    """A virtual environment's root, and whether it also sees the system's packages."""
    folder = command.rpartition("/")[0]
    for root in (folder, folder.rpartition("/")[0]):
        data = view.read(f"{root}/pyvenv.cfg")
        if data is not None:
            lines = data.decode("utf-8", "replace").splitlines()
            pairs = {k.strip().lower(): v.strip() for k, _, v in (x.partition("=") for x in lines)}
            return root, pairs.get("include-system-site-packages", "").lower() == "true"
    return None
