"""Runs git on the objects of a clone, without the clone's configuration.

A clone's configuration can name programs: ``gpg.program``, ``core.sshCommand``,
``core.fsmonitor``, filters, hooks and more.  So it is not read.  git works in an empty
repository of ours, whose refs and objects are those of the clone.  It knows no remote, and so
fetches nothing, even if objects are missing.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder.errors import RemoteError, UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

#: Seconds for one command; ``git rev-list`` of Linux's history takes about 30.
_PATIENCE = 300.0
#: Size limit of an answer other than a diff or an archive: a million commits.
_MAX_ANSWER = 64 << 20
_MAX_MESSAGE = 2000
_HEAD = re.compile(r"ref: refs/[\x21-\x7e]+|[0-9a-f]{40}(?:[0-9a-f]{24})?")
#: What the clone's own repository has besides objects; linked, so that nothing is copied.
_LINKED = ("refs", "packed-refs", "shallow", "reftable")
#: Where git looks for a repository needs the user's ``safe.directory``, and so the user's
#: configuration.  It runs nothing that a configuration names; these make sure of it.
_WARY = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", "--no-pager")


@dataclass(frozen=True)
class Answer:
    """An answer of git: its exit status, and its standard output."""

    code: int
    data: bytes

    @property
    def text(self) -> str:
        """The output as text, without line ends at its end."""
        return self.data.decode("utf-8", "replace").strip()


class Git:
    """git, on the refs and objects of one clone."""

    def __init__(self, folder: Path, patience: float = _PATIENCE) -> None:
        """Find the repository of a folder; ``patience`` is the limit of one command in seconds.

        Raises:
            RemoteError: git finds none, or cannot read it.
            UsageError: git is not installed.
        """
        self.folder = folder
        self._patience = patience
        words = ("rev-parse", "--path-format=absolute", "--git-dir", "--git-common-dir")
        outside = _without_git(os.environ) | {"GIT_ALLOW_PROTOCOL": "none"}
        command = ["git", *_WARY, "-C", str(folder), *words, "--show-object-format"]
        found = self._checked(command, outside, "rev-parse", (0,), _MAX_ANSWER)
        places = found.data.decode("utf-8", "surrogateescape").splitlines()
        if len(places) != 3:
            raise RemoteError(f"git rev-parse in {folder}: unexpected answer {found.text[:200]!r}")
        self._own, self._common, form = Path(places[0]), Path(places[1]), places[2]
        # removed when this object is
        self._scratch = tempfile.TemporaryDirectory(prefix="spark-build-clone-")
        self._imitate(Path(self._scratch.name), form)

    def _imitate(self, place: Path, form: str) -> None:
        """A repository of our own with the clone's refs."""
        extensions = [f"objectFormat = {form}"] if form != "sha1" else []
        for name in _LINKED:
            if (self._common / name).exists():
                (place / name).symlink_to(self._common / name)
        if (self._common / "reftable").is_dir():
            extensions.append("refStorage = reftable")
        settings = ["[core]", f"repositoryformatversion = {int(bool(extensions))}", "bare = true"]
        settings += ["[extensions]", *extensions] if extensions else []
        (place / "config").write_text("\n".join([*settings, ""]), "utf-8")
        head = self._own / "HEAD"
        text = ""
        if head.is_file():
            with head.open("rb") as stream:
                text = stream.read(4096).decode("ascii", "replace").strip()
        known = _HEAD.fullmatch(text)
        (place / "HEAD").write_text(f"{text if known else 'ref: refs/heads/none'}\n", "utf-8")

    @property
    def remote_urls(self) -> list[str]:
        """The addresses of the clone's remotes, from its configuration file alone."""
        file = self._common / "config"
        if not file.is_file():
            return []
        words = (
            "--file",
            str(file),
            "--no-includes",
            "--null",
            "--get-regexp",
            r"^remote\..*\.url$",
        )
        listed = self.run("config", *words, codes=(0, 1))
        return [row.partition("\n")[2] for row in listed.text.split("\0")]

    def run(self, *words: str, codes: Collection[int] = (0,), limit: int = _MAX_ANSWER) -> Answer:
        """Run a command of git; exit statuses other than ``codes`` are errors, signals too.

        Raises:
            RemoteError: it failed, took too long, or printed more than ``limit`` bytes.
        """
        place = self._scratch.name
        env = _without_git(os.environ) | {
            "GIT_DIR": place,
            "GIT_OBJECT_DIRECTORY": str(self._common / "objects"),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_SYSTEM": os.devnull,
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_ALLOW_PROTOCOL": "none",
            "HOME": place,
            "XDG_CONFIG_HOME": place,
        }
        settings = ["-c", "core.quotePath=false"]
        if words[0] == "diff-tree":  # else git 2.43 to 2.45 reads the attributes of HEAD
            settings += ["-c", "attr.tree=refs/none"]
        command = ["git", "--no-pager", *settings, *words]
        return self._checked(command, env, words[0], codes, limit)

    def _checked(
        self,
        command: list[str],
        env: Mapping[str, str],
        name: str,
        codes: Collection[int],
        limit: int,
    ) -> Answer:
        subject = f"git {name} in {self.folder}"
        late = threading.Event()
        with tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.Popen(
                    command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                )
            except FileNotFoundError:
                raise UsageError("git is not installed, and --forge-clone needs it") from None

            def stop() -> None:
                late.set()
                process.kill()

            timer = threading.Timer(self._patience, stop)
            timer.start()
            try:
                assert process.stdout is not None
                data = process.stdout.read(limit + 1)
                process.stdout.close()
                if len(data) > limit:
                    raise RemoteError(f"{subject}: the answer is larger than {limit >> 20} MiB")
                code = process.wait()
            finally:
                timer.cancel()
                process.kill()
                process.wait()
            errors.seek(0)
            message = errors.read(_MAX_MESSAGE).decode("utf-8", "replace").strip()
        if late.is_set():
            raise RemoteError(f"{subject}: no answer after {self._patience:.0f} s")
        if code not in codes:
            raise self._failure(subject, code, message)
        return Answer(code, data)

    def _failure(self, subject: str, code: int, message: str) -> RemoteError:
        how = f"ended by signal {-code}" if code < 0 else f"exit status {code}"
        place = shlex.quote(str(self.folder))
        hint = f"git -C {place} fsck"
        if hasattr(self, "_common") and any((self._common / "objects").glob("pack/*.promisor")):
            message += "; it is a partial clone, and spark-build fetches nothing for it"
            hint = f"git -C {place} fetch --refetch --no-filter origin"
        return RemoteError(f"{subject}: {how}: {message}", hint=hint)


def _without_git(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables for git, without those that change what it does."""
    kept = {name: value for name, value in variables.items() if not name.startswith("GIT_")}
    return kept | {"GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
