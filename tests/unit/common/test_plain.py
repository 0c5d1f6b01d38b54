"""What others wrote is shown, and commands no terminal."""

from __future__ import annotations

import sys

import pytest

from builder.common.console import Console, below, no_commands, plain, plain_data

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b1A\x7f\b\r\u202eevil\u2028\udcff"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x9b1A\x7f\x08\x0d\u202eevil\u2028\xff"


def test_every_control_character_is_escaped() -> None:
    assert plain(EVIL) == plain(EVIL, styled=True) == SHOWN
    assert plain("tab\tline\nümlaut ✓") == "tab\tline\nümlaut ✓"


def test_only_our_own_colours_are_kept() -> None:
    assert plain("\x1b[31mred\x1b[0m") == r"\x1b[31mred\x1b[0m"
    assert plain("\x1b[1;31mred\x1b[0m", styled=True) == "\x1b[1;31mred\x1b[0m"
    assert plain("\x1b[8mhidden", styled=True) == r"\x1b[8mhidden"


def test_a_source_file_on_stdout_is_unchanged() -> None:
    assert plain_data("a\f\r\nb\rc", sys.stdout) == "a\f\r\nb\\x0dc"


def test_embedded_line_breaks_are_indented() -> None:
    said = below("tag x\nerror: forged\n  ::set-env name=A::b\n##[group]\n  our own")
    assert said.split("\n") == [
        "tag x", "  error: forged", "  | ::set-env name=A::b", "  ## [group]", "  our own",
    ]  # fmt: skip


COMMANDS = "::error::a\n  ::set-env name=A::b\n##[group]x\n\t##[error]y\nours: ::no"
NO_COMMANDS = "| ::error::a\n  | ::set-env name=A::b\n## [group]x\n\t## [error]y\nours: ::no"


def test_no_line_is_a_workflow_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert no_commands(COMMANDS) == NO_COMMANDS
    console = Console()
    console.say(COMMANDS)
    console.warn(COMMANDS)
    console.error(COMMANDS, hint=COMMANDS)
    with console.as_data():
        console.say(COMMANDS)
    said = capsys.readouterr()
    for line in (said.out + said.err).splitlines():
        assert not line.lstrip().startswith("::")
        assert "##[" not in line


@pytest.mark.parametrize("coloured", ["", "1"])
def test_every_console_method_escapes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, coloured: str
) -> None:
    monkeypatch.setenv("CLICOLOR_FORCE", coloured)
    monkeypatch.delenv("NO_COLOR", raising=False)
    console = Console()
    console.say(EVIL)
    console.warn(f"{EVIL}\nerror: forged")
    console.error(EVIL, hint=EVIL)
    with console.step(EVIL), console.progress(EVIL):
        pass
    with console.as_data():
        console.say(EVIL)
    out, err = capsys.readouterr()
    for ours in ("1", "31", "33", "0"):
        err = err.replace(f"\x1b[{ours}m", "")
    assert SHOWN in out
    assert err.count(SHOWN) == 6
    assert not set("\x1b\x07\x9b\x7f\b\r\u202e\udcff") & set(out + err)
    assert "\nerror: forged" not in err
