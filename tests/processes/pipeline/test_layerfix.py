"""A layer that drifted on the newest release, fixed by an edit of its files there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.layers.layerfile import load_layer
from tests.unit.fakes import vllm_files
from tests.wheels.fakeindex import FakeIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.unit.conftest import Called

    Run = Callable[..., Called]

BEFORE = "import os\n\n\ndef pick(names):\n    names = sorted(names)\n    return names[0]\n"
#: the anchor's second line was moved into a helper
MOVED = (
    "import os\n\n\ndef first(names):\n    return names[0]\n\n\n"
    "def pick(names):\n    names = list(sorted(names))\n    return first(names)\n"
)
OTHER = "def size():\n    return 1\n\n\ndef area():\n    return 2\n"
LAYER = """\
summary = "picks the last name"
order = 50
package = "vllm"

[provenance]
origin = "own"
forwarded = "no"
applied-upstream = "no"
last-update = 2026-01-01

[[not-applicable]]
when = { "vllm" = ">=0.42.0rc0" }
reason = "newer than what was read"

# all of them
[[variant]]
name = "vllm-0.40"
when = { "vllm" = ">=0.40.0rc0,<0.42.0rc0" }
serve-flags = ["--one"]

[[variant.op]]
op = "replace"
file = "vllm/pick.py"
old = '''
    names = sorted(names)
    return names[0]
'''
new = '''
    names = sorted(names)
    return names[-1]
'''

[[variant.op]]
op = "replace"
file = "vllm/other.py"
old = '''
def size():
    return 1
'''
new = '''
def size():
    return 3
'''
"""


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIndex]:
    with FakeIndex() as running:
        for version, pick in (("0.40.0", BEFORE), ("0.41.0", BEFORE), ("0.42.0", MOVED)):
            running.add("vllm", version, vllm_files(version, pick=pick, other=OTHER))
        monkeypatch.setenv("PIP_INDEX_URL", running.url)
        yield running


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    folder = tmp_path / "layers" / "last"
    folder.mkdir(parents=True)
    (folder / "layer.toml").write_text(LAYER)
    return folder.parent


def diff(run: Run, layers: Path, *words: object, base: str = "0.42.0") -> Called:
    return run(
        "layers", "diff", "last", "--patches", layers, "--base", f"pypi:vllm=={base}",
        "--edit", "work", *words,
    )  # fmt: skip


def test_an_edit_becomes_a_variant(
    spark_build: Run, index: FakeIndex, layers: Path, tmp_path: Path
) -> None:
    first = diff(spark_build, layers)
    assert first.code == 0, first.err
    assert "2 files to edit" in first.out
    assert "op 1 (replace vllm/pick.py)" in first.out
    work = tmp_path / "work" / "work"
    assert (work / "edit/vllm/other.py").read_text() == OTHER.replace("1", "3")
    assert "    return names[-1]" in (work / "README").read_text()

    file = work / "edit/vllm/pick.py"
    file.write_text(file.read_text().replace("return names[0]", "return names[-1]"))
    second = diff(spark_build, layers)
    assert second.code == 0, second.err
    assert "replace: one anchor of" in second.out
    layer = load_layer(layers / "last")
    assert [(v.name, v.when["vllm"]) for v in layer.variants] == [
        ("vllm-0.40", ">=0.40.0rc0,<0.42.0rc0"),
        ("vllm-0.42.0", ">=0.42.0rc0,<0.43.0rc0"),
    ]
    assert [op.subject for op in layer.variants[1].ops] == ["vllm/other.py", "vllm/pick.py"]
    assert layer.variants[1].serve_flags == ["--one"]
    assert layer.not_applicable[0].when == {"vllm": ">=0.43.0rc0"}
    assert layer.provenance["last-update"] != "2026-01-01"
    text = (layers / "last/layer.toml").read_text()
    assert text.index("# all of them") < text.index("# Made on ") < text.index("vllm-0.42.0")
    plan = spark_build(
        "plan", "-l", "last", "--patches", layers, "--base", "pypi:vllm==0.42.0", "--json"
    )
    assert [row["state"] for row in plan.json["layers"]] == ["needed"]


def edited(
    run: Run, layers: Path, tmp_path: Path, edits: dict[str, str], base: str = "0.42.0"
) -> Called:
    """Both calls, with these texts in between."""
    first = diff(run, layers, base=base)
    assert first.code == 0, first.err
    for path, text in edits.items():
        file = tmp_path / "work" / "work" / "edit" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return diff(run, layers, base=base)


def test_a_variant_whose_range_has_the_release_ends_before_it(
    spark_build: Run, index: FakeIndex, layers: Path, tmp_path: Path
) -> None:
    file = layers / "last/layer.toml"
    file.write_text(LAYER.replace("<0.42.0rc0", "<0.50.0rc0").replace(">=0.42", ">=0.60"))
    done = edited(spark_build, layers, tmp_path, {"vllm/pick.py": MOVED.replace("[0]", "[-1]")})
    assert done.code == 0, done.err
    layer = load_layer(layers / "last")
    assert [(v.name, v.when["vllm"]) for v in layer.variants] == [
        ("vllm-0.40", ">=0.40.0rc0,<0.42.0rc0"),
        ("vllm-0.40-again", ">=0.43.0rc0,<0.50.0rc0"),
        ("vllm-0.42.0", ">=0.42.0rc0,<0.43.0rc0"),
    ]


def test_two_places_become_a_diff_and_a_new_file_a_copy(
    spark_build: Run, index: FakeIndex, layers: Path, tmp_path: Path
) -> None:
    far = MOVED + "".join(f"\n\ndef f{n}():\n    return {n}\n" for n in range(9))
    index.add("vllm", "0.42.0", vllm_files("0.42.0", pick=far, other=OTHER))
    text = far.replace("names[0]", "names[-1]").replace("return 8", "return 9")
    edits = {"vllm/pick.py": text, "vllm/new.py": "NEW = 1\n"}
    done = edited(spark_build, layers, tmp_path, edits)
    assert done.code == 0, done.err
    kinds = [(op.kind, op.subject) for op in load_layer(layers / "last").variants[1].ops]
    assert kinds == [
        ("replace", "vllm/other.py"),
        ("diff", "vllm-0.42.0-pick.patch"),
        ("copy", "vllm/new.py"),
    ]


def test_text_that_a_release_has_becomes_a_graft(
    spark_build: Run, index: FakeIndex, layers: Path, tmp_path: Path
) -> None:
    fixed = MOVED.replace("[0]", "[-1]")
    index.add("vllm", "0.43.0", vllm_files("0.43.0", pick=fixed, other=OTHER))
    done = edited(spark_build, layers, tmp_path, {"vllm/pick.py": fixed})
    assert done.code == 0, done.err
    assert "graft: first out of vllm==0.43.0, in vllm/pick.py" in done.out
    assert (layers / "last/pins.toml").is_file()
    assert load_layer(layers / "last").variants[1].when == {"vllm": ">=0.42.0rc0,<0.43.0rc0"}


def test_nothing_is_written_if_the_edit_cannot_be_told_from_the_release(
    spark_build: Run, index: FakeIndex, layers: Path, tmp_path: Path
) -> None:
    """The edit undoes what an op that fits does: both would be needed and not."""
    before = (layers / "last/layer.toml").read_bytes()
    edits = {"vllm/pick.py": MOVED.replace("[0]", "[-1]"), "vllm/other.py": OTHER}
    done = edited(spark_build, layers, tmp_path, edits)
    assert done.code == 4
    assert "nothing was written" in done.err
    assert (layers / "last/layer.toml").read_bytes() == before


def test_refusals(spark_build: Run, index: FakeIndex, layers: Path, tmp_path: Path) -> None:
    fits = diff(spark_build, layers, base="0.41.0")
    assert (fits.code, "fits pypi:vllm==0.41.0: there is nothing to fix" in fits.err) == (2, True)
    untouched = edited(spark_build, layers, tmp_path, {})
    assert (untouched.code, "nothing was edited" in untouched.err) == (2, True)
    index.add("vllm", "0.44.0", vllm_files("0.44.0", pick=MOVED + "\n", other=OTHER))
    other = spark_build(
        "layers", "diff", "last", "--patches", layers, "--base", "pypi:vllm==0.44.0",
        "--edit", "work", "--refresh",
    )  # fmt: skip
    assert (other.code, "is of another base: vllm/pick.py differs" in other.err) == (2, True)


def test_an_editor_opens_the_files(
    spark_build: Run, index: FakeIndex, layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "layers", "diff", "last", "--patches", layers, "--base", "pypi:vllm==0.42.0"
    )  # fmt: skip
    for name in ("VISUAL", "EDITOR"):
        monkeypatch.delenv(name, raising=False)
    without = spark_build(*words)
    assert (without.code, "neither VISUAL nor EDITOR is set" in without.err) == (2, True)
    monkeypatch.setenv("EDITOR", "false")
    failed = spark_build(*words)
    assert (failed.code, "editor false ended with 1" in failed.err) == (2, True)
    monkeypatch.setenv("EDITOR", "sed -i 's/return names\\[0\\]/return names[-1]/'")
    done = spark_build(*words, "--json")
    assert done.code == 0, done.err
    assert done.json["state"] == "written"
    assert done.json["when"] == {"vllm": ">=0.42.0rc0,<0.43.0rc0"}
    assert done.json["fits"] == "0.42.0"


def test_check_reads_releases_when_asked(spark_build: Run, index: FakeIndex, layers: Path) -> None:
    file = layers / "last/layer.toml"
    file.write_text(LAYER.replace("<0.42.0rc0", "<0.43.0rc0").replace(">=0.42.0", ">=0.43.0"))
    words = ("layers", "check", "last", "--patches", layers, "--strict")
    alone = spark_build(*words)
    assert "reaches beyond" in alone.err
    done = spark_build(*words, "--releases", "all")
    assert done.code == 2
    assert "vllm 0.42.0: variant vllm-0.40 is for it, and does not fit it" in done.err
    fine = spark_build(*words, "--releases", "0.40.0,0.41.0")
    assert "is for it" not in fine.err


def test_check_sees_a_release_where_the_probe_of_upstream_fails(
    spark_build: Run, index: FakeIndex, layers: Path
) -> None:
    before, _, after = LAYER.partition("[[not-applicable]]")
    upstream = """[[upstream]]
when = { "vllm" = ">=0.42.0rc0" }
since = "vLLM 0.42.0"
reason = "the last name is picked"
probe = [{ file = "vllm/pick.py", contains = "    return the_last_of(names)\\n" }]

# all of them"""
    (layers / "last/layer.toml").write_text(before + upstream + after.partition("# all of them")[2])
    words = ("layers", "check", "last", "--patches", layers, "--releases")
    failed = "vllm 0.42.0: vLLM 0.42.0 should have this fix, but its probe failed"
    assert failed not in spark_build(*words, "0.41.0").err
    assert failed in spark_build(*words, "all").err


def test_a_layer_that_fits_gets_the_release_without_an_edit(
    spark_build: Run, index: FakeIndex, layers: Path
) -> None:
    index.add("vllm", "0.42.0", vllm_files("0.42.0", pick="# new\n" + BEFORE, other=OTHER))
    done = diff(spark_build, layers)
    assert done.code == 0, done.err
    (variant,) = load_layer(layers / "last").variants
    assert (variant.name, variant.when) == ("vllm-0.40", {"vllm": ">=0.40.0rc0,<0.43.0rc0"})
    assert "# all of them" in (layers / "last/layer.toml").read_text()
    index.add("vllm", "0.44.0", vllm_files("0.44.0", pick=BEFORE, other=OTHER))
    index.add("vllm", "0.43.0", vllm_files("0.43.0", pick=MOVED, other=OTHER))
    assert diff(spark_build, layers, "--refresh", base="0.44.0").code == 0
    ranges = [variant.when["vllm"] for variant in load_layer(layers / "last").variants]
    assert ranges == [">=0.40.0rc0,<0.43.0rc0", ">=0.44.0rc0,<0.45.0rc0"]


@pytest.mark.parametrize("end", ["0.42.0rc0", "0.42.0rc1", "0.42.0rc3"])
def test_a_candidate_widens_the_range_wherever_it_ends(
    spark_build: Run, index: FakeIndex, layers: Path, end: str
) -> None:
    """The candidate before it is of the same release, and may be in the range already."""
    file = layers / "last/layer.toml"
    file.write_text(LAYER.replace("<0.42.0rc0", f"<{end}"))
    for version in ("0.42.0rc2", "0.42.0"):
        index.add("vllm", version, vllm_files(version, pick="# new\n" + BEFORE, other=OTHER))
    done = diff(spark_build, layers, base="0.42.0rc2")
    assert done.code == 0, done.err
    (variant,) = load_layer(layers / "last").variants
    assert (variant.name, variant.when) == ("vllm-0.40", {"vllm": ">=0.40.0rc0,<0.43.0rc0"})


def test_a_candidate_that_differs_from_its_release_has_a_range_of_its_own(
    spark_build: Run, index: FakeIndex, layers: Path, tmp_path: Path
) -> None:
    other = MOVED.replace("list(sorted(names))", "sorted(set(names))")
    index.add("vllm", "0.42.0rc2", vllm_files("0.42.0rc2", pick=other, other=OTHER))
    edits = {"vllm/pick.py": other.replace("set(names)", "names, reverse=True")}
    done = edited(spark_build, layers, tmp_path, edits, base="0.42.0rc2")
    assert done.code == 0, done.err
    layer = load_layer(layers / "last")
    assert layer.variants[1].when == {"vllm": ">=0.42.0rc0,<0.42.0rc3"}
    assert layer.not_applicable[0].when == {"vllm": ">=0.42.0rc3"}
