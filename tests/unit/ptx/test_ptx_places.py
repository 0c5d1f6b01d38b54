"""Source lines of PTX: ``.loc`` and ``.file``."""

from __future__ import annotations

import pytest

from builder.ptx.source import Places, kernels_of, without_places

PLAIN = """.version 9.1
.target sm_121a
.visible .entry first()
{
	ret;
}
.visible .entry second()
{
	bar.sync 0;
	ret;
}
"""
TOLD = """.version 9.1
.target sm_121a
.visible .entry first()
{
	.loc	1 10 3 // where it ends
	ret;
}
.visible .entry second()
{
	bar.sync 0;
	.loc	1 0 0
	ret;
}
	.file	1 "one.py"
"""


@pytest.mark.parametrize(
    ("directives", "source"),
    [
        ("", ""),
        (".loc 1 12 5", "one.py:12"),
        (".loc 1 12 5\n.loc 2 3 0", "two.py:3"),
        (".loc 2 8 1, function_name $L_f, inlined_at 1 40 2", "two.py:8, inlined at one.py:40"),
        (".loc 2 8 1, function_name $L_f+16, inlined_at 7 40 2", "two.py:8"),
        (".loc 1 0 0", ""),
        (".loc 1 12 5\n.loc 9 1 1", ""),
        ("// .loc 1 12 5", ""),
        ("/*\n.loc 1 12 5\n*/", ""),
    ],
)
def test_a_line_belongs_to_the_last_loc_before_it(directives: str, source: str) -> None:
    text = f'.file 1 "one.py"\n.entry k() {{\n{directives}\nret;\n}}\n.file 2 "two.py", 77, 8\n'
    assert Places(text).at(text.split("\n").index("ret;") + 1) == source


def test_a_function_does_not_inherit_the_lines_of_the_one_before() -> None:
    places = Places(TOLD)
    lines = TOLD.split("\n")
    assert [places.at(n + 1) for n, text in enumerate(lines) if text == "\tret;"] == [
        "one.py:10",
        "",
    ]
    assert places.at(lines.index("\tbar.sync 0;") + 1) == ""
    assert places.at(1) == ""


def test_line_info_is_not_code() -> None:
    assert without_places(TOLD) == PLAIN
    plain, told = kernels_of(PLAIN)["second"], kernels_of(TOLD)["second"]
    assert [i.name for i in told.code] == [i.name for i in plain.code] == ["bar.sync", "ret"]
    assert [i.line for i in told.code] == [10, 12]
