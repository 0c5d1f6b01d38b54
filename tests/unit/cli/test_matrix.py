"""The matrix fits a terminal, and says nothing about releases that were not looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.cli.matrix import print_table
from builder.common.paths import data_dir
from builder.layers.catalog import Catalog
from builder.pipeline.matrix import MatrixRow
from builder.proof.recorded import read_records

if TYPE_CHECKING:
    import pytest

    from builder.common.plan import State


def row(vllm: str, *states: State, served: bool = True) -> MatrixRow:
    named = dict(zip("abcdefgh", states, strict=False))
    return MatrixRow(vllm=vllm, states=named, reasons=dict.fromkeys(named, ""), served=served)


ROWS = [
    row("0.19.0", "not-applicable", "needed", served=False),
    row("0.19.1", "not-applicable", "needed", served=False),
    row("0.20.0", "needed", "needed"),
    row("0.20.1", "needed", "needed"),
    row("0.21.0", "needed", "needed"),
    row("0.22.0", "upstream", "drift"),
    row("0.23.0", "needed", "needed"),
]


def test_equal_neighbours_are_one_column(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["a", "b"], ROWS, listed=False)
    assert capsys.readouterr().out.splitlines()[:6] == [
        "   0.20.0 -  0.22.0    0.23.0",
        "   0.21.0",
        "a  needed    upstream  needed",
        "b  needed    DRIFT     needed",
        "",
        "Not supported by the profile: 0.19.0 to 0.19.1",
    ]


def test_a_layer_before_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    stacked = MatrixRow(
        vllm="0.20.0", states={"a": "needed", "b": "applied"}, reasons={}, served=True,
        after={"b": "a"},
    )  # fmt: skip
    print_table(["a", "b"], [stacked], listed=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "b  after a"
    assert lines[-1] == "after LAYER: that layer makes the same change before it"


def test_a_list_of_releases_makes_no_range(capsys: pytest.CaptureFixture[str]) -> None:
    """Releases between those of the list were not looked at."""
    print_table(["a", "b"], ROWS, listed=True)
    assert capsys.readouterr().out.splitlines()[:3] == [
        "   0.20.0  0.22.0    0.23.0",
        "   0.20.1",
        "   0.21.0",
    ]


def test_no_release_is_supported(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["a", "b"], ROWS[:2], listed=False)
    assert capsys.readouterr().out.startswith("Not supported by the profile: 0.19.0 to 0.19.1\n")


def test_many_columns_are_several_tables(capsys: pytest.CaptureFixture[str]) -> None:
    states: list[State] = ["needed", "upstream"]
    rows = [row(f"0.{n}.0", states[n % 2], states[n % 2]) for n in range(20, 60)]
    print_table(["a", "b"], rows, listed=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert [word for line in lines if line.startswith("  ") for word in line.split()] == [
        one.vllm for one in rows
    ]
    assert sum(line.startswith("a ") for line in lines) > 1


def test_every_profile_fits_into_one_hundred_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """With the states that the records of all releases have."""
    records = read_records(data_dir("docs") / "evidence")
    for profile in Catalog.discover().profile_files:
        names = list(Catalog.discover().select([profile]).layers)
        rows = [
            MatrixRow(
                vllm=record.vllm,
                states={
                    layer.name: (asked.layers or {}).get(layer.name, "not-applicable")
                    for layer in names
                },
                reasons={},
                served=asked.layers is not None,
            )
            for record in records
            if (asked := record.profiles.get(profile)) is not None
        ]
        if not rows:  # a profile that no release was asked about yet
            continue
        print_table([layer.name for layer in names], rows, listed=False)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 100, profile
        tables = 2 if profile == "b12x-full" else 1
        assert sum(line.startswith(names[0].name) for line in lines) == tables, profile
