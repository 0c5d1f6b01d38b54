"""What each release's own parser says, in a form that what we read can be held against.

    python -m tests.wheels.real_parsers [RELEASE...]

runs the parsers of these releases (all of the table of states, if none is named) without a GPU,
some 15 s each and a download of 200 to 400 MB for each torch, prints where our reading differs, and
writes the digests of what they said to ``real-parsers.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from builder.applier.values import canonical_json, sha256_hex
from builder.common.pypi import PackageIndex
from builder.layers.pinned import IndexSources
from builder.serving.serveflags import ServeInterface, interface_in, wrong_kind

from .sandboxed import release_of
from .states import expected
from .support import Planner

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .support import Planned

EVIDENCE = Path(__file__).with_name("real-parsers.json")
#: Words that tell apart what a flag makes of its value.
TRIED = ("word", "7", "-7", "1.5", "4k", "4K", "2.5k", "auto", "{}", "[1]", "true", "", "1e3",
         "0x10", " 5", "None")  # fmt: skip
#: The choices of these depend on the machine, or are too many to name: we check none.
UNCHECKED = {"--mm-processor-device", "--collect-detailed-traces"}
#: argparse's ``nargs``, as we call it.
_TAKES = {None: "one", "?": "optional", "+": "many", "*": "many", 0: "nothing"}


class Spoken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a release's parser said, as digests."""

    wheel: str
    sha256: str
    parser: str


def evidence() -> dict[str, Spoken]:
    """What is committed, by release."""
    return msgspec.json.decode(EVIDENCE.read_bytes(), type=dict[str, Spoken])


def as_said(said: dict[str, Any]) -> dict[str, Any]:
    """What a parser said."""
    flags = {}
    for flag in said["flags"]:
        takes = _TAKES.get(flag["nargs"], flag["nargs"])
        choices = sorted(c for c in flag["choices"] or () if c != "None")
        if "--help" not in flag["names"]:
            flags[_key(flag["names"])] = _row(
                flag["names"], takes, choices, flag["tried"], flag["keys"]
            )
    return {"flags": flags, **{key: said[key] for key in ("variables", "reasoning", "tools")}}


def as_read(read: ServeInterface) -> dict[str, Any]:
    """The same, as we read it."""
    flags = {}
    for flag in read.flags:
        tried = [v for v in TRIED if not wrong_kind(flag.kind, v, nullable=flag.nullable)]
        # of plain JSON the configuration checks the keys, not the parser
        own = () if flag.kind == "json" else flag.keys
        keys = sorted(key.name for key in own)
        flags[_key(flag.names)] = _row(flag.names, flag.takes, list(flag.choices), tried, keys)
    return {
        "flags": flags,
        "variables": list(read.variables),
        "reasoning": list(read.reasoning_parsers),
        "tools": list(read.tool_parsers),
    }


def _key(names: Sequence[str]) -> str:
    return " ".join(sorted(names))


def _row(
    names: Sequence[str], takes: object, choices: list[str], tried: list[str], keys: list[str]
) -> Any:
    return {
        "takes": takes,
        "choices": [] if UNCHECKED & {*names} else choices,
        "tried": [] if takes == "nothing" else tried,
        "keys": keys,
    }


def digest(value: dict[str, Any]) -> str:
    """The sha256 of either, without keys: these are compared where a parser runs."""
    rows = {
        name: {word: said for word, said in row.items() if word != "keys"}
        for name, row in value["flags"].items()
    }
    return sha256_hex(canonical_json({**value, "flags": rows}))


def differences(said: dict[str, Any], read: dict[str, Any]) -> Iterator[str]:
    """Where two of them differ."""
    for name in sorted({*said["flags"], *read["flags"]}):
        theirs, ours = said["flags"].get(name), read["flags"].get(name)
        if theirs != ours:
            yield f"{name}: the parser has {theirs}, we read {ours}"
    for key in ("variables", "reasoning", "tools"):
        if said[key] != read[key]:
            yield f"{key}: {sorted({*said[key]} ^ {*read[key]})}"


def ask(planned: Planned) -> dict[str, Any]:
    """What the parser of a planned release says, run in the sandbox."""
    running = release_of(planned)
    (said,) = running.run("arguments.py", given={**running.simulation(), "tried": TRIED})
    return as_said(said)


def spoken(planned: Planned, said: dict[str, Any]) -> Spoken:
    """What is committed of it."""
    (wheel,) = (w for w in planned.plan.base.wheels if w.filename.startswith("vllm-"))
    return Spoken(wheel=wheel.filename, sha256=wheel.sha256, parser=digest(said))


def main(releases: Sequence[str]) -> int:
    """Ask, compare, write."""
    index = PackageIndex()
    planner = Planner(index, IndexSources(index))
    known = evidence() if EVIDENCE.exists() else {}
    wrong = 0
    for release in releases or list(expected()["vllm"].releases):
        planned = planner(f"pypi:vllm=={release}", "marlin")
        said, read = ask(planned), as_read(interface_in(planned.base.tree, release))
        found = list(differences(said, read))
        wrong += len(found)
        print(release, "as we read it" if not found else "\n  ".join(["differs:", *found]))
        known[release] = spoken(planned, said)
    table = {name: msgspec.to_builtins(known[name]) for name in sorted(known, key=_ordered)}
    EVIDENCE.write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    return 1 if wrong else 0


def _ordered(release: str) -> list[int]:
    return [int(part) for part in release.split(".")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
