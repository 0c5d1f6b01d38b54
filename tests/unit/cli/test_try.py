"""The ``try:`` line of an error can be run: it has the user's own arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.common.hints import running
from builder.images.registry.reference import intended_reference
from builder.serving import recipefiles
from tests.unit.cli.test_cli import FIX
from tests.unit.fakes import vllm_files, write_tree
from tests.unit.hints import problem
from tests.unit.serving.served import served

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.conftest import Called

    SparkBuild = Callable[..., Called]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with a layer, and a space in its name."""
    write_tree(tmp_path / "my layers", {"fix/layer.toml": FIX.encode()})
    return tmp_path / "my layers"


def tried(result: Called) -> str:
    """What the error says to try."""
    (line,) = [line for line in result.err.splitlines() if line.startswith("  try: ")]
    return line.removeprefix("  try: ")


def test_an_option_completes_the_user_s_own_command(spark_build: SparkBuild, own: Path) -> None:
    result = spark_build("plan", "-l", "fix", "--patches", own)
    assert tried(result) == f"spark-build plan -l fix --patches '{own}' --base pypi:vllm==0.33.0"
    result = spark_build("image", "-l", "b12x-full", "-b", "pypi:vllm==0.20.1", "--push")
    assert tried(result).endswith("-b pypi:vllm==0.20.1 --push --tag HOST/NAME:TAG")


def test_value_of_an_option_keeps_its_commas(spark_build: SparkBuild) -> None:
    result = spark_build("bench", "http://localhost:1", "--concurrency", "0")
    assert tried(result) == "spark-build bench http://localhost:1 --concurrency 1,2,4,8,16"


def test_another_command_has_the_user_s_layers(spark_build: SparkBuild, own: Path) -> None:
    result = spark_build("layers", "show", "nope", "--patches", own)
    assert "unknown layer or profile 'nope'" in result.err
    assert tried(result) == f"spark-build layers list --patches '{own}'"
    result = spark_build("plan", "-l", "nope", f"--patches={own}", "-b", "pypi:vllm==0.20.1")
    assert tried(result) == f"spark-build layers list --patches '{own}'"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("verify", "dir:nowhere"), "spark-build verify --help"),
        (("cache", "prune", "--older-than", "x"), "spark-build cache prune --help"),
        (("imgae",), "spark-build --help"),
    ],
)
def test_every_error_has_a_hint(spark_build: SparkBuild, words: tuple[str, ...], said: str) -> None:
    assert tried(spark_build(*words)) == said


def test_folders_and_releases_are_not_images(
    spark_build: SparkBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    write_tree(work / "out put", {"index.json": b"{}", "oci-layout": b"{}"})
    write_tree(work / "env" / "lib" / "python3.12" / "site-packages", vllm_files())
    (work / "vllm").mkdir()
    monkeypatch.chdir(work)
    result = spark_build("verify", "out put", "--level", "static")
    assert result.code == 2
    assert "did you mean 'oci:out put'?" in result.err
    assert tried(result) == "spark-build verify 'oci:out put' --level static"
    result = spark_build("plan", "-l", "b12x-full", "--base=0.20.1")
    assert tried(result) == "spark-build plan -l b12x-full --base=pypi:vllm==0.20.1"
    result = spark_build("publish", "out put", "--to", "localhost:1/x")
    assert tried(result) == "spark-build publish 'oci:out put' --to localhost:1/x"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0.20.1", "pypi:vllm==0.20.1"),
        ("v0.20.1", "pypi:vllm==0.20.1"),
        ("0.20.1rc1", "pypi:vllm==0.20.1rc1"),
        ("vllm==0.20.1", "pypi:vllm==0.20.1"),
        ("vllm[b12x]==0.33.0", "pypi:vllm[b12x]==0.33.0"),
        ("vllm/vllm-openai:v0.20.1", ""),
        ("registry.local:5000/vllm", ""),
        ("ubuntu", ""),
    ],
)
def test_suggested_reference(text: str, said: str) -> None:
    assert intended_reference(text) == said


def test_a_folder_can_have_the_name_of_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vllm").mkdir()
    running([])
    assert intended_reference("vllm") == ""


RECIPE = ("recipe", "nemotron-3-super", "--release", "0.33.0")
ONE, TWO = ("--address", "10.0.0.1"), ("--address", "10.0.0.1", "--address", "10.0.0.2")


@pytest.mark.parametrize(
    ("given", "added"),
    [
        (
            ("--topology", "tp2"),
            "--address HEAD --address OTHER",
        ),
        (("--topology", "tp2", *ONE), "--address OTHER"),
        (("--topology", "tp2", *TWO), "--interface NAME"),
    ],
)
def test_what_two_nodes_lack_is_added(
    spark_build: SparkBuild, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], added: str
) -> None:
    monkeypatch.setattr(recipefiles, "served_profile", lambda *_: served())
    words = " ".join(["spark-build", *RECIPE, *given])
    assert tried(spark_build(*RECIPE, *given)) == f"{words} {added}"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--set", "port=9"), "--port 9"),
        (("--set=port=9",), "--port 9"),
        (("--port=8", "--set", "port=many"), "--port 8"),
        (("--set", "model=x"), "models list"),
        (("--set", "tensor-parallel-size=4"), "--topology tp2"),
        (("--topology", "solo", "--set=-tp=2"), "--topology tp2"),
        (("--set=-tp=2", "--set=max-num-seqs=2"), "--set=max-num-seqs=2 --topology tp2"),
        (("--set", "data-parallel-size=2"), "--topology two-solos"),
        (
            ("--topology", "tp2", *TWO, "--interface=e0", "--set", "-tp=4"),
            "--topology tp2 --address 10.0.0.1 --address 10.0.0.2 --interface=e0",
        ),
        (("--port", "8", "--set", "--port=9", "--set", "dtype=auto"), "--set dtype=auto --port 9"),
    ],
)
def test_what_cannot_be_set_is_left_out(
    spark_build: SparkBuild, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(recipefiles, "served_profile", lambda *_: served())
    begins = "" if said == "models list" else f"{' '.join(RECIPE)} "
    assert tried(spark_build(*RECIPE, *given)) == f"spark-build {begins}{said}"


@pytest.mark.parametrize("given", [ONE, ("--interface", "eth0", *ONE), ("--interface=eth0",)])
def test_what_one_node_does_not_have_is_left_out(
    spark_build: SparkBuild, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...]
) -> None:
    monkeypatch.setattr(recipefiles, "served_profile", lambda *_: served())
    assert tried(spark_build(*RECIPE, *given)) == f"spark-build {' '.join(RECIPE)}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("recipe", "nemotron-3-super", "--format", "trtllm", "-o", "a b"),
            "spark-build recipe nemotron-3-super --format trtllm -o 'a b/run.sh'",
        ),
        (
            ("recipe", "nemotron-3-super", "--release", "newest"),
            "spark-build recipe nemotron-3-super --release 0.33.0",
        ),
        (("plan", "-l", "marlin", "-b", "pypi:vllm"), "spark-build plan -l marlin -b {}"),
        (("bench", "localhost"), "spark-build bench http://localhost:8000"),
        (
            ("mods", "export", "-l", "b12x-env"),
            "spark-build mods export NAME --layers L[,L...]",
        ),
        (
            ("image", "-l", "marlin", "-b", "x/y", "--all-platforms", "--compile"),
            "spark-build image -l marlin -b x/y --compile",
        ),
    ],
)
def test_commands_to_try(
    spark_build: SparkBuild, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "work" / "a b").mkdir()
    assert tried(spark_build(*words)) == said.format("pypi:vllm==0.33.0")


@pytest.mark.parametrize(
    ("given", "better"), [("Bad Name", "bad-name"), ("marlin", "my-marlin"), ("..", "my-layer")]
)
def test_a_better_name_of_a_layer(spark_build: SparkBuild, given: str, better: str) -> None:
    assert tried(spark_build("layers", "new", given)) == f"spark-build layers new {better}"


@pytest.mark.parametrize("text", [None, "{}", "[", '{"manifests": 5}'])
def test_a_folder_that_is_no_layout_is_no_failure_of_a_remote(
    spark_build: SparkBuild, tmp_path: Path, text: str | None
) -> None:
    (tmp_path / "work" / "out").mkdir()
    if text is not None:
        (tmp_path / "work" / "out" / "index.json").write_text(text)
    result = spark_build("plan", "-l", "marlin", "-b", "oci:out")
    assert (result.code, "OCI layout" in result.err) == (2, True)
    assert tried(result).startswith("name a folder")


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        ("spark-build plan -l x -b y   (then look at it)", "unexpected extra argument"),
        ("--base y", "options without their command"),
        ("spark-build plan -l x -b y", ""),
        ("spark-build layers list", ""),
        ("spark-build image --help", ""),
        ("spark-build dispatch ask && spark-build dispatch table", ""),
        ("any other text", ""),
        ("spark-build plan -l x, and then publish", "unexpected extra argument"),
        ("spark-build plan --no-such-option", "No such option"),
        ("spark-build layers show", "Missing argument"),
        ("spark-build plan --platform", "requires an argument"),
        ("spark-build dispatch ask && spark-build nonsense", "No such command"),
        ("spark-build plan -l 'x", "No closing quotation"),
    ],
)
def test_a_hint_that_is_not_a_command_is_found(hint: str, said: str) -> None:
    found = problem(hint)
    assert (said in found) if said else (not found)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("recipe", "gpt-oss-120b", "--topology", "tp3"),
            "recipe gpt-oss-120b --topology solo",
        ),
        (("layers", "new", "x", "--in", "there"), "layers new x --in DIR"),
    ],
)
def test_another_value_stands_in_place_of_the_wrong_one(
    spark_build: SparkBuild, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "work" / "there" / "x").mkdir(parents=True)
    assert tried(spark_build(*words)) == f"spark-build {said}"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("plan", "-l", "marlin", "--base", ""), "'--base' / '-b'"),
        (("image", "-l", "marlin", "--output="), "'--output' / '-o'"),
        (("recipes", "export", "--release", ""), "'--release'"),
        (("recipe", "nemotron-3-super", "--set", ""), "'--set'"),
        (("memory", ""), "'MODEL_OR_DIR'"),
        (("diagnose", "a.log", ""), "'LOG'"),
    ],
)
def test_an_empty_value_is_not_the_default(
    spark_build: SparkBuild, words: tuple[str, ...], name: str
) -> None:
    result = spark_build(*words)
    assert (result.code, f"Invalid value for {name}: it is empty\n" in result.err) == (2, True)


def test_a_list_may_have_nothing_in_it(spark_build: SparkBuild) -> None:
    words = ("--serve-args", "", "--require", "", "--layers", "")
    assert "it is empty" not in spark_build("verify", "dir:nowhere", *words).err
