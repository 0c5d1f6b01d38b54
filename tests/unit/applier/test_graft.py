"""``graft``: a named definition out of a released wheel, at its place or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from builder.applier.edits import definition, graft_text
from builder.applier.states import APPLIED, DRIFT, NEEDED, POST, PRE
from builder.applier.values import ApplyError
from tests.unit.fakes import MemoryTree, judged, make_layer, make_wheel, vllm_files

if TYPE_CHECKING:
    from builder.applier.layers import Layer

DONOR = '''\
"""A module with everything that a graft may name."""

import functools

LIMIT = 3
TABLE: dict[str, int] = {
    "a": 1,
}


@functools.cache
def cached(n):
    return n


async def fetch():
    return LIMIT


class Kernel:
    """A kernel."""

    def run(self):
        return 121
'''
TARGET = "import functools\n\n\nclass Old:\n    pass\n\n\nclass Last:\n    pass\n"


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("LIMIT", "LIMIT = 3", "LIMIT = 3"),
        ("TABLE", "TABLE: dict[str, int] = {", "}"),
        ("cached", "@functools.cache", "    return n"),
        ("fetch", "async def fetch():", "    return LIMIT"),
        ("Kernel", "class Kernel:", "        return 121"),
    ],
)
class TestKinds:
    def test_complete_definition_is_copied(self, name: str, first: str, last: str) -> None:
        text = definition(DONOR, name) or ""
        assert (text.splitlines()[0], text.splitlines()[-1]) == (first, last)

    def test_is_put_after_the_named_definition(self, name: str, first: str, last: str) -> None:
        found, text = graft_text(TARGET, DONOR, [name], "Old", False)
        assert found == PRE
        wanted = definition(DONOR, name)
        assert text == TARGET.replace("    pass\n", f"    pass\n\n\n{wanted}", 1)

    def test_is_found_when_already_applied(self, name: str, first: str, last: str) -> None:
        _, text = graft_text(TARGET, DONOR, [name], "Old", False)
        assert graft_text(text, DONOR, [name], "Old", False) == (POST, text)

    def test_goes_to_the_end_without_a_position(self, name: str, first: str, last: str) -> None:
        assert graft_text(TARGET, DONOR, [name], None, False)[1] == (
            f"{TARGET}\n\n{definition(DONOR, name)}"
        )

    def test_replaces_one_that_differs(self, name: str, first: str, last: str) -> None:
        own = f"def {name}():\n    return 'own'\n"
        found, text = graft_text(f"{TARGET}\n\n{own}", DONOR, [name], None, True)
        assert (found, text) == (PRE, f"{TARGET}\n\n{definition(DONOR, name)}")


def test_several_names_keep_their_order() -> None:
    _, text = graft_text(TARGET, DONOR, ["Kernel", "cached"], "Old", False)
    places = [
        text.index(word) for word in ("class Old", "class Kernel", "def cached", "class Last")
    ]
    assert places == sorted(places)


def test_two_blank_lines_follow_where_code_follows_directly() -> None:
    _, text = graft_text("A = 1\nB = 2\n", DONOR, ["LIMIT"], "A", False)
    assert text == "A = 1\n\n\nLIMIT = 3\n\n\nB = 2\n"


def test_a_file_without_a_final_newline_works() -> None:
    assert graft_text("A = 1", DONOR, ["LIMIT"], None, False)[1] == "A = 1\n\n\nLIMIT = 3\n"


@pytest.mark.parametrize(
    ("target", "names", "after", "replace", "reason"),
    [
        ("LIMIT = 4\n", ["LIMIT"], None, False, "already defined (line 1) and differs"),
        (TARGET, ["LIMIT"], None, True, "cannot be replaced"),
        (TARGET, ["LIMIT"], "Gone", False, "LIMIT belongs after Gone, which is not defined"),
        (f"{TARGET}LIMIT = 3\n", ["LIMIT", "Kernel"], "Old", False, "some of the definitions"),
    ],
)
def test_drift_gives_the_reason(
    target: str, names: list[str], after: str | None, replace: bool, reason: str
) -> None:
    found, why = graft_text(target, DONOR, names, after, replace)
    assert found == DRIFT
    assert reason in why


def test_a_donor_without_the_name_is_an_error() -> None:
    with pytest.raises(ApplyError, match="does not define Missing"):
        graft_text(TARGET, DONOR, ["Missing"], None, False)


@pytest.mark.parametrize("odd", ["\x0c", "\x1c", "\u2028"])
def test_lines_are_counted_as_python_counts_them(odd: str) -> None:
    """A form feed is no line end to Python's parser, so it must be none to us."""
    donor = f"A = '{odd}'\n\n\ndef fixed():\n    return 1\n\n\nB = 2\n"
    assert definition(donor, "fixed") == "def fixed():\n    return 1\n"


WHEEL = make_wheel("vllm", "0.30.0", {"vllm/kernels.py": DONOR, "vllm/other.py": "X = 1\n"})


def graft_layer(**op: object) -> Layer:
    rendered = {"op": "graft", "file": "vllm/kernels.py", "from": "vllm==0.30.0", **op}
    return make_layer("cherry", rendered, donors=[WHEEL.donor_pin("vllm/kernels.py")])


def test_a_layer_takes_the_definition_from_the_pinned_wheel() -> None:
    layer, tree = graft_layer(names=["Kernel"], after="Old"), MemoryTree(vllm_files(kernels=TARGET))
    outcome = judged(layer, tree, WHEEL)
    assert outcome.state == NEEDED
    assert [pin.filename for pin in outcome.inputs] == [WHEEL.filename]
    assert judged(layer, tree.after(outcome), WHEEL).state == APPLIED


class TestWholeFile:
    LAYER = graft_layer(whole=True)

    def test_is_created(self) -> None:
        outcome = judged(self.LAYER, vllm_files(), WHEEL)
        content = outcome.changes["vllm/kernels.py"]
        assert content is not None
        assert content.read().decode() == DONOR

    def test_is_found(self) -> None:
        assert judged(self.LAYER, vllm_files(kernels=DONOR), WHEEL).state == APPLIED

    def test_never_overwrites_a_different_file(self) -> None:
        outcome = judged(self.LAYER, vllm_files(kernels=TARGET), WHEEL)
        assert outcome.state == DRIFT
        assert "already exists with different content" in outcome.reason


def test_an_input_that_is_not_pinned_is_refused() -> None:
    layer = graft_layer(names=["X"], member="vllm/other.py")
    with pytest.raises(ApplyError, match=r"no pin for vllm/other.py of vllm==0.30.0"):
        judged(layer, vllm_files(kernels=TARGET), WHEEL)


def test_a_target_that_is_not_python_is_drift() -> None:
    outcome = judged(graft_layer(names=["Kernel"]), vllm_files(kernels="def broken(:\n"), WHEEL)
    assert outcome.state == DRIFT
    assert "vllm/kernels.py" in outcome.reason
