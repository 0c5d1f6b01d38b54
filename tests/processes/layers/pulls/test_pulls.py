"""``--with-pr``: what each kind of pull request comes to on a release, and what is said of it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.values import sha256_hex
from builder.common.diffs import normalise
from builder.common.pypi import PackageIndex
from builder.errors import RemoteError
from tests.forge import API, Fault, LocalForge, Pull
from tests.processes import pullworld as pw
from tests.unit.fakes import write_tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.processes.pullworld import World
    from tests.unit.conftest import Called

    Call = Callable[..., Called]

pytestmark = pytest.mark.usefixtures("wheels")


def named(*numbers: int) -> list[str]:
    return [word for n in numbers for word in ("--with-pr", f"vllm-project/vllm#{n}")]


@pytest.fixture
def plan(spark_build: Call, forge: LocalForge) -> Callable[..., Called]:
    """Plan some pull requests on a release."""

    def planned(*numbers: int, base: str = "1.0.0", more: tuple[str, ...] = ("--json",)) -> Called:
        return spark_build("plan", *named(*numbers), "--base", f"pypi:vllm=={base}", *more)

    return planned


def outcome(called: Called) -> dict[str, Any]:
    """Layer -> state."""
    return {layer["name"]: layer["state"] for layer in called.json["layers"]}


# ----------------------------------------------------------------------------- one on one release

STATES = {
    "open": (pw.OPEN, "1.0.0", "needed", 0),
    "merged-not-there-yet": (pw.MERGED_BY_SQUASH, "1.1.0", "needed", 0),
    "merged-there": (pw.MERGED_BY_SQUASH, "1.2.0", "applied", 0),
    "merged-then-edited": (pw.MERGED_BY_SQUASH, "1.3.0", "upstream", 0),
    "merged-by-a-merge": (pw.MERGED_BY_MERGE, "1.2.0", "applied", 0),
    "closed": (pw.SUPERSEDED, "1.0.0", "needed", 0),
    "closed-and-overtaken": (pw.SUPERSEDED, "1.3.0", "drift", 4),
    "cuda-only": (pw.GPU_ONLY, "1.0.0", "needs-rebuild", 10),
    "cuda-and-python": (pw.GPU_AND_PYTHON, "1.0.0", "needs-rebuild", 10),
    "submodule": (pw.SUBMODULE, "1.0.0", "needs-rebuild", 10),
    "binary-outside": (pw.BINARY_OUTSIDE, "1.0.0", "needed", 0),
    "every-shape": (pw.SHAPES, "1.0.0", "needed", 0),
    "line-ends": (pw.LINE_ENDS, "1.0.0", "needed", 0),
    "tests-only": (pw.TESTS_ONLY, "1.0.0", "not-applicable", 3),
    "taken-back": (pw.REVERTED, "1.3.0", "needed", 0),
}


@pytest.mark.parametrize(("number", "base", "state", "code"), STATES.values(), ids=STATES.keys())
def test_a_pull_request_on_a_release(
    plan: Call, number: int, base: str, state: str, code: int
) -> None:
    result = plan(number, base=base)
    assert (outcome(result), result.code) == ({f"pr-vllm-{number}": state}, code)


def test_an_open_pull_request_is_reported_completely(
    plan: Call, world: World, forge: LocalForge
) -> None:
    (report,) = plan(pw.OPEN).json["pulls"]
    pull = world.pulls[pw.OPEN]
    assert report["commit"] == pull.head
    assert (report["state"], report["title"], report["in_base"]) == ("open", "Faster alpha", "no")
    assert report["layer"] == "pr-vllm-1"
    assert report["installed"] == [
        {"path": "vllm/kernels.py", "change": "edit", "hunks": ["pre"], "offsets": [0]}
    ]
    assert {row["path"]: row["why"] for row in report["dropped"]} == {
        "docs/guide.md": "documentation",
        "requirements/cuda.txt": "defines the build or the requirements of the package",
        "tests/test_kernels.py": "a test",
    }
    base = world.repository.git("merge-base", "main", pull.head)
    diff = normalise(world.repository.run("diff", base, pull.head))
    assert (report["base"], report["sha256"]) == (base, sha256_hex(diff))


def test_a_merged_pull_request_names_its_release_and_suggests_a_graft(plan: Call) -> None:
    result = plan(pw.MERGED_BY_SQUASH)
    (report,) = result.json["pulls"]
    assert (report["state"], report["release"]) == ("merged", "1.2.0")
    assert report["merged_at"].startswith("2026-01-")
    assert "graft help_gamma from there" in report["hints"][0]
    assert 'from = "vllm==1.2.0"' in report["hints"][0]
    assert report["hints"][0] in result.json["hints"]


def test_an_applied_pull_request_is_to_be_removed(plan: Call) -> None:
    for base in ("1.2.0", "1.3.0"):
        (report,) = plan(pw.MERGED_BY_SQUASH, base=base).json["pulls"]
        assert report["in_base"] == "whole"
        assert "already in this base; remove it from the selection" in report["hints"][0]


def test_a_partly_applied_pull_request_is_drift(
    spark_build: Call, forge: LocalForge, world: World, tmp_path: Path
) -> None:
    files = world.release("1.0.0")
    files["vllm/crlf.py"] = world.repository.read(world.pulls[pw.LINE_ENDS].head, "vllm/crlf.py")
    info = {"vllm-1.0.0.dist-info/METADATA": b"Name: vllm\n", "vllm-1.0.0.dist-info/RECORD": b""}
    site = write_tree(tmp_path / "site-packages", {**files, **info})
    result = spark_build("plan", *named(pw.LINE_ENDS), "-b", f"dir:{site}", "--json")
    assert (outcome(result), result.code) == ({"pr-vllm-10": "drift"}, 4)
    assert "vllm/crlf.py already patched, vllm/no_end.py not" in result.json["error"]["message"]
    (report,) = result.json["pulls"]
    assert report["in_base"] == "part"
    assert {file["path"]: file["hunks"] for file in report["installed"]} == {
        "vllm/crlf.py": ["post"],
        "vllm/no_end.py": ["pre"],
    }
    assert "is partly applied (vllm/crlf.py)" in report["hints"][0]


def test_a_reverted_pull_request_is_reported(plan: Call) -> None:
    (report,) = plan(pw.REVERTED, base="1.3.0").json["pulls"]
    assert report["release"] == "1.2.0"
    assert "was reverted" in report["hints"][0]


def test_a_superseded_one_names_its_successor(plan: Call) -> None:
    (report,) = plan(pw.SUPERSEDED).json["pulls"]
    assert report["superseded_by"] == "vllm-project/vllm#2"


def test_compiled_files_are_listed(plan: Call) -> None:
    result = plan(pw.GPU_ONLY)
    assert result.json["pulls"][0]["compiled"] == ["CMakeLists.txt", "csrc/gemm.cu"]
    assert "csrc/gemm.cu" in result.json["error"]["message"]


def test_a_submodule_counts_only_if_it_is_compiled(plan: Call) -> None:
    (report,) = plan(pw.SUBMODULE).json["pulls"]
    assert report["compiled"] == ["csrc/cutlass"]
    assert report["dropped"] == [{"path": "third_party/other", "why": "a submodule"}]


REFUSED = {
    "binary-inside": (pw.BINARY_INSIDE, 2, "vllm/logo.png, which is installed and is a binary"),
    "into-the-package": (pw.INTO_PACKAGE, 2, "does not contain the whole file"),
    "empty": (pw.EMPTY, 3, "its diff is empty"),
    "unknown": (99, 8, "vllm-project/vllm#99 is not on 127.0.0.1"),
}


@pytest.mark.parametrize(("number", "code", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_an_unsupported_change_is_refused_with_a_reason(
    plan: Call, number: int, code: int, message: str
) -> None:
    result = plan(number, more=())
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert "try: " in result.err


def test_a_diff_of_five_megabytes(plan: Call) -> None:
    result = plan(pw.HUGE)
    assert outcome(result) == {"pr-vllm-14": "needed"}
    assert result.json["pulls"][0]["size"] > 5_000_000


# ----------------------------------------------------------------------------------------- series


def test_a_series_keeps_its_order(plan: Call) -> None:
    result = plan(pw.LOWER, pw.UPPER)
    assert list(outcome(result).items()) == [("pr-vllm-11", "needed"), ("pr-vllm-12", "needed")]
    assert plan(pw.UPPER, pw.LOWER).code == 4


def test_a_series_in_the_base_is_found_from_its_last_part(
    plan: Call, world: World, spark_build: Call, tmp_path: Path
) -> None:
    """Somebody patched this environment without us: no receipt says so."""
    files = world.repository.files(world.pulls[pw.UPPER].head, "vllm")
    info = {"vllm-1.0.0.dist-info/METADATA": b"Name: vllm\n", "vllm-1.0.0.dist-info/RECORD": b""}
    site = write_tree(tmp_path / "site-packages", {**files, **info})
    result = spark_build("plan", *named(pw.LOWER, pw.UPPER), "-b", f"dir:{site}", "--json")
    assert outcome(result) == {"pr-vllm-11": "applied", "pr-vllm-12": "applied"}


def test_a_conflict_within_a_series_names_the_layer_in_the_way(plan: Call) -> None:
    result = plan(pw.LOWER, pw.CONFLICTING)
    assert (list(outcome(result).values()), result.code) == (["needed", "drift"], 4)
    (conflict,) = result.json["pulls"][1]["conflicts"]
    assert conflict["history"].endswith("layer pr-vllm-11 changed these lines first")


def test_independent_pull_requests_do_not_interfere(plan: Call) -> None:
    result = plan(pw.UNRELATED, pw.OPEN, pw.MERGED_BY_SQUASH)
    assert list(outcome(result)) == ["pr-vllm-20", "pr-vllm-1", "pr-vllm-2"]
    assert set(outcome(result).values()) == {"needed"}


def test_naming_one_twice_is_an_error(plan: Call) -> None:
    result = plan(pw.OPEN, pw.OPEN, more=())
    assert result.code == 2
    assert "named twice" in result.err


# -------------------------------------------------------------------------------------- conflicts


class TestConflict:
    def test_is_shown_side_by_side(self, plan: Call) -> None:
        said = plan(pw.SUPERSEDED, base="1.3.0", more=()).out
        assert "vllm/kernels.py, hunk 1 (line 16 in the diff, 16 here): the text differs" in said
        assert re.search(r"expected by vllm-project/vllm#4 +found in the base", said)
        assert re.search(r"kept = first_of_gamma \* 2 +\| +kept = first_of_gamma << 1", said)
        assert re.search(r"return kept +\| +return first_of_gamma_as_it_was or value", said)

    def test_says_which_releases_it_fits(self, plan: Call) -> None:
        (report,) = plan(pw.SUPERSEDED, base="1.3.0").json["pulls"]
        (conflict,) = report["conflicts"]
        assert conflict["history"] == (
            "this hunk's text is in vllm 1.0.0 … 1.1.0, not in 1.2.0 … 1.3.0"
        )
        assert "    kept = first_of_gamma * 2" in conflict["expected"]
        assert "    kept = first_of_gamma << 1" in conflict["found"]

    def test_names_a_next_command(self, plan: Call) -> None:
        error = plan(pw.SUPERSEDED, base="1.3.0").json["error"]
        assert error["hint"].startswith(
            "spark-build layers new NAME --from-pr 'vllm-project/vllm#4'"
        )

    def test_of_a_missing_file(self, plan: Call, forge: LocalForge, world: World) -> None:
        world.repository.branch("pr-later", "v1.2.0")
        change = {"vllm/gamma_helper.py": "def help_gamma(value):\n    return value\n"}
        forge.pulls[30] = Pull(head=world.repository.commit("Later", change), title="Later")
        (report,) = plan(30).json["pulls"]
        (conflict,) = report["conflicts"]
        assert conflict["why"] == "the file is not in the base"
        assert conflict["history"] == (
            "this hunk's text is in vllm 1.2.0 … 1.3.0, not in 1.0.0 … 1.1.0"
        )

    def test_without_an_index_it_reports_that(
        self, plan: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan(pw.OPEN, base="1.3.0")

        def unreachable(*_: object) -> None:
            raise RemoteError("the package index did not answer")

        monkeypatch.setattr(PackageIndex, "releases", unreachable)
        (report,) = plan(pw.SUPERSEDED, base="1.3.0").json["pulls"]
        assert "no release was checked" in report["conflicts"][0]["history"]


# ------------------------------------------------------------------------- what is asked, and when


class TestCommits:
    def test_an_older_commit_can_be_named(
        self, plan: Call, spark_build: Call, world: World, forge: LocalForge
    ) -> None:
        old = world.pulls[pw.OPEN].head
        world.repository.branch("pr-1-more", old)
        forge.pulls[pw.OPEN].head = world.repository.commit("More", {"vllm/late.py": "LATE = 1\n"})
        words = ["--with-pr", f"vllm-project/vllm#1@{old[:9]}", "-b", "pypi:vllm==1.0.0"]
        result = spark_build("plan", *words)
        assert "1 commits ahead" in result.err
        assert "1 file to change" in result.out
        assert "2 files to change" in plan(pw.OPEN, more=()).out

    def test_a_force_push_is_detected(
        self, spark_build: Call, world: World, forge: LocalForge
    ) -> None:
        old = world.pulls[pw.OPEN].head
        forge.pulls[pw.OPEN].head = world.pulls[pw.UNRELATED].head
        words = ["--with-pr", f"vllm-project/vllm#1@{old}", "-b", "pypi:vllm==1.0.0"]
        result = spark_build("plan", *words)
        assert result.code == 0
        assert f"{old[:12]} is not in the history of its head" in result.err

    def test_a_single_commit_is_a_pull_too(
        self, spark_build: Call, world: World, forge: LocalForge
    ) -> None:
        merged = world.pulls[pw.MERGED_BY_SQUASH].merge_commit
        words = [
            "--with-pr",
            f"vllm-project/vllm@{merged[:10]}",
            "-b",
            "pypi:vllm==1.0.0",
            "--json",
        ]
        result = spark_build("plan", *words)
        assert outcome(result) == {f"commit-vllm-{merged[:10]}": "needed"}
        assert result.json["pulls"][0]["commit"] == merged

    def test_the_first_commit_changes_nothing(
        self, spark_build: Call, world: World, forge: LocalForge
    ) -> None:
        first = world.repository.git("rev-parse", "v1.0.0")
        result = spark_build("plan", "--with-pr", f"o/vllm@{first}", "-b", "pypi:vllm==1.0.0")
        assert result.code == 8

    def test_a_page_address_works_like_a_number(self, spark_build: Call, forge: LocalForge) -> None:
        page = f"{forge.root}/vllm-project/vllm/pull/1/files"
        assert spark_build("plan", "--with-pr", page, "-b", "pypi:vllm==1.0.0").code == 0

    def test_a_page_on_another_host_is_refused_without_a_request(
        self, spark_build: Call, forge: LocalForge
    ) -> None:
        page = "https://github.com/vllm-project/vllm/pull/1"
        result = spark_build("plan", "--with-pr", page, "-b", "pypi:vllm==1.0.0")
        assert (result.code, forge.requests) == (2, [])
        assert "try: SPARK_BUILD_FORGE=github.com" in result.err


class TestRequests:
    def test_a_diff_is_fetched_once(self, plan: Call, forge: LocalForge) -> None:
        plan(pw.OPEN)
        assert len(forge.requests) == 4
        plan(pw.OPEN)
        assert forge.paths[4:] == ["/repos/vllm-project/vllm/pulls/1"]

    def test_a_renamed_repository_is_followed_and_pinned_by_its_name(
        self, spark_build: Call, forge: LocalForge
    ) -> None:
        forge.former.add("old-owner/vllm")
        words = ["--with-pr", "old-owner/vllm#1", "-b", "pypi:vllm==1.0.0", "--json"]
        result = spark_build("plan", *words)
        assert result.json["pulls"][0]["repository"] == "vllm-project/vllm"
        assert result.json["pulls"][0]["request"] == "old-owner/vllm#1"

    def test_offline_with_a_warm_cache(self, plan: Call, forge: LocalForge) -> None:
        first = plan(pw.OPEN)
        forge.faults.append(Fault(API, 200, delay=0))
        forge.__exit__()
        again = plan(pw.OPEN)
        assert (again.code, again.json["plan_digest"]) == (0, first.json["plan_digest"])
        assert "using the cached state of vllm-project/vllm#1" in again.err

    def test_offline_with_a_cold_one_is_an_error(self, plan: Call, forge: LocalForge) -> None:
        forge.__exit__()
        result = plan(pw.OPEN, more=())
        assert result.code == 8
        assert "connection refused, 5 times" in result.err

    def test_a_rate_limit_is_an_error_of_the_remote(self, plan: Call, forge: LocalForge) -> None:
        headers = {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "4102444800"}
        forge.faults.append(Fault("/pulls/1", 403, headers))
        result = plan(pw.OPEN, more=())
        assert result.code == 8
        assert "try again after 2100-01-01 00:00" in result.err

    @pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"number": 1}', b'{"head": null}'])
    def test_a_malformed_response_gives_no_traceback(
        self, plan: Call, forge: LocalForge, body: bytes
    ) -> None:
        forge.faults.append(Fault("/pulls/1", 200, body=body))
        result = plan(pw.OPEN, more=())
        assert result.code == 8
        assert "did not answer like GitHub's API" in result.err

    def test_a_malformed_diff_is_refused(self, plan: Call, forge: LocalForge) -> None:
        plan(pw.UNRELATED)
        forge.faults.append(
            Fault("/compare/", 200, body=b'{"merge_base_commit": {"sha": "%s"}}' % (b"a" * 40))
        )
        result = plan(pw.OPEN, more=())
        assert result.code == 8
        assert "is not a git diff" in result.err

    def test_a_title_cannot_send_escape_codes(self, plan: Call, forge: LocalForge) -> None:
        forge.pulls[pw.OPEN].title = "Red \x1b[31m and \u202ebackwards"
        assert plan(pw.OPEN).json["pulls"][0]["title"] == "Red  [31m and  backwards"


# ----------------------------------------------------------------------- what comes of it elsewhere


class TestElsewhere:
    def test_apply_and_revert(
        self, spark_build: Call, forge: LocalForge, world: World, tmp_path: Path
    ) -> None:
        info = {
            "vllm-1.0.0.dist-info/METADATA": b"Name: vllm\n",
            "vllm-1.0.0.dist-info/RECORD": b"",
        }
        site = write_tree(tmp_path / "site-packages", {**world.release("1.0.0"), **info})
        assert spark_build("apply", site, *named(pw.SHAPES, pw.OPEN)).code == 0
        assert (site / "vllm/sub/moved.py").is_file()
        assert not (site / "vllm/legacy.py").exists()
        assert "kept + 1" in (site / "vllm/kernels.py").read_text()
        again = spark_build("apply", site, *named(pw.SHAPES, pw.OPEN), "--json")
        assert set(outcome(again).values()) == {"applied"}
        assert spark_build("revert", site, "--layers", "pr-vllm-1").code == 0
        assert spark_build("revert", site).code == 0
        for path, data in world.release("1.0.0").items():
            assert (site / path).read_bytes() == data

    def test_an_image_contains_the_text_and_its_origin(
        self, spark_build: Call, forge: LocalForge, tmp_path: Path
    ) -> None:
        words = ["-b", "pypi:vllm==1.0.0", "--engine", "oci", "-o", "oci:out", "--no-verify"]
        assert spark_build("image", *named(pw.OPEN), *words).code == 0
        forge.__exit__()
        assert spark_build("verify", "oci:out", "--level", "static").code == 0
        (blob,) = [
            data
            for path in (tmp_path / "work/out/blobs/sha256").iterdir()
            if b'"annotations"' in (data := path.read_bytes())
        ]
        assert "pr-vllm-1" in json.loads(blob)["annotations"]["io.github.spark-build.layers"]

    def test_a_mod_needs_no_forge(
        self, spark_build: Call, forge: LocalForge, world: World, tmp_path: Path
    ) -> None:
        words = ["mods", "export", "mine", *named(pw.OPEN, pw.MERGED_BY_SQUASH), "--in", "mods"]
        assert spark_build(*words).code == 0
        bundle = json.loads((tmp_path / "work/mods/mine/layers.json").read_bytes())
        ops = [op for layer in bundle["layers"] for v in layer["variants"] for op in v["ops"]]
        assert [op["op"] for op in ops] == ["diff", "diff"]
        assert ops[0]["pull"]["commit"] == world.pulls[pw.OPEN].head
        assert spark_build(*words, "--check").code == 0

    @pytest.mark.parametrize(("base", "code"), [("1.0.0", 5), ("1.2.0", 0)])
    def test_a_release_is_compared_with_it(
        self, spark_build: Call, forge: LocalForge, base: str, code: int
    ) -> None:
        words = [*named(pw.MERGED_BY_SQUASH), "--level", "static"]
        assert spark_build("verify", f"pypi:vllm=={base}", *words).code == code

    def test_an_empty_selection_is_an_error(self, spark_build: Call) -> None:
        for command in (["plan"], ["image"], ["apply", "."]):
            result = spark_build(*command)
            assert result.code == 2
            assert "--layers or --with-pr" in result.err
