"""The cache: what is shown, what goes first, and what is never touched."""

from __future__ import annotations

import io
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import builder
from builder.__main__ import run
from builder.cli import complete
from builder.cli.command import bytes_of, seconds_of
from builder.common.cache import KINDS, PruneRequest, entries, locked, prune
from builder.common.paths import _in_use, cache_dir, in_use_lock
from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.conftest import Called

    SparkBuild = Callable[..., Called]

DAY = 86400.0
WHEEL, OLD_WHEEL, TREE = "a" * 64, "b" * 64, "c" * 24


def put(path: str, size: int, days: float = 0.0) -> Path:
    """A file in the cache that was last used some days ago."""
    target = cache_dir() / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(b"x" * size)
    age(target, days)
    return target


def age(target: Path, days: float) -> None:
    """Let a file, and the folders above it, be of some days ago."""
    when = time.time() - days * DAY
    while target != cache_dir():
        os.utime(target, (when, when))
        target = target.parent


@pytest.fixture
def cache() -> Path:
    """A cache with something in it."""
    with locked("anything"):
        put(f"wheels/{WHEEL}/files/x.py", 3000, days=2)
        put(f"wheels/{OLD_WHEEL}/y.whl", 5000, days=40)
        put(f"trees/{TREE}/vllm/a.py", 700, days=3)
        put("index/vllm.json", 10, days=1.5)
        put("engine-tests/tools/docker", 90000, days=90)
        put("mine/notes.txt", 11, days=90)
        put("wheels/notes.txt", 7, days=90)
    return cache_dir()


def test_show_lists_every_kind(spark_build: SparkBuild, cache: Path) -> None:
    value = spark_build("cache", "show", "--json").json
    rows = {row["kind"]: row for row in value["kinds"]}
    assert {name: (row["entries"], row["bytes"]) for name, row in rows.items()} == {
        "wheels": (2, 8000),
        "index": (1, 10),
        "trees": (1, 700),
        "engine-tests": (1, 90000),
        "other": (2, 18),
    }
    assert value["bytes"] == 98728
    assert value["cache"] == str(cache)
    assert rows["wheels"]["oldest_use"] < rows["wheels"]["last_use"]
    assert {name for name, row in rows.items() if row["prunable"]} == {"wheels", "index", "trees"}
    said = spark_build("cache", "show").out
    assert "8.0 kB" in said
    assert str(cache) in said.splitlines()[-1]


def test_a_cache_that_does_not_exist(
    spark_build: SparkBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_BUILD_CACHE", "/nonexistent/cache")
    assert spark_build("cache", "show", "--json").json["kinds"] == []
    result = spark_build("cache", "prune")
    assert result.code == 2
    assert "there is no cache at /nonexistent/cache" in result.err


def test_old_entries_are_removed(spark_build: SparkBuild, cache: Path) -> None:
    first = spark_build("cache", "prune", "--older-than", "30d", "--dry-run", "--json").json
    assert (cache / "wheels" / OLD_WHEEL).exists()
    value = spark_build("cache", "prune", "--older-than", "30d", "--json").json
    assert value == {**first, "dry_run": False}
    assert [row["path"] for row in value["removed"]] == [str(cache / "wheels" / OLD_WHEEL)]
    assert value["freed_bytes"] == 5000
    assert value["kept_bytes"] == 3710
    assert not (cache / "wheels" / OLD_WHEEL).exists()
    assert sorted(path.name for path in (cache / "wheels").iterdir()) == [WHEEL, "notes.txt"]
    again = spark_build("cache", "prune", "--older-than", "30d", "--json")
    assert again.code == 3
    assert "within the last 30d; the other 3.7 kB are kept" in again.json["error"]["message"]


def test_the_least_recently_used_is_removed_first(spark_build: SparkBuild, cache: Path) -> None:
    value = spark_build("cache", "prune", "--keep-bytes", "3.1kB", "--json").json
    assert [Path(row["path"]).name for row in value["removed"]] == [OLD_WHEEL, TREE]
    assert value["kept_bytes"] == 3010


def left_in(cache: Path) -> list[str]:
    """Files in the cache, locks aside."""
    found = sorted(str(p.relative_to(cache)) for p in cache.rglob("*") if p.is_file())
    return [path for path in found if not path.startswith("locks/")]


NOT_OURS = ["engine-tests/tools/docker", "mine/notes.txt", "wheels/notes.txt"]


@pytest.mark.parametrize("words", [(), ("--kind", "wheels")])
def test_without_an_age_entries_unused_for_a_month_are_removed(
    spark_build: SparkBuild, cache: Path, words: tuple[str, ...]
) -> None:
    value = spark_build("cache", "prune", *words, "--json").json
    assert [Path(row["path"]).name for row in value["removed"]] == [OLD_WHEEL]
    assert (cache / "wheels" / WHEEL).exists()
    result = spark_build("cache", "prune", "--kind", "trees")
    assert result.code == 3
    assert "every entry was used within the last 30d" in result.err
    assert "try: spark-build cache clean" in result.err


def test_clean_removes_one_kind_or_all(spark_build: SparkBuild, cache: Path) -> None:
    result = spark_build("cache", "clean", "--kind", "trees", "--yes")
    assert result.out == "freed 700 B; 0 B stay\n"
    planned = spark_build("cache", "clean", "--dry-run", "--json").json
    assert {row["kind"] for row in planned["removed"]} == {"wheels", "index"}
    done = spark_build("cache", "clean", "--yes", "--json").json
    assert done == {**planned, "dry_run": False}
    assert left_in(cache) == NOT_OURS
    assert spark_build("cache", "clean", "-y").code == 3


def test_clean_without_a_terminal_needs_yes(spark_build: SparkBuild, cache: Path) -> None:
    before = left_in(cache)
    for words in (("--kind", "wheels"), ("--kind", "wheels", "--json")):
        result = spark_build("cache", "clean", *words)
        assert result.code == 2
        said = f"this would remove 8.0 kB of {cache}"
        assert said in (result.json["error"]["message"] if "--json" in words else result.err)
    assert "try: spark-build cache clean --kind wheels --yes" in (
        spark_build("cache", "clean", "--kind", "wheels").err
    )
    assert left_in(cache) == before


class Terminal(io.StringIO):
    """Somebody who types."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("\n", 3), ("n\n", 3), ("", 3)])
def test_clean_asks_on_a_terminal(
    cache: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    said = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    monkeypatch.setattr("sys.stderr", said)
    assert run(["cache", "clean"]) == code
    assert "continue? [y/N]" in said.getvalue()
    assert f"remove 8.7 kB of {cache}" in said.getvalue()
    assert (left_in(cache) == NOT_OURS) is (code == 0)


def test_a_use_is_recorded(cache: Path) -> None:
    """Reading a file counts, as far as the file system notes it; so does a new file."""
    file = cache / "wheels" / OLD_WHEEL / "y.whl"
    when = time.time() - DAY
    os.utime(file, (when, file.stat().st_mtime))
    kinds = tuple(kind for kind in KINDS if kind.name == "wheels")
    assert not prune(cache, PruneRequest(kinds=kinds, older_than=30 * DAY)).removed


def test_an_entry_used_during_the_scan_is_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = tuple(kind for kind in KINDS if kind.name == "trees")
    real = Path.rename

    def used(self: Path, target: Path) -> Path:
        if self.name == TREE:
            os.utime(self)
        return real(self, target)

    monkeypatch.setattr(Path, "rename", used)
    done = prune(cache, PruneRequest(kinds=kinds))
    assert not done.removed
    assert [path.name for path in (cache / "trees").iterdir()] == [TREE]


def test_a_cache_that_only_plans_wrote_to_is_ours(
    spark_build: SparkBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take no lock of a subject; each run leaves notes of what it is writing."""
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "fresh"))
    (tmp_path / "fresh" / "locks" / "runs").mkdir(parents=True)
    put(f"wheels/{WHEEL}/x.py", 10)
    assert not list((tmp_path / "fresh" / "locks").glob("*.lock"))
    assert spark_build("cache", "clean", "--yes").code == 0
    assert not list((tmp_path / "fresh" / "wheels").iterdir())


def test_a_foreign_directory_is_refused(
    spark_build: SparkBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious = tmp_path / "home" / "wheels" / WHEEL / "precious"
    precious.parent.mkdir(parents=True)
    precious.write_text("x")
    age_of = time.time() - 90 * DAY
    os.utime(precious, (age_of, age_of))
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "home"))
    result = spark_build("cache", "prune", "--json")
    assert result.code == 2
    assert "is not a cache of spark-build" in result.json["error"]["message"]
    assert precious.exists()


def test_a_read_only_cache_is_named_as_the_reason(
    spark_build: SparkBuild, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other run keeps the entries, so none has to end."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    for words in (("prune",), ("clean", "--yes")):
        result = spark_build("cache", *words)
        assert result.code == 2
        assert f"cannot write to {cache}" in result.err


@pytest.mark.parametrize("link", ["wheels", f"wheels/{TREE}", f"wheels/{WHEEL}/files"])
def test_links_are_not_followed(cache: Path, tmp_path: Path, link: str) -> None:
    precious = tmp_path / "outside" / WHEEL / "precious"
    precious.parent.mkdir(parents=True)
    precious.write_bytes(b"x" * 1000)
    place = cache / link
    if place.exists():
        place.rename(tmp_path / "was")
    place.symlink_to(tmp_path / "outside")
    kinds = tuple(kind for kind in KINDS if kind.name == "wheels")
    assert all(entry.bytes < 10_000 for entry in entries(cache, kinds))
    prune(cache, PruneRequest(kinds=kinds))
    assert precious.exists()


def test_a_file_with_two_names_counts_once(cache: Path) -> None:
    file = put(f"dsl/libraries/{WHEEL}", 400)
    other = cache / "dsl" / "mirrors" / TREE / "lib.so"
    other.parent.mkdir(parents=True)
    os.link(file, other)
    kinds = tuple(kind for kind in KINDS if kind.name == "dsl")
    assert sum(entry.bytes for entry in entries(cache, kinds)) == 400


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--older-than", "3"), "is not a duration such as"),
        (("--older-than", "-3d"), "is not a duration such as"),
        (("--keep-bytes", "5 apples"), "is not a size such as"),
        (("--keep-bytes", "-1"), "is not a size such as"),
        (("--kind", "wheel"), "did you mean 'wheels'"),
        (("--kind", "engine-tests"), "a Docker Engine may be using them"),
    ],
)
def test_wrong_arguments(
    spark_build: SparkBuild, cache: Path, words: tuple[str, ...], said: str
) -> None:
    result = spark_build("cache", "prune", *words)
    assert result.code == 2
    assert said in result.err
    assert (cache / "wheels" / OLD_WHEEL).exists()


def test_times_and_sizes() -> None:
    assert [seconds_of(text) for text in ("45s", "90m", "12h", "30d", "2w")] == [
        45, 5400, 12 * 3600, 30 * DAY, 14 * DAY,
    ]  # fmt: skip
    assert [bytes_of(text) for text in ("7", "5GB", "2GiB", "1.5 mb", "0")] == [
        7, 5 * 10**9, 2 << 30, 1_500_000, 0,
    ]  # fmt: skip
    with pytest.raises(UsageError):
        bytes_of("")


def test_completion() -> None:
    assert complete.kinds("s") == ["sandboxes", "sources"]
    assert "engine-tests" not in complete.kinds("")


def test_every_kind_in_the_cache_is_described() -> None:
    """Who adds a folder to the cache says in ``builder/common/cache.py`` what lies there."""
    pattern = re.compile(r'cache_dir\(\) / "([\w-]+)"')
    used = {
        name
        for path in Path(builder.__file__).parent.rglob("*.py")
        for name in pattern.findall(path.read_text())
    }
    known = {folder.split("/")[0] for kind in KINDS for folder in kind.folders}
    assert used - {"locks"} <= known
    assert len(used) > 12


def test_two_threads_share_one_lock(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two open files for the lock, one was closed while its thread believed to hold it."""
    _in_use.clear()
    both = threading.Barrier(2)
    real = os.open

    def opened(*words: Any, **more: Any) -> int:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # until the other thread is here, too, if it can be
        return real(*words, **more)

    monkeypatch.setattr(os, "open", opened)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(in_use_lock, [cache, cache])
    assert first is not None
    assert first == second
    os.fstat(first)
