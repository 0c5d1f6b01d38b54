"""Layers with a ``pull`` op: made, pinned, checked, shown and judged."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.layers import Pull
from builder.common.diffs import read_sections
from builder.common.plan import read_pin
from builder.errors import UsageError
from builder.layers.layerfile import load_layer
from builder.layers.pulls import notes_of, parts_of, project_of, take_apart
from tests.processes import pullworld as pw
from tests.unit.fakes import write_tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.forge import LocalForge
    from tests.processes.pullworld import World
    from tests.unit.conftest import Called

    Call = Callable[..., Called]

pytestmark = pytest.mark.usefixtures("wheels")
BASE = ("-b", "pypi:vllm==1.0.0")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The directory that commands run in."""
    return tmp_path / "work"


@pytest.fixture
def made(spark_build: Call, forge: LocalForge, project: Path) -> Callable[..., Path]:
    """Make a layer of a pull request."""

    def make(number: int = pw.OPEN, name: str = "mine") -> Path:
        words = [
            "layers",
            "new",
            name,
            "--in",
            "layers",
            "--from-pr",
            f"vllm-project/vllm#{number}",
        ]
        result = spark_build(*words)
        assert result.code == 0, result.err
        return project / "layers" / name

    return make


OWN = ("--patches", "layers")


class TestNew:
    def test_records_its_origin(self, made: Callable[..., Path], world: World) -> None:
        layer = load_layer(made())
        assert layer.summary == "Faster alpha"
        said = layer.rendered["provenance"]
        assert said["origin"].startswith("upstream, vllm-project/vllm pull request 1, http://")
        assert said["bug"] == ["vllm-project/vllm#1"]
        assert (said["forwarded"], said["applied-upstream"]) == ("not-needed", "no")
        assert layer.pins.pull[0]["commit"] == world.pulls[pw.OPEN].head

    def test_from_a_merged_pull_names_release_and_commit(
        self, made: Callable[..., Path], world: World
    ) -> None:
        said = load_layer(made(pw.MERGED_BY_SQUASH)).provenance
        merged = world.pulls[pw.MERGED_BY_SQUASH].merge_commit
        assert said["applied-upstream"] == f"1.2.0, {merged}"

    def test_lists_dropped_and_compiled_files(self, made: Callable[..., Path]) -> None:
        assert "# not installed, so dropped: docs/guide.md" in (made() / "layer.toml").read_text()
        text = (made(pw.GPU_AND_PYTHON, "gpu") / "layer.toml").read_text()
        assert "# compiled into the wheel: csrc/gemm.cu" in text

    def test_can_be_planned_at_once(self, made: Callable[..., Path], spark_build: Call) -> None:
        made()
        result = spark_build("plan", "-l", "mine", *OWN, *BASE, "--json")
        assert [(x["name"], x["state"]) for x in result.json["layers"]] == [("mine", "needed")]
        assert result.json["pulls"][0]["layer"] == "mine"

    def test_with_a_title_full_of_quotes(
        self, made: Callable[..., Path], forge: LocalForge
    ) -> None:
        forge.pulls[pw.OPEN].title = 'It\'s "so" \\fast\\ 🚀 """'
        assert load_layer(made()).summary == 'It\'s "so" \\fast\\ 🚀 """'

    @pytest.mark.parametrize(
        ("pull", "code"), [("12", 2), ("vllm-project/vllm#99", 8), ("vllm-project/vllm#7", 2)]
    )
    def test_that_fails_leaves_nothing(
        self, spark_build: Call, forge: LocalForge, project: Path, pull: str, code: int
    ) -> None:
        assert spark_build("layers", "new", "mine", "--from-pr", pull).code == code
        assert not (project / "mine").exists()

    def test_a_file_that_no_layer_can_hold_is_left_out_as_the_hint_says(
        self, spark_build: Call, forge: LocalForge, project: Path
    ) -> None:
        words = ["layers", "new", "mine", "--in", "layers", "--from-pr", "vllm-project/vllm#7"]
        refused = spark_build(*words)
        assert (refused.code, len(forge.paths) > 0) == (2, True)
        assert refused.err.splitlines()[-1].endswith(
            "layers new NAME --from-pr 'vllm-project/vllm#7' --exclude vllm/logo.png"
        )
        assert spark_build(*words, "--exclude", "vllm/logo.png").code == 0
        (op,) = load_layer(project / "layers" / "mine").variants[0].ops
        assert isinstance(op, Pull)
        assert list(op.exclude) == ["vllm/logo.png"]

    def test_that_changes_nothing_says_so(self, spark_build: Call, forge: LocalForge) -> None:
        made = spark_build("layers", "new", "mine", "--from-pr", "vllm-project/vllm#16")
        assert (made.code, len(forge.paths) > 0) == (0, True)
        assert "none of its files is installed" in made.err

    def test_does_not_overwrite(self, made: Callable[..., Path], spark_build: Call) -> None:
        before = (made() / "layer.toml").read_bytes()
        words = ["layers", "new", "mine", "--in", "layers", "--from-pr", "vllm-project/vllm#2"]
        assert spark_build(*words).code == 2
        assert (made(name="other") / "layer.toml").read_bytes() == before


class TestPinned:
    def test_a_moved_head_is_ignored_until_pinned_again(
        self, made: Callable[..., Path], spark_build: Call, forge: LocalForge, world: World
    ) -> None:
        folder = made()
        forge.pulls[pw.OPEN].head = world.pulls[pw.UNRELATED].head
        forge.requests.clear()
        before = spark_build("plan", "-l", "mine", *OWN, *BASE, "--json").json
        assert before["pulls"][0]["commit"] == world.pulls[pw.OPEN].head
        assert forge.requests == []
        assert spark_build("layers", "pin", "mine", *OWN).code == 0
        pins = tomllib.loads((folder / "pins.toml").read_text())
        assert pins["pull"][0]["commit"] == world.pulls[pw.UNRELATED].head

    def test_show_prints_the_pinned_and_with_refresh_the_current_state(
        self, made: Callable[..., Path], spark_build: Call, forge: LocalForge, world: World
    ) -> None:
        made()
        forge.pulls[pw.OPEN].head = world.pulls[pw.UNRELATED].head
        forge.pulls[pw.OPEN].state = "closed"
        result = spark_build("layers", "show", "mine", *OWN)
        assert "pull vllm-project/vllm#1: open" in result.out
        assert "today" not in result.out
        result = spark_build("layers", "show", "mine", *OWN, "--refresh")
        assert f"today      closed, moved to {world.pulls[pw.UNRELATED].head}" in result.out
        shown = spark_build("layers", "show", "mine", *OWN, "--refresh", "--json").json["pulls"]
        assert (shown[0]["pinned"]["state"], shown[0]["today"]["state"]) == ("open", "closed")

    def test_check_needs_no_network_and_reports_a_missing_pin(
        self, made: Callable[..., Path], spark_build: Call, forge: LocalForge
    ) -> None:
        folder = made()
        forge.__exit__()
        assert spark_build("layers", "check", "mine", *OWN).code == 0
        (folder / "pins.toml").unlink()
        result = spark_build("layers", "check", "mine", *OWN)
        assert result.code == 2
        assert "vllm-project/vllm#1 is not pinned" in result.err
        assert "try: spark-build layers pin --patches layers mine" in result.err
        assert spark_build("plan", "-l", "mine", *OWN, *BASE).code == 2

    def test_a_mod_of_it_is_complete(
        self, made: Callable[..., Path], spark_build: Call, forge: LocalForge, project: Path
    ) -> None:
        made()
        forge.__exit__()
        assert spark_build("mods", "export", "m", "-l", "mine", *OWN, "--in", "mods").code == 0
        text = (project / "mods/m/layers.json").read_text()
        assert "kept + 1" in text
        assert '"op": "pull"' not in text

    def test_the_same_text_is_the_same_layer_at_any_time(
        self, made: Callable[..., Path], spark_build: Call, forge: LocalForge
    ) -> None:
        """Titles and states move on; what is built does not."""
        made()
        words = ("plan", "-l", "mine", *OWN, *BASE, "--json")
        before = spark_build(*words).json
        forge.pulls[pw.OPEN].title, forge.pulls[pw.OPEN].state = "Other", "closed"
        spark_build("layers", "pin", "mine", *OWN)
        after = spark_build(*words).json
        assert after["pulls"][0]["state"] == "closed"
        assert after["plan_digest"] == before["plan_digest"]


def test_on_every_release_in_one_table(made: Callable[..., Path], spark_build: Call) -> None:
    made(pw.MERGED_BY_SQUASH)
    result = spark_build("matrix", "-l", "mine", *OWN, "--releases", "1.0.0,1.2.0,1.3.0", "--json")
    states = [row["states"]["mine"] for row in result.json["rows"]]
    assert states == ["needed", "applied", "upstream"]


class TestOp:
    def edit(self, folder: Path, extra: str) -> None:
        with (folder / "layer.toml").open("a") as file:
            file.write(extra)

    def test_files_can_be_excluded(self, made: Callable[..., Path], spark_build: Call) -> None:
        folder = made(pw.GPU_AND_PYTHON)
        self.edit(folder, 'exclude = ["csrc/*"]\n')
        result = spark_build("plan", "-l", "mine", *OWN, *BASE, "--json")
        assert [layer["state"] for layer in result.json["layers"]] == ["needed"]
        assert result.json["pulls"][0]["dropped"] == [
            {"path": "csrc/gemm.cu", "why": "left out by the layer"}
        ]

    def test_files_can_be_included(self, made: Callable[..., Path], spark_build: Call) -> None:
        folder = made(pw.SHAPES)
        self.edit(folder, 'include = ["vllm/new/*"]\n')
        (report,) = spark_build("plan", "-l", "mine", *OWN, *BASE, "--json").json["pulls"]
        assert [file["path"] for file in report["installed"]] == [
            "vllm/new/__init__.py",
            "vllm/new/thing.py",
        ]

    def test_a_map_says_where_files_go(self, made: Callable[..., Path], spark_build: Call) -> None:
        folder = made(pw.TESTS_ONLY)
        self.edit(folder, 'map = { "tests/" = "vllm/tests/" }\n')
        (report,) = spark_build("plan", "-l", "mine", *OWN, *BASE, "--json").json["pulls"]
        assert [file["path"] for file in report["installed"]] == ["vllm/tests/test_more.py"]

    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            ("inclde = []\n", "unknown key 'inclde'; did you mean 'include'?"),
            ("include = [1]\n", "should be a list of patterns"),
            ('map = { "a/" = "../b/" }\n', "is not below site-packages"),
            ('map = { "a" = "b" }\n', "both with '/'"),
        ],
    )
    def test_mistakes_are_found(
        self, made: Callable[..., Path], spark_build: Call, extra: str, message: str
    ) -> None:
        self.edit(made(), extra)
        result = spark_build("layers", "check", "mine", *OWN)
        assert result.code == 2
        assert message in result.err

    def test_can_be_combined_with_other_ops(
        self, made: Callable[..., Path], spark_build: Call
    ) -> None:
        folder = made()
        self.edit(
            folder,
            '\n[[variant.op]]\nop = "replace"\nfile = "vllm/kernels.py"\n'
            'old = "return kept + 1"\nnew = "return kept + 2"\n',
        )
        result = spark_build("plan", "-l", "mine", *OWN, *BASE, "--json")
        assert [layer["state"] for layer in result.json["layers"]] == ["needed"]


BAD_PINS = {
    "short-commit": ("commit", "abc", "at `$.commit`"),
    "no-sha256": ("sha256", "", "at `$.sha256`"),
    "number-as-text": ("number", "1", "Expected `int`, got `str` - at `$.number`"),
    "unknown-key": ("comit", "x", "unknown field `comit`"),
}


@pytest.mark.parametrize(("key", "value", "message"), BAD_PINS.values(), ids=BAD_PINS.keys())
def test_a_malformed_pin_is_refused(key: str, value: str, message: str) -> None:
    good = {"request": "o/r#1", "forge": "f", "repository": "o/r", "base": "a" * 40}
    good |= {"commit": "b" * 40, "date": "2026-01-01", "sha256": "c" * 64}
    row: dict[str, Any] = {**good, "size": 3}
    assert read_pin(row, "here").commit == "b" * 40
    with pytest.raises(UsageError, match="here: ") as caught:
        read_pin({**row, key: value}, "here")
    assert message in str(caught.value)


# ------------------------------------------------------------------------------ other repositories


def diff(*paths: str) -> bytes:
    return b"".join(
        f"diff --git a/{p} b/{p}\nnew file mode 100644\n--- /dev/null\n+++ b/{p}\n"
        "@@ -0,0 +1 @@\n+x = 1\n".encode()
        for p in paths
    )


PROJECTS = {
    "flashinfer": (
        "flashinfer-ai/flashinfer",
        ["flashinfer/a.py", "csrc/b.cu", "include/flashinfer/c.cuh", "3rdparty/x", "tests/t.py"],
        [
            "flashinfer/a.py",
            "flashinfer/data/csrc/b.cu",
            "flashinfer/data/include/flashinfer/c.cuh",
        ],
        ["3rdparty/x"],
    ),
    "cutlass": (
        "NVIDIA/cutlass",
        ["python/CuTeDSL/cutlass/a.py", "include/cutlass/b.h"],
        ["nvidia_cutlass_dsl/python_packages/cutlass/a.py"],
        [],
    ),
    "a-src-layout": (
        "huggingface/transformers",
        ["src/transformers/a.py", "docs/x.md", "tests/t.py"],
        ["transformers/a.py"],
        [],
    ),
    "an-unknown-one-with-sources": (
        "someone/thing",
        ["thing/a.py", "src/b.cc", "tests/c.cc"],
        ["thing/a.py"],
        ["src/b.cc"],
    ),
}


@pytest.mark.parametrize(
    ("repository", "paths", "installed", "compiled"), PROJECTS.values(), ids=PROJECTS.keys()
)
def test_installed_path_of_a_file(
    repository: str, paths: list[str], installed: list[str], compiled: list[str]
) -> None:
    sections = read_sections(diff(*paths))
    project = project_of(repository, paths)
    assert project is not None
    parts = take_apart("x#1", sections, project)
    assert sorted(s.path for s in parts.installed[0][1]) == sorted(installed)
    assert [s.path for s in parts.compiled] == compiled


def test_files_of_the_dsl_have_another_path_from_4_6() -> None:
    paths = ["python/CuTeDSL/cutlass/a.py"]
    project = project_of("nvidia/CUTLASS", paths)
    assert project is not None
    parts = take_apart("x#1", read_sections(diff(*paths)), project)
    assert {layout.when["nvidia-cutlass-dsl"]: s[0].path for layout, s in parts.installed} == {
        "<4.6.0a0": "nvidia_cutlass_dsl/python_packages/cutlass/a.py",
        ">=4.6.0a0": "nvidia_cutlass_dsl/dsl_packages/cutlass/a.py",
    }


def test_sources_compiled_into_another_wheel_are_recognised() -> None:
    project = project_of("flashinfer-ai/flashinfer", [])
    assert project is not None
    parts = take_apart("x#1", read_sections(diff("csrc/b.cu", "flashinfer/a.py")), project)
    assert parts.late() == ("flashinfer/data/csrc/b.cu",)


def test_fork_with_the_same_name_is_read_like_its_repository() -> None:
    project = project_of("someone/vLLM", ["csrc/a.cu", "vllm/b.py"])
    assert project is not None
    assert project.repository == "vllm-project/vllm"
    assert project.compiled("csrc/a.cu")


def test_other_repository_with_the_same_name_is_not_a_fork() -> None:
    project = project_of("someone/flashinfer", ["python/flashinfer/a.py"])
    assert project is not None
    assert not project.described


def test_op_of_a_renamed_fork_names_its_project() -> None:
    class Pin:
        request, repository = "someone/vllm-gb10#1", "someone/vllm-gb10"

    pin: Any = Pin()
    sections = read_sections(diff("vllm/a.py", "csrc/b.cu"))
    with pytest.raises(UsageError, match="no changed file is in a folder"):
        parts_of(pin, sections, Pull(pull=pin.request))
    op = Pull(pull=pin.request, project="vllm-project/vllm")
    parts = parts_of(pin, sections, op)
    assert parts.any_installed
    assert [section.path for section in parts.compiled] == ["csrc/b.cu"]
    notes = notes_of(pin, parts)
    assert notes == ["someone/vllm-gb10 is read as a fork of vllm-project/vllm"]


def test_an_unknown_repository_is_not_guessed() -> None:
    assert project_of("someone/thing", ["lib/a.py", "other/b.py"]) is None


def test_a_user_folder_can_contain_a_pinned_pull(tmp_path: Path) -> None:
    """What ``pins.toml`` says is read with hyphens, as everything else in it."""
    text = (
        'summary = "s"\norder = 1\npackage = "vllm"\n[provenance]\norigin = "o"\nforwarded = "no"\n'
        'applied-upstream = "no"\nlast-update = 2026-01-01\n[[variant]]\nname = "a"\n'
        'when = { vllm = ">=0" }\n[[variant.op]]\nop = "pull"\npull = "o/r#1"\n'
    )
    pin = (
        f'[[pull]]\nrequest = "o/r#1"\nforge = "f"\nrepository = "o/r"\nbase = "{"a" * 40}"\n'
        f'commit = "{"b" * 40}"\ndate = "2026-01-01"\nsha256 = "{"c" * 64}"\nsize = 3\n'
        f'merge-commit = "{"d" * 40}"\n'
    )
    files = {"mine/layer.toml": text.encode(), "mine/pins.toml": pin.encode()}
    layer = load_layer(write_tree(tmp_path, files) / "mine")
    assert layer.pins.pull[0]["merge_commit"] == "d" * 40
