"""Models as data: what comes with spark-build, and what users add."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.errors import UsageError
from builder.serving.models import Models, read_model

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.caller import Call

OURS = Models.discover()
SMALL = """
summary = "a model of mine"

[id]
value = "me/mine"
source = "myself"
"""


def write(folder: Path, text: str, name: str = "mine") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.toml"
    path.write_text(text, "utf-8")
    return path


@pytest.mark.parametrize("name", OURS.files)
def test_ours_can_be_read_and_say_what_nobody_knows(name: str) -> None:
    model = OURS.model(name)
    assert model.name == name
    assert bool(model.reasoning_parsers) is ("reasoning-parsers" not in model.unknown())
    assert set(model.unknown()).isdisjoint({"holds", "parameters"})
    assert OURS.model(model.id.value) == model


def test_the_models_of_the_write_ups_are_there() -> None:
    assert set(OURS.files) >= {
        "nemotron-3-super", "nemotron-3-nano", "nemotron-3-nano-w4a16", "qwen3.6-35b-a3b",
        "gemma-4-31b", "gpt-oss-120b",
    }  # fmt: skip


def test_what_no_source_says_is_unknown(tmp_path: Path) -> None:
    model = read_model(write(tmp_path, SMALL))
    assert (model.context, model.kinds(), model.experts) == (None, set(), None)
    assert {"context", "holds", "experts", "weight-bytes", "measured"} <= set(model.unknown())


@pytest.mark.parametrize(
    "text", ['"me/a\\n  touch x"', "'me/$(touch x)'", "'me/`x`'", "'me/a b'", "'-x'", "'me/{x}'"]
)
@pytest.mark.parametrize("key", ["id", "revision"])
def test_an_id_or_a_revision_is_one_plain_word(tmp_path: Path, key: str, text: str) -> None:
    """Tools of others put it into a command as it is."""
    row = f"value = {text}\nsource = 'myself'\n"
    whole = (
        SMALL.replace('value = "me/mine"\nsource = "myself"\n', row)
        if key == "id"
        else (f"{SMALL}\n[revision]\n{row}")
    )
    with pytest.raises(UsageError, match=f"{key} .* is not one plain word"):
        read_model(write(tmp_path, whole))


#: Rows of a model's file with a name that a shell, a container or a manifest reads as it is.
NAMED = {
    "variables": "[[variables]]\nname = {}\nvalue = '1'\nwhy = 'x'\nsource = 'x'\n",
    "flags": "[[flags]]\nflag = {}\nwhy = 'x'\nsource = 'x'\n",
    "plugin": "[[tool-parsers]]\nname = 'x'\nplugin = {}\nsource = 'x'\n",
    "image": "[tensorrt-llm]\nimage = {}\nsource = 'x'\n",
    "variables of TensorRT-LLM": "[tensorrt-llm]\nimage = 'x'\nsource = 'x'\n"
    "variables = {{{} = ''}}\n",
    "flags of TensorRT-LLM": "[tensorrt-llm]\nimage = 'x'\nsource = 'x'\nflags = {{{} = ''}}\n",
}
GOOD = {
    "variables": "VLLM_A1", "flags": "--max-len", "plugin": "a_parser.py",
    "image": "a.b:5/c@sha256:0",
    "variables of TensorRT-LLM": "TLLM_A", "flags of TensorRT-LLM": "--tp_size",
}  # fmt: skip


@pytest.mark.parametrize(
    "end", ["; touch x", " x", "=1", "$(x)", "`x`", "/../../x", "\\ntouch x", "\\n"]
)
@pytest.mark.parametrize("what", NAMED)
def test_a_name_that_is_written_without_quotes_is_a_name(
    tmp_path: Path, what: str, end: str
) -> None:
    """A script has ``export NAME=``: a name with a semicolon would start a program."""
    good = SMALL + NAMED[what].format(f'"{GOOD[what]}"')
    assert read_model(write(tmp_path, good)).id.value == "me/mine"
    if (what, end) == ("image", "/../../x"):
        return  # an image has slashes, and is no path
    with pytest.raises(UsageError, match="Expected `str` matching regex"):
        read_model(write(tmp_path, SMALL + NAMED[what].format(f'"{GOOD[what]}{end}"')))


@pytest.mark.parametrize("id_", ["me/mine", "/models/mine", "./mine", "~/mine", "org/Qwen3.5-1B"])
def test_an_id_is_a_name_or_a_path(tmp_path: Path, id_: str) -> None:
    assert read_model(write(tmp_path, SMALL.replace("me/mine", id_))).id.value == id_


def test_a_users_model_goes_before_ours(tmp_path: Path) -> None:
    write(tmp_path / "models", SMALL, "nemotron-3-super")
    assert Models.discover([tmp_path / "models"]).model("nemotron-3-super").id.value == "me/mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("summary = 1", "`$.summary`"),
        ("summary = ", "not valid TOML"),
        (SMALL.replace('source = "myself"', ""), "missing required field `source` - at `$.id`"),
        (SMALL + "[contxt]\nvalue = 1\nsource = 'x'", "unknown field `contxt`"),
        (SMALL + "[context]\nvalue = -1\nsource = 'x'", "`$.context.value`"),
        (SMALL + "[[holds]]\nkind = 'int4'\nsource = 'x'", "Invalid enum value 'int4'"),
        (SMALL + "[needs]\nvllm = '0.19 or so'\nsource = 'x'", "'0.19 or so' is not a range"),
        (SMALL + "[[flags]]\nflag = 'x'\nwhy = 'y'\nsource = 'z'", "`$.flags[0].flag`"),
    ],
)
def test_a_malformed_file_says_where(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as failure:
        read_model(path)
    assert message in str(failure.value)
    assert str(path) in str(failure.value)


def test_a_range_holds_for_prereleases_of_its_releases(tmp_path: Path) -> None:
    model = read_model(write(tmp_path, SMALL + "[needs]\nvllm = '>=0.19.0'\nsource = 'x'"))
    assert model.needs is not None
    assert [model.needs.holds_for(v) for v in ("0.18.1", "0.19.0", "0.26.1rc1.dev191+g1")] == [
        False, True, True,
    ]  # fmt: skip


def test_the_commands(call: Call, tmp_path: Path) -> None:
    write(tmp_path / "models", SMALL)
    listed = call("models", "list", "--models", tmp_path / "models", "--json").json
    assert {"mine", "gpt-oss-120b"} <= {row["name"] for row in listed["models"]}
    shown = call("models", "show", "nemotron-3-super", "--json").json
    assert shown["model"]["context"]["value"] == 200_000
    assert shown["unknown"] == ["revision"]
    text = call("models", "show", "nemotron-3-super").out
    assert "unknown: revision\n" in text
    assert "  context                 200000\n" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "nemotron-3-supr"], "did you mean 'nemotron-3-super'?"),
        (["show", "nobody/nothing"], "unknown model 'nobody/nothing'"),
        (["list", "--models", "gone"], "models folder gone does not exist"),
        (["list", "--models", "."], "contains no model (NAME.toml)"),
    ],
)
def test_what_is_not_there(call: Call, words: list[str], message: str) -> None:
    result = call("models", *words)
    assert result.code == 2
    assert message in result.err


def test_tables_of_a_model_are_shown_as_its_file_has_them(call: Call) -> None:
    shown = call("models", "show", "nemotron-3-super").out
    assert "variables TLLM_ALLOW_LONG_MAX_MODEL_LEN 1\n" in shown
    assert "flags --trust_remote_code\n" in shown
    assert "options kv_cache_config.enable_block_reuse false\n" in shown
    assert not set("{}") & set(shown)
