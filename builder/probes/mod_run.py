"""Runs a mod on a copy of a release's files, and prints what it changed.  Standard library only.

It runs inside an isolated place, is read from standard input, and takes a JSON object as its
argument.  The copy lies where an image has its site-packages.  Programs that need the network are
replaced by ones that say so.  The mod runs as the same user, so the reader of what is printed
checks it.
"""

from __future__ import annotations

import base64
import contextlib
import filecmp
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

#: A mod's programs see these before the machine's own.
_BIN = Path("/usr/local/bin")
_LIB = Path("/usr/local/lib/spark-build")
#: One line each: what needed the network, and modules that the mod's programs asked for in vain.
_NEEDED, _LACKED = _LIB / "needed", _LIB / "lacked"
#: Most changed files, bytes of one, and of all.
_FILES, _ONE, _ALL = 2000, 16 << 20, 64 << 20
#: Most processes, bytes of memory of all and of one, and bytes of output.
_PROCESSES, _MEMORY, _SPACE, _OUTPUT = 200, 2 << 30, 4 << 30, 16 << 20
#: Bytes of the end of the output that are returned, and seconds between two looks.
_TAIL, _LOOK = 16 << 10, 0.05
_PAGE = os.sysconf("SC_PAGE_SIZE")

_OFFLINE = """\
#!/bin/sh
printf '%s\\n' "{name} $*" >> {needed}
echo "{name}: a mod's run has no network" >&2
exit 69
"""
_GIT = """\
#!/bin/sh
for word in "$@"; do
  case "$word" in
    clone|fetch|pull|ls-remote)
      printf '%s\\n' "git $*" >> {needed}
      echo "git: a mod's run has no network" >&2
      exit 69;;
  esac
done
exec /usr/bin/git "$@"
"""
_PIP = """\
#!/bin/sh
exec python3 -m pip "$@"
"""
_NOTHING = "#!/bin/sh\nexit 0\n"
#: pip: it shows what is installed, and installs nothing.
_PIP_MODULE = """\
import importlib.metadata, sys
words = [word for word in sys.argv[1:] if not word.startswith("-")]
if words[:1] in (["list"], ["freeze"]):
    between = "==" if words[0] == "freeze" else " "
    for one in importlib.metadata.distributions(path=["{site}"]):
        print(one.metadata["Name"], one.version, sep=between)
    sys.exit()
if words[:1] != ["show"]:
    with open({needed!r}, "a") as out:
        out.write("pip " + " ".join(sys.argv[1:]) + "\\n")
    sys.exit("pip: a mod's run installs nothing")
for name in words[1:]:
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"WARNING: Package(s) not found: {{name}}")
    print("Name:", found.metadata["Name"], "\\nVersion:", found.version, "\\nLocation: {site}")
"""
#: Python of a mod: site-packages is the copy, whose modules are found and not executed, because
#: what they import (torch) is not there.
_CUSTOMIZE = """\
import functools, importlib.machinery, importlib.metadata, os, site, sys, sysconfig
SITE = {site!r}
sys.path[:] = [p for p in sys.path if p == SITE or "-packages" not in p]
site.getsitepackages = lambda prefixes=None: [SITE]
_paths, _path = sysconfig.get_paths, sysconfig.get_path
_OWN = dict.fromkeys(("purelib", "platlib"), SITE)
sysconfig.get_paths = lambda *a, **k: {{**_paths(*a, **k), **_OWN}}
sysconfig.get_path = lambda name, *a, **k: _OWN.get(name) or _path(name, *a, **k)

def _lacks(name, frame):
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    if frame is not None and frame.f_globals.get("__name__") == "__main__":
        with open({lacked!r}, "a") as out:
            out.write(name + "\\n")

def _attribute(module, name):
    caller = sys._getframe(1)  # the import system asks too, before it looks for a submodule
    if not name.startswith("__") and not caller.f_code.co_filename.startswith("<frozen importlib"):
        _lacks(module, caller)
    raise AttributeError(f"module {{module!r}} is not executed, so it has no {{name!r}}")

class _Loader:
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        name = module.__name__
        module.__getattr__ = functools.partial(_attribute, name)
        if "." not in name:
            names = importlib.metadata.packages_distributions().get(name)
            try:
                module.__version__ = importlib.metadata.version((names or [name])[0])
            except importlib.metadata.PackageNotFoundError:
                pass

class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, [SITE] if path is None else path)
        if spec is None or not (spec.origin or "").startswith(SITE + "/"):
            return None
        spec.loader = _Loader()
        return spec

class _Last:
    @staticmethod
    def find_spec(name, path=None, target=None):
        _lacks(name, sys._getframe(1))

sys.meta_path[:] = [_Finder, *sys.meta_path, _Last]
"""
_OFFLINE_NAMES = ("curl", "wget", "uv", "apt", "apt-get", "dnf", "hf", "huggingface-cli", "conda")


def main() -> int:
    """Run it, and print the result as JSON."""
    request = json.loads(sys.argv[1])
    site, tree = Path(request["site"]), Path(request["tree"])
    shutil.copytree(tree, site, dirs_exist_ok=True)
    home = Path("/workspace/mods", request["name"])
    shutil.copytree(request["mod"], home)
    (home / "run.sh").chmod(0o755)
    _put_programs(site)
    for package in map(Path, request["packages"]):
        shutil.copytree(package, _LIB / package.name)
    tops = list(map(Path, request["writable"]))
    before = _outside(tops, site, home)
    result = _run(home, site, request["seconds"])
    result |= {"needed": _lines(_NEEDED), "lacked": _lines(_LACKED)}
    if os.path.realpath(site) != str(site) or not site.is_dir():
        result["over"] = f"it moved or removed {site}"
        site = tree  # a link there may lead anywhere
    for top in tops:
        if not os.statvfs(top).f_bavail:
            result["over"] = f"it filled {top}"
    after = _outside(tops, site, home)
    outside = sorted(path for path, seen in after.items() if before.get(path) != seen)
    changed, links, large = _changed(tree, site)
    result |= {"outside": outside[:_FILES], "links": links, "large": large}
    print(json.dumps({**result, "files": changed}))
    return 0


def _put_programs(site: Path) -> None:
    _BIN.mkdir(parents=True, exist_ok=True)
    _LIB.mkdir(parents=True)
    values = {"site": str(site), "needed": str(_NEEDED), "lacked": str(_LACKED)}
    scripts = {name: _OFFLINE.format(name=name, **values) for name in _OFFLINE_NAMES}
    scripts |= {"pip": _PIP, "pip3": _PIP, "ldconfig": _NOTHING}
    if os.access("/usr/bin/git", os.X_OK):
        scripts["git"] = _GIT.format(**values)
    for name, text in scripts.items():
        (_BIN / name).write_text(text, "utf-8")
        (_BIN / name).chmod(0o755)
    own = re.findall(r"python3\.\d+", str(site))[:1]
    beside = site.parents[2] / "bin" if own and site.parent.name == own[0] else _BIN
    for place in (_BIN, beside):
        place.mkdir(parents=True, exist_ok=True)
        for name in ("python3", "python", *own):
            with contextlib.suppress(FileExistsError):
                (place / name).symlink_to(os.path.realpath(sys.executable))
    Path("/etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n", "utf-8")
    Path("/etc/group").write_text("root:x:0:\n", "utf-8")
    (_LIB / "pip").mkdir()
    (_LIB / "pip/__init__.py").touch()
    (_LIB / "pip/__main__.py").write_text(_PIP_MODULE.format(**values), "utf-8")
    (_LIB / "sitecustomize.py").write_text(_CUSTOMIZE.format(**values), "utf-8")


def _run(home: Path, site: Path, seconds: float) -> dict[str, Any]:
    """Run the script until it ends or takes too much: its status, and the end of its output."""
    env = {
        **os.environ, "HOME": "/root", "WORKSPACE_DIR": "/workspace",
        "PATH": f"{_BIN}:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": f"{_LIB}:{site}", "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    limits = (f"--as={_SPACE}", f"--nproc={2 * _PROCESSES}", f"--fsize={4 * _ALL}", "--core=0")
    process = subprocess.Popen(
        ["/usr/bin/prlimit", *limits, "--", "/bin/bash", "-c", "exec ./run.sh"], cwd=home, env=env,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    said = bytearray()
    seen = [0]

    def read() -> None:
        assert process.stdout is not None
        while data := os.read(process.stdout.fileno(), 1 << 16):
            seen[0] += len(data)
            said.extend(data)
            del said[:-_TAIL]

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    until = time.monotonic() + seconds
    over = ""
    while process.poll() is None and not over:
        over = _too_much(until, seconds, seen[0])
        time.sleep(_LOOK)
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # all of this place but this process
    process.wait()
    reader.join(5)
    tail = bytes(said).decode("utf-8", "replace").splitlines()
    return {"status": process.returncode, "over": over, "tail": tail}


def _too_much(until: float, seconds: float, printed: int) -> str:
    if time.monotonic() > until:
        return f"it took more than {seconds:.0f} s"
    if printed > _OUTPUT:
        return f"it printed more than {_OUTPUT >> 20} MiB"
    ids = [name for name in os.listdir("/proc") if name.isdigit()]
    if len(ids) > _PROCESSES:
        return f"it had more than {_PROCESSES} processes"
    pages = 0
    for name in ids:
        with contextlib.suppress(OSError, ValueError):
            pages += int(Path(f"/proc/{name}/statm").read_bytes().split()[1])
    return f"it took more than {_MEMORY >> 30} GiB of memory" if pages * _PAGE > _MEMORY else ""


def _files(top: Path) -> dict[str, Path]:
    """The files and links below a folder, without what Python compiled and what is mounted."""
    found: dict[str, Path] = {}
    device = top.stat().st_dev
    for folder, names, files in os.walk(top):
        links = [name for name in names if Path(folder, name).is_symlink()]
        names[:] = [
            name
            for name in names
            if name not in ("__pycache__", *links) and Path(folder, name).stat().st_dev == device
        ]
        for name in (*files, *links):
            path = Path(folder, name)
            found[path.relative_to(top).as_posix()] = path
    return found


def _outside(tops: list[Path], site: Path, home: Path) -> dict[str, tuple[int, int]]:
    """What lies in the other folders that can be written to."""
    seen: dict[str, tuple[int, int]] = {}
    for top in tops:
        for path in _files(top).values():
            own = path.is_relative_to(site) or path.is_relative_to(home)
            with contextlib.suppress(OSError):
                info = path.lstat()
                if not own and not path.is_relative_to(_LIB):
                    seen[str(path)] = info.st_size, info.st_mtime_ns
    return seen


def _changed(tree: Path, site: Path) -> tuple[dict[str, str | None], list[str], list[str]]:
    """The changed files in base64 (None: removed), new links, and files that are too large."""
    old, new = _files(tree), _files(site)
    changed: dict[str, str | None] = dict.fromkeys(sorted(old.keys() - new.keys()))
    links: list[str] = []
    large: list[str] = []
    total = 0
    for name, path in sorted(new.items()):
        if path.is_symlink() or not path.is_file():
            links.append(name)
        elif name not in old or not filecmp.cmp(old[name], path, shallow=False):
            size = path.stat().st_size
            total += size
            if size > _ONE or total > _ALL or len(changed) >= _FILES:
                large.append(name)
            else:
                changed[name] = base64.b64encode(path.read_bytes()).decode()
    return changed, links[:_FILES], large[:_FILES]


def _lines(file: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return file.read_text("utf-8", "replace")[:_TAIL].splitlines()
    return []


if __name__ == "__main__":
    sys.exit(main())
