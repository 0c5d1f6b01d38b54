"""Answers of GitHub's API: read into types, and refused if they are of another form."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pytest
from requests.structures import CaseInsensitiveDict

from builder.applier.diff import parse_diff
from builder.applier.edits import judge_diff
from builder.applier.values import ApplyError
from builder.common.diffs import normalise, read_sections
from builder.common.document import plain
from builder.common.forge import ForgeClient, Forges, GitHub, PullStore, Site, parse_pull
from builder.common.plan import read_pin
from builder.common.retry import RetryPolicy
from builder.errors import RemoteError, SparkBuildError, UsageError
from builder.layers.pulls import conflicts_of
from tests.unit.chance import CASES
from tests.unit.fakes import MemoryTree, vllm_files
from tests.unit.images.rootfs.test_fuzz import (  # noqa: F401 - a fixture
    _bounded,
    broken,
    dices,
    document,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    import requests

NAME = "vllm-project/vllm"
HEAD, BASE, MERGED = "1" * 40, "2" * 40, "3" * 40
PULL: dict[str, Any] = {
    "number": 7,
    "state": "closed",
    "title": "A change",
    "body": "superseded by #8",
    "merged_at": None,
    "merge_commit_sha": MERGED,
    "html_url": f"https://github.com/{NAME}/pull/7",
    "head": {"sha": HEAD},
    "base": {"sha": BASE, "repo": {"full_name": NAME}},
}
COMMIT: dict[str, Any] = {
    "sha": HEAD,
    "html_url": f"https://github.com/{NAME}/commit/{HEAD}",
    "parents": [{"sha": BASE}],
    "commit": {"message": "A change\n\nMore", "committer": {"date": "2026-01-02T03:04:05Z"}},
}
COMPARED = {"status": "ahead", "ahead_by": 2, "merge_base_commit": {"sha": BASE}}
COMMENTS = [{"body": "Closing in favour of #9."}, {"body": None}]
DIFF = b"""\
diff --git a/vllm/core.py b/vllm/core.py
index 1234567..89abcde 100644
--- a/vllm/core.py
+++ b/vllm/core.py
@@ -1,3 +1,3 @@
-BACKEND = 'cutlass'
+BACKEND = 'b12x'


diff --git a/vllm/new.py b/vllm/new.py
new file mode 100644
--- /dev/null
+++ b/vllm/new.py
@@ -0,0 +1,2 @@
+ONE = 1
+TWO = 2
\\ No newline at end of file
diff --git a/vllm/old.py b/vllm/newer.py
similarity index 100%
rename from vllm/old.py
rename to vllm/newer.py
diff --git "a/tests/\\303\\244.py" "b/tests/\\303\\244.py"
deleted file mode 100644
--- "a/tests/\\303\\244.py"
+++ /dev/null
@@ -1 +0,0 @@
-x
"""


@dataclass
class Reply:
    """What a server answers."""

    body: bytes
    status_code: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class FakeSession:
    """Answers by path; the first part of a path that is known decides."""

    def __init__(self, **replies: Reply) -> None:
        self.auth: object = None
        honest = {"pulls": PULL, "commits": COMMIT, "compare": COMPARED, "comments": COMMENTS}
        self.replies = {part: Reply(json.dumps(value).encode()) for part, value in honest.items()}
        self.replies |= {"diff": Reply(DIFF), **replies}
        self.asked: list[str] = []

    def get(self, url: str, headers: dict[str, str], **_: object) -> requests.Response:
        self.asked.append(url)
        parts = ["diff"] if "diff" in headers["Accept"] else list(self.replies)
        reply = next(self.replies[part] for part in parts if part == "diff" or f"/{part}" in url)
        return cast("requests.Response", _Response(reply))


class _Response:
    def __init__(self, reply: Reply) -> None:
        self.status_code, self._body = reply.status_code, reply.body
        self.headers = CaseInsensitiveDict(reply.headers)

    def __enter__(self) -> _Response:
        return self

    def __exit__(self, *_: object) -> None: ...

    def iter_content(self, size: int) -> Iterator[bytes]:
        yield from (self._body[at : at + size] for at in range(0, len(self._body), size))


def github(**replies: Reply) -> GitHub:
    """The API of a server that answers so."""
    session = FakeSession(**replies)
    place = Site(api="https://forge.example.com/api/v3", host="forge.example.com")
    policy = RetryPolicy(attempts=1, pause=lambda _: None)
    return GitHub(ForgeClient(place, cast("requests.Session", session), policy))


def with_value(value: dict[str, Any], path: str, new: object) -> Reply:
    """A reply with another value at a place such as ``head.sha``."""
    made = json.loads(json.dumps(value))
    at = made
    *above, last = path.split(".")
    for key in above:
        at = at[key]
    at[last] = new
    return Reply(json.dumps(made).encode())


def asked_everything(forge: GitHub) -> None:
    """Ask for all that is asked for a pull request and a commit."""
    forge.facts(parse_pull(f"{NAME}#7"))
    forge.facts(parse_pull(f"{NAME}#7@{HEAD[:9]}"))
    forge.facts(parse_pull(f"{NAME}@{HEAD[:9]}"))
    forge.merge_base(NAME, BASE, HEAD)
    forge.date(NAME, HEAD)


def test_honest_answers_are_read() -> None:
    facts = github().facts(parse_pull(f"{NAME}#7"))
    assert (facts.commit, facts.target, facts.state) == (HEAD, BASE, "closed")
    assert facts.superseded_by == f"{NAME}#9"
    assert github().facts(parse_pull(f"{NAME}#7@{HEAD[:9]}")).notice == ""
    assert github().facts(parse_pull(f"{NAME}@{HEAD[:9]}")).merged_at == "2026-01-02"
    asked_everything(github())


ODD_NAMES: tuple[object, ...] = (
    "HEAD",
    "",
    "1" * 39,
    "1" * 41,
    "1" * 63,
    "A" * 40,
    f"{HEAD}\n",
    "../x",
    None,
    7,
    [],
)
ODD: dict[str, Reply] = {
    **{f"head {n!r:.9}{len(str(n))}": with_value(PULL, "head.sha", n) for n in ODD_NAMES},
    **{f"base {n!r:.9}{len(str(n))}": with_value(PULL, "base.sha", n) for n in ODD_NAMES},
    "state": with_value(PULL, "state", "other"),
    "merged-at": with_value(PULL, "merged_at", "yesterday"),
    "merge-commit": with_value(PULL, "merge_commit_sha", "HEAD"),
    "title": with_value(PULL, "title", ["x"]),
    "another-number": with_value(PULL, "number", 8),
    "path": with_value(PULL, "base.repo.full_name", "../../user"),
    "dots": with_value(PULL, "base.repo.full_name", "o/.."),
    "query": with_value(PULL, "base.repo.full_name", "o/r?x="),
    "list": Reply(b"[]"),
    "text": Reply(b'"x"'),
    "nothing": Reply(b""),
    "page": Reply(b"<html>"),
    "deep-list": Reply(b"[" * 200_000),
    "deep-object": Reply(b'{"a":' * 200_000),
    "deep-below": Reply(b'{"head":' * 200_000 + b"1" + b"}" * 200_000),
    "number": Reply(b'{"number": 1e999}'),
    "half-character": Reply(json.dumps(PULL).encode().replace(b"A change", b"\\ud800")),
    "not-utf-8": Reply(json.dumps(PULL).encode().replace(b"A change", b"\xff")),
    "compressed": Reply(b"", headers={"Content-Encoding": "gzip"}),
}


@pytest.mark.parametrize("reply", ODD.values(), ids=ODD.keys())
def test_an_odd_pull_request_is_a_failure_of_the_forge(reply: Reply) -> None:
    with pytest.raises(RemoteError) as caught:
        github(pulls=reply).facts(parse_pull(f"{NAME}#7"))
    assert caught.value.code == 8
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "reply",
    [
        with_value(COMMIT, "sha", "HEAD"),
        with_value(COMMIT, "sha", MERGED),
        with_value(COMMIT, "parents", [{"sha": ""}]),
        with_value(COMMIT, "parents", {}),
        with_value(COMMIT, "commit", []),
        with_value(COMMIT, "commit.committer.date", "x" * 20),
        Reply(b"[1]"),
    ],
)
def test_an_odd_commit_is_too(reply: Reply) -> None:
    with pytest.raises(RemoteError):
        github(commits=reply).facts(parse_pull(f"{NAME}@{HEAD[:9]}"))


def test_odd_comments_and_comparisons_are_too() -> None:
    for value in (b"{}", b"[1]", b'[{"body": 1}]', b"[" * 100_000):
        with pytest.raises(RemoteError):
            github(comments=Reply(value)).facts(parse_pull(f"{NAME}#7"))
    for value in (b"[]", b'{"merge_base_commit": {"sha": "HEAD"}}', b'{"merge_base_commit": []}'):
        with pytest.raises(RemoteError):
            github(compare=Reply(value)).merge_base(NAME, BASE, HEAD)


HEADERS: dict[str, dict[str, str]] = {
    "superscript": {"Retry-After": "²"},
    "arabic": {"Retry-After": "٣"},
    "huge": {"Retry-After": "9" * 5000},
    "infinite": {"Retry-After": "inf"},
    "negative": {"Retry-After": "-5"},
    "date": {"Retry-After": "Mon, 01 Jan 0001 00:00:00 +2359"},
    "reset": {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "9" * 400},
    "reset-superscript": {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "²"},
    "clock": {
        "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "9",
        "Date": "Mon, 01 Jan 0001 00:00:00 +2359",
    },
    "year": {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "9", "Date": "1 Jan 99999999999"},
}  # fmt: skip


@pytest.mark.parametrize("status", [403, 429, 503])
@pytest.mark.parametrize("headers", HEADERS.values(), ids=HEADERS.keys())
def test_odd_waiting_times_are_no_crash(headers: dict[str, str], status: int) -> None:
    with pytest.raises(RemoteError) as caught:
        github(pulls=Reply(b"[" * 100_000, status, headers)).facts(parse_pull(f"{NAME}#7"))
    assert caught.value.code == 8


def store_of(forge: GitHub) -> PullStore:
    """A store whose forge this is."""
    forges = Forges()
    forges._api = forge
    return PullStore(forges)


def test_a_pin_can_be_read_again() -> None:
    pin = store_of(github()).resolve(parse_pull(f"{NAME}#7"))
    assert read_pin(plain(pin), "lock") == pin


@pytest.mark.parametrize("url", ["javascript:alert(1)", "https://x/\n", "//x", 'https://x/"> x'])
def test_an_address_that_is_no_page_is_left_out(url: str) -> None:
    """It becomes a link in the page of the evidence."""
    pin = store_of(github(pulls=with_value(PULL, "html_url", url))).resolve(parse_pull(f"{NAME}#7"))
    assert pin.url == ""
    with pytest.raises(UsageError, match="url"):
        read_pin({**plain(pin), "url": url}, "lock")


def test_a_release_that_is_no_version_is_refused() -> None:
    pin = store_of(github()).resolve(parse_pull(f"{NAME}#7"))
    with pytest.raises(UsageError):
        read_pin({**plain(pin), "release": "newest"}, "lock")


@pytest.mark.parametrize("day", ["9999-99-99", "2026-02-30", "0000-01-01"])
def test_a_day_that_no_calendar_has_is_refused(day: str) -> None:
    """It is written into TOML, whose dates are real ones."""
    store = store_of(
        github(commits=with_value(COMMIT, "commit.committer.date", f"{day}T00:00:00Z"))
    )
    with pytest.raises(RemoteError, match="cannot be pinned"):
        store.resolve(parse_pull(f"{NAME}#7"))
    pin = store_of(github()).resolve(parse_pull(f"{NAME}#7"))
    for name in ("date", "merged_at"):
        with pytest.raises(UsageError):
            read_pin({**plain(pin), name: day}, "lock")


def test_the_hint_at_a_diff_that_is_none_is_another_way_to_it() -> None:
    """The same command would get the same answer."""
    with pytest.raises(RemoteError) as caught:
        store_of(github(diff=Reply(b"<html>"))).resolve(parse_pull(f"{NAME}#7"))
    assert "--forge-clone DIR" in caught.value.hint


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (DIFF.replace(b"vllm/core.py", b"../core.py"), "not a path in a repository"),
        (DIFF.replace(b"vllm/core.py", b"vllm//core.py"), "has an empty name"),
        (DIFF.replace(b"vllm/core.py", b"vllm/./core.py"), "has a name '.'"),
        (b"<html>", "not a git diff"),
        (b"x" * (65 << 20), "larger than 64 MiB"),
        (DIFF + b"\n" * 1_000_001, "the limits are 64 MiB and 1000000 lines"),
    ],
    ids=["up", "empty", "dot", "page", "long", "lines"],
)
def test_a_diff_that_is_none_is_a_failure_of_the_forge(body: bytes, message: str) -> None:
    with pytest.raises(RemoteError, match=message) as caught:
        store_of(github(diff=Reply(body))).resolve(parse_pull(f"{NAME}#7"))
    assert caught.value.code == 8


# --------------------------------------------------------------------------------------- by chance


def test_answers_by_chance() -> None:
    """They are refused as a failure of the forge, or give a pin that can be read again."""
    codes: list[int] = []
    bodies = {part: reply.body for part, reply in FakeSession().replies.items()}
    statuses = (200, 200, 200, 200, 301, 403, 404, 406, 429, 500, 503)
    for name, dice in dices("forge", CASES * 40):
        part = dice.choice(list(bodies))
        change = diff_by_chance if part == "diff" else document
        body = change(dice, bodies[part]) if dice.random() < 0.9 else b""
        headers = dice.choice([{}, *HEADERS.values(), {"Location": "http://[::1"}])
        reply = Reply(body, dice.choice(statuses), dict(headers))
        try:
            forge = github(**{part: reply})
            asked_everything(forge)
            pin = store_of(forge).resolve(parse_pull(f"{NAME}#{dice.choice((7, 7, 8))}"))
        except SparkBuildError as error:
            codes.append(error.code)
            continue
        assert read_pin(plain(pin), name) == pin
    assert {8} <= set(codes) <= {3, 8}
    assert len(codes) < CASES * 40


PARTS = (
    b"diff --git a/x b/x\n", b"--- a/x\n", b"+++ b/x\n", b"--- /dev/null\n", b"+++ /dev/null\n",
    b"@@ -1 +1 @@\n", b"@@ -0,0 +1,2 @@\n", b"@@ -1,99999999999 +1 @@\n", b"rename from x\n",
    b"rename to ../x\n", b"rename to \n", b"new file mode 100644\n", b"new file mode 160000\n",
    b"old mode 9\n", b"new mode 1007555\n", b"new mode abcdef\n", b"deleted file mode 100644\n",
    b"copy from x\n", b"Binary files a/x and b/x differ\n", b"GIT binary patch\n", b" \n", b"\n",
    b"-x\n", b"+x\0\n", b"\\ No newline at end of file\n", b"\\\n", b'--- "a/\\', b'"a/\\777"\n',
    b"+++ b/vllm/core.py/x\n", b"--- a/vllm//core.py\n", b"+++ b/vllm\\core.py\n", b"+++ b/ x\n",
    b"index 1..2 120000\n", b"\r\n", b"\xff\n", b"+++ b/" + b"x" * 5000 + b"\n",
)  # fmt: skip


def diff_by_chance(dice: random.Random, data: bytes) -> bytes:
    """A diff with lines of others in it, without some, or in another order."""
    lines = data.splitlines(keepends=True)
    for _ in range(dice.choice((1, 1, 2, 5))):
        at = dice.randrange(len(lines) + 1)
        kind = dice.randrange(4)
        if kind == 0:
            lines[at:at] = [dice.choice(PARTS)]
        elif kind == 1:
            lines[at : at + dice.randrange(3)] = []
        elif kind == 2:
            lines[at:at] = [dice.choice([*lines, b""]), dice.choice(PARTS)]
        else:
            lines[at : at + 1] = [dice.choice(PARTS)]
    made = b"".join(lines)
    return broken(dice, made) if dice.random() < 0.1 else made


def test_diffs_by_chance() -> None:
    """A diff is refused, or has one normal form, which says the same to the applier."""
    tree = MemoryTree(vllm_files(old="OLD = 1\n"))
    read = 0
    for name, dice in dices("diff", CASES * 100):
        data = diff_by_chance(dice, DIFF)
        try:
            normal = normalise(data)
        except UsageError:
            continue
        assert normalise(normal) == normal, name
        sections = [section for section in read_sections(normal) if not section.special]
        text = b"".join(section.render() for section in sections).decode()
        try:
            changes = parse_diff(text)
            assert {change.path for change in changes} <= {s.path for s in sections}, name
            judge_diff(changes, tree)
            for change in changes:
                conflicts_of(change, tree)
        except ApplyError:
            continue
        read += 1
    assert read > CASES
