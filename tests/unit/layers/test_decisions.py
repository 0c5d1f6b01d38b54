"""A decision is kept by all that it depends on, with the places that show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.common.plan import Platform
from builder.common.pypi import PackageIndex, WheelFile
from builder.layers.catalog import Selection
from builder.layers.decisions import (
    Decision,
    DecisionStore,
    base_key,
    decide,
    decision_key,
    version,
)
from tests.unit.fakes import FakeSources, altered, fake_base, make_layer, replace_op, vllm_files

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from builder.applier.layers import Layer

PLATFORM = Platform()
SHA256 = "0123456789abcdef" * 4
OLD, NEW = "    return BACKEND\n", "    return 'b12x'\n"


def index_with(
    patch: pytest.MonkeyPatch, *names: str, uploaded: str = "2026-05-04"
) -> PackageIndex:
    """An index with these wheels."""
    files = [WheelFile(filename=name, url="", sha256=SHA256, uploaded=uploaded) for name in names]
    patch.setattr(PackageIndex, "wheels", lambda _self, _project: files)
    return PackageIndex("https://index.example.invalid/simple")


def decided(layer: Layer, text: str = "") -> Decision:
    files = vllm_files()
    if text:
        files["vllm/core.py"] = text.encode()
    selection = Selection((layer,), ())
    (decision,) = decide(fake_base(files), selection, FakeSources())
    return decision


def test_what_is_needed_stands_where_the_old_text_is() -> None:
    decision = decided(make_layer("fix", replace_op(OLD, NEW)))
    (place,) = decision.evidence
    assert decision.state == "needed"
    assert (place.file, place.found, place.line) == ("vllm/core.py", "old", 5)
    assert place.anchor == "return BACKEND"
    assert len(place.sha256) == 64


def test_what_is_applied_stands_where_the_new_text_is() -> None:
    decision = decided(make_layer("fix", replace_op(OLD, NEW)), f"\ndef run():\n{NEW}")
    (place,) = decision.evidence
    assert decision.state == "applied"
    assert (place.found, place.line, place.anchor) == ("new", 3, "return 'b12x'")


def test_an_anchor_that_moved_is_shown_beside_what_is_nearest() -> None:
    decision = decided(
        make_layer("fix", replace_op(OLD, NEW)), "\n\ndef run():\n    return BACKENDS\n"
    )
    (place,) = decision.evidence
    assert decision.state == "drift"
    assert (place.found, place.line) == ("absent", 4)


def test_an_upstream_form_is_shown_by_its_probe() -> None:
    layer = altered(
        make_layer("fix", replace_op(OLD, NEW)),
        upstream=[
            {
                "when": {"vllm": ">=0.20.0"},
                "since": "vllm 0.20.0",
                "reason": "merged",
                "probe": [{"file": "vllm/core.py", "contains": "def run("}],
            }
        ],
    )
    decision = decided(layer)
    (place,) = decision.evidence
    assert (decision.state, decision.since) == ("upstream", "vllm 0.20.0")
    assert (place.found, place.line, place.anchor) == ("probe", 4, "def run(")


def test_a_layer_for_other_releases_has_no_place() -> None:
    layer = altered(make_layer("fix", replace_op(OLD, NEW)), package="flashinfer-python")
    assert decided(layer).evidence == ()


def test_a_later_run_reads_what_an_earlier_one_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = index_with(monkeypatch, "vllm-0.20.1-cp38-abi3-manylinux_2_31_aarch64.whl")
    layer = make_layer("fix", replace_op(OLD, NEW))
    selection = Selection((layer,), ())
    store, identity = DecisionStore(tmp_path), fake_base(vllm_files()).identity
    key = base_key("pypi:vllm==0.20.1", PLATFORM, selection, index)
    known = store.add_base(key, identity, index)
    store.add_decisions(decision_key(known, PLATFORM, selection), (decided(layer),))
    store.save()

    later = DecisionStore(tmp_path)
    assert later.base(key, index) == known
    kept = later.decisions(decision_key(known, PLATFORM, selection))
    assert kept == (decided(layer),)
    other = Selection((make_layer("fix", replace_op(OLD, OLD.upper())),), ())
    assert later.decisions(decision_key(known, PLATFORM, other)) is None
    amd64 = Platform.parse("linux/amd64")
    assert later.decisions(decision_key(known, amd64, selection)) is None


def test_a_base_is_asked_again_when_its_page_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel may be built again, or be yanked."""
    wheel = "vllm-0.20.1-cp38-abi3-manylinux_2_31_aarch64.whl"
    index = index_with(monkeypatch, wheel)
    store, identity = DecisionStore(tmp_path), fake_base(vllm_files()).identity
    store.add_base("key", identity, index)
    assert store.base("key", index) is not None
    rebuilt = index_with(monkeypatch, wheel, wheel.replace("0.20.1-", "0.20.1-1-"))
    assert store.base("key", rebuilt) is None


def test_a_damaged_file_is_none(tmp_path: Path) -> None:
    (tmp_path / f"decisions-{version()}.json").write_text("{")
    assert DecisionStore(tmp_path).decisions("key") is None


def test_runs_side_by_side_keep_what_the_other_added(tmp_path: Path) -> None:
    one, other = DecisionStore(tmp_path), DecisionStore(tmp_path)
    one.add_decisions("one", ())
    other.add_decisions("other", ())
    one.save()
    other.save()
    assert DecisionStore(tmp_path).decisions("one") == ()


def test_the_store_is_bounded(tmp_path: Path) -> None:
    store = DecisionStore(tmp_path)
    for number in range(5000):
        store.add_decisions(str(number), ())
    for number in range(9):
        (tmp_path / f"decisions-{number:012}.json").write_text("{}")
    store.save()
    later = DecisionStore(tmp_path)
    assert later.decisions("4999") == ()
    assert later.decisions("0") is None
    assert len(list(tmp_path.glob("decisions-*.json"))) == 4


def test_texts_are_made_once(tmp_path: Path) -> None:
    store = DecisionStore(tmp_path)
    assert store.text("key", lambda: "first") == "first"
    assert store.text("key", lambda: "second") == "first"


def test_releases_have_days_builds_and_are_yanked_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arm, again = "vllm-0.20.1-py3-none-any.whl", "vllm-0.20.1-1-py3-none-any.whl"
    index = index_with(monkeypatch, arm, again, "vllm-0.19.0-py3-none-any.whl")
    first, second = index.history("vllm")
    assert (first.version, first.builds, first.uploaded) == ("0.19.0", 1, "2026-05-04")
    assert (second.version, second.builds, second.yanked) == ("0.20.1", 2, None)
    gone = [
        WheelFile(filename=name, url="", sha256=SHA256, yanked=why, uploaded=day)
        for name, why, day in ((arm, "broken", "2026-05-05"), (again, "", "2026-05-04"))
    ]
    monkeypatch.setattr(PackageIndex, "wheels", lambda _self, _project: gone)
    (release,) = index.history("vllm")
    assert (release.yanked, release.uploaded) == ("broken", "2026-05-04")
    monkeypatch.setattr(PackageIndex, "wheels", lambda _self, _project: [*gone[:1], files()])
    (release,) = index.history("vllm")
    assert release.yanked is None


def files() -> WheelFile:
    return WheelFile(filename="vllm-0.20.1-2-py3-none-any.whl", url="", sha256=SHA256, uploaded="")
