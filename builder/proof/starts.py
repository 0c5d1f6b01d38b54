"""How a container of an image starts Python: its entrypoint, ``vllm``, ``python -m``."""

from __future__ import annotations

import posixpath
import re
import shlex
from typing import TYPE_CHECKING

from builder.errors import UsageError
from builder.images.rootfs.tar import FILE
from builder.images.rootfs.view import DEFAULT_PATH
from builder.proof.searchpath import Build, Options, Start

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from builder.images.registry.model import ImageConfig
    from builder.images.rootfs.view import Interpreter
    from builder.proof.searchpath import Disk

#: The command of vLLM, and its module.
COMMAND, _MODULE = "vllm", "vllm.entrypoints.openai.api_server"
#: Homes of a user that the password file does not have: a runtime's, and what launchers set.
_NO_HOME = ("/", "/root")
_PASSWD, _PASSWD_BYTES = "/etc/passwd", 1 << 20
_PYTHON = re.compile(r"python(?P<version>3(\.\d+)?)?t?")
_VERSION = re.compile(r"python(3\.\d+)t?")
#: Bytes of a script's first line that Linux reads (``BINPRM_BUF_SIZE``).
_SHEBANG = 256
_SHELLS = ("sh", "bash", "dash")
#: The second line of a script whose first would be too long (pip), or that may be moved (uv).
_EXEC = re.compile(r"""'''exec' (?P<words>.+) "\$0" "\$@"\s*""")
_BESIDE = re.compile(r"""\"\$\(dirname -- "\$\(realpath -- "\$0"\)"\)"/'?(?P<name>[\w.]+)'?""")


def homes(env: Mapping[str, str], user: str, passwd: bytes) -> tuple[str, ...]:
    """The HOME that a runtime sets if the image does not: that of its user in ``/etc/passwd``."""
    if env.get("HOME"):
        return (env["HOME"],)
    wanted = user.partition(":")[0]
    for line in passwd.decode("utf-8", "replace").splitlines():
        fields = line.strip().split(":")
        if len(fields) > 5 and (wanted in (fields[0], fields[2]) if wanted else fields[2] == "0"):
            return (fields[5] or "/",)
    return _NO_HOME


def homes_of(disk: Disk, config: ImageConfig) -> tuple[str, ...]:
    """The homes that the image's user may have.

    Raises:
        UsageError: its password file is larger than any.
    """
    entry = None if config.env.get("HOME") else disk.stat(_PASSWD)
    if entry is not None and entry.row.size > _PASSWD_BYTES:
        raise UsageError(f"{_PASSWD} of the image has {entry.row.size} bytes")
    data = disk.read_known(_PASSWD) if entry is not None and entry.kind == FILE else None
    return homes(config.env, config.user, data or b"")


def starts_of(disk: Disk, config: ImageConfig, python: Interpreter) -> list[Start]:
    """Every start of the image, each with every HOME that it may have."""
    env = {"PATH": DEFAULT_PATH, **config.env}
    here = posixpath.normpath(posixpath.join("/", config.working_directory))
    settings = config.settings
    words = [*(settings.get("Entrypoint") or ()), *(settings.get("Cmd") or ())]
    called = [words] if words and all(isinstance(word, str) for word in words) else []
    called.append([COMMAND])
    called += [[name, "-m", _MODULE] for name in ("python3", "python", python.command)]
    starts = [
        start
        for home in homes_of(disk, config)
        for line in called
        if (start := _start(disk, line, {**env, "HOME": home}, here, python)) is not None
    ]
    return list({repr(start): start for start in starts}.values())


def build_of(disk: Disk, start: Start, python: Interpreter) -> Build:
    """What was compiled into the interpreter of a start, as its files tell."""
    path = found_on_path(disk, start.called, start.env, start.working_dir)
    real = (disk.realpath(path) if path else None) or python.command
    named = _VERSION.fullmatch(real.rpartition("/")[2])
    lib = python.stdlib[1].rpartition("/")[0].rpartition("/")[2] if python.stdlib else "lib"
    prefix = real.rpartition("/")[0].rpartition("/")[0]
    return Build(version=named[1] if named else python.version, prefix=prefix or "/", lib=lib)


def found_on_path(disk: Disk, program: str, env: Mapping[str, str], here: str) -> str:
    """Where a runtime finds a program; ``""`` if it does not."""
    if "/" in program:
        places = [posixpath.join(here, program)]
    else:
        places = [f"{posixpath.join(here, p)}/{program}" for p in env.get("PATH", "").split(":")]
    for place in places:
        entry = disk.stat(place)
        if entry is not None and entry.executable:
            return posixpath.normpath(place)
    return ""


def _start(
    disk: Disk, words: Sequence[str], env: Mapping[str, str], here: str, python: Interpreter
) -> Start | None:
    path = found_on_path(disk, words[0], env, here)
    if not path:
        return None
    names = {(disk.realpath(path) or path).rpartition("/")[2], path.rpartition("/")[2]}
    if any(map(_PYTHON.fullmatch, names)):
        called, options, script = words[0], tuple(words[1:]), ""
        rest = Options.of(options).rest
        script = rest[0] if rest else ""
    else:
        # of another program the first line is not read: if it is a script, Python runs it
        data = disk.read_known(path) if words[0].rpartition("/")[2] == COMMAND else None
        called, options = next(interpreter_of(disk, path, data), (python.command, ()))
        script = path
    return Start(
        called=called,
        options=options,
        script=script,
        env=env,
        working_dir=here,
        name=" ".join(words[:2]) if words[1:2] == ["-m"] else words[0],
    )


def interpreter_of(
    disk: Disk, path: str, script: bytes | None
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """How the first lines of a script call Python, with its options; nothing for other programs."""
    text = (script or b"")[: _SHEBANG * 4].decode("utf-8", "replace")
    first, *more = text.split("\n")
    if not first.startswith("#!"):
        return
    program, _, argument = first[2:_SHEBANG].strip().partition(" ")
    name, words = program.rpartition("/")[2], argument.split()
    if name == "env":
        words = words[1:] if words[:1] == ["-S"] else words[:1]
        if words and not words[0].startswith("-") and "=" not in words[0]:
            yield words[0], tuple(words[1:])
    elif name in _SHELLS and more and (match := _EXEC.match(more[0])):
        yield from _executed(disk, path, match["words"])
    elif name not in _SHELLS and program:
        yield program, ((argument.strip(),) if argument.strip() else ())


def _executed(disk: Disk, path: str, text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The program of an ``exec`` in a shell's line."""
    beside = _BESIDE.fullmatch(text.strip())
    if beside:
        folder = (disk.realpath(path) or path).rpartition("/")[0]
        yield f"{folder}/{beside['name']}", ()
        return
    try:
        words = shlex.split(text)
    except ValueError:
        return
    if words and words[0].startswith("/"):
        yield words[0], tuple(words[1:])
