"""Decides which variables of others a process on this machine gets, for every command and level.

An image, its plan and a serve file may be a stranger's.  Their variables reach a process that is
not isolated only if they are on a closed list, in a closed form (``builder/data/variables.toml``).
What the user typed, and what layers of this machine set, is the user's own.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from builder.common.paths import package_file
from builder.proof.isolation import SandboxUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Value = TypeVar("Value", str, "str | None")

#: How the evidence begins to say that a variable was not passed.
LEFT_OUT = "left out: "
_NOT_LISTED = "not on the list of variables that choose kernels"
_FOLDER = "a process of this machine writes to a folder of its own"
#: Letters of a value that a message shows, at most.
_SHOWN = 60


@dataclass(frozen=True, kw_only=True)
class Known:
    """The closed list."""

    #: how variables begin that the programs read
    read: tuple[str, ...]
    #: variables that name a folder which a program writes to
    folders: frozenset[str]
    #: variable -> the name of its form, and the pattern of its whole value
    forms: Mapping[str, tuple[str, re.Pattern[str]]]


@cache
def known() -> Known:
    """The closed list, from its file."""
    raw = tomllib.loads(package_file("data", "variables.toml").read_text("utf-8"))
    forms = {
        name: (form["name"], re.compile(form["pattern"], re.ASCII))
        for form in raw["form"]
        for name in form["variables"]
    }
    return Known(read=tuple(raw["read"]), folders=frozenset(raw["folders"]), forms=forms)


@dataclass(frozen=True)
class Variables:
    """What a process gets, and what the evidence says of the others."""

    passed: Mapping[str, str | None]
    left_out: tuple[str, ...] = ()


def is_read(name: str) -> bool:
    """Whether a variable begins as those that the programs read."""
    return name.startswith(known().read)


def for_a_process(
    env: Mapping[str, Value], own: Callable[[str, str | None], bool], *, apart: bool
) -> Variables:
    """The variables that a process gets, isolated (``apart``) or not; None unsets one.

    ``own`` tells whether the user, or a layer of this machine, gives a variable this value; of
    None, whether they give it any.

    Raises:
        SandboxUnavailable: a variable that chooses kernels has a value of another form, so what the
            process would answer without it is no answer about the target.
    """
    if apart:
        return Variables(dict(env))
    passed: dict[str, str | None] = {}
    left_out: list[str] = []
    for name, value in sorted(env.items()):
        if name in known().folders:
            left_out += [f"{LEFT_OUT}{name} ({_FOLDER})"] if value is not None else []
        elif _has_form(name, value) or own(name, value):
            passed[name] = value
        elif name in known().forms:
            form, _ = known().forms[name]
            raise SandboxUnavailable(
                f"{name}={_short(value)} is not passed to a process of this machine: its value is "
                f"not {form}"
            )
        elif is_read(name):
            left_out.append(f"{LEFT_OUT}{_short(name)} ({_NOT_LISTED})")
    return Variables(passed, tuple(left_out))


def _has_form(name: str, value: str | None) -> bool:
    """Whether a variable is on the list, and its value has the form; unsetting one is harmless."""
    if value is None:
        return is_read(name)
    return name in known().forms and bool(known().forms[name][1].fullmatch(value))


def _short(text: object) -> str:
    """A stranger's text for a message: a name as it is, anything else quoted and cut."""
    shown = str(text)
    if re.fullmatch(r"\w{1,100}", shown, re.ASCII):
        return shown
    return repr(shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}...")


def own_folders(folder: str) -> dict[str, str]:
    """The variables by which a process writes below a folder of its own alone."""
    return dict.fromkeys(sorted(known().folders), folder)
