"""The states of layers on released packages: what is expected, and what plans say now.

python -m tests.wheels.states [--check]    write tests/wheels/expected-states.toml, or compare it
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder.common.files import write_atomically
from builder.common.pypi import PackageIndex, vllm_releases
from builder.layers.catalog import Catalog
from builder.layers.pinned import IndexSources

from .support import Planner

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

FILE = Path(__file__).parent / "expected-states.toml"
#: Kinds of tables, each with the base of a release and the comment above it.
REFS = {
    "vllm": "pypi:vllm=={}",
    "dsl": "pypi:vllm==0.20.1,nvidia-cutlass-dsl=={}",
    "dsl-cu13": "pypi:vllm==0.20.1,nvidia-cutlass-dsl[cu13]=={}",
    "flashinfer": "pypi:vllm==0.20.1,flashinfer-python=={},nvidia-cutlass-dsl==4.4.2",
}
HEADS = {
    "vllm": """\
# What each vLLM pins.  Where vLLM leaves the CuTe DSL open (up to 0.20.2), the profiles pin 4.4.2.
""",
    "dsl": """
# nvidia-cutlass-dsl beside vLLM 0.20.1, without and with its cu13 extra.
""",
    "dsl-cu13": "\n",
    "flashinfer": """
# flashinfer-python beside vLLM 0.20.1 and CuTe DSL 4.4.2.
""",
}
PINS = {"flashinfer": "flashinfer-python", "dsl": "nvidia-cutlass-dsl"}
HEAD = """\
# The state of each layer on released packages.  A state holds from the release that it stands
# beside up to the next one that is named.  A state that changes here changes what an image has:
# look at the release before you change a row.  `python -m tests.wheels.states` writes this file.

"""


@dataclass(frozen=True)
class Table:
    """The states of layers on the releases of one package."""

    #: in their order, each with what it pins
    releases: Mapping[str, Mapping[str, str]]
    #: layer -> release -> state, for every release
    states: Mapping[str, Mapping[str, str]]

    def row(self, release: str) -> dict[str, str]:
        """Layer -> state on one release."""
        return {layer: states[release] for layer, states in self.states.items()}

    def needed(self, layers: Sequence[str]) -> list[tuple[str, str]]:
        """(layer, release) where the state is ``needed``."""
        return [
            (layer, release)
            for release in self.releases
            for layer, states in self.states.items()
            if layer in layers and states[release] == "needed"
        ]


def read(text: str) -> dict[str, Table]:
    """The tables of a file."""
    tables = {}
    for kind, table in tomllib.loads(text).items():
        pins = table["releases"]
        releases = pins if isinstance(pins, dict) else {name: {} for name in pins}
        states: dict[str, dict[str, str]] = {}
        for layer, changes in table["states"].items():
            state, states[layer] = "", {}
            for release in releases:
                state = changes.get(release, state)
                states[layer][release] = state
        tables[kind] = Table(releases, states)
    return tables


def expected() -> dict[str, Table]:
    """The tables of this repository."""
    return read(FILE.read_text("utf-8"))


def written(tables: Mapping[str, Table]) -> str:
    """The text of a file."""
    return HEAD + "".join(line for kind in REFS for line in _lines(kind, tables[kind]))


def _lines(kind: str, table: Table) -> Iterator[str]:
    if any(table.releases.values()):
        yield f"{HEADS[kind]}[{kind}.releases]\n"
        for release, pins in table.releases.items():
            pairs = ", ".join(f'{name} = "{version}"' for name, version in pins.items())
            yield f'"{release}" = {{ {pairs} }}\n'
    else:
        yield f"{HEADS[kind]}[{kind}]\nreleases = [\n"
        yield from (f'  "{release}",\n' for release in table.releases)
        yield "]\n"
    for layer, states in table.states.items():
        yield f"\n[{kind}.states.{layer}]\n"
        before = None
        for release, state in states.items():
            if state != before:
                yield f'"{release}" = "{state}"\n'
            before = state


def planned(before: Mapping[str, Table]) -> dict[str, Table]:
    """What plans say now: all releases of vLLM, and those of other packages that the file names."""
    index = PackageIndex()
    planner = Planner(index, IndexSources(index))
    layers = list(Catalog.discover().folders)
    tables = {}
    for kind, ref in REFS.items():
        names = layers if kind == "vllm" else list(before[kind].states)
        releases = vllm_releases(index, None) if kind == "vllm" else list(before[kind].releases)
        pins: dict[str, dict[str, str]] = {}
        rows = {}
        for release in releases:
            rows[release] = planner.states(ref.format(release))
            packages = planner(ref.format(release)).plan.base.packages
            pins[release] = {k: packages[name] for k, name in PINS.items() if kind == "vllm"}
            print(kind, release, file=sys.stderr)
        states = {name: {release: rows[release][name] for release in releases} for name in names}
        tables[kind] = Table(pins, states)
    return tables


def main(words: Sequence[str]) -> int:
    """Write the file, or compare it: 9 if plans say something else."""
    text = written(planned(expected()))
    if FILE.read_text("utf-8") == text:
        print(f"{FILE.name} is up to date")
        return 0
    if "--check" in words:
        print(f"error: {FILE.name} is not what plans say\n  try: python -m tests.wheels.states")
        return 9
    write_atomically(FILE, text.encode())
    print(f"{FILE.name} written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
