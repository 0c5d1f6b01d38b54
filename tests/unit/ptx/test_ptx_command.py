"""``ptx run`` and ``ptx races``: the example of docs/ptx.md, and kernels with other faults."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from builder.ptx.launchfile import TYPES, as_numbers, encoded
from builder.ptx.machine import to_bf16
from tests.documents import validated, validator

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.conftest import Called

PAGE = (Path(__file__).parents[3] / "docs" / "ptx.md").read_text("utf-8")
(RACY,) = re.findall(r"```ptx\n(.*?)```", PAGE, re.DOTALL)
(LAUNCH,) = (json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL))
SAID_RACES, SAID_RUN = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
GOOD = RACY.replace("  mov.b32 %r4, 32;", "  bar.sync 0;\n  mov.b32 %r4, 32;")
STUCK = GOOD.replace("  bar.sync 0;\n  shr", "  bar.sync 0, 128;\n  shr")
OUTSIDE = GOOD.replace("st.global.f32 [%rd3], %f1;", "st.global.f32 [%rd3+4], %f1;")
ALL = ["eager", "lazy", "random 1"]


@pytest.fixture
def ptx(spark_build: Callable[..., Called]) -> Callable[..., Called]:
    """Run a command on a kernel, in a directory with that and its launch."""

    def called(
        command: str, source: str | bytes, *words: str, launch: object = None, **changes: Any
    ) -> Called:
        data = source if isinstance(source, bytes) else source.encode()
        Path("total.ptx").write_bytes(data)
        document = {**LAUNCH, **changes} if launch is None else launch
        text = document if isinstance(document, str) else json.dumps(document)
        Path("launch.json").write_text(text)
        return spark_build("ptx", command, "total.ptx", "--launch", "launch.json", *words)

    return called


def test_the_page_shows_what_the_commands_print(ptx: Callable[..., Called]) -> None:
    races = ptx("races", RACY)
    assert (races.code, races.out) == (5, SAID_RACES)
    assert races.err.startswith("error: total.ptx: total has 2 races\n")
    good = ptx("run", GOOD)
    assert (good.code, good.out, good.err) == (0, SAID_RUN, "")


def test_a_good_kernel_has_no_races(ptx: Callable[..., Called]) -> None:
    text = ptx("races", GOOD)
    assert (text.code, text.out) == (0, "no races in eager, lazy, random 1\n")
    found = validated("ptx-races", ptx("races", GOOD, "--json").json)
    assert (found["races"], found["stopped"], found["schedules"]) == ([], [], ALL)


def test_a_race_is_reported_with_both_lines(ptx: Callable[..., Called]) -> None:
    called = ptx("races", RACY, "--json")
    found = validated("ptx-races", called.json)
    assert (called.code, found["error"]["code"]) == (5, 5)
    _, race = found["races"]
    assert race["kind"] == "write without order after a read"
    lines = [(line["line"], line["text"]) for line in race["lines"]]
    source = RACY.splitlines()
    assert lines == [
        (16, "st.shared.f32 [%r2], %f1;"),
        (23, "ld.shared.f32 %f2, [%r5];"),
    ]
    assert all(source[number - 1].strip() == text for number, text in lines)
    assert (race["agents"], race["schedules"]) == (["warp 1", "warp 0"], ALL)


def test_source_lines_of_the_kernel_are_named(ptx: Callable[..., Called]) -> None:
    """Of PTX with line info: with each line of a race, a fault or a deadlock."""
    store, load = "  st.shared.f32 [%r2], %f1;", "  ld.shared.f32 %f2, [%r5];"

    def told(kernel: str) -> str:
        told = kernel.replace(store, f"  .loc 1 30 5\n{store}", 1)
        told = told.replace(load, f"  .loc 2 8 1, function_name $L__0, inlined_at 1 41 9\n{load}")
        told = told.replace("END:", "  .loc 1 50 1\nEND:")
        return told + '.file 1 "kernels/total.py"\n\t.file\t2 "lib//add.py"\n'

    found = validated("ptx-races", ptx("races", told(RACY), "--json").json)
    sources = [line["source"] for line in found["races"][1]["lines"]]
    assert sources == ["kernels/total.py:30", "lib//add.py:8, inlined at kernels/total.py:41"]
    text = ptx("races", told(RACY)).out
    assert "\n  line 17 (warp 1, kernels/total.py:30): st.shared.f32 [%r2], %f1;\n" in text
    assert validated("ptx-run", ptx("run", told(GOOD), "--json").json)["runs"][0]["races"] == []
    outside = told(OUTSIDE.replace("[%rd3+4], %f1;\n", "[%rd3+4], %f1;\n  .loc 1 49 1\n"))
    before = "(lib//add.py:8, inlined at kernels/total.py:41), block 0,0,0, warp 0: global address"
    assert before in ptx("run", outside).out
    stuck = told(STUCK.replace("  bar.sync 0, 128;", "  .loc 1 44 2\n  bar.sync 0, 128;"))
    assert re.search(
        r"waits at barrier 0 at line \d+ \(kernels/total.py:44\)", ptx("run", stuck).out
    )


def test_run_reports_each_schedule(ptx: Callable[..., Called]) -> None:
    called = ptx("run", RACY, "--json", "--schedule", "lazy", "--schedule", "random:7")
    found = validated("ptx-run", called.json)
    assert called.code == 5
    assert [run["schedule"] for run in found["runs"]] == ["lazy", "random 7"]
    assert [(run["values"], run["wrong"]) for run in found["runs"]] == [(1, 1), (1, 1)]
    assert all(len(run["races"]) == 2 for run in found["runs"])
    text = ptx("run", RACY, "--schedule", "eager")
    assert "eager: found" in text.out
    assert "1 of 1 values wrong" in text.out
    assert "line 16 (warp 1): st.shared" in text.out
    assert text.err.startswith("error: total.ptx: total is wrong in eager\n")


#: The example, whose threads jump over a store if the sum is not negative: no run goes there.
PARTLY = GOOD.replace(
    "  add.f32 %f1, %f1, %f3;",
    "  add.f32 %f1, %f1, %f3; setp.ge.f32 %p1, %f1, 0f00000000; @%p1 bra ON;\n"
    "  neg.f32 %f1, %f1;\n  neg.f32 %f1, %f1;\nON:",
)


def test_what_no_schedule_reached_is_counted_and_named(ptx: Callable[..., Called]) -> None:
    found = validated("ptx-run", ptx("run", PARTLY, "--json").json)
    assert found["coverage"] == {
        "blocks": 12,
        "blocks_ran": 11,
        "lines": 31,
        "lines_ran": 29,
        "unreached": ["line 36", "line 37"],
    }
    assert [run["covered"] for run in found["runs"]] == [11] * 3
    text = ptx("run", PARTLY).out
    assert text.splitlines()[0] == "total: 11 of 12 basic blocks and 29 of 31 lines ran"
    assert "line 36" not in text
    assert "\nnot reached: line 36-37\n" in ptx("run", PARTLY, "-v").out


def test_with_line_info_the_lines_are_those_of_the_source(ptx: Callable[..., Called]) -> None:
    """Of code that was inlined, where it is written."""
    told = PARTLY.replace("  mov.u32 %r1", "  .loc 1 7 1\n  mov.u32 %r1")
    told = told.replace("  neg", "  .loc 2 8 1, function_name $L, inlined_at 1 9 1\n  neg", 1)
    told = told.replace("ON:", "ON:\n  .loc 1 12 1", 1)
    told += '.file 1 "kernels/total.py"\n.file 2 "lib/add.py"\n'
    found = validated("ptx-run", ptx("run", told, "--json").json)["coverage"]
    assert (found["lines"], found["lines_ran"]) == (3, 2)
    assert found["unreached"] == ["lib/add.py:8"]


def test_a_run_that_ends_in_a_fault_counts_what_ran_before(ptx: Callable[..., Called]) -> None:
    for kernel in (STUCK, OUTSIDE):
        found = validated("ptx-run", ptx("run", kernel, "--json").json)
        assert 0 < found["runs"][0]["covered"] <= found["coverage"]["blocks_ran"]
        assert found["runs"][0]["instructions"] > 0


def test_several_kernels_are_listed_where_a_launch_names_none_or_a_part(
    ptx: Callable[..., Called],
) -> None:
    entry = GOOD[GOOD.index(".visible") :]
    two = GOOD + entry.replace("entry total(", "entry subtotal(") + entry.replace("total(", "mean(")
    several = "total.ptx: which kernel? it has 3 names: total, subtotal, mean\n"
    assert several in ptx("run", two).err
    part = "total.ptx: 'tal' is a part of 2 names: total, subtotal\n"
    assert part in ptx("run", two, kernel="tal").err
    assert ptx("run", two, kernel="total").out.startswith("total: ")
    assert ptx("run", two, kernel="sub").out.startswith("subtotal: ")


def test_a_wrong_value_alone_is_found(ptx: Callable[..., Called]) -> None:
    wrong = {"array": "sum", "exact": {"values": [128.0]}}
    called = ptx("run", GOOD, result=wrong)
    assert called.code == 5
    assert "1 of 1 values wrong; worst at [0]: 128.5 instead of 128 +- 0" in called.out
    assert ptx("run", GOOD, result={**wrong, "bound": 0.5}).code == 0
    assert ptx("races", GOOD, result=wrong).code == 0, "values are not its matter"


@pytest.mark.parametrize(
    ("kernel", "deadlock", "words"),
    [
        (STUCK, True, "waits at barrier 0"),
        (OUTSIDE, False, "PTX line 37, block 0,0,0, warp 0: global address"),
    ],
    ids=["deadlock", "out of bounds"],
)
def test_a_run_that_does_not_finish(
    ptx: Callable[..., Called], kernel: str, deadlock: bool, words: str
) -> None:
    for command, key in (("run", "runs"), ("races", "stopped")):
        called = ptx(command, kernel, "--json")
        assert called.code == 5
        stopped = validated(f"ptx-{command}", called.json)[key]
        assert [run["schedule"] for run in stopped] == ALL
        assert all(run["deadlock"] is deadlock and words in run["fault"] for run in stopped)
        text = ptx(command, kernel)
        assert f"{'deadlock' if deadlock else 'fault'}: " in text.out
        assert words in text.out


def test_a_store_to_an_input_is_a_fault(ptx: Callable[..., Called]) -> None:
    given, total = LAUNCH["memory"]
    called = ptx("run", GOOD, memory=[given, {**total, "writable": False}])
    assert called.code == 5
    assert "a write to sum at" in called.out
    assert "there are no buffers" in ptx("run", GOOD, memory=[], parameters=["00" * 8, "00" * 8, "00" * 4], result=None).out  # fmt: skip  # noqa: E501


def test_outputs_are_written_by_schedule(ptx: Callable[..., Called]) -> None:
    called = ptx("run", GOOD, "--out", "results/deep")
    assert called.code == 0
    names = sorted(str(path) for path in Path("results").rglob("*.npy"))
    assert names == [f"results/deep/{name}/sum.npy" for name in ("eager", "lazy", "random-1")]
    for name in names:
        array = np.load(name)
        assert (array.dtype, array.tolist()) == (np.float32, [128.5])
    Path("taken").write_text("a file")
    taken = ptx("run", GOOD, "--out", "taken")
    assert taken.code == 2
    assert "cannot write taken" in taken.err


def test_schedules_that_differ_are_noted(ptx: Callable[..., Called]) -> None:
    """An exchange of each warp at one place: the last wins, and atomics do not race."""
    body = GOOD.replace("  setp.ne.u32 %p3, %r1, 0;\n", "  mov.b32 %r6, %warpid;\n")
    body = body.replace("  @%p3 bra END;\n", "").replace("st.global.f32 [%rd3], %f1", "atom.global.exch.b32 %r6, [%rd3], %r6")  # fmt: skip  # noqa: E501
    words = [w for seed in range(1, 9) for w in ("--schedule", f"random:{seed}")]
    called = ptx("run", body, *words, result=None)
    assert called.code == 0, called.out
    assert "the schedules left different values in sum" in called.out


def test_arrays_come_from_files_values_and_addresses(ptx: Callable[..., Called]) -> None:
    two = np.full(64, 2, np.float32)
    np.save("given.npy", two)
    Path("given.bin").write_bytes(two.tobytes())
    total = {**LAUNCH["memory"][1], "address": 0x7000_0000_1000}
    for given in (
        {"file": "given.npy"},
        {"file": "given.npy", "type": "f32", "shape": [8, 8]},
        {"file": "given.bin", "type": "f32"},
        {"file": "given.bin"},
        {"values": [[2] * 32] * 2, "type": "f32"},
    ):
        called = ptx("run", GOOD, memory=[{"name": "given", **given}, total])
        assert (called.code, called.err) == (0, ""), given
    np.save("more.npy", np.concatenate([[9, 9], two]).astype(np.float32))
    shifted = [{"array": "more.npy", "offset": 8}, *LAUNCH["parameters"][1:]]
    assert ptx("run", GOOD, memory=[{"file": "more.npy"}, total], parameters=shifted).code == 0
    address = (0x7000_0000_1000).to_bytes(8, "little").hex()
    by_hand = [LAUNCH["parameters"][0], address, "0000003f"]
    assert ptx("run", GOOD, memory=[LAUNCH["memory"][0], total], parameters=by_hand).code == 0


@pytest.mark.parametrize("kind", TYPES)
def test_numbers_are_checked_for_every_type(kind: str) -> None:
    values = encoded([0, 1, 2], kind, "x")
    assert as_numbers(values.tobytes(), kind).tolist() == [0, 1, 2]


def test_bfloat16_is_rounded() -> None:
    bits = encoded([1.00390625, float("nan")], "bf16", "x")
    assert bits.tolist() == to_bf16(np.array([1.0, np.nan], np.float32)).tolist()


def memory(**changes: object) -> dict[str, object]:
    """The example's memory with another first array."""
    first = {"name": "given", "type": "f32", "shape": [64], "fill": 2}
    kept = {key: value for key, value in {**first, **changes}.items() if value is not None}
    return {"memory": [kept, LAUNCH["memory"][1]]}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"launch": "{"}, "launch.json is not a launch: Expecting property name"),
    ({"launch": "[" * 100_000}, "launch.json is not a launch: "),
    ({"launch": [1]}, "launch.json is not a launch: it is not a JSON object: [1]"),
    ({"launch": {}}, "launch.json is not a launch: no 'schema'"),
    ({"blocks": 1}, "it has a key 'blocks' that is not known; did you mean 'block'?"),
    ({"schema": 2}, "launch.json: schema 2, not 1"),
    ({"kernel": "sum"}, "no kernel sum; it has total"),
    ({"grid": [0, 1, 1]}, "a size of grid is not a whole number of at least 1: 0"),
    ({"grid": 4}, "grid is not a list of three numbers: 4"),
    ({"grid": [2**20, 1, 1]}, "4096 are the most"),
    ({"block": [1025, 1, 1]}, "1024 are the most"),
    ({"shared": -1}, "shared is not a whole number of at least 0"),
    ({"shared": 2**20}, "a block has at most 232448"),
    ({"parameters": {}}, "parameters is not a list"),
    ({"parameters": []}, "parameters of [] bytes; total takes [8, 8, 4]"),
    ({"parameters": ["00" * 8, "00" * 8, "00"]}, "of [8, 8, 1] bytes; total takes [8, 8, 4]"),
    ({"parameters": [1]}, "parameters[0] is not a JSON object: 1"),
    ({"parameters": ["xy"]}, "is not a launch: "),
    ({"parameters": [{"type": "u8"}]}, "parameters[0] has not an array, or a type and a value"),
    ({"parameters": [{"type": "f8", "value": 1}]}, "parameters[0]: type 'f8' is not known"),
    ({"parameters": [{"type": "u8", "value": 256}]}, "u8 cannot represent 256"),
    ({"parameters": [{"type": "u8", "value": 1.5}]}, "u8 cannot represent 1.5"),
    ({"parameters": [{"type": "u8", "value": -1}]}, "u8 cannot represent -1"),
    ({"parameters": [{"type": "u8", "value": "1"}]}, "these are not numbers: 1"),
    ({"parameters": [{"type": "u8", "value": [1, 2]}]}, "parameters[0] has 2 values"),
    ({"parameters": [{"array": "givn"}]}, "an array 'givn'; did you mean 'given'?"),
    ({"parameters": [{"array": "given", "value": 1}]}, "has an array, and a type or a value"),
    ({"memory": 1}, "memory is not a list of arrays"),
    ({"memory": LAUNCH["memory"] * 2}, "two arrays have the name given"),
    (memory(name="../x"), "a name is letters, digits"),
    (memory(fill=None), "array given has none of file, values, fill"),
    (memory(values=[1]), "array given has values and fill of file, values, fill"),
    (memory(type="float"), "array given: type 'float' is not known; types are u8"),
    (memory(type=None), "array given has no type"),
    (memory(shape=None), "array given has no shape to fill"),
    (memory(shape=[2**40]), "has more than 1073741824 bytes"),
    (memory(fill=None, values=[1, 2, 3]), "12 bytes are not [64] elements of f32"),
    (memory(fill=None, values=[[1], [1, 2]]), "is not a launch: "),
    (memory(writable=1), "writable is true or false, not 1"),
    (memory(address=2**63), "ends beyond the 48-bit address space"),
    (memory(fill=None, file="none.bin"), "none.bin: No such file or directory"),
    (memory(fill=None, file="launch.json"), "bytes are n"),
    ({"result": {"array": "sum"}}, "no 'exact'"),
    ({"result": {"array": "sum", "exact": {"values": [1, 2]}}}, "8 bytes are not [1] elements"),
    ({"result": {"array": "sum", "exact": {"fill": 1}, "bound": -1}}, "bound is not a number"),
    ({"result": {"array": "nosuch", "exact": {}}}, "result names an array 'nosuch'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), BAD, ids=[words for _, words in BAD])
def test_a_malformed_launch(
    ptx: Callable[..., Called], changes: dict[str, Any], words: str
) -> None:
    called = ptx("run", GOOD, "--out", "results", **changes)
    assert (called.code, called.out) == (2, "")
    assert called.err.startswith("error: ")
    assert words in called.err
    assert not Path("results").exists()


@pytest.mark.parametrize("data", [b"", b"no array", b"PK\x03\x04"], ids=["empty", "text", "zip"])
def test_invalid_npy_files(ptx: Callable[..., Called], data: bytes) -> None:
    Path("given.npy").write_bytes(data)
    called = ptx("run", GOOD, **memory(fill=None, file="given.npy"))
    assert called.code == 2
    assert "given.npy" in called.err


def test_a_npy_file_of_another_type(ptx: Callable[..., Called]) -> None:
    np.save("given.npy", np.zeros(64))
    called = ptx("run", GOOD, **memory(fill=None, file="given.npy"))
    assert called.code == 2
    assert "given.npy holds float64, not f32" in called.err


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (GOOD.replace("shr.u32", "frob.u32"), "PTX line 29: unknown instruction frob.u32"),
        (GOOD.replace("bar.sync 0", "bar.sync"), "PTX line 17: unknown instruction bar.sync: its"),
        (GOOD.replace("[%r5]", "[%r5+x]"), "PTX line 24: not understood: ld.shared.f32"),
        (GOOD.replace("bra MEET", "bra"), "PTX line 21: a branch to a label that does not exist"),
        ("hello", "there is no .target directive: is this PTX?"),
        (".target sm_121a\n", "total.ptx: it has no kernel"),
        (b"\x7fELF\xff\xfe", "total.ptx is not PTX: it is not UTF-8 text"),
    ],
    ids=["opcode", "operands", "address", "branch", "text", "no kernel", "binary"],
)  # fmt: skip
def test_malformed_ptx(ptx: Callable[..., Called], kernel: str | bytes, words: str) -> None:
    for command in ("run", "races"):
        called = ptx(command, kernel)
        assert (called.code, called.out) == (2, "")
        assert words in called.err
        document = ptx(command, kernel, "--json").json
        assert words in validated(f"ptx-{command}", document)["error"]["message"]


def test_missing_files(spark_build: Callable[..., Called]) -> None:
    Path("launch.json").write_text(json.dumps(LAUNCH))
    for file, launch, words in (
        ("none.ptx", "launch.json", "cannot read none.ptx: No such file or directory"),
        ("none.ptx", "none.json", "cannot read none.json: No such file or directory"),
        ("none.ptx", ".", "cannot read .: Is a directory"),
    ):
        called = spark_build("ptx", "run", file, "--launch", launch)
        assert called.code == 2
        assert words in called.err


@pytest.mark.parametrize("word", ["eagre", "random:", "random:x", "random:-1", "eager:1"])
def test_unknown_schedules(ptx: Callable[..., Called], word: str) -> None:
    called = ptx("run", GOOD, "--schedule", word)
    assert called.code == 2
    assert (
        f"no schedule {word!r}; the schedules are eager, lazy, random and random:SEED" in called.err
    )


@pytest.mark.parametrize(
    ("command", "path", "value"),
    [
        ("races", ("schedules",), []),
        ("races", ("races", 0, "lines"), []),
        ("races", ("races", 0, "agents"), ["a", "b", "c"]),
        ("races", ("races", 0, "lines", 0, "line"), 0),
        ("races", ("races", 0, "schedules"), None),
        ("races", ("ptx",), "0"),
        ("run", ("runs",), []),
        ("run", ("runs", 0, "wrong"), -1),
        ("run", ("runs", 0, "outputs", 0, "sha256"), "sha256:0"),
        ("run", ("runs", 0, "colour"), "green"),
    ],
)
def test_a_broken_document_is_refused(
    ptx: Callable[..., Called], command: str, path: tuple[Any, ...], value: Any
) -> None:
    document = validated(f"ptx-{command}", ptx(command, RACY, "--json").json)
    part = document
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    assert not validator(f"ptx-{command}").is_valid(document)
