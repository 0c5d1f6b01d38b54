"""Clones whose configuration names programs, and clones with damaged or missing objects."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from builder.common.forge import Clone, Forges, Git, PullStore, parse_pull
from builder.errors import RemoteError, UsageError
from tests.forge import Repository

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.conftest import Called

NAME = "vllm-project/vllm"
CODE = "".join(f"line_{number} = {number}\n" for number in range(30))
SIGNATURE = "gpgsig -----BEGIN PGP SIGNATURE-----\n \n iQ==\n -----END PGP SIGNATURE-----\n"
#: Settings of a clone that make git run a program, and the plain command that shows it.
TRAPS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "gpg.program": ({"log.showSignature": "true"}, ("log", "-1", "signed")),
    "core.fsmonitor": ({}, ("status",)),
    "filter.trap.smudge": ({}, ("archive", "--format=tar", "pr")),
    "diff.trap.textconv": ({}, ("log", "-p", "-1", "pr")),
    "diff.trap.command": ({}, ("diff", "main", "pr")),
    "diff.external": ({}, ("diff", "main", "pr", "--", "vllm/b.py")),
    "remote.origin.uploadpack": (
        {"remote.origin.promisor": "true", "core.repositoryFormatVersion": "1",
         "extensions.partialClone": "origin"},
        ("diff", "main", "missing"),
    ),
    "core.sshCommand": (
        {"remote.origin.promisor": "true", "remote.origin.url": "ssh://127.0.0.1/vllm-project/vllm",
         "core.repositoryFormatVersion": "1", "extensions.partialClone": "origin"},
        ("diff", "main", "missing"),
    ),
}  # fmt: skip
#: Others that name programs; which command runs them differs from version to version of git.
MORE = (
    "core.pager", "pager.diff-tree", "pager.rev-list", "pager.show", "core.editor", "core.askPass",
    "credential.helper", "core.gitProxy", "core.alternateRefsCommand", "gpg.ssh.program",
    "gpg.x509.program", "uploadpack.packObjectsHook", "tar.tar.command", "tar.tar.gz.command",
    "filter.trap.clean", "filter.trap.process", "merge.trap.driver", "sequence.editor",
    "alias.diff-tree", "alias.rev-parse", "trailer.x.cmd", "mailmap.file", "interactive.diffFilter",
)  # fmt: skip


class Hostile:
    """A clone with every trap, and the file that a sprung trap writes."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder / "mark"
        self.program = folder / "program"
        self.program.write_text(f'#!/bin/sh\necho "$0 $*" >> {self.mark}\nexit 0\n')
        self.program.chmod(0o755)
        self.repository = Repository(folder / "clone")
        self.at = self.repository.folder
        start = {"vllm/__init__.py": "", "vllm/a.py": CODE, "vllm/b.py": CODE}
        self.repository.commit("start", {**start, ".gitattributes": "a.py diff=trap filter=trap\n"})
        self.repository.branch("missing", "main")
        self.repository.commit("unavailable", {"vllm/b.py": "gone = 1\n" + CODE})
        self.repository.branch("pr", "main")
        changed = CODE.replace("line_9 = 9", "line_9 = 99")
        self.head = self.repository.commit("change", {"vllm/a.py": changed, "vllm/b.py": changed})
        self.repository.git("update-ref", "refs/pull/1/head", self.head)
        self.repository.git("update-ref", "refs/pull/2/head", "missing")
        self._sign()
        self.repository.git("checkout", "-q", "-f", "main")

    def _sign(self) -> None:
        body = self.repository.run("cat-file", "commit", self.head).decode()
        head, _, message = body.partition("\n\n")
        signed = self.at / "commit"
        signed.write_text(f"{head}\n{SIGNATURE}\n{message}")
        name = self.repository.git("hash-object", "-w", "-t", "commit", str(signed))
        signed.unlink()
        self.repository.git("update-ref", "refs/heads/signed", name)
        self.repository.git("update-ref", "refs/pull/1/head", name)

    def lose(self, path: str) -> None:
        """Remove the object of a file."""
        name = self.repository.git("rev-parse", path)
        (self.at / ".git" / "objects" / name[:2] / name[2:]).unlink()

    def set(self, key: str, value: str | None = None) -> None:
        """A setting in the clone's own configuration: by default the program."""
        config = str(self.at / ".git" / "config")
        self.repository.git("config", "--file", config, key, value or str(self.program))

    def hooks(self) -> None:
        """Every hook that git knows by its name."""
        folder = self.at / "hooks"
        folder.mkdir()
        for name in ("reference-transaction", "post-index-change", "fsmonitor-watchman",
                     "post-checkout", "pre-auto-gc", "proc-receive"):  # fmt: skip
            (folder / name).symlink_to(self.program)
        self.set("core.hooksPath", str(folder))

    def used(self, number: int = 1) -> str:
        """Ask the clone for all that a pull request needs; gives the error, if there is one."""
        try:
            clone = Clone(self.at)
            clone.holds(NAME)
            facts = clone.facts(parse_pull(f"{NAME}#{number}"))
            clone.facts(parse_pull(f"{NAME}@{self.head[:12]}"))
            base = clone.merge_base(NAME, facts.target, facts.commit)
            clone.date(NAME, facts.commit)
            clone.releases_with(NAME, facts.commit)
            clone.archive(NAME, facts.commit)
            clone.diff(NAME, base, facts.commit)
        except (RemoteError, UsageError) as error:
            return f"{error.code} {error} {error.hint}"
        return ""


@pytest.fixture
def hostile(tmp_path: Path) -> Hostile:
    return Hostile(tmp_path)


@pytest.mark.parametrize("trap", TRAPS)
def test_no_program_of_a_clone_runs(hostile: Hostile, trap: str) -> None:
    more, command = TRAPS[trap]
    hostile.set(trap)
    hostile.set("remote.origin.url", str(hostile.at))
    for key, value in more.items():
        hostile.set(key, value)
    hostile.lose("missing:vllm/b.py")
    hostile.used()
    hostile.used(2)
    assert not hostile.mark.exists(), hostile.mark.read_text()
    # the trap works: plain git runs the program
    words = ["git", "-C", str(hostile.at), *command]
    subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert hostile.mark.exists(), f"{trap} is no trap"


def test_nor_any_other_program(hostile: Hostile, monkeypatch: pytest.MonkeyPatch) -> None:
    """All settings at once, hooks too, included by other files, and from the environment."""
    for key in (*MORE, *TRAPS):
        hostile.set(key)
    for more, _ in TRAPS.values():
        for key, value in more.items():
            hostile.set(key, value)
    hostile.hooks()
    hostile.lose("missing:vllm/b.py")
    config = hostile.at / ".git" / "config"
    included = hostile.at / ".git" / "more"
    included.write_bytes(config.read_bytes())
    with config.open("a") as file:
        file.write(f'[include]\n path = {included}\n[includeIf "gitdir:/**"]\n path = {included}\n')
    for name in ("EXTERNAL_DIFF", "PAGER", "SSH_COMMAND", "SSH", "ASKPASS", "EDITOR"):
        monkeypatch.setenv(f"GIT_{name}", str(hostile.program))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "diff.external")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", str(hostile.program))
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert hostile.used() == ""
    assert "exit status" in hostile.used(2)
    assert not hostile.mark.exists(), hostile.mark.read_text()


def test_replaced_objects_and_attributes_do_not_change_a_diff(hostile: Hostile) -> None:
    """The forge has neither, and a pin made with one must hold with the other."""
    clone = Clone(hostile.at)
    diff = clone.diff(NAME, hostile.repository.git("rev-parse", "main"), hostile.head)
    hostile.repository.git("replace", hostile.head, "missing")
    (hostile.at / ".git" / "info" / "attributes").write_text("* -diff\n")
    (hostile.at / ".gitattributes").write_text("* -diff\n")
    base = hostile.repository.git("rev-parse", "main")
    assert Clone(hostile.at).diff(NAME, base, hostile.head) == diff
    assert b"+line_9 = 99" in diff


def test_a_user_s_own_settings_do_not_change_a_diff(
    hostile: Hostile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = hostile.repository.git("rev-parse", "main")
    diff = Clone(hostile.at).diff(NAME, main, hostile.head)
    (tmp_path / ".gitconfig").write_text(
        "[diff]\n noprefix = true\n context = 9\n algorithm = patience\n"
        "[log]\n showSignature = true\n date = relative\n[color]\n ui = always\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Clone(hostile.at).diff(NAME, main, hostile.head) == diff
    assert Clone(hostile.at).date(NAME, hostile.head).startswith("2026-")


# ------------------------------------------------------------------------------ broken and partial


def test_an_unreadable_object_gives_no_half_of_a_pull_request(
    hostile: Hostile, spark_build: Callable[..., Called], wheels: object
) -> None:
    """git prints the first file's diff, and ends with 128 at the second."""
    main = hostile.repository.git("rev-parse", "main")
    hostile.lose("pr:vllm/b.py")
    with pytest.raises(RemoteError, match=r"git diff-tree .*: exit status 128: .*unable to read"):
        Clone(hostile.at).diff(NAME, main, hostile.head)
    words = ["plan", "--with-pr", f"{NAME}#1", "-b", "pypi:vllm==1.0.0"]
    done = spark_build(*words, "--forge-clone", hostile.at)
    assert done.code == 8
    assert f"try: git -C {hostile.at} fsck" in done.err


def test_a_partial_clone_fetches_nothing_and_says_how_to_get_the_rest(
    hostile: Hostile, tmp_path: Path
) -> None:
    """It was "empty" before, with exit 3."""
    hostile.set("uploadpack.allowFilter", "true")
    partial = tmp_path / "partial"
    words = ["--bare", "--filter=blob:none", "--mirror", f"file://{hostile.at}", str(partial)]
    subprocess.run(["git", "clone", "-q", *words], check=True, capture_output=True)
    ref = parse_pull(f"{NAME}#1")
    with pytest.raises(
        RemoteError, match="it is a partial clone, and spark-build fetches"
    ) as error:
        PullStore(Forges([f"{NAME}={partial}"])).resolve(ref)
    assert error.value.hint == f"git -C {partial} fetch --refetch --no-filter origin"
    subprocess.run(error.value.hint.split(), check=True, capture_output=True)
    assert PullStore(Forges([f"{NAME}={partial}"])).resolve(ref).size > 0


def test_a_signal_is_an_error(
    hostile: Hostile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A git that is killed has not answered, whatever it printed before."""
    git = Git(hostile.at)
    (tmp_path / "bin").mkdir()
    broken = tmp_path / "bin" / "git"
    broken.write_text("#!/bin/sh\necho half\nkill -KILL $$\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(RemoteError, match=f"ended by signal {int(signal.SIGKILL)}"):
        git.run("diff-tree")


def test_a_git_that_does_not_end_is_ended(hostile: Hostile) -> None:
    """A clone can have a FIFO where git expects a file."""
    (hostile.at / ".git" / "packed-refs").unlink(missing_ok=True)
    os.mkfifo(hostile.at / ".git" / "packed-refs")
    with pytest.raises(RemoteError, match="no answer after"):
        Git(hostile.at, patience=0.2).run("for-each-ref")


def test_an_answer_has_a_limit(hostile: Hostile) -> None:
    git = Git(hostile.at)
    size = len(git.run("rev-list", "--all").data)
    assert len(git.run("rev-list", "--all", limit=size).data) == size
    with pytest.raises(RemoteError, match="the answer is larger than 0 MiB"):
        git.run("rev-list", "--all", limit=size - 1)


@pytest.mark.parametrize("kind", ["worktree", "sha256", "packed", "shared", "file"])
def test_clones_of_every_form(hostile: Hostile, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "other"
    head = hostile.repository.git("rev-parse", "pr")
    if kind == "worktree":
        hostile.repository.git("worktree", "add", "-q", str(folder), "pr")
    elif kind == "sha256":
        folder.mkdir()
        run = ["git", "-C", str(folder)]
        subprocess.run([*run, "init", "-q", "--object-format=sha256"], check=True)
        (folder / "a").write_text("1\n")
        subprocess.run([*run, "add", "a"], check=True)
        who = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        subprocess.run([*run, *who, "commit", "-qm", "one"], check=True)
        head = subprocess.check_output([*run, "rev-parse", "HEAD"], text=True).strip()
        assert len(head) == 64
    elif kind == "packed":
        hostile.repository.git("gc", "-q")
        folder = hostile.at / "vllm"  # a folder inside it names it too
    else:
        words = ["--shared"] if kind == "shared" else [f"--separate-git-dir={tmp_path}/dir"]
        subprocess.run(["git", "clone", "-q", *words, hostile.at, folder], check=True)
    assert Clone(folder).commit(NAME, head[:12]) == head
