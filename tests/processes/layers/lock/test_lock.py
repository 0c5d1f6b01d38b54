"""``spark-build.lock``: found by itself, holds what it says, and says what no longer holds."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from builder.common import cache
from builder.common.reference import Ref
from builder.errors import RemoteError, SparkBuildError, UsageError
from builder.images.bases.identify import IDENTIFIERS
from builder.images.registry.layout import LayoutDirectory
from builder.images.registry.model import blobs
from builder.images.subject import Subject
from builder.layers import lock
from builder.layers.lock import NAME, lock_path, read_facts, read_lock, write_facts
from builder.pipeline import bases, locking
from tests.forge import Fault, LocalForge, Pull
from tests.processes import pullworld as pw
from tests.unit.fakes import fake_base, layer_text, vllm_files, write_tree
from tests.unit.imagefiles import SITE, Item, put_vllm
from tests.unit.proof.test_unrecorded import hooks, on_top

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from builder.images.subject import BaseRequest
    from tests.processes.pullworld import World
    from tests.unit.conftest import Called
    from tests.wheels.fakeindex import FakeIndex

    Call = Callable[..., Called]

BASE = ("--base", "pypi:vllm==1.0.0")
OPEN = ("--with-pr", "vllm-project/vllm#1")
MERGED = ("--with-pr", "vllm-project/vllm#2")
LAYER = layer_text('op = "copy"\nfrom = "fix.txt"\nto = "vllm/fix.txt"\n', when=">=1.0.0")


@pytest.fixture
def fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A layer folder of the user's own, in use."""
    write_tree(tmp_path / "patches", {"fix/layer.toml": LAYER.encode(), "fix/fix.txt": b"one\n"})
    monkeypatch.setenv("SPARK_BUILD_PATCHES", str(tmp_path / "patches"))
    return tmp_path / "patches" / "fix"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The directory that commands run in."""
    return tmp_path / "work"


def lock_of(project: Path) -> Any:
    return json.loads((project / NAME).read_bytes())


def entry_of(project: Path) -> Any:
    (entry,) = lock_of(project)["locked"].values()
    return entry


def record_of(wheel: bytes) -> str:
    """The sha256 of a wheel's RECORD."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/RECORD"))
        return hashlib.sha256(archive.read(name)).hexdigest()


@pytest.fixture
def cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was locked before is in another cache."""
    monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "cold"))


# ---------------------------------------------------------------------------------- where it lies


class TestPlace:
    def test_is_in_the_current_directory_without_a_project(self, tmp_path: Path) -> None:
        (tmp_path / NAME).write_text("{}")
        (tmp_path / "below").mkdir()
        assert lock_path(tmp_path / "below") == tmp_path / "below" / NAME

    def test_is_the_root_of_the_checkout(self, tmp_path: Path) -> None:
        (tmp_path / ".git").mkdir()
        (tmp_path / "a/b").mkdir(parents=True)
        assert lock_path(tmp_path / "a/b") == tmp_path / NAME

    def test_the_nearest_lock_counts_but_none_above_the_root(self, tmp_path: Path) -> None:
        (tmp_path / NAME).write_text("{}")
        (tmp_path / "root/.git").mkdir(parents=True)
        (tmp_path / "root/a/b").mkdir(parents=True)
        assert lock_path(tmp_path / "root/a/b") == tmp_path / "root" / NAME
        (tmp_path / "root/a" / NAME).write_text("{}")
        assert lock_path(tmp_path / "root/a/b") == tmp_path / "root/a" / NAME

    def test_a_work_tree_s_git_file_marks_a_root_too(self, tmp_path: Path) -> None:
        (tmp_path / ".git").write_text("gitdir: elsewhere\n")
        (tmp_path / "a").mkdir()
        assert lock_path(tmp_path / "a") == tmp_path / NAME

    def test_path_can_be_set(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPARK_BUILD_LOCK", str(tmp_path / "other.lock"))
        assert lock_path(tmp_path) == tmp_path / "other.lock"


# ------------------------------------------------------------------------------- what it holds


class TestWriting:
    @pytest.fixture(autouse=True)
    def locked(self, spark_build: Call, wheels: FakeIndex, forge: LocalForge, fix: Path) -> None:
        assert spark_build("lock", "-l", "fix", *OPEN, *MERGED, *BASE).code == 0

    def test_a_new_lock_is_up_to_date(self, spark_build: Call) -> None:
        words = ("lock", "-l", "fix", *BASE)
        assert "not locked yet" in spark_build(*words, "--check").err
        result = spark_build(*words)
        assert "    new\n" in result.err
        assert "not locked yet" not in result.err
        assert result.out.endswith(": 1 locked\n")

    def test_contains_base_packages_and_wheels(self, project: Path, wheels: FakeIndex) -> None:
        base = entry_of(project)["base"]
        assert base["packages"] == {"vllm": "1.0.0"}
        assert base["digest"].startswith("sha256:")
        name = "vllm-1.0.0-py3-none-any.whl"
        (wheel,) = base["wheels"]
        assert wheel == {
            "filename": name,
            "sha256": wheels.sha256(name),
            "size": len(wheels.files[name]),
            "record": record_of(wheels.files[name]),
        }

    def test_contains_layers_with_their_files_and_every_input(self, project: Path) -> None:
        entry = entry_of(project)
        assert [layer["name"] for layer in entry["layers"]] == ["pr-vllm-1", "pr-vllm-2", "fix"]
        assert set(entry["layers"][2]["files"]) == {"layer.toml", "fix.txt"}
        assert {row["request"] for row in entry["inputs"]} == {
            "vllm-project/vllm#1",
            "vllm-project/vllm#2",
        }

    def test_pins_pull_requests_for_the_whole_project(self, project: Path, world: World) -> None:
        pulls = lock_of(project)["pulls"]
        assert pulls["vllm-project/vllm#1"]["commit"] == world.pulls[pw.OPEN].head
        assert pulls["vllm-project/vllm#2"]["release"] == "1.2.0"

    def test_is_sorted_and_one_value_a_line(self, project: Path) -> None:
        data = (project / NAME).read_bytes()
        again = json.dumps(json.loads(data), indent=2, sort_keys=True, ensure_ascii=False)
        assert data == again.encode() + b"\n"

    def test_contains_no_index_address(self, project: Path, wheels: FakeIndex) -> None:
        assert wheels.root.encode() not in (project / NAME).read_bytes()

    def test_again_changes_nothing_and_needs_no_network(
        self, spark_build: Call, project: Path, forge: LocalForge, wheels: FakeIndex
    ) -> None:
        before = (project / NAME).read_bytes()
        forge.requests.clear()
        wheels.requests.clear()
        result = spark_build("lock")
        assert (result.code, (project / NAME).read_bytes()) == (0, before)
        assert "nothing changed" in result.out
        assert (forge.requests, wheels.requests) == ([], [])

    def test_of_another_request_keeps_the_first(self, spark_build: Call, project: Path) -> None:
        assert spark_build("lock", "-l", "fix", "--base", "pypi:vllm==1.1.0", "--json").code == 0
        assert len(lock_of(project)["locked"]) == 2

    def test_a_failed_write_leaves_the_old_one(
        self, spark_build: Call, project: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = (project / NAME).read_bytes()

        def full(path: Path, _data: bytes) -> None:
            raise UsageError(f"cannot write {path}: no space left")

        monkeypatch.setattr(lock, "write_atomically", full)
        assert spark_build("lock", "-l", "fix", "--base", "pypi:vllm==1.1.0").code == 2
        assert (project / NAME).read_bytes() == before
        assert sorted(p.name for p in project.iterdir()) == [NAME]

    def test_waits_for_another_writer(
        self, spark_build: Call, project: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two locks at a time would each lose what the other one added."""
        held: list[str] = []
        original = cache.locked

        def noted(subject: str, **options: Any) -> Any:
            held.append(subject)
            return original(subject, **options)

        monkeypatch.setattr(locking, "locked", noted)
        spark_build("lock")
        assert held == [str(project / NAME)]


def test_without_a_request_and_without_a_lock_is_an_error(spark_build: Call) -> None:
    result = spark_build("lock")
    assert result.code == 2
    assert "nothing to lock" in result.err


def test_a_directory_is_not_locked(spark_build: Call, fix: Path, site: Path) -> None:
    result = spark_build("lock", "-l", "fix", "-b", f"dir:{site}")
    assert result.code == 2
    assert "pypi:vllm==VERSION" in result.err


def test_an_impossible_build_is_not_locked(
    spark_build: Call, wheels: FakeIndex, forge: LocalForge, project: Path
) -> None:
    words = ["--with-pr", "vllm-project/vllm#4", "-b", "pypi:vllm==1.3.0"]
    assert spark_build("lock", *words).code == 4
    assert not (project / NAME).exists()


def test_a_build_that_needs_a_compiler_is_locked_too(
    spark_build: Call, wheels: FakeIndex, forge: LocalForge, project: Path
) -> None:
    result = spark_build("lock", "--with-pr", "vllm-project/vllm#6", *BASE)
    assert result.code == 0
    assert "needs a rebuild" in result.err
    assert (project / NAME).exists()


# ------------------------------------------------------------------------------------- --locked


class TestLocked:
    @pytest.fixture(autouse=True)
    def _locked(self, spark_build: Call, wheels: FakeIndex, forge: LocalForge, fix: Path) -> None:
        assert spark_build("lock", "-l", "fix", *OPEN, *BASE).code == 0
        forge.requests.clear()

    WORDS = ("-l", "fix", *OPEN)

    @pytest.mark.parametrize("command", ["plan", "image"])
    def test_takes_the_base_and_everything_else_from_it(
        self, spark_build: Call, forge: LocalForge, wheels: FakeIndex, command: str
    ) -> None:
        """With a warm cache: no network at all."""
        spark_build("plan", *self.WORDS, *BASE)
        forge.__exit__()
        wheels.__exit__()
        assert spark_build(command, *self.WORDS, "--locked", "--json", *_DRY[command]).code == 0

    def test_gives_the_same_plan_as_without_a_lock(
        self, spark_build: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held = spark_build("plan", *self.WORDS, *BASE, "--locked", "--json").json["plan_digest"]
        monkeypatch.setenv("SPARK_BUILD_LOCK", str(tmp_path / "none"))
        assert spark_build("plan", *self.WORDS, *BASE, "--json").json["plan_digest"] == held

    def test_a_moved_head_is_not_used(
        self, spark_build: Call, forge: LocalForge, world: World
    ) -> None:
        forge.pulls[pw.OPEN].head = world.pulls[pw.UNRELATED].head
        for more in ((), ("--locked",)):
            result = spark_build("plan", *self.WORDS, *BASE, "--json", *more)
            assert result.json["pulls"][0]["commit"] == world.pulls[pw.OPEN].head
        assert forge.requests == []

    @pytest.mark.usefixtures("cold_cache")
    def test_a_forced_push_is_fetched_by_commit_when_the_cache_is_cold(
        self,
        spark_build: Call,
        forge: LocalForge,
        world: World,
    ) -> None:
        forge.pulls[pw.OPEN].head = world.pulls[pw.UNRELATED].head
        result = spark_build("plan", *self.WORDS, *BASE, "--locked", "--json")
        assert result.json["pulls"][0]["commit"] == world.pulls[pw.OPEN].head
        (path,) = forge.paths
        assert path.endswith(f"...{world.pulls[pw.OPEN].head}")

    @pytest.mark.usefixtures("cold_cache")
    def test_a_missing_commit_is_a_clear_error(
        self,
        spark_build: Call,
        forge: LocalForge,
        world: World,
    ) -> None:
        forge.forgotten.add(world.pulls[pw.OPEN].head)
        result = spark_build("plan", *self.WORDS, *BASE, "--locked")
        assert result.code == 8
        assert f"pinned at {world.pulls[pw.OPEN].head}" in result.err
        assert "no longer has (force-pushed or deleted)" in result.err
        assert "spark-build lock --upgrade" in result.err

    @pytest.mark.usefixtures("cold_cache")
    def test_another_diff_for_the_same_commit_is_refused(
        self,
        spark_build: Call,
        forge: LocalForge,
        world: World,
    ) -> None:
        forged = world.repository.run("diff", "v1.0.0", world.pulls[pw.UNRELATED].head)
        forge.faults.append(Fault("/compare/", 200, body=forged))
        result = spark_build("plan", *self.WORDS, *BASE, "--locked")
        assert result.code == 8
        assert "do not build from it" in result.err

    def test_a_damaged_cache_is_not_used(
        self, spark_build: Call, forge: LocalForge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from builder.common.paths import cache_dir

        (diff,) = (cache_dir() / "forge/diffs").iterdir()
        diff.write_bytes(diff.read_bytes().replace(b"kept + 1", b"kept + 6"))
        assert spark_build("plan", *self.WORDS, *BASE, "--locked").code == 0
        assert len(forge.requests) == 1

    def test_upgrade_uses_the_new_head(
        self, spark_build: Call, forge: LocalForge, world: World, project: Path
    ) -> None:
        forge.pulls[pw.OPEN].head = world.pulls[pw.UNRELATED].head
        assert spark_build("lock").code == 0
        assert lock_of(project)["pulls"]["vllm-project/vllm#1"]["commit"] == world.pulls[1].head
        result = spark_build("lock", "--upgrade", "--json")
        (changes,) = result.json["changes"].values()
        old, new = world.pulls[1].head[:12], world.pulls[pw.UNRELATED].head[:12]
        assert f"pull vllm-project/vllm#1: {old}, now {new}" in changes
        assert spark_build("lock", "--check").code == 0

    STALE: tuple[str, ...] = ("plan", "image", "lock")

    @pytest.mark.parametrize("command", STALE)
    def test_a_changed_layer_is_stale_and_names_the_file(
        self, spark_build: Call, fix: Path, project: Path, command: str
    ) -> None:
        before = (project / NAME).read_bytes()
        (fix / "fix.txt").write_text("two\n")
        more = ("--check",) if command == "lock" else ("--locked", *_DRY[command])
        result = spark_build(command, *self.WORDS, *BASE, *more)
        assert result.code == 9
        assert "layer fix: file fix.txt:" in result.err
        assert (project / NAME).read_bytes() == before
        assert spark_build("lock").code == 0
        assert spark_build("plan", *self.WORDS, *BASE, "--locked").code == 0

    def test_without_the_option_a_stale_lock_is_a_warning(
        self, spark_build: Call, fix: Path
    ) -> None:
        (fix / "fix.txt").write_text("two\n")
        result = spark_build("plan", *self.WORDS, *BASE)
        assert result.code == 0
        assert "warning" in result.err
        assert "is stale" in result.err

    def test_a_comment_in_a_layer_changes_nothing(self, spark_build: Call, fix: Path) -> None:
        (fix / "layer.toml").write_text(f"# a comment\n{LAYER}")
        assert spark_build("plan", *self.WORDS, *BASE, "--locked").code == 0

    @pytest.mark.parametrize(
        "words",
        [("-l", "fix"), ("-l", "fix", *OPEN, *MERGED), OPEN],
        ids=["no-pull", "another-pull", "no-layer"],
    )
    def test_an_entry_that_was_not_locked_is_stale(
        self, spark_build: Call, words: tuple[str, ...]
    ) -> None:
        result = spark_build("plan", *words, *BASE, "--locked")
        assert result.code == 9
        assert "has no entry for" in result.err
        assert "try: spark-build lock" in result.err

    @pytest.mark.usefixtures("cold_cache")
    def test_a_replaced_wheel_is_refused(
        self,
        spark_build: Call,
        wheels: FakeIndex,
        world: World,
    ) -> None:
        wheels.add("vllm", "1.0.0", {**world.release("1.0.0"), "vllm/more.py": b""})
        result = spark_build("plan", *self.WORDS, *BASE, "--locked")
        assert result.code == 8
        assert "which is locked, differs from the file on the package index" in result.err

    def test_apply_uses_the_locked_layers_for_any_directory(
        self, spark_build: Call, world: World, tmp_path: Path, fix: Path, forge: LocalForge
    ) -> None:
        info = {
            "vllm-1.0.0.dist-info/METADATA": b"Name: vllm\n",
            "vllm-1.0.0.dist-info/RECORD": b"",
        }
        site = write_tree(tmp_path / "site-packages", {**world.release("1.0.0"), **info})
        assert spark_build("apply", site, *self.WORDS, "--locked", "-n").code == 0
        (fix / "fix.txt").write_text("two\n")
        assert spark_build("apply", site, *self.WORDS, "--locked").code == 9
        assert not (site / ".spark-build").exists()

    def test_verify_compares_the_target_with_it(
        self, spark_build: Call, fix: Path, forge: LocalForge
    ) -> None:
        words = ["--engine", "oci", "-o", "oci:out", "--no-verify"]
        assert spark_build("image", *self.WORDS, *BASE, "--locked", *words).code == 0
        check = ("verify", "oci:out", "--level", "static", "--locked")
        assert spark_build(*check).code == 0
        (fix / "fix.txt").write_text("two\n")
        assert spark_build("lock").code == 0
        result = spark_build(*check)
        assert result.code == 9
        assert "layer fix:" in result.err


_DRY = {"plan": (), "image": ("--dry-run",)}


@pytest.mark.parametrize("command", ["plan", "image", "verify", "apply"])
def test_without_a_lock_locked_is_stale(
    spark_build: Call, fix: Path, site: Path, command: str
) -> None:
    subjects: dict[str, tuple[object, ...]] = {"verify": ("oci:none",), "apply": (site,)}
    subject = subjects.get(command, BASE)
    result = spark_build(command, *subject, "--layers", "fix", "--locked")
    assert result.code == 9
    assert "there is no spark-build.lock" in result.err


DAMAGED = {
    "no-json": "<<<<<<< ours\n",
    "no-object": "[]",
    "deep": "[" * 100_000,
    "another-schema": '{"schema": 2, "pulls": {}, "locked": {}}',
    "bad-pin": '{"schema": 1, "pulls": {"o/r#1": {"commit": "x"}}, "locked": {}}',
    "bad-entry": '{"schema": 1, "pulls": {}, "locked": {"x": {}}}',
}


def test_a_lock_is_written_as_it_was_read(tmp_path: Path) -> None:
    digest = "0" * 64
    wheel = {"filename": "vllm-1-py3-none-any.whl", "sha256": digest, "size": 5}
    pull = {"request": "o/r#1", "repository": "o/r", "number": 0, "sha256": digest}
    pull["commit"] = "c" * 40
    base = {"kind": "pypi", "digest": f"sha256:{digest}", "platform": "linux/arm64"}
    facts = {"file": "base-0123456789ab.json.gz", "sha256": digest, "layers": digest, "depth": 2}
    request = {"layers": ["fix"], "with-pr": ["o/r#1"], "base": "b", "platform": "own"}
    entry = {
        "request": {**request, "python": "own"},
        "base": {**base, "python": "3.12", "packages": {"vllm": "1"}, "wheels": [wheel],
                 "facts": facts},
        "layers": [{"name": "fix", "digest": digest, "files": {"layer.toml": digest}},
                   {"name": "pr", "digest": digest, "files": {}}],
        "inputs": [wheel, {"filename": "b-1-py3-none-any.whl", "sha256": digest}, pull],
    }  # fmt: skip
    pin = {"base": "a" * 40, "commit": "b" * 40, "date": "2026-01-01", "forge": "f", "size": 3,
           "repository": "o/r", "request": "o/r#1", "sha256": digest, "title": "é"}  # fmt: skip
    key = "fix + o/r#1 on b for own, Python own"
    value: dict[str, Any] = {"schema": 1, "pulls": {"o/r#1": pin}, "locked": {key: entry}}
    path = tmp_path / NAME
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(f"{text}\n", "utf-8")
    lock = read_lock(path)
    assert lock is not None
    assert lock.data() == path.read_bytes()
    value["locked"][key]["base"]["wheels"][0]["size"] = "5"
    path.write_text(json.dumps(value))
    with pytest.raises(SparkBuildError, match=r"wheels\[0\]\.size"):
        read_lock(path)


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_lock_is_stale_and_can_be_recreated(
    spark_build: Call, wheels: FakeIndex, fix: Path, project: Path, text: str
) -> None:
    (project / NAME).write_text(text)
    result = spark_build("plan", "-l", "fix", *BASE)
    assert result.code == 9
    assert NAME in result.err
    (project / NAME).unlink()
    assert spark_build("lock", "-l", "fix", *BASE).code == 0


def test_line_ends_of_a_checkout_do_not_matter(
    spark_build: Call, wheels: FakeIndex, fix: Path, project: Path
) -> None:
    assert spark_build("lock", "-l", "fix", *BASE).code == 0
    data = (project / NAME).read_bytes()
    (project / NAME).write_bytes(data.replace(b"\n", b"\r\n"))
    assert spark_build("plan", "-l", "fix", *BASE, "--locked").code == 0


# ------------------------------------------------------------------------------- a tag that moved


class TestMovedTag:
    """An image base: what a tag names today, and what it named when it was locked."""

    OLD, NEW = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"
    WORDS = ("-l", "fix", "-b", "registry.test/vllm:v1")

    @pytest.fixture(autouse=True)
    def images(self, fix: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
        """Reference -> digest of what is to be had."""
        known = {"registry.test/vllm:v1": self.OLD, f"registry.test/vllm@{self.OLD}": self.OLD}

        def identify_known(request: BaseRequest, _rest: str) -> Subject:
            ref = request.ref.text
            if ref not in known:
                raise RemoteError(f"image {ref} cannot be pulled")
            made = fake_base(vllm_files("1.0.0"), "image")
            changed = dataclasses.replace(made.identity, ref=ref, digest=known[ref])
            return Subject(changed, made.tree)

        monkeypatch.setitem(IDENTIFIERS, "docker", identify_known)
        return known

    @pytest.fixture(autouse=True)
    def _moved(self, spark_build: Call, images: dict[str, str]) -> None:
        assert spark_build("lock", *self.WORDS).code == 0
        images["registry.test/vllm:v1"] = self.NEW

    def test_is_used_with_a_notice(self, spark_build: Call) -> None:
        result = spark_build("plan", *self.WORDS, "--json")
        assert (result.code, result.json["base"]["digest"]) == (0, self.NEW)
        assert "registry.test/vllm:v1 moved from sha256:aaaaaaaaaaaa" in result.err

    def test_is_not_used_with_locked(self, spark_build: Call) -> None:
        result = spark_build("plan", *self.WORDS, "--locked", "--json")
        assert (result.code, result.json["base"]["digest"]) == (0, self.OLD)
        assert result.json["base"]["ref"] == f"registry.test/vllm@{self.OLD}"

    def test_is_an_error_when_the_locked_image_is_gone(
        self, spark_build: Call, images: dict[str, str]
    ) -> None:
        del images[f"registry.test/vllm@{self.OLD}"]
        result = spark_build("plan", *self.WORDS, "--locked")
        assert result.code == 8
        assert "is no longer available" in result.err

    def test_a_local_image_is_found_by_its_id(
        self, spark_build: Call, images: dict[str, str]
    ) -> None:
        del images[f"registry.test/vllm@{self.OLD}"]
        images[self.OLD] = self.OLD
        result = spark_build("plan", *self.WORDS, "--locked", "--json")
        assert (result.code, result.json["base"]["digest"]) == (0, self.OLD)

    def test_is_kept_by_lock_and_renewed_by_upgrade(self, spark_build: Call, project: Path) -> None:
        assert spark_build("lock").code == 0
        assert entry_of(project)["base"]["digest"] == self.OLD
        assert spark_build("lock", "--upgrade").code == 0
        assert entry_of(project)["base"]["digest"] == self.NEW


# --------------------------------------------------------------------- what a base's layers hold


class TestFacts:
    """A base in a layout, whose layers are gone once it is locked."""

    @pytest.fixture(autouse=True)
    def base(self, spark_build: Call, fix: Path, tmp_path: Path) -> tuple[str, ...]:
        (fix / "layer.toml").write_text(LAYER.replace("1.0.0", "0.20.1"))
        put_vllm(tmp_path / "base", name="v1")
        words = ("-l", "fix", "-b", f"oci:{tmp_path / 'base'}:v1")
        assert spark_build("lock", *words).code == 0
        return words

    @pytest.fixture
    def cold(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, base: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Nothing is left of the base but its manifest and its configuration."""
        monkeypatch.setenv("SPARK_BUILD_CACHE", str(tmp_path / "empty"))
        layout = LayoutDirectory(tmp_path / "base")
        for layer in blobs(layout.manifest("v1"))[1:]:
            (layout.path / "blobs/sha256" / layer.digest.partition(":")[2]).unlink()
        return base

    def test_replace_reading_the_layers(
        self, spark_build: Call, cold: tuple[str, ...], project: Path
    ) -> None:
        assert spark_build("plan", *cold, "--locked").code == 0
        image = ("image", *cold, "--locked", "--engine", "oci", "--thin", "-o", "oci:out")
        assert spark_build(*image, "--no-verify").code == 0
        assert spark_build("verify", "oci:out", "--level", "static", "--locked").code == 0
        assert spark_build("verify", "oci:out", "--level", "static").code == 0
        assert spark_build("lock", "--check").code == 0
        (project / NAME).unlink()
        assert spark_build("plan", *cold).code == 8, "nothing else holds them"

    def test_are_not_used_for_patch_layers(
        self, spark_build: Call, base: tuple[str, ...], project: Path
    ) -> None:
        image = ("image", *base, "--locked", "--engine", "oci", "--thin", "-o", "oci:out")
        assert spark_build(*image).code == 0
        layout = LayoutDirectory(project / "out")
        (entry,) = json.loads((layout.path / "index.json").read_bytes())["manifests"]
        top = blobs(layout.manifest(entry["digest"]))[-1]
        (layout.path / "blobs/sha256" / top.digest.partition(":")[2]).unlink()
        result = spark_build("verify", "oci:out", "--level", "static", "--locked")
        assert (result.code, top.digest in result.err) == (8, True), "although the cache knows it"

    def test_describe_files_added_to_the_base(
        self, spark_build: Call, cold: tuple[str, ...], project: Path
    ) -> None:
        image = ("image", *cold, "--locked", "--engine", "oci", "--thin", "-o", "oci:out")
        assert spark_build(*image, "--no-verify").code == 0
        on_top(LayoutDirectory(project / "out"), Item(f"{SITE}/evil.pth", b"import os\n"))
        code, check = hooks(spark_build)
        assert (code, check["unrecorded"]) == (5, ["evil.pth"]), "and no layer of the base is read"

    def test_describe_starts_of_the_base(
        self, spark_build: Call, cold: tuple[str, ...], project: Path
    ) -> None:
        image = ("image", *cold, "--locked", "--engine", "oci", "--thin", "-o", "oci:out")
        assert spark_build(*image, "--no-verify").code == 0
        paths = ["srv/lib/libc.so.6", "usr/lib/aarch64-linux-gnu/libc.so.6",
                 "root/.cache/flashinfer/x.so"]  # fmt: skip
        items = [Item(path, b"x") for path in (*paths, "json.py")]
        env = ["LD_LIBRARY_PATH=/missing:/srv/lib"]
        on_top(LayoutDirectory(project / "out"), *items, env=env)
        done = spark_build("verify", "oci:out", "--level", "static", "--json")
        checks = {check["name"]: check for check in done.json["checks"]}
        assert "/json.py instead of json" in checks["imported modules"]["seen"]
        assert checks["startup hooks"]["unrecorded"] == [
            "/srv/lib/libc.so.6",
            "/usr/lib/aarch64-linux-gnu/libc.so.6",
            "/root/.cache/flashinfer/",
        ], "and no layer of the base is read"

    def test_are_kept_when_a_docker_engine_reads_the_base(
        self, spark_build: Call, cold: tuple[str, ...], project: Path, fix: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        pin = entry_of(project)["base"]["facts"]
        (fix / "fix.txt").write_text("two\n")
        identify_base = bases.identify_base

        def by_engine(*words: Any, **more: Any) -> Subject:
            return dataclasses.replace(identify_base(*words, **more), image=None)

        monkeypatch.setattr(bases, "identify_base", by_engine)
        assert spark_build("lock").code == 0
        assert entry_of(project)["base"]["facts"] == pin
        assert spark_build("lock", "--upgrade").code == 8, "which takes nothing from the lock"

    def test_that_are_incomplete_make_the_lock_stale(
        self, spark_build: Call, base: tuple[str, ...], project: Path
    ) -> None:
        """As another version of this program would that asks for more."""
        lock = read_lock(project / NAME)
        assert lock is not None
        (entry,) = lock.entries.values()
        assert entry.base.facts is not None
        facts = read_facts(lock.path, entry.base.facts)
        (name,) = (n for n, data in facts.contents.items() if data.startswith(b"Metadata"))
        del facts.contents[name]
        lacking = replace(entry.base, facts=write_facts(lock.path, facts))
        lock.entries[entry.request.key] = replace(entry, base=lacking)
        assert lock.write()
        assert spark_build("plan", *base, "--locked").code == 0, "the layers are there"
        result = spark_build("lock", "--check")
        assert (result.code, "lacks facts about its layers (1)" in result.err) == (9, True)
        assert spark_build("lock").code == 0
        assert spark_build("lock", "--check").code == 0

    @pytest.mark.parametrize(
        "change",
        [{"sha256": "x"}, {"layers": 3}, {"depth": 0}, {"depth": "2"}, {"file": "../x.json.gz"}],
    )
    def test_pinned_in_another_form_are_refused(
        self, spark_build: Call, base: tuple[str, ...], project: Path, change: dict[str, object]
    ) -> None:
        lock = lock_of(project)
        (entry,) = lock["locked"].values()
        entry["base"]["facts"].update(change)
        (project / NAME).write_text(json.dumps(lock))
        assert spark_build("plan", *base).code == 9

    @pytest.mark.parametrize("key", ["kind", "digest", "packages"])
    def test_a_base_that_lacks_a_key_makes_the_lock_damaged(
        self, spark_build: Call, base: tuple[str, ...], project: Path, key: str
    ) -> None:
        lock = lock_of(project)
        (entry,) = lock["locked"].values()
        del entry["base"][key]
        (project / NAME).write_text(json.dumps(lock))
        result = spark_build("plan", *base)
        assert (result.code, "cannot be used" in result.err) == (9, True)

    def test_of_a_damaged_lock_are_not_used(
        self, spark_build: Call, base: tuple[str, ...], project: Path
    ) -> None:
        image = ("image", *base, "--engine", "oci", "--thin", "-o", "oci:out", "--no-verify")
        assert spark_build(*image).code == 0
        (project / NAME).write_text("<<<<<<< ours\n")
        result = spark_build("verify", "oci:out", "--level", "static")
        assert (result.code, "cannot be used" in result.err) == (0, True)


@pytest.mark.parametrize(
    ("ref", "name"),
    [
        ("vllm/vllm-openai:v0.20.1", "vllm/vllm-openai"),
        ("registry.test:5000/vllm", "registry.test:5000/vllm"),
        ("docker://registry.test:5000/vllm:a", "docker://registry.test:5000/vllm"),
        (f"registry.test/vllm@sha256:{'c' * 64}", "registry.test/vllm"),
        ("oci:images", "oci:images"),
        ("oci:some/images", "oci:some/images"),
    ],
)
def test_places_where_a_digest_is_looked_up(ref: str, name: str) -> None:
    assert Ref(ref).at("sha256:0") == Ref(f"{name}@sha256:0")


def test_a_pull_request_by_commit_is_pinned_like_any_other(
    spark_build: Call, wheels: FakeIndex, forge: LocalForge, world: World, project: Path
) -> None:
    commit = world.pulls[pw.OPEN].head
    forge.pulls[40] = Pull(head=world.pulls[pw.UNRELATED].head, title="x")
    words = ["--with-pr", f"vllm-project/vllm@{commit}", *BASE]
    assert spark_build("lock", *words).code == 0
    (pin,) = lock_of(project)["pulls"].values()
    assert (pin["commit"], "number" in pin) == (commit, False)
