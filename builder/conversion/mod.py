"""Reads a mod (a folder or zip file with ``run.sh``) and turns what it does into ops.

eugr's scripts and sparkrun run mods in a container before the server starts.  The script
is read, not run.  Its changes to files of installed packages become ops; other commands are
reported with their line.
"""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement

from builder.conversion.draft import DraftOp
from builder.conversion.patchfile import patch_ops, read_patch
from builder.conversion.sed import read_sed
from builder.conversion.shell import UNKNOWN, Command, read_script
from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from builder.conversion.patchfile import OpKeys, Patch

#: Size limit of a file in a mod's zip; patches and Python files are far smaller.
_LARGEST = 16 << 20
#: Commands that change nothing in an installed package.
_HARMLESS = frozenset(
    (  # noqa: SIM905 - readable as a list of commands
        "set cd echo printf test [ [[ : true false exit return shift local readonly declare chmod "
        "command which grep egrep cat head tail awk tee mkdir ls pwd dirname basename id trap "
        "unset source . shopt find sleep wait export wc sort tr cut"
    ).split()
)
_SITE = re.compile(r"(?:site|dist)-packages/?(.*)$", re.DOTALL)
_PULL = re.compile(
    r"[/.]github(?:usercontent)?\.com/(?:raw/)?([\w.-]+/[\w.-]+)/pull/(\d+)\.(?:diff|patch)"
)
_SERVER = "VLLM_"


@dataclass
class ModOps:
    """The result of reading a mod."""

    ops: list[DraftOp] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    unconverted: list[str] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)


def mod_files(path: Path) -> dict[str, bytes]:
    """The files of a mod, by their path in it; large ones, which no op holds, are left out.

    Raises:
        UsageError: it is neither a folder nor a zip file with ``run.sh``.
    """
    files: dict[str, bytes] = {}
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file() and file.stat().st_size <= _LARGEST:
                files[file.relative_to(path).as_posix()] = file.read_bytes()
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if not info.is_dir() and info.file_size <= _LARGEST:
                    files[info.filename] = archive.read(info)
    if "run.sh" not in files:
        raise UsageError(f"{path} is not a mod: it has no run.sh")
    return files


def read_mod(name: str, files: Mapping[str, bytes], package: str = "") -> ModOps:
    """Convert a mod to ops.

    Raises:
        UsageError: a patch of the mod is malformed or changes several packages.
    """
    reader = _Mod(name, files, package)
    for command in read_script(files["run.sh"]):
        reader.command(command)
    return reader.found


class _Mod:
    def __init__(self, name: str, files: Mapping[str, bytes], package: str) -> None:
        self.name, self.files, self.package = name, files, package
        self.found = ModOps()

    def command(self, command: Command) -> None:
        if command.exports:
            self.export(command)
            return
        name = command.name.replace("-", "_")
        if name in ("python3", "python", "pip", "pip3", "uv"):
            self.python(command)
            return
        handler = getattr(self, f"do_{name}", None) if name.isidentifier() else None
        if handler:
            handler(command)
        elif name not in _HARMLESS and not (name == "rm" and "__pycache__" in command.text):
            self.skip(command, "spark-build has no op for it")

    def skip(self, command: Command, why: str) -> None:
        first = command.text.splitlines()[0] if command.text else command.name
        text = first if len(first) <= 100 else first[:97] + "..."
        self.found.unconverted.append(f"run.sh line {command.line}: {text} ({why})")

    def add(self, command: Command, keys: OpKeys) -> None:
        comments = [f"run.sh line {command.line}"]
        if command.inside:
            comments.append(f"the mod does this only inside {', '.join(command.inside)}")
        op = DraftOp(keys=dict(keys), comments=(", ".join(comments),))
        if all(op.keys != other.keys for other in self.found.ops):
            self.found.ops.append(op)

    # -- one method for each command

    def do_patch(self, command: Command) -> None:
        words = list(command.words[1:])
        if "--dry-run" in words:
            return
        named = [words[i + 1] for i, w in enumerate(words[:-1]) if w in ("-i", "--input")]
        self.patch(command, named[0] if named else command.stdin)

    def do_git(self, command: Command) -> None:
        words = command.words
        if "apply" not in words:
            self.skip(command, "spark-build has no op for it")
            return
        arguments = words[words.index("apply") + 1 :]
        if any(word in ("--check", "--stat", "--summary") for word in arguments):
            return
        if any(word in ("-R", "--reverse") for word in arguments):
            self.skip(command, "it reverts a patch")
            return
        exclude = [w.partition("=")[2] for w in arguments if w.startswith("--exclude=")]
        files = [w for w in arguments if not w.startswith("-")]
        for file in files or [command.stdin]:
            self.patch(command, file, exclude)

    def patch(self, command: Command, file: str, exclude: list[str] | None = None) -> None:
        """A patch in the mod's folder, or a pull request that the mod downloads."""
        source = command.source
        if source is not None and source.name in ("curl", "wget"):
            self.pull(command, source, exclude or [])
            return
        name = self.own_file(file)
        if name is None:
            self.skip(command, "the patch is not a file of the mod")
            return
        patch = read_patch(name, self.files[name], package=self.package, exclude=exclude or ())
        self.package_of(patch)
        for op, text in patch_ops(patch):
            stored = str(op["file"])
            self.found.files[stored] = text
            self.add(command, op)
        self.found.dropped += [f"{path} of {name} ({why})" for path, why in patch.parts.dropped]

    def package_of(self, patch: Patch) -> None:
        if patch.package not in self.found.packages:
            self.found.packages.append(patch.package)

    def pull(self, command: Command, source: Command, exclude: list[str]) -> None:
        match = next(filter(None, (_PULL.search(word) for word in source.words)), None)
        if match is None:
            self.skip(command, "it downloads a patch that is not a pull request of GitHub")
            return
        keys: OpKeys = {"op": "pull", "pull": f"{match[1]}#{match[2]}"}
        if exclude:
            keys["exclude"] = exclude
        self.add(command, keys)

    def do_curl(self, command: Command) -> None:
        if not any(_PULL.search(word) for word in command.words):
            self.skip(command, "it downloads a file that is not pinned")

    do_wget = do_curl

    def do_sed(self, command: Command) -> None:
        if not any(re.match(r"-\w*i|--in-place", word) for word in command.words[1:]):
            return  # it prints: nothing changes
        read = read_sed(command.words)
        if read.problem:
            self.skip(command, read.problem)
            return
        for file in read.files:
            path = self.installed(command, file)
            if path is None:
                self.skip(command, "which file it edits is known only when it runs")
                return
            for one in read.replacements:
                if UNKNOWN in one.old + one.new:
                    self.skip(command, "its texts are known only when it runs")
                    return
                keys: OpKeys = {
                    "op": "replace",
                    "file": path,
                    "old": one.old,
                    "new": one.new,
                    "count": 1,
                }
                self.add(command, keys)

    def do_cp(self, command: Command) -> None:
        words = [word for word in command.words[1:] if not word.startswith("-")]
        target = self.installed(command, words[-1]) if len(words) > 1 else None
        if target is None:
            self.skip(command, "it does not copy into an installed package")
            return
        for word in words[:-1]:
            names = self.own_files(word)
            if not names:
                self.skip(command, f"{word.replace(UNKNOWN, '...')} is not a file of the mod")
            for name in names:
                folder = words[-1].endswith("/") or not PurePosixPath(target).suffix
                base = PurePosixPath(name).name
                to = str(PurePosixPath(target) / base) if folder else target
                self.found.files[base] = self.files[name]
                self.add(command, {"op": "copy", "from": base, "to": to})

    do_install = do_cp

    def python(self, command: Command) -> None:
        words = [w for w in command.words if w != "-m"]
        if "install" in words and any(w in ("pip", "pip3") or w.endswith("/pip") for w in words):
            self.pip(command, words[words.index("install") + 1 :])
        elif command.words[0] in ("pip", "pip3", "uv") and not {"uninstall"} & set(words):
            return  # it prints
        elif "-c" in words and not re.search(r"\bwrite|open\([^)]*['\"]w", command.text):
            return  # it looks
        else:
            self.skip(command, "a Python program: write what it edits as replace ops, or as a hook")

    def pip(self, command: Command, words: list[str]) -> None:
        for word in words:
            if word.startswith("-"):
                continue
            try:
                wanted = Requirement(word)
            except InvalidRequirement:
                self.skip(command, f"{word.replace(UNKNOWN, '...')} is not a released wheel")
                continue
            exact = [s.version for s in wanted.specifier if s.operator == "=="]
            if len(exact) != 1 or exact[0].endswith(".*"):
                self.skip(command, f"{word} has no exact version")
                continue
            keys: OpKeys = {"op": "wheel", "distribution": wanted.name, "version": exact[0]}
            self.add(command, keys)

    def export(self, command: Command) -> None:
        """A variable: ``export`` in ``run.sh`` does not reach the server, an ``env`` op does."""
        for name, value in command.exports:
            if UNKNOWN in value:
                self.skip(command, "its value is known only when it runs")
            elif name.startswith(_SERVER):
                self.add(command, {"op": "env", "name": name, "value": value})
            elif name not in ("PATH", "PYTHONPATH"):
                why = f"give its op the reader: the file that reads {name}"
                self.skip(command, why)

    # -- paths

    def own_file(self, word: str) -> str | None:
        return next(iter(self.own_files(word)), None)

    def own_files(self, word: str) -> list[str]:
        """The mod's files for a word, which may have an unknown folder or be a pattern."""
        name = word.rpartition(UNKNOWN)[2].removeprefix("/").removeprefix("./")
        name = re.sub(rf"^/?workspace/mods/{re.escape(self.name)}/", "", name)
        return [file for file in self.files if fnmatchcase(file, name)] if name else []

    def installed(self, command: Command, word: str) -> str | None:
        """The path below site-packages for a word, or None."""
        match = _SITE.search(word)
        if match:
            return None if UNKNOWN in match[1] else match[1] or "."
        if UNKNOWN in word or word.startswith("/"):
            return None
        folder = _SITE.search(command.folder)
        return str(PurePosixPath(folder[1]) / word) if folder else None
