"""Create a layer folder: with an example to edit, or from a pull request."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

from builder.applier.layers import Pull
from builder.common.console import console, some_of
from builder.common.files import write_atomically
from builder.common.forge import Forges, PullStore, parse_pull
from builder.common.pypi import PackageIndex
from builder.layers.conversion import toml_value
from builder.layers.pulls import ORDER, pin_pull, provenance
from builder.pipeline.pins import pins_text
from builder.pipeline.show import state_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from builder.common.plan import Pin
    from builder.layers.pulls import Parts

#: Paths in a message.
_LISTED = 5
_DESCRIPTION = """
Why this project needs it, and what goes wrong without it.
"""


_TEMPLATE = '''\
summary = "what this layer does, in one line"
description = """
Why it exists, and what goes wrong without it.
"""
order = 50
package = "{package}"

[provenance]
origin = "vendor, our own"
forwarded = "no"
applied-upstream = "no"
last-update = {today}

# Releases that already have the change: the range selects them, the probe then checks the file.
# [[upstream]]
# when = {{ "{package}" = ">=1.2.0rc0" }}
# since = "{package} 1.2.0"
# reason = "merged as #123"
# probe = [{{ file = "{module}/example.py", contains = "def fixed" }}]

[[variant]]
name = "first"
when = {{ "{package}" = ">=1.0.0,<1.2.0rc0" }}

[[variant.op]]
op = "replace"
file = "{module}/example.py"
old = \'\'\'the exact text before\'\'\'
new = \'\'\'the exact text after\'\'\'
count = 1
'''


def write_example(folder: Path, package: str) -> None:
    """Write ``layer.toml`` with an example to edit."""
    folder.mkdir(parents=True)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    text = _TEMPLATE.format(package=package, module=package.replace("-", "_"), today=today)
    (folder / "layer.toml").write_text(text)


def write_layer(
    folder: Path, pull: str, project: str, forge_clone: Sequence[str], exclude: Sequence[str] = ()
) -> None:
    """Write ``layer.toml`` and ``pins.toml`` for a pull request, without the files in ``exclude``.

    Raises:
        RemoteError: the forge does not answer, or has no such pull request.
        UsageError: the reference is malformed, or its changes cannot be expressed as text.
    """
    ref = parse_pull(pull)
    store = PullStore(Forges(forge_clone))
    op = Pull(pull=str(ref), project=project, exclude=tuple(exclude))
    pin, parts = pin_pull(op, "", store, PackageIndex())
    write_atomically(folder / "pins.toml", pins_text({"pull": [pin]}).encode())
    write_atomically(folder / "layer.toml", _layer_text(pin, parts, op).encode())
    console.say(f"  {pin.request}  {state_of(pin)}  {pin.short}")
    if not parts.any_installed and not parts.compiled:
        names = some_of([path for path, _ in parts.dropped], most=_LISTED)
        console.warn(f"{pin.request}: none of its files is installed, so nothing changes: {names}")


def _layer_text(pin: Pin, parts: Parts, op: Pull) -> str:
    origin = provenance(pin)
    lines = [
        f"summary = {toml_value(pin.title or pin.request)}",
        f'description = """{_DESCRIPTION}"""',
        f"order = {ORDER}",
        f"package = {toml_value(parts.project.package)}",
        "",
        "[provenance]",
        f"origin = {toml_value(origin['origin'])}",
    ]
    if "bug" in origin:
        lines.append(f"bug = [{toml_value(origin['bug'][0])}]")
    lines += [f"{key} = {toml_value(origin[key])}" for key in ("forwarded", "applied-upstream")]
    lines += [f"last-update = {pin.date}", "", "[[variant]]"]
    lines += [f"name = {toml_value(f'pr-{pin.number}' if pin.number else pin.short)}"]
    lines += [
        "# Every release in this range is searched for the text; narrow it to leave releases out."
    ]
    lines += [f'when = {{ {toml_value(parts.project.package)} = ">=0" }}', ""]
    if pin.release:
        package = parts.project.package
        lines.append(f"# {package} {pin.release} has it; from there on it counts as upstream.")
    lines += [f"# not installed, so dropped: {path} ({why})" for path, why in parts.dropped]
    lines += [f"# compiled into the wheel: {section.path}" for section in parts.compiled]
    lines += ["[[variant.op]]", 'op = "pull"', f"pull = {toml_value(pin.request)}"]
    if op.project:
        lines.append(f"project = {toml_value(op.project)}")
    if op.exclude:
        lines.append(f"exclude = {toml_value(op.exclude)}")
    return "\n".join([*lines, ""])
