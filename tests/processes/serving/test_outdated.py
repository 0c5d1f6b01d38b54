"""A made-up release of tomorrow: what ``outdated`` says of it, and of one without changes."""

from __future__ import annotations

import shlex
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from builder.common.paths import data_dir
from builder.proof.recorded import Outcome, file_of, read_records, record_bytes
from tests.forge import LocalForge, Pull, Repository
from tests.unit.fakes import vllm_files
from tests.unit.serving import release
from tests.wheels.fakeindex import FakeIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.unit.conftest import Called

    Run = Callable[..., Called]

PICK = "import os\n\n\ndef pick(names):\n    names = sorted(names)\n    return names[0]\n"
#: the anchor is the same code, in another place and with other names
PICK_MOVED = PICK.replace("names", "options").replace(
    "def pick", "def first():\n    ...\n\n\ndef pick"
)
SIZE = "def size(items):\n    return len(items)\n"
#: what the layer writes is in the release, with a line more
SIZE_FIXED = (
    "def size(items):\n    if items is None:\n        raise ValueError('no items')\n"
    "    note(items)\n    return len(items)\n"
)
MOVED, FIXED = "last-name", "no-items"
FORWARDED = "vllm-project/vllm#7"


def layer(old: str, new: str, file: str, forwarded: str = "no", end: str = "0.50.0rc0") -> str:
    return f"""\
summary = "a fix"
order = 50
package = "vllm"

[provenance]
origin = "own"
forwarded = "{forwarded}"
applied-upstream = "no"
last-update = 2026-01-01

[[variant]]
name = "vllm-0.40"
when = {{ "vllm" = ">=0.40.0rc0,<{end}" }}

[[variant.op]]
op = "replace"
file = "{file}"
old = '''
{old}'''
new = '''
{new}'''
"""


def wheel(version: str, pick: str = PICK, size: str = SIZE, **changed: str) -> dict[str, bytes]:
    """A release with a parser and two files that layers change."""
    files = {**vllm_files(version, pick=pick, size=size), **release.files()}
    return files | {f"vllm/{name}.py": text.encode() for name, text in changed.items()}


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    texts = {
        MOVED: layer(
            "    names = sorted(names)\n    return names[0]\n",
            "    names = sorted(names)\n    return names[-1]\n",
            "vllm/pick.py",
        ),
        FIXED: layer(
            "def size(items):\n    return len(items)\n",
            "def size(items):\n    if items is None:\n        raise ValueError('no items')\n"
            "    return len(items)\n",
            "vllm/size.py",
            FORWARDED,
        ),
    }
    for name, text in texts.items():
        (tmp_path / "layers" / name).mkdir(parents=True)
        (tmp_path / "layers" / name / "layer.toml").write_text(text)
    return tmp_path / "layers"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIndex]:
    """The release that is in use, and one after it that changes nothing."""
    with FakeIndex() as running:
        for version in ("0.40.0", "0.41.0"):
            running.add("vllm", version, wheel(version))
        monkeypatch.setenv("PIP_INDEX_URL", running.url)
        yield running


def tomorrow(index: FakeIndex) -> None:
    """0.42.0: an anchor moved, a fix merged in another form, a flag renamed, a variable gone."""
    renamed = {
        "engine/arg_utils": release.ARG_UTILS.replace('"--backend"', '"--worker-backend"'),
        "envs": release.ENVS.replace('    "VLLM_HOST_IP": lambda: None,\n', ""),
    }
    index.add("vllm", "0.42.0", wheel("0.42.0", PICK_MOVED, SIZE_FIXED, **renamed))


def asked(run: Run, layers: Path, *words: object) -> dict[str, Any]:
    done = run(
        "outdated", "-l", f"{MOVED},{FIXED}", "--patches", layers, "--refresh", *words, "--json"
    )
    assert done.code == 0, done.err
    document: dict[str, Any] = done.json
    return document


def test_nothing_is_said_of_a_release_that_changes_nothing(
    spark_build: Run, index: FakeIndex, layers: Path
) -> None:
    found = asked(spark_build, layers, "--since", "0.40.0", "--no-forge")
    assert [row["vllm"] for row in found["releases"]] == ["0.41.0"]
    assert found["newest"] == "0.41.0"
    for part in ("changes", "flags", "wheels", "recipes", "kernels"):
        assert found[part] == []
    text = spark_build(
        "outdated", "-l", MOVED, "--patches", layers, "--since", "0.40.0", "--no-forge"
    )
    assert "every layer is as before" in text.out


def test_the_release_of_tomorrow(spark_build: Run, index: FakeIndex, layers: Path) -> None:
    tomorrow(index)
    found = asked(spark_build, layers, "--since", "v0.40.0", "--no-forge")
    moved, fixed = found["changes"]
    assert (moved["layer"], moved["vllm"], moved["after"]) == (MOVED, "0.42.0", "drift")
    assert "merged" not in moved
    assert "return names[0]" in moved["diffs"][0]["diff"]
    command = f"spark-build layers diff {MOVED} --base pypi:vllm==0.42.0 --patches {layers}"
    assert moved["command"] == f"{command} --edit work"
    assert (fixed["layer"], fixed["after"]) == (FIXED, "drift")
    assert fixed["merged"] == "2 of the 2 lines that the layer adds are new in the release"
    assert [(f["what"], f["change"], f["name"], f.get("detail", "")) for f in found["flags"]] == [
        ("flag", "renamed", "--backend", "--worker-backend"),
        ("variable", "went", "VLLM_HOST_IP", ""),
    ]
    (thread,) = found["threads"]
    assert thread == {"thread": FORWARDED, "layers": [FIXED]}
    assert found["notes"] == ["the forge was not asked about commits and threads (--no-forge)"]


def test_the_layer_that_drifted_is_mended_in_one_sitting(
    spark_build: Run, index: FakeIndex, layers: Path, tmp_path: Path
) -> None:
    tomorrow(index)
    words = ("layers", "diff", MOVED, "--patches", layers, "-b", "pypi:vllm==0.42.0")
    first = spark_build(*words, "--edit", "work")
    assert first.code == 0, first.err
    (file,) = (tmp_path / "work/work/edit").rglob("pick.py")
    file.write_text(file.read_text().replace("options[0]", "options[-1]"))
    second = spark_build(*words, "--edit", "work")
    assert second.code == 0, second.err
    changes = asked(spark_build, layers, "--since", "0.40.0", "--no-forge")["changes"]
    assert [change["layer"] for change in changes] == [FIXED]


def test_the_transcript_of_the_page_is_what_the_commands_print(
    spark_build: Run, index: FakeIndex, layers: Path, tmp_path: Path
) -> None:
    tomorrow(index)
    (tmp_path / "work/my-layers").symlink_to(layers)
    page = (data_dir("docs") / "outdated.md").read_text("utf-8")
    text = page.partition("## Fix a layer that drifted")[2].partition("```\n$ ")[2]
    steps = text.partition("\n```\n")[0].split("\n$ ")
    assert len(steps) == 5
    for step in steps:
        command, *lines = step.splitlines()
        words = shlex.split(command)
        if words[0] == "sed":
            subprocess.run(words, check=True)
            continue
        done = spark_build(*words[1:])
        assert done.code == 0, done.err
        printed = [line.rstrip() for line in (done.out + done.err).splitlines()]
        shown = [line.rstrip() for line in lines if line.strip() not in ("", "...")]
        assert [line for line in shown if line not in printed] == []


def test_a_flag_that_only_looks_alike_is_not_called_renamed(
    spark_build: Run, index: FakeIndex, layers: Path
) -> None:
    """Other words, or another kind of value, or two flags that it may be."""
    text = release.ARG_UTILS.replace('"--backend"', '"--fabric"')
    text = text.replace('"--shade", choices=get_args(Shade)', '"--shade-level", type=int')
    index.add("vllm", "0.42.0", wheel("0.42.0", **{"engine/arg_utils": text}))
    flags = asked(spark_build, layers, "--since", "0.40.0", "--no-forge")["flags"]
    assert [(f["change"], f["name"]) for f in flags] == [
        ("went", "--backend"),
        ("went", "--shade"),
        ("appeared", "--fabric"),
        ("appeared", "--shade-level"),
    ]


def test_the_forge_says_who_did_it(
    spark_build: Run,
    index: FakeIndex,
    layers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tomorrow(index)
    repository = Repository(tmp_path / "repository")
    repository.commit("start", {"vllm/pick.py": PICK, "vllm/size.py": SIZE})
    for version in ("0.40.0", "0.41.0"):
        repository.git("tag", f"v{version}")
    head = repository.commit("Options, not names (#41)", {"vllm/pick.py": PICK_MOVED})
    merge = repository.commit("Refuse no items (#7)", {"vllm/size.py": SIZE_FIXED})
    repository.git("tag", "v0.42.0")
    with LocalForge(repository) as forge:
        forge.pulls[7] = Pull(head=head, title="Refuse no items", merge_commit=merge)
        monkeypatch.setenv("SPARK_BUILD_FORGE", forge.root)
        found = asked(spark_build, layers, "--since", "0.40.0")
    moved, fixed = found["changes"]
    assert [c["pull"] for c in moved["commits"]] == ["vllm-project/vllm#41"]
    assert fixed["merged"] == f"{FORWARDED} was merged"
    (thread,) = found["threads"]
    assert (thread["state"], thread["title"]) == ("merged", "Refuse no items")
    assert "notes" not in found


def test_a_forge_that_does_not_answer_is_said_once(
    spark_build: Run,
    index: FakeIndex,
    layers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tomorrow(index)
    repository = Repository(tmp_path / "repository")
    repository.commit("start", {"vllm/pick.py": PICK})
    with LocalForge(repository) as forge:
        monkeypatch.setenv("SPARK_BUILD_FORGE", forge.root)
        found = asked(spark_build, layers, "--since", "0.40.0")
        assert len(forge.requests) == 1
    assert len(found["changes"]) == 2
    (note,) = found["notes"]
    assert note.startswith("the forge was not asked further: ")


def test_wheels_that_are_not_what_was_locked(
    spark_build: Run, index: FakeIndex, layers: Path, tmp_path: Path
) -> None:
    words = ("-l", f"{MOVED},{FIXED}", "--patches", layers)
    locked = spark_build("lock", *words, "-b", "pypi:vllm==0.40.0", "--platform", "linux/arm64")
    assert locked.code == 0, locked.err
    same = spark_build("outdated", "--patches", layers, "--refresh", "--no-forge", "--json")
    assert same.code == 0, same.err
    assert (same.json["since"], same.json["wheels"]) == ("0.40.0", [])
    assert same.json["layers"] == [MOVED, FIXED]

    index.add("vllm", "0.40.0", {**wheel("0.40.0"), "vllm/new.py": b"NEW = 1\n"})
    (rebuilt,) = asked(spark_build, layers, "--no-forge")["wheels"]
    name = "vllm-0.40.0-py3-none-any.whl"
    assert (rebuilt["filename"], rebuilt["what"]) == (name, "rebuilt")
    assert index.sha256(name) in rebuilt["detail"]

    index.add("vllm", "0.40.0", wheel("0.40.0"))
    again = name.replace("0.40.0-", "0.40.0-1-")
    index.files[again] = index.files[name]
    (later,) = asked(spark_build, layers, "--no-forge")["wheels"]
    assert (later["what"], again in later["detail"]) == ("rebuilt", True)
    del index.files[again]

    index.faults.yanked[name] = "wrong kernels"
    (yanked,) = asked(spark_build, layers, "--no-forge")["wheels"]
    assert (yanked["what"], yanked["detail"]) == ("yanked", "wrong kernels")


def test_a_yanked_or_young_release_is_said_and_not_gone_to(
    spark_build: Run, index: FakeIndex, layers: Path
) -> None:
    index.add("vllm", "0.42.0", wheel("0.42.0", PICK_MOVED))
    index.faults.yanked["vllm-0.42.0-py3-none-any.whl"] = "wrong kernels"
    found = asked(spark_build, layers, "--since", "0.40.0", "--no-forge")
    assert (found["newest"], found["changes"]) == ("0.41.0", [])
    assert found["releases"][1]["yanked"] == "wrong kernels"
    young = asked(spark_build, layers, "--since", "0.40.0", "--no-forge", "--min-age", "7d")
    assert young["newest"] == ""
    assert [row["young"] for row in young["releases"]] == [True, True]


def test_a_range_that_ends_is_told_from_text_that_went(
    spark_build: Run, index: FakeIndex, layers: Path
) -> None:
    for name in (MOVED, FIXED):
        file = layers / name / "layer.toml"
        file.write_text(file.read_text().replace("<0.50.0rc0", "<0.42.0rc0"))
    index.add("vllm", "0.42.0", wheel("0.42.0", PICK_MOVED))
    moved, fits = asked(spark_build, layers, "--since", "0.40.0", "--no-forge")["changes"]
    assert (moved["after"], moved["would"]) == ("not-applicable", "drift")
    assert (fits["after"], fits["would"]) == ("not-applicable", "needed")


def test_recipes_that_the_release_refuses(
    spark_build: Run, index: FakeIndex, layers: Path, tmp_path: Path
) -> None:
    tomorrow(index)
    (tmp_path / "recipes").mkdir()
    recipe = "model: a/b\ncommand: |\n  vllm serve a/b \\\n    --backend ray --max-model-len 4096\n"
    (tmp_path / "recipes/one.yaml").write_text(recipe)
    words = ("--since", "0.40.0", "--no-forge", "--recipes", tmp_path / "recipes")
    found = asked(spark_build, layers, *words)
    assert found["linted"] == 1
    (one,) = found["recipes"]
    assert (one["rule"], one["line"]) == ("unknown-flag", 4)
    assert "--backend" in one["message"]


def test_kernels_are_those_that_are_recorded(
    spark_build: Run, index: FakeIndex, layers: Path, tmp_path: Path
) -> None:
    words = ("outdated", "-l", "marlin", "--since", "0.40.0", "--no-forge", "--json")
    folder = tmp_path / "evidence"
    folder.mkdir()
    newest = read_records(data_dir("docs") / "evidence")[-1]
    for version in ("0.40.0", "0.41.0"):
        record = replace(newest, vllm=version)
        file_of(folder, version).write_bytes(record_bytes(record))
    assert spark_build(*words, "--evidence", folder).json["kernels"] == []

    profile = newest.profiles["marlin"]
    kinds = {**(profile.kinds or {}), "nvfp4-linear": Outcome(refused="no kernel")}
    profiles = {**newest.profiles, "marlin": replace(profile, kinds=kinds)}
    record = replace(newest, vllm="0.41.0", profiles=profiles)
    file_of(folder, "0.41.0").write_bytes(record_bytes(record))
    (change,) = spark_build(*words, "--evidence", folder).json["kernels"]
    assert (change["kind"], change["before"], change["after"]) == (
        "nvfp4-linear", "MarlinNvFp4", "refused"
    )  # fmt: skip

    file_of(folder, "0.41.0").unlink()
    (missing,) = spark_build(*words, "--evidence", folder).json["kernels"]
    assert missing == {"profile": "marlin", "vllm": "0.41.0"}


def test_exit_codes(spark_build: Run, index: FakeIndex, layers: Path) -> None:
    words = ("outdated", "-l", MOVED, "--patches", layers, "--no-forge")
    assert spark_build(*words, "--since", "0.40.0").code == 0
    assert spark_build(*words, "--since", "0.40.0", "--check").code == 9
    assert spark_build(*words, "--since", "0.41.0", "--check").code == 0
    for wrong in (("--since", "yesterday"), ("--min-age", "week"), ("--since", "2020-01-01")):
        assert spark_build(*words, *wrong).code == 2


def test_lock_diff_says_what_an_upgrade_changes(
    spark_build: Run, index: FakeIndex, layers: Path, tmp_path: Path
) -> None:
    tomorrow(index)
    words = ("-l", f"{MOVED},{FIXED}", "--patches", layers)
    nothing = spark_build("lock", "--diff", *words)
    assert (nothing.code, "no entry to compare with" in nothing.err) == (2, True)
    locked = spark_build("lock", *words, "-b", "pypi:vllm==0.40.0", "--platform", "linux/arm64")
    assert locked.code == 0, locked.err
    before = (tmp_path / "work/spark-build.lock").read_bytes()
    same = spark_build("lock", "--diff", "--patches", layers)
    assert same.out.splitlines()[1:] == ["  nothing changes"]
    there = ("lock", "--diff", "--patches", layers, "-b")
    quiet = spark_build(*there, "pypi:vllm==0.41.0", "--json").json["upgrades"][0]
    assert quiet["releases"] == ["vllm: 0.40.0 -> 0.41.0"]
    assert quiet["layers"] == quiet["files"] == quiet["kernels"] == []
    assert quiet["download"] == len(index.files["vllm-0.41.0-py3-none-any.whl"])
    drifted = spark_build(*there, "pypi:vllm==0.42.0").out
    assert f"layer {MOVED}: needed -> drift (the layer must be fixed" in drifted
    assert "vllm/pick.py: no longer patched" in drifted
    assert ".spark-build" not in drifted
    assert (tmp_path / "work/spark-build.lock").read_bytes() == before
    both = spark_build("lock", "--diff", "--check")
    assert (both.code, "exclude each other" in both.err) == (2, True)


def test_texts_for_the_project_that_were_not_sent(
    spark_build: Run, index: FakeIndex, layers: Path
) -> None:
    for name in (MOVED, FIXED):
        (layers / name / "upstream.md").write_text("# It\n\nvLLM #7 and FlashInfer #3 know it.\n")
    tomorrow(index)
    found = asked(spark_build, layers, "--since", "0.40.0", "--no-forge")
    assert found["threads"] == [
        {"thread": FORWARDED, "layers": [MOVED, FIXED]},
        {"thread": "flashinfer-ai/flashinfer#3", "layers": [MOVED, FIXED]},
    ]
    (ready,) = found["ready"]
    assert ready == {
        "layer": MOVED, "vllm": "0.42.0", "state": "drift",
        "command": f"spark-build layers export {MOVED} --format pr --patches {layers}",
    }  # fmt: skip


def test_a_release_that_cannot_be_asked_is_named(
    spark_build: Run, index: FakeIndex, layers: Path, tmp_path: Path
) -> None:
    """The index lacks what a sandbox needs: `--ask` tries both releases, and the rest is there."""
    recipe = "model: a/b\ncommand: |\n  vllm serve a/b \\\n    --max-model-len 4096\n"
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/one.yaml").write_text(recipe)
    words = ("--since", "0.40.0", "--no-forge", "--recipes", tmp_path / "recipes")
    done = spark_build("outdated", "-l", "marlin", "--refresh", *words, "--ask", "--json")
    assert done.code == 0, done.err
    assert done.json["kernels"] == [{"profile": "marlin", "vllm": "0.41.0"}]
    starts = [note.partition(": ")[0] for note in done.json["notes"]]
    assert starts == [
        "the forge was not asked about commits and threads (--no-forge)",
        "recipes", "kernels of vLLM 0.40.0", "kernels of vLLM 0.41.0",
    ]  # fmt: skip
    assert [row["vllm"] for row in done.json["releases"]] == ["0.41.0"]
