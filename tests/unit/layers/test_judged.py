"""Judgements from the cache: the same plan and bytes, only for the same base, layers and code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.judging import judge_in_order
from builder.applier.values import ApplyError, sha256_hex
from builder.common.paths import cache_dir
from builder.layers import judged as module
from builder.layers.judged import judged
from tests.unit.fakes import (
    BACKEND,
    FakeSources,
    copy_op,
    env_op,
    fake_base,
    make_layer,
    make_wheel,
    replace_op,
    vllm_files,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from builder.applier.judging import Step
    from builder.applier.layers import Layer
    from builder.applier.trees import Content
    from builder.images.subject import Subject

SOURCES = FakeSources()
INDEXES = {"vllm": "0123456789ab"}
LAYERS = [
    make_layer("backend", BACKEND, env_op("VLLM_NVFP4_GEMM_BACKEND", "marlin")),
    make_layer("more", replace_op("BACKEND = 'b12x'", "BACKEND = 'c'"), copy_op("vllm/n.py", b"1")),
    make_layer("other", replace_op("not there", "x")),
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each time that layers are really judged."""
    times: list[int] = []

    def counted(*words: Any) -> Any:
        times.append(1)
        return judge_in_order(*words)

    monkeypatch.setattr(module, "judge_in_order", counted)
    return times


def base(**files: str) -> Subject:
    return fake_base(vllm_files(**files))


def entries() -> list[Path]:
    return sorted((cache_dir() / "judged").glob("*.json"))


def plain(steps: Sequence[Step]) -> list[Any]:
    """All that a step has, with the bytes of its files."""

    def read(changes: dict[str, Content | None]) -> dict[str, Any]:
        return {
            path: one and (one.sha256, one.size, one.mode, one.read())
            for path, one in changes.items()
        }

    return [
        (
            step.layer,
            {**vars(step.outcome), "changes": read(step.outcome.changes)},
            step.receipt,
            read(step.changes),
        )
        for step in steps
    ]


def test_the_second_time_nothing_is_judged_and_all_is_the_same(asked: list[int]) -> None:
    first = judged(base(), LAYERS, SOURCES, INDEXES)
    second = judged(base(), LAYERS, SOURCES, INDEXES)
    assert asked == [1]
    assert [s.outcome.state for s in second] == ["needed", "needed", "drift"]
    assert [s.receipt for s in second] == [s.receipt for s in first]
    assert asked == [1], "states, receipts and digests need no bytes"


def test_bytes_are_those_of_another_judgement(asked: list[int]) -> None:
    first = judged(base(), LAYERS, SOURCES, INDEXES)
    second = judged(base(), LAYERS, SOURCES, INDEXES)
    states = {step.layer.name: step.outcome.changes for step in first}
    assert states["backend"]
    for one, two in zip(first, second, strict=True):
        assert {**vars(one.outcome), "changes": 0} == {**vars(two.outcome), "changes": 0}
        for path, content in one.changes.items():
            again = two.changes[path]
            assert content is not None
            assert again is not None
            assert (again.sha256, again.size, again.mode) == (
                content.sha256,
                content.size,
                content.mode,
            )
            assert again.read() == content.read()
    assert asked == [1, 1], "judged again once, for all files"


def test_inputs_of_wheels_are_the_same() -> None:
    wheel = make_wheel("lib", "2", {"lib/a.py": "1"})
    sources = FakeSources(wheel)
    op = {"op": "wheel", "distribution": "lib", "version": "2"}
    layers = [make_layer("lib", op, wheels=[wheel])]
    first, second = (judged(base(), layers, sources, INDEXES) for _ in range(2))
    assert first[0].outcome.inputs
    assert second[0].outcome.inputs == first[0].outcome.inputs
    assert plain(second) == plain(first)


def test_another_base_layer_order_index_or_code_is_judged(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged(base(), LAYERS, SOURCES, INDEXES)
    others: list[tuple[Subject, list[Layer]]] = [
        (fake_base(vllm_files(), digest="sha256:other"), LAYERS),
        (fake_base(vllm_files(), env={"A": "b"}), LAYERS),
        (fake_base(vllm_files("0.21.0")), LAYERS),
        (base(), LAYERS[:1]),
        (base(), [make_layer("backend", BACKEND), *LAYERS[1:]]),
    ]
    for number, (one, layers) in enumerate(others, 2):
        judged(one, layers, SOURCES, INDEXES)
        assert len(asked) == number
    monkeypatch.setattr(module, "version", lambda: "other")
    judged(base(), LAYERS, SOURCES, INDEXES)
    assert len(asked) == len(others) + 2
    judged(base(), LAYERS, SOURCES, {"vllm": "another"})  # it may serve other bytes
    assert len(asked) == len(others) + 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-9],
        lambda data: data.replace(b"needed", b"upstream"),
        lambda _data: b"",
        lambda _data: sha256_hex(b"{}").encode() + b"\n{}",
    ],
)
def test_a_damaged_entry_is_judged_again(asked: list[int], damage: Any) -> None:
    judged(base(), LAYERS, SOURCES, INDEXES)
    (entry,) = entries()
    entry.write_bytes(damage(entry.read_bytes()))
    again = judged(base(), LAYERS, SOURCES, INDEXES)
    assert asked == [1, 1]
    assert again[0].outcome.state == "needed"
    judged(base(), LAYERS, SOURCES, INDEXES)
    assert asked == [1, 1]


def test_a_base_that_is_not_what_its_digest_says_gives_no_wrong_bytes() -> None:
    """The files of a plan are what its digests say, or an error."""
    files = vllm_files()
    judged(fake_base(files, digest="sha256:x"), LAYERS, SOURCES, INDEXES)
    changed = {**files, "vllm/core.py": files["vllm/core.py"] + b"# more\n"}
    steps = judged(fake_base(changed, digest="sha256:x"), LAYERS, SOURCES, INDEXES)
    content = steps[0].changes["vllm/core.py"]
    assert content is not None
    with pytest.raises(ApplyError, match="sha256"):
        content.read()


def test_a_layer_that_now_writes_less_is_an_error() -> None:
    files = vllm_files()
    judged(fake_base(files, digest="sha256:x"), LAYERS, SOURCES, INDEXES)
    less = {**files, "vllm/core.py": b"BACKEND = 'b12x'\n"}
    steps = judged(fake_base(less, digest="sha256:x"), LAYERS, SOURCES, INDEXES)
    content = steps[0].changes["vllm/core.py"]
    assert content is not None
    with pytest.raises(ApplyError, match="does not write"):
        content.read()
