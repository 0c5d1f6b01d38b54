"""Evidence from the cache: only of the same content, and only complete passes."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.values import sha256_hex
from builder.common.document import plain
from builder.common.paths import cache_dir
from builder.common.pypi import PackageIndex
from builder.common.reference import Ref
from builder.images.registry.layout import LayoutDirectory
from builder.images.rootfs.image import open_image
from builder.pipeline import verify as pipeline_verify
from builder.proof import cached
from builder.proof.cached import EvidenceCache, layout_content
from builder.proof.checks import Check, Status
from builder.proof.isolation import Bubblewrap
from builder.proof.report import Report, render_html, render_summary
from builder.proof.run import verify as run_verify
from builder.proof.trust import IsolatedRun, TrustedSources
from tests.unit.fakes import write_tree
from tests.unit.imagefiles import SITE, Item, packed, put_image, put_vllm, tar_of
from tests.unit.plans import planned

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.unit.caller import Call

VERIFY = ("verify", "oci:out", "--level", "static", "--json")
IMAGE = ("image", "-l", "fix", "--output", "oci:out")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The levels of each verification that really ran."""
    asked: list[Sequence[str]] = []

    def noted(target: Any, levels: Sequence[str], heard: Any = None) -> Report:
        asked.append(levels)
        return run_verify(target, levels, heard)

    monkeypatch.setattr(pipeline_verify, "verify", noted)
    return asked


@pytest.fixture
def out(call: Call, tmp_path: Path) -> Path:
    put_vllm(tmp_path / "base")
    call(*IMAGE, "-b", f"oci:{tmp_path}/base", "--no-verify")
    return tmp_path / "work/out"


def entries() -> list[Path]:
    return sorted((cache_dir() / "evidence").glob("*.json"))


@pytest.mark.usefixtures("out")
def test_the_second_run_takes_the_evidence_of_the_first(
    call: Call, runs: list[Sequence[str]]
) -> None:
    first, second = call(*VERIFY), call(*VERIFY)
    assert (first.code, second.code, runs) == (0, 0, [("static",)])
    assert "cached" not in first.json
    assert second.json["cached"].endswith("Z")
    assert {**second.json, "cached": None} == {**first.json, "cached": None}


@pytest.mark.usefixtures("out")
def test_people_are_told_that_evidence_is_from_the_cache(call: Call) -> None:
    first = call(*VERIFY[:-1])
    second = call(*VERIFY[:-1])
    lines = second.err.splitlines()
    (told,) = [line for line in lines if "from the cache" in line]
    assert "--refresh" in told
    assert "PASS    static" in second.err
    assert "from the cache" not in first.err
    assert second.out == first.out


@pytest.mark.usefixtures("out")
def test_refresh_asks_again_and_other_levels_are_other_evidence(
    call: Call, runs: list[Sequence[str]]
) -> None:
    call(*VERIFY)
    assert "cached" not in call(*VERIFY, "--refresh").json
    assert "cached" not in call("verify", "oci:out", "--level", "static,imports", "--json").json
    assert len(runs) == 3
    assert "cached" in call(*VERIFY).json


def test_what_failed_is_asked_again(
    call: Call, tmp_path: Path, out: Path, runs: list[Sequence[str]]
) -> None:
    call(*VERIFY)
    image = open_image(Ref(f"oci:{out}"))
    blobs = []
    for layer in image.layers:
        with LayoutDirectory(out).open(layer) as stream:
            blobs.append(stream.read())
    spoiled = packed(tar_of(Item(f"{SITE}/vllm/core.py", b"BACKEND = 'other'\n")))
    put_image(tmp_path / "spoiled", *blobs, spoiled, config=dict(image.config.settings))
    words = ("verify", f"oci:{tmp_path}/spoiled", "--level", "static", "--json")
    assert [call(*words).code, call(*words).code] == [5, 5]
    assert len(runs) == 3
    assert len(entries()) == 1


@pytest.mark.usefixtures("out")
def test_what_did_not_run_is_asked_again(call: Call, runs: list[Sequence[str]]) -> None:
    """Of the default levels, dispatch cannot run here."""
    first, again = (call("verify", "oci:out", "--json") for _ in range(2))
    assert {check["status"] for check in first.json["checks"]} == {"pass", "not-run"}
    assert "cached" not in again.json
    assert (len(runs), entries()) == (2, [])


def test_the_same_name_with_other_content_is_asked_again(
    call: Call, tmp_path: Path, out: Path, runs: list[Sequence[str]]
) -> None:
    call(*VERIFY)
    put_vllm(tmp_path / "other", items=[Item("opt/more", b"x")])
    shutil.rmtree(out)
    call(*IMAGE, "-b", f"oci:{tmp_path}/other", "--no-verify")
    assert "cached" not in call(*VERIFY).json
    assert (len(runs), len(entries())) == (2, 2)


def test_a_damaged_blob_is_asked_again(call: Call, out: Path, runs: list[Sequence[str]]) -> None:
    call(*VERIFY)
    top = open_image(Ref(f"oci:{out}")).layers[-1]
    blob = out / LayoutDirectory.blob_path(top.digest)
    data = bytearray(blob.read_bytes())
    data[-9] ^= 1
    blob.write_bytes(data)
    assert layout_content(Ref(f"oci:{out}")) == ()
    again = call(*VERIFY)
    assert '"cached"' not in again.out
    assert (len(runs), len(entries())) == (2, 1)


def test_a_missing_blob_is_no_known_content(out: Path) -> None:
    assert len(layout_content(Ref(f"oci:{out}"))) > 1
    top = open_image(Ref(f"oci:{out}")).layers[-1]
    (out / LayoutDirectory.blob_path(top.digest)).unlink()
    assert layout_content(Ref(f"oci:{out}")) == ()


def test_a_large_layout_is_not_hashed(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "_MOST_HASHED", 10)
    assert layout_content(Ref(f"oci:{out}")) == ()


def _cut(data: bytes) -> bytes:
    return data[:-20]


def _flip(data: bytes) -> bytes:
    return data.replace(b'"pass"', b'"fail"', 1)


def _empty(_data: bytes) -> bytes:
    return b""


def _nested(_data: bytes) -> bytes:
    deep = b"[" * 100_000
    return sha256_hex(deep).encode() + b"\n" + deep


@pytest.mark.parametrize("damage", [_cut, _flip, _empty, _nested])
@pytest.mark.usefixtures("out")
def test_a_damaged_entry_is_asked_again(call: Call, runs: list[Sequence[str]], damage: Any) -> None:
    call(*VERIFY)
    (entry,) = entries()
    entry.write_bytes(damage(entry.read_bytes()))
    again = call(*VERIFY)
    assert (again.code, len(runs)) == (0, 2)
    assert "cached" not in again.json
    assert "cached" in call(*VERIFY).json, "it was written again"


@pytest.mark.usefixtures("out")
def test_an_entry_under_another_key_is_asked_again(call: Call, runs: list[Sequence[str]]) -> None:
    call(*VERIFY)
    (entry,) = entries()
    call("verify", "oci:out", "--level", "imports", "--json")
    for other in entries():
        other.write_bytes(entry.read_bytes())
    call("verify", "oci:out", "--level", "imports", "--json")
    assert [*map(tuple, runs)].count(("imports",)) == 2


# ------------------------------------------------------------------------------------ what is kept


KEY = "a" * 64


def put(evidence: EvidenceCache, report: Report) -> None:
    for name in report.plan.base.packages:  # the index has no wheel of them
        evidence.index._pages[name] = []
    evidence.put(KEY, report, Ref("pypi:vllm==0.20.1"))


def check(level: Any, status: Status, *, moot: bool = False, isolated: bool = False) -> Check:
    reason = "" if status == "pass" else "why"
    run = IsolatedRun(isolation=Bubblewrap(), because="x")
    return Check(
        level=level, name=f"{level} {status} {moot}", status=status, expected="", seen="",
        reason=reason, moot=moot, simulated=(run.text(),) if isolated else (),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("checks", "is_kept"),
    [
        ([check("static", "pass"), check("imports", "pass")], True),
        (
            [
                check("static", "pass"),
                check("imports", "pass"),
                check("imports", "not-run", moot=True),
            ],
            True,
        ),
        ([check("static", "pass"), check("imports", "fail")], False),
        ([check("static", "pass"), check("imports", "not-run")], False),
        ([check("static", "pass"), check("imports", "not-run", moot=True)], False),
        ([check("static", "pass"), check("imports", "pass"), check("static", "not-run")], False),
        ([check("static", "pass")], False),
        ([check("static", "pass"), check("imports", "pass", isolated=True)], False),
        ([], False),
    ],
)
def test_only_a_complete_pass_is_kept(checks: list[Check], is_kept: bool) -> None:
    evidence = EvidenceCache(
        levels=("static", "imports"), trust=TrustedSources(), index=PackageIndex()
    )
    put(evidence, Report(target="t", plan=planned(), checks=checks))
    assert bool(entries()) is is_kept
    assert (evidence.get(KEY) is not None) is is_kept


def test_evidence_on_wheels_that_the_index_replaced_is_asked_again() -> None:
    evidence = EvidenceCache(levels=("static",), trust=TrustedSources(), index=PackageIndex())
    report = Report(target="t", plan=planned(), checks=[check("static", "pass")])
    put(evidence, report)
    kept = evidence.get(KEY)
    assert kept is not None
    assert kept.pages
    changed = dict.fromkeys(kept.pages, "0" * 64)
    data = json.dumps({**plain(kept), "pages": changed}).encode()
    entries()[0].write_bytes(sha256_hex(data).encode() + b"\n" + data)
    assert evidence.get(KEY) is None


@pytest.mark.parametrize(
    ("levels", "usable"),
    [
        (("static", "imports", "dispatch"), True),
        (("static", "codegen", "numbers", "binaries"), True),
        (("static", "model"), False),
        (("device",), False),
        (("static", "serve"), False),
        (("unknown",), False),
    ],
)
def test_levels_that_depend_on_more_than_content(levels: tuple[str, ...], usable: bool) -> None:
    evidence = EvidenceCache(levels=levels, trust=TrustedSources(), index=PackageIndex())
    assert evidence.usable is usable


def test_what_an_image_says_of_itself_with_consent_is_not_kept() -> None:
    trust = TrustedSources(everything=True)
    evidence = EvidenceCache(levels=("static",), trust=trust, index=PackageIndex())
    assert evidence.usable is False


def test_the_key_depends_on_each_of_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(content: str = "sha256:1", plan: str = "p", **changes: Any) -> str:
        values: dict[str, Any] = {
            "levels": ("static",),
            "trust": TrustedSources(),
            "index": PackageIndex(),
        }
        return EvidenceCache(**{**values, **changes}).key([content], plan)

    lock = tmp_path / "lock"
    lock.write_text("x")
    mine = write_tree(tmp_path / "mine", {"own/layer.toml": b"summary = 'x'"})
    keys = [
        key(),
        key("sha256:2"),
        key(plan="q"),
        key(levels=("static", "imports")),
        key(platform="linux/amd64"),
        key(trust=TrustedSources(patches=(mine,))),
        key(trust=TrustedSources(written={("a", "b"): None})),
        key(lock=lock),
    ]
    assert key() == keys[0]
    monkeypatch.setattr(sys, "version", "other")
    keys.append(key())
    monkeypatch.setenv("SPARK_BUILD_TORCH", "2.0")
    keys.append(key())
    monkeypatch.setattr(cached, "code_digest", lambda: "other")
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_the_digest_of_the_code_changes_with_any_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "probes").mkdir()
    (tmp_path / "probes/ask.py").write_text("a = 1")
    monkeypatch.setattr(cached, "package_file", lambda: tmp_path)

    def digest() -> str:
        cached.code_digest.cache_clear()
        return cached.code_digest()

    first = digest()
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__/ask.pyc").write_bytes(b"x")
    assert digest() == first
    (tmp_path / "probes/ask.py").write_text("a = 2")
    assert digest() != first
    cached.code_digest.cache_clear()


def test_pages_say_that_the_evidence_is_from_the_cache() -> None:
    report = Report(target="t", plan=planned(), checks=[check("static", "pass")])
    when = "2026-11-27T21:50:00Z"
    assert "from the cache" not in render_html(report)
    report.cached = when
    assert when in render_html(report)
    assert f"From the cache: these checks ran on the same content on {when}." in (
        render_summary(report)
    )
