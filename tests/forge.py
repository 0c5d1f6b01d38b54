"""A forge on the loopback interface: GitHub's API shapes, answered from a real git repository.

The history is made by git itself, so that merge bases, diffs and ancestry are its own.  Faults are
switched on by tests, and every request is kept with its headers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from tests.loopback import LoopbackHandler, LoopbackServer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

#: Where GitHub Enterprise Server has its API, and so where this forge has.
API = "/api/v3"
_FIRST_DAY = 1_767_225_600  # 2026-01-01, one day for each commit
#: Commands of git that change nothing: asked the same, they answer the same until another one runs.
_READING = {"archive", "diff", "ls-tree", "merge-base", "rev-list", "rev-parse", "show"}


class Repository:
    """A git repository whose commits are the same every time."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._commits = 0
        self._answers: dict[tuple[str, ...], bytes] = {}
        self.git("init", "-q", "-b", "main")

    def git(self, *words: str) -> str:
        """Run git; its output."""
        return self.run(*words).decode("utf-8", "replace").strip()

    def run(self, *words: str) -> bytes:
        """Run git; its output as it is.  Many tests ask one repository the same."""
        if words[2 if words[0] == "-c" else 0] not in _READING:
            self._answers.clear()
            return self._run(words)
        if words not in self._answers:
            self._answers[words] = self._run(words)
        return self._answers[words]

    def _run(self, words: tuple[str, ...]) -> bytes:
        date = f"{_FIRST_DAY + self._commits * 86_400} +0000"
        identity = {"NAME": "A Developer", "EMAIL": "developer@example.org"}
        env = {f"GIT_{who}_{k}": v for who in ("AUTHOR", "COMMITTER") for k, v in identity.items()}
        env |= {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
        env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        return subprocess.run(
            ["git", "-C", str(self.folder), *words],
            env={**os.environ, **env},
            capture_output=True,
            check=True,
        ).stdout

    def commit(
        self,
        message: str,
        changes: Mapping[str, bytes | str | None],
        *,
        modes: Mapping[str, int] | None = None,
    ) -> str:
        """Write and delete files, and commit them; the commit's name."""
        for path, data in changes.items():
            target = self.folder / path
            if data is None:
                target.unlink()
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data.encode() if isinstance(data, str) else data)
        for path, mode in (modes or {}).items():
            (self.folder / path).chmod(mode)
        self.git("add", "-A")
        return self._committed("commit", "-q", "--allow-empty", "-m", message)

    def _committed(self, *words: str) -> str:
        self._commits += 1
        self.git(*words)
        return self.git("rev-parse", "HEAD")

    def branch(self, name: str, start: str) -> None:
        """Start a branch."""
        self.git("checkout", "-q", "-f", "-B", name, start)

    def merge(self, name: str, message: str) -> str:
        """Merge a branch into main with a merge commit."""
        self.git("checkout", "-q", "main")
        return self._committed("merge", "-q", "--no-ff", "-m", message, name)

    def squash(self, name: str, message: str) -> str:
        """Bring a branch into main as one commit."""
        self.git("checkout", "-q", "main")
        self.git("merge", "-q", "--squash", name)
        return self._committed("commit", "-q", "-m", message)

    def read(self, commit: str, path: str) -> bytes:
        """A file of a commit."""
        return self.run("show", f"{commit}:{path}")

    def files(self, commit: str, below: str) -> dict[str, bytes]:
        """The files of a commit below a folder."""
        names = self.git("ls-tree", "-r", "--name-only", commit, below).splitlines()
        return {name: self.read(commit, name) for name in names}


@dataclass
class Pull:
    """A pull request; ``head`` and ``merge_commit`` are commits, ``base`` a branch."""

    head: str
    title: str
    base: str = "main"
    state: str = "open"
    body: str = ""
    merge_commit: str = ""
    comments: list[str] = field(default_factory=list)


@dataclass
class Fault:
    """An answer in place of the right one, for paths that hold ``path``, so many times."""

    path: str
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b'{"message": "no"}'
    times: int = 1 << 30
    delay: float = 0.0


class LocalForge(LoopbackServer):
    """Serves one repository; use it as a context manager."""

    def __init__(self, repository: Repository, name: str = "vllm-project/vllm") -> None:
        self.repository, self.name = repository, name
        self.pulls: dict[int, Pull] = {}
        self.faults: list[Fault] = []
        #: former names of the repository
        self.former: set[str] = set()
        #: commits that were pruned after a force-push
        self.forgotten: set[str] = set()
        self.requests: list[tuple[str, dict[str, str]]] = []
        self._packed = 0
        self.listen(_Handler)

    @property
    def root(self) -> str:
        """The server's address, as ``SPARK_BUILD_FORGE`` takes it."""
        return self.url

    @property
    def paths(self) -> list[str]:
        """What was asked for, in order."""
        return [path.removeprefix(API) for path, _ in self.requests]

    # -- the API, as far as it is used

    def answer(self, path: str, accept: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a path below the API."""
        wants_diff = "diff" in accept
        match = re.match(r"/repos/([^/]+/[^/]+)(/.*)?$", path.partition("?")[0])
        if match and match[1] in self.former:
            return 301, {"Location": f"{self.root}{API}/repositories/7{match[2] or ''}"}, b""
        rest = path.partition("?")[0].removeprefix("/repositories/7")
        if match:
            rest = (match[2] or "") if match[1].lower() == self.name.lower() else "/missing"
        pull = re.fullmatch(r"/pulls/(\d+)", rest)
        comments = re.fullmatch(r"/issues/(\d+)/comments", rest)
        compare = re.fullmatch(r"/compare/(\w+)\.\.\.(\w+)", rest)
        commit = re.fullmatch(r"/commits/(\w+)", rest)
        tarball = re.fullmatch(r"/tarball/(\w+)", rest)
        issue = re.fullmatch(r"/issues/(\d+)", rest)
        with suppress(subprocess.CalledProcessError):
            if pull and int(pull[1]) in self.pulls:
                return _ok(self._pull(int(pull[1])))
            if comments and int(comments[1]) in self.pulls:
                said = self.pulls[int(comments[1])].comments
                return _ok([{"body": text} for text in said])
            if issue and int(issue[1]) in self.pulls:
                return _ok(self._issue(int(issue[1])))
            if rest == "/commits":
                return _ok(self._listed(parse_qs(path.partition("?")[2])))
            if compare:
                return self._compare(self._known(compare[1]), self._known(compare[2]), wants_diff)
            if commit:
                return _ok(self._commit(self._known(commit[1])))
            if tarball:
                return self._tarball(self._known(tarball[1]))
        return 404, {}, b'{"message": "Not Found"}'

    def _known(self, name: str) -> str:
        commit = self.repository.git("rev-parse", "--verify", "-q", f"{name}^{{commit}}")
        if commit in self.forgotten:
            raise subprocess.CalledProcessError(128, "git")
        return commit

    def _pull(self, number: int) -> dict[str, Any]:
        pull, git = self.pulls[number], self.repository.git
        merged = bool(pull.merge_commit)
        when = git("show", "-s", "--format=%cI", pull.merge_commit) if merged else None
        return {
            "number": number,
            "state": "closed" if merged else pull.state,
            "title": pull.title,
            "body": pull.body,
            "merged_at": when,
            "merge_commit_sha": pull.merge_commit or None,
            "html_url": f"{self.root}/{self.name}/pull/{number}",
            "head": {"sha": pull.head},
            "base": {
                "ref": pull.base,
                "sha": git("rev-parse", f"{pull.merge_commit}^1" if merged else pull.base),
                "repo": {"full_name": self.name},
            },
        }

    def _issue(self, number: int) -> dict[str, Any]:
        pull = self._pull(number)
        return {
            **{key: pull[key] for key in ("number", "state", "title")},
            "updated_at": self.repository.git("show", "-s", "--format=%cI", pull["head"]["sha"]),
            "pull_request": {"merged_at": pull["merged_at"]},
        }

    def _listed(self, query: Mapping[str, list[str]]) -> list[dict[str, Any]]:
        words = (f"-{query['per_page'][0]}", query["sha"][0], "--", query["path"][0])
        names = self.repository.git("log", "--format=%H", *words).split()
        return [self._commit(name) for name in names]

    def _compare(self, base: str, head: str, diff: bool) -> tuple[int, dict[str, str], bytes]:
        shared = self.repository.git("merge-base", base, head)
        if diff:
            data = self.repository.run("diff", "--no-color", "-M", shared, head)
            return 200, {"Content-Type": "application/vnd.github.diff; charset=utf-8"}, data
        ahead = int(self.repository.git("rev-list", "--count", f"{base}..{head}"))
        behind = int(self.repository.git("rev-list", "--count", f"{head}..{base}"))
        words = {(True, True): "diverged", (True, False): "ahead", (False, True): "behind"}
        status = words.get((ahead > 0, behind > 0), "identical")
        return _ok({"status": status, "ahead_by": ahead, "merge_base_commit": {"sha": shared}})

    def _tarball(self, commit: str) -> tuple[int, dict[str, str], bytes]:
        """Packed anew each time, with other bytes and the same files."""
        self._packed += 1
        folder = f"{self.name.replace('/', '-')}-{commit[:7]}/"
        words = ("-c", f"tar.tar.gz.command=gzip -n -{self._packed % 9 + 1}", "archive")
        data = self.repository.run(*words, "--format=tar.gz", f"--prefix={folder}", commit)
        return 200, {"Content-Type": "application/x-gzip"}, data

    def _commit(self, commit: str) -> dict[str, Any]:
        git = self.repository.git
        parents = git("show", "-s", "--format=%P", commit).split()
        return {
            "sha": commit,
            "html_url": f"{self.root}/{self.name}/commit/{commit}",
            "parents": [{"sha": parent} for parent in parents],
            "commit": {
                "message": git("show", "-s", "--format=%B", commit),
                "committer": {"date": git("show", "-s", "--format=%cI", commit)},
            },
        }


def _ok(value: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json; charset=utf-8"}, json.dumps(value).encode()


class _Handler(LoopbackHandler):
    owner: LocalForge
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        forge = self.owner
        forge.requests.append((self.path, dict(self.headers)))
        fault = next((f for f in forge.faults if f.path in self.path and f.times > 0), None)
        if fault is not None:
            fault.times -= 1
            time.sleep(fault.delay)
            status, headers, body = fault.status, fault.headers, fault.body
        elif self.path.startswith(API):
            accept = self.headers.get("Accept", "")
            status, headers, body = forge.answer(self.path.removeprefix(API), accept)
        else:
            status, headers, body = 404, {}, b""
        with suppress(ConnectionError):  # the client gave up
            if "Date" in headers:
                self.send_response_only(status)
            else:
                self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
