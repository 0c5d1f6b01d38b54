"""Hints: the next command to run, and explanations of operating system errors."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from builder.applier.files import UnusableFile
from builder.common.paths import cache_dir

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PROGRAM = "spark-build"
#: Hints for unusable places, by kind.
TEMPORARY = "set TMPDIR to another folder"
CACHE = "set SPARK_BUILD_CACHE to another folder"
OUTPUT = "choose another place with --output oci:DIR"
ELSEWHERE = "name another place"

_ADVICE = {
    errno.ENOSPC: "free some space, or {elsewhere}",
    errno.EDQUOT: "free some space (a quota is used up), or {elsewhere}",
    errno.EFBIG: "the file is larger than that disk or 'ulimit -f' allows; {elsewhere}",
    errno.EACCES: "see who may use it with: ls -ld {path}; or {elsewhere}",
    errno.EPERM: "see who may use it with: ls -ld {path}; or {elsewhere}",
    errno.EROFS: "it is mounted read-only; {elsewhere}",
    errno.ENOTDIR: "a file is where a folder is needed; {elsewhere}",
    errno.EEXIST: "a file is where a folder is needed; {elsewhere}",
    errno.EISDIR: "a folder is where a file is needed; {elsewhere}",
    errno.ENAMETOOLONG: "give it a shorter name",
    errno.ELOOP: "a link leads back to itself; see: namei -l {path}",
    errno.EMFILE: "too many files are open at once; allow more with: ulimit -n 4096",
    errno.ENFILE: "too many files are open on this machine; end other programs",
    errno.EIO: "the disk, or the connection to it, fails (see: dmesg); {elsewhere}",
    errno.ESTALE: "the network disk was exchanged; mount it again, or {elsewhere}",
}
_SQLITE = {"FULL": errno.ENOSPC, "READONLY": errno.EROFS, "IOERR": errno.EIO, "PERM": errno.EACCES}

#: The words of the current command.
_words: list[str] = []
#: How the user starts the program, and the commands in a text that are started so.
_start, _commands = PROGRAM, re.compile("(?!)")


def started_as(start: str, commands: Iterable[str]) -> None:
    """Store how the user starts the program; ``commands`` are the names of its commands."""
    global _start, _commands  # noqa: PLW0603 - of this process, like its arguments
    names = "|".join(map(re.escape, commands))
    _start = start
    _commands = re.compile(rf"(?<![\w./:@=-]){PROGRAM}(?= (?:(?:{names})(?![\w-])|-|\[OPTIONS))")


def as_started(text: str) -> str:
    """A text with its commands of spark-build as the user can run them.

    Texts name the program ``spark-build``.  In a checkout it is ``.venv/bin/spark-build``, with uvx
    ``uvx --from ... spark-build``.
    """
    return text if _start == PROGRAM else _commands.sub(lambda _: _start, text)


def start_of_this_process() -> str:
    """How this process was started, as words that a shell starts it with again."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return f"{_from_here(sys.orig_argv[0])} -m builder"
    if _of_uvx():
        return _uvx()
    on_path = shutil.which(PROGRAM)
    if program.name != PROGRAM or (on_path and Path(on_path).resolve() == program.resolve()):
        return PROGRAM
    words = _from_here(str(program))
    return words if "/" in words else f"./{words}"


def _from_here(program: str) -> str:
    """The path of a program, as a word of a shell; relative if it is below the current folder."""
    with suppress(ValueError, OSError):
        program = str(Path(program).relative_to(Path.cwd()))
    return shlex.quote(program)


def _of_uvx() -> bool:
    """Whether uvx made this environment, in its cache; uv names itself to what it starts."""
    return "UV" in os.environ and any(p.startswith("archive-v") for p in Path(sys.prefix).parts)


def _uvx() -> str:
    """The command of uvx for the source of this installation (PEP 610)."""
    import json
    from importlib import metadata
    from urllib.parse import unquote, urlsplit

    source = ""
    with suppress(metadata.PackageNotFoundError, OSError, ValueError):
        text = metadata.distribution(PROGRAM).read_text("direct_url.json") or "{}"
        origin = json.loads(text)
        address = str(origin.get("url", ""))
        if "vcs_info" in origin:
            revision = origin["vcs_info"].get("requested_revision")
            source = f"{origin['vcs_info']['vcs']}+{address}{f'@{revision}' if revision else ''}"
        elif address.startswith("file:"):
            source = unquote(urlsplit(address).path)
        else:
            source = address
    return shlex.join(["uvx", *(["--from", source] if source else []), PROGRAM])


def running(begins: Sequence[str]) -> None:
    """Store the words of the current command."""
    _words[:] = begins


def words() -> list[str]:
    """The words of the current command."""
    return list(_words)


def instead(word: str, better: str) -> str:
    """The user's command line with one word replaced, also after ``--option=``."""
    ends = f"={word}"
    given = [
        better if w == word else w.removesuffix(word) + better if w.endswith(ends) else w
        for w in _words
    ]
    return shlex.join([PROGRAM, *given]) if given != _words else better


def again(*more: str, without: Sequence[str] = ()) -> str:
    """The user's command line with ``more`` words, and without some options."""
    words = [word for word in _words if word not in without]
    return shlex.join([PROGRAM, *words, *more])


def in_place_of(option: str, value: str, *more: str) -> str:
    """The user's command line with the options ``more`` in place of ``option value``."""
    words: list[str] = []
    rest = list(_words)
    while rest:
        word = rest.pop(0)
        name, equals, given = word.partition("=")
        if name != option and (name not in more or not name.startswith("-")):
            words.append(word)
            continue
        if not equals and rest:
            given = rest.pop(0)
        if name == option and given != value:
            words += [word] if equals else [word, given]
    return shlex.join([PROGRAM, *words, *more])


def reason(error: Exception) -> str:
    """Why a file cannot be read, without Python's numbers and names."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not text in UTF-8"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    module, name = type(error).__module__, type(error).__name__
    if (module, name) in (("msgspec", "DecodeError"), ("json.decoder", "JSONDecodeError")):
        return "it is not valid JSON"  # msgspec: "Input data was truncated", for an empty file too
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def os_hint(error: Exception, elsewhere: str) -> str:
    """The hint for an operating system error at a path; ``elsewhere`` suggests another path."""
    path = shlex.quote(str(_there(getattr(error, "filename", None) or ".")))
    return _ADVICE.get(_number(error), "{elsewhere}").format(path=path, elsewhere=elsewhere)


def _there(name: str | bytes | int) -> Path:
    """A path, or its nearest existing parent."""
    path = Path(str(name)).absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def _number(error: Exception) -> int:
    name = str(getattr(error, "sqlite_errorname", "")).removeprefix("SQLITE_").partition("_")[0]
    return _SQLITE.get(name) or getattr(error, "errno", None) or 0


def of_the_system(error: Exception) -> tuple[str, str] | None:
    """Message and hint for an unexpected error of the operating system."""
    if isinstance(error, UnusableFile):
        return f"cannot read {error.filename}: {error.strerror}", "give it a regular file"
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # of pathlib
        return f"{error}", "remove the link"
    if type(error).__module__ not in {"builtins", "sqlite3"}:  # TLS and HTTP have their own
        return None
    if isinstance(error, FileNotFoundError):
        try:
            Path.cwd()
        except FileNotFoundError:
            hint = f"cd to a folder that exists, then: {again()}"
            return "the working directory no longer exists", hint
    number = _number(error)
    if number not in _ADVICE:
        return None
    path = getattr(error, "filename", None)
    subject = f"cannot use {path}" if path else "cannot use a file"
    reason = getattr(error, "strerror", None) or str(error)
    return f"{subject}: {reason}", os_hint(error, CACHE if _in_cache(path) else ELSEWHERE)


def _in_cache(path: object) -> bool:
    """Whether a path is in the cache, which its user chose with a variable."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        return False
    cache = os.path.realpath(cache_dir())
    return os.path.realpath(os.fsdecode(path)).startswith(f"{cache}{os.sep}")


#: Characters of a user's word in a message.
_SHOWN = 200


def shortened(word: str) -> str:
    """A word for a message: a long one is cut."""
    return word if len(word) <= _SHOWN else f"{word[:_SHOWN]}..."
