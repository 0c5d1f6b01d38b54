"""What is read from a release's source is what its own parser says, made without a GPU.

The parsers of FULL run here.  Those of all releases were run once, and ``real-parsers.json`` has
the digest of what each said, beside that of its wheel: what we read is held against it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest

from builder.serving.serveflags import interface_in

from .real_parsers import as_read, ask, differences, digest, evidence, spoken
from .sandboxed import release_of
from .states import expected

if TYPE_CHECKING:
    from .support import Planner

#: The oldest and the newest, both sides of the moved parser, and one of each torch between.
FULL = ("0.17.1", "0.20.1", "0.24.0", "0.28.0", "0.33.0")
ALL = tuple(expected()["vllm"].releases)


@pytest.mark.parametrize("release", FULL)
def test_a_parser_that_runs_says_what_we_read(planned: Planner, release: str) -> None:
    plan = planned(f"pypi:vllm=={release}", "marlin")
    said, read = ask(plan), as_read(interface_in(plan.base.tree, release))
    assert list(differences(said, read)) == []
    assert evidence()[release] == spoken(plan, said)


@pytest.mark.parametrize("release", FULL)
def test_the_parser_refuses_other_keys_and_values_of_objects(
    planned: Planner, release: str
) -> None:
    plan = planned(f"pypi:vllm=={release}", "marlin")
    read = interface_in(plan.base.tree, release)
    objects = [(flag.names[0], flag.keys) for flag in read.flags if flag.kind == "object"]
    other = {"no_such": 1}
    lines = [[name, json.dumps(other)] for name, _ in objects]
    for name, keys in objects:
        lines += [[name, json.dumps({key.name: "no_such"})] for key in keys if key.choices]
        lines += [[name, json.dumps({key.name: other})] for key in keys if key.keys]
    running = release_of(plan)
    given = {**running.simulation(), "lines": lines}
    (said,) = running.run("arguments.py", given=given)
    assert len(lines) > 2 * len(objects)
    assert all(said["complaints"]), said
    assert all(read.refusal(name, value) for name, value in lines)


@pytest.mark.parametrize("release", ALL)
def test_we_read_what_the_parser_was_recorded_to_say(planned: Planner, release: str) -> None:
    plan = planned(f"pypi:vllm=={release}", "marlin")
    read = as_read(interface_in(plan.base.tree, release))
    again = f"try: python -m tests.wheels.real_parsers {release}"
    assert spoken(plan, read) == evidence()[release], again


@pytest.mark.parametrize("release", FULL)
@pytest.mark.parametrize(
    ("flag", "value", "near"),
    [
        ("--kv-cache-dtype", "fp8_e4m4", "fp8_e4m3"),
        ("--moe-backend", "marlins", "marlin"),
        ("--quantization", "modelop", "modelopt"),
        ("--attention-backend", "FLASH_ATN", "FLASH_ATTN"),
        ("--model-impl", "transformer", "transformers"),
        ("--distributed-executor-backend", "rays", "ray"),
        ("--dtype", "bfloat15", "bfloat16"),
    ],
)
def test_values_that_only_the_configuration_checks_are_read_too(
    planned: Planner, release: str, flag: str, value: str, near: str
) -> None:
    read = interface_in(planned(f"pypi:vllm=={release}", "marlin").base.tree, release)
    assert f"has no value {value!r}; did you mean {near!r}?" in read.refusal(flag, value)
    assert read.refusal(flag, near) == ""


def test_records_are_of_these_releases() -> None:
    assert tuple(evidence()) == ALL
    assert {one.wheel.split("-")[1] for one in evidence().values()} == {*ALL}


@pytest.mark.parametrize(
    "change", ["name", "takes", "kind", "choices", "keys", "variable", "parser"]
)
def test_any_other_reading_differs(planned: Planner, change: str) -> None:
    plan = planned("pypi:vllm==0.33.0", "marlin")
    read = interface_in(plan.base.tree, "0.33.0")
    changed = msgspec.json.decode(msgspec.json.encode(read))
    flag = next(f for f in changed["flags"] if "--moe-backend" in f["names"])
    if change == "name":
        flag["names"].append("--moe")
    elif change == "takes":
        flag["takes"] = "many"
    elif change == "kind":
        flag["kind"] = "integer"
    elif change == "choices":
        flag["choices"].pop()
    elif change == "keys":
        next(f for f in changed["flags"] if "--kernel-config" in f["names"])["keys"].pop()
    elif change == "variable":
        del changed["variables"]["VLLM_HOST_IP"]
    else:
        changed["tool_parsers"].pop()
    other = as_read(msgspec.convert(changed, type(read)))
    assert (digest(other) != digest(as_read(read))) == (change != "keys")
    assert len(list(differences(as_read(read), other))) == (2 if change == "name" else 1)
