"""``layer.toml``: every mistake is found, and the message names the file and the place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.applier.layers import Hook
from builder.errors import UsageError
from builder.layers.layerfile import load_layer

if TYPE_CHECKING:
    from pathlib import Path

HEAD = """\
summary = "a fix"
order = 50
package = "VLLM"

[provenance]
origin = "vendor, our own"
forwarded = "no"
applied-upstream = "no"
last-update = 2026-01-02
"""
VARIANT = """
[[variant]]
name = "only"
when = { vllm = ">=0.20.0" }
"""
REPLACE = 'op = "replace"\nfile = "vllm/core.py"\nold = "a"\nnew = "b"\n'


def with_op(op: str) -> str:
    return f"{HEAD}{VARIANT}\n[[variant.op]]\n{op}"


GOOD = with_op(REPLACE)


def folder(tmp_path: Path, text: str = GOOD, **files: str) -> Path:
    """A layer folder; extra files are named ``name_suffix``."""
    root = tmp_path / "my-fix"
    root.mkdir()
    (root / "layer.toml").write_text(text)
    for name, content in files.items():
        (root / name.replace("_", ".")).write_text(content)
    return root


def test_a_good_layer_is_rendered(tmp_path: Path) -> None:
    layer = load_layer(folder(tmp_path))
    assert (layer.name, layer.package, layer.order) == ("my-fix", "vllm", 50)
    assert layer.provenance["last-update"] == "2026-01-02"
    (variant,) = layer.rendered["variants"]
    assert variant["ops"] == [
        {"op": "replace", "file": "vllm/core.py", "old": "a", "new": "b", "count": 1}
    ]


def test_its_digest_depends_on_content_not_layout(tmp_path: Path) -> None:
    one, two = (tmp_path / name for name in "ab")
    one.mkdir()
    two.mkdir()
    first = load_layer(folder(one))
    assert first.digest == load_layer(folder(two, f"# a comment\n{GOOD}")).digest
    changed = GOOD.replace('new = "b"', 'new = "c"')
    (two / "my-fix" / "layer.toml").write_text(changed)
    assert first.digest != load_layer(two / "my-fix").digest


MISTAKES = {
    "bad-toml": ("summary = ", "layer.toml: not valid TOML:"),
    "unknown-key": (f"sumary = 'x'\n{GOOD}", "unknown key 'sumary'; did you mean 'summary'?"),
    "missing-key": (GOOD.replace("order = 50\n", ""), "layer.toml: key 'order' is missing"),
    "wrong-type": (GOOD.replace("= 50", '= "50"'), "layer.toml: 'order' should be a whole number"),
    "op-is-a-list": (with_op('op = ["x"]\n'), "unknown op ['x']"),
    "many-parts": (f"{HEAD}a{'.a' * 100_000} = 1\n", "has more than 200 dots"),
    "deep": (f"{HEAD}a = {'[' * 100_000}\n", "not valid TOML"),
    "range": (GOOD.replace('vllm = ">=0.20.0"', "vllm = [1]"), "should be a text in quotes"),
    "zero-byte": (with_op('op = "copy"\nfrom = "a\\u0000"\nto = "x"\n'), "cannot be read"),
    "onto-itself": (with_op('op = "copy"\nfrom = "layer.toml"\nto = "."\n'), "a name '.'"),
    "slashes": (with_op(REPLACE.replace("vllm/", "vllm//")), "it has an empty name"),
    "backslash": (with_op(REPLACE.replace("vllm/", "vllm\\\\")), "it has a backslash"),
    "bool-is-no-int": (GOOD.replace("= 50", "= true"), "'order' should be a whole number"),
    "no-variant": (HEAD, "layer.toml: key 'variant' is missing"),
    "provenance-key": (
        GOOD.replace("forwarded", "forwardet"),
        "provenance: unknown key 'forwardet'; did you mean 'forwarded'?",
    ),
    "provenance-date": (
        GOOD.replace("2026-01-02", '"2026"'),
        "provenance: 'last-update' should be a date",
    ),
    "provenance-datetime": (
        GOOD.replace("2026-01-02", "2026-01-02T03:04:05Z"),
        "provenance: 'last-update' should be a date",
    ),
    "variant-key": (
        GOOD.replace('name = "only"', 'name = "only"\nnote = []'),
        "variant 1: unknown key 'note'; did you mean 'notes'?",
    ),
    "variant-does-nothing": (f"{HEAD}{VARIANT}", "variant 1: has no op and no flags"),
    "bare-upper-bound": (
        GOOD.replace(">=0.20.0", "<1.0"),
        "variant 1: vllm <1.0: a bare bound treats pre-releases and local versions wrongly",
    ),
    "bare-lower-bound": (GOOD.replace(">=0.20.0", ">1.0"), "vllm >1.0: a bare bound"),
    "no-range": (GOOD.replace(">=0.20.0", "newest"), "'newest' is not a PEP 440 range"),
    "endless-range": (
        GOOD.replace(">=0.20.0", f">=0.{'9' * 5000}"),
        "variant 1: '>=0.9999",
    ),
    "endless-ops": (
        with_op("[[variant.op]]\n".join([REPLACE] * 1001)),
        "variant 1: has 1001 ops, and 1000 is the limit",
    ),
    "no-op-kind": (with_op('file = "vllm/core.py"'), "variant 1 op 1: key 'op' is missing"),
    "unknown-op": (with_op('op = "replce"'), "unknown op 'replce'; did you mean 'replace'?"),
    "op-key": (
        with_op(f"{REPLACE}counts = 2"),
        "variant 1 op 1 (replace): unknown key 'counts'; did you mean 'count'?",
    ),
    "op-type": (with_op(f'{REPLACE}count = "2"'), "'count' should be a whole number"),
    "op-count": (with_op(f"{REPLACE}count = 0"), "variant 1 op 1: 'count'"),
    "op-missing-key": (with_op('op = "replace"\nold = "a"\nnew = "b"'), "key 'file' is missing"),
    "op-if": (with_op(f'{REPLACE}if = {{ vllm = "x" }}'), "op 1: 'x' is not a PEP 440 range"),
    "absolute": (with_op(REPLACE.replace("vllm/", "/vllm/")), "is not below site-packages"),
    "upwards": (with_op(REPLACE.replace("vllm/", "../vllm/")), "is not below site-packages"),
    "same-text": (with_op(REPLACE.replace('"b"', '"a"')), "'old' and 'new' are the same text"),
    "empty-old": (with_op(REPLACE.replace('"a"', '""')), "'old' is empty"),
    "empty-new": (with_op(REPLACE.replace('"b"', '""')), "'new' is empty"),
    "no-old": (with_op(REPLACE.replace('old = "a"\n', "")), "give either 'old' or 'old-file'"),
    "both-olds": (
        with_op(f'{REPLACE}old-file = "old.txt"'),
        "op 1: give either 'old' or 'old-file'",
    ),
    "no-such-file": (
        with_op('op = "diff"\nfile = "gone.patch"'),
        "file 'gone.patch' does not exist",
    ),
    "outside": (
        with_op('op = "replace"\nfile = "a.py"\nold-file = "../x.txt"\nnew = "b"'),
        "'../x.txt' is outside the layer's folder",
    ),
    "graft-nothing": (
        with_op('op = "graft"\nfile = "a.py"\nfrom = "vllm==1"'),
        "give either 'names' or 'whole = true'",
    ),
    "graft-from": (
        with_op('op = "graft"\nfile = "a.py"\nfrom = "vllm>=1"\nwhole = true'),
        "'from' 'vllm>=1' is not DISTRIBUTION==VERSION",
    ),
    "wheel-version": (
        with_op('op = "wheel"\ndistribution = "lib"'),
        "give either 'version' or 'version-of'",
    ),
    "remove-unless": (
        with_op('op = "remove"\ndistribution = "lib"\nunless = "soon"'),
        "op 1: 'soon' is not a PEP 440 range",
    ),
    "env-reader": (
        with_op('op = "env"\nname = "FLASHINFER_X"\nvalue = "1"'),
        "FLASHINFER_X needs a 'reader'",
    ),
    "hook-name": (
        with_op('op = "hook"\nfile = "vllm/core.py"\nhook = "hook.py"'),
        "'hook' is not FILE.py:FUNCTION",
    ),
}


@pytest.mark.parametrize(("text", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_error_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_layer(folder(tmp_path, text))
    assert str(caught.value).startswith("my-fix/layer.toml: ")
    assert message in str(caught.value)
    assert caught.value.code == 2
    assert caught.value.hint == "spark-build layers check my-fix"


UPSTREAM = """
[[upstream]]
when = { vllm = ">=0.21.0rc0" }
since = "vllm 0.21.0"
reason = "merged"
probe = [PROBE]
"""


def test_an_oversized_number_is_invalid_toml(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not valid TOML"):
        load_layer(folder(tmp_path, GOOD.replace("order = 50", f"order = {'5' * 5000}")))


@pytest.mark.parametrize(
    ("probe", "message"),
    [
        ('{ file = "a.py", contains = "x" }', None),
        ('{ file = "a.py", missing = true }', None),
        ("", "upstream 1: the probe is empty: a version range alone is not enough"),
        ('{ file = "a.py" }', "upstream 1: a probe clause is 'file' and one test"),
        ('{ file = "a.py", contains = "x", lacks = "y" }', "'file' and one test"),
        ('{ file = "a.py", holds = "x" }', "upstream 1 probe: unknown key 'holds'"),
        ('{ file = "a.py", missing = false }', "upstream 1"),
    ],
)
def test_probes(tmp_path: Path, probe: str, message: str | None) -> None:
    root = folder(tmp_path, GOOD + UPSTREAM.replace("PROBE", probe))
    if message is None:
        assert len(load_layer(root).upstream) == 1
        return
    with pytest.raises(UsageError, match=r"my-fix/layer\.toml") as caught:
        load_layer(root)
    assert message in str(caught.value)


# ------------------------------------------------------------------------------------------ files

LINES = [f"line {number}\n" for number in range(1, 8)]
CONTEXT = "".join(f" {line}" for line in LINES[:3])
HUNK = f"--- a/vllm/core.py\n+++ b/vllm/core.py\n@@ -1,4 +1,4 @@\n{CONTEXT}-x\n+y\n"
DIFF = with_op('op = "diff"\nfile = "fix.patch"')


def test_a_diff_is_inlined(tmp_path: Path) -> None:
    layer = load_layer(folder(tmp_path, DIFF, fix_patch=HUNK))
    assert layer.rendered["variants"][0]["ops"][0]["diff"] == HUNK


def test_a_diff_may_add_and_delete_whole_files(tmp_path: Path) -> None:
    made = "--- /dev/null\n+++ b/vllm/new.py\n@@ -0,0 +1,3 @@\n+a\n+b\n+c\n"
    gone = "--- a/vllm/old.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n"
    layer = load_layer(folder(tmp_path, DIFF, fix_patch=made + gone))
    assert layer.rendered["variants"][0]["ops"][0]["diff"] == made + gone


@pytest.mark.parametrize(
    "diff",
    [
        pytest.param(HUNK.replace("1,4 +1,4", "1,1 +1,1").replace(CONTEXT, ""), id="no-context"),
        pytest.param(
            "--- a/vllm/core.py\n+++ b/vllm/core.py\n@@ -1,4 +1,4 @@\n"
            "-a\n-b\n-c\n-d\n+e\n+f\n+g\n+h\n",
            id="no-context-but-many-lines",
        ),
        pytest.param(
            "--- /dev/null\n+++ b/../new.py\n@@ -0,0 +1,3 @@\n+a\n+b\n+c\n", id="new-file-outside"
        ),
        pytest.param(HUNK.replace("vllm/core.py", "../core.py"), id="out-of-site-packages"),
        pytest.param(HUNK.replace("1,4 +1,4", "1,9 +1,9"), id="malformed"),
        pytest.param("not a diff\n", id="no-diff"),
    ],
)
def test_an_unsafe_diff_is_refused(tmp_path: Path, diff: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_layer(folder(tmp_path, DIFF, fix_patch=diff))
    assert caught.value.code == 2
    assert "my-fix" in str(caught.value)
    assert "variant 1 op 1" in str(caught.value)


def test_old_and_new_can_be_files(tmp_path: Path) -> None:
    op = 'op = "replace"\nfile = "vllm/core.py"\nold-file = "old.txt"\nnew-file = "new.txt"'
    layer = load_layer(folder(tmp_path, with_op(op), old_txt="a\n", new_txt="b\n"))
    rendered = layer.rendered["variants"][0]["ops"][0]
    assert (rendered["old"], rendered["new"]) == ("a\n", "b\n")
    assert not [key for key in rendered if key.endswith("-file")]


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    root = folder(tmp_path, DIFF)
    (root / "fix.patch").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"my-fix/.*fix\.patch"):
        load_layer(root)


HOOK = with_op('op = "hook"\nfile = "vllm/core.py"\nhook = "hook.py:edit"')


def test_a_hook_is_inlined_with_its_function(tmp_path: Path) -> None:
    source = "def edit(text):\n    return text\n"
    (op,) = load_layer(folder(tmp_path, HOOK, hook_py=source)).ops
    assert op == Hook("vllm/core.py", source, "edit")


@pytest.mark.parametrize("source", ["def other(text):\n    return text\n", "def edit(:\n"])
def test_an_invalid_hook_is_refused(tmp_path: Path, source: str) -> None:
    with pytest.raises(UsageError, match=r"my-fix/.*hook"):
        load_layer(folder(tmp_path, HOOK, hook_py=source))


# ------------------------------------------------------------------------------------------- pins

PIN = """\
[[wheel]]
distribution = "lib"
version = "1.0"
filename = "lib-1.0-py3-none-any.whl"
sha256 = "0000000000000000000000000000000000000000000000000000000000000000"
size = 1
platform = "any"
python = "py3"
"""


def test_pins_are_part_of_the_layer(tmp_path: Path) -> None:
    pins = load_layer(folder(tmp_path, pins_toml=PIN)).pins
    assert [pin.filename for pin in pins.wheel] == ["lib-1.0-py3-none-any.whl"]
    assert not pins.donor


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ("[[wheel", "not valid TOML"),
        (PIN.replace("[[wheel]]", "[[wheels]]"), "unknown key 'wheels'; did you mean 'wheel'?"),
        (PIN.replace("size = 1\n", ""), "wheel 1: key 'size' is missing"),
        (PIN.replace("sha256", "sha265"), "wheel 1: unknown key 'sha265'"),
    ],
)
def test_a_mistake_in_the_pins_is_named(tmp_path: Path, pins: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_layer(folder(tmp_path, pins_toml=pins))
    assert str(caught.value).startswith("my-fix/pins.toml: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (".".join(["a"] * 100_000) + " = 1\n", "more than 200 dots"),
        ("x = {" + ".".join(["a"] * 100_000) + " = 1}\n", "more than 200 dots"),
        ("[" + " . ".join(['"a"'] * 100_000) + "]\n", "more than 200 dots"),
        ("x = " + "[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ("x = " + "{a=" * 50_000 + "1" + "}" * 50_000, "nested too deeply"),
        ("x = 1\n" * 1_000_000, "more than 4 MiB"),
        ("\udcff", "utf-8"),
    ],
    ids=range(7),
)
def test_odd_toml_is_refused(tmp_path: Path, text: str, why: str) -> None:
    """A key of 100,000 parts took minutes."""
    place = folder(tmp_path)
    (place / "layer.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=why):
        load_layer(place)


@pytest.mark.parametrize("sha256", ["00", "../x", "A" * 64, "0" * 65])
def test_a_pin_has_a_sha256(tmp_path: Path, sha256: str) -> None:
    """It becomes a path in the cache."""
    with pytest.raises(UsageError, match="is not a sha256"):
        load_layer(folder(tmp_path, pins_toml=PIN.replace("0" * 64, sha256)))
