"""Checks what spark-build wrote into an image, besides the packages, against what it wrote."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from builder.applier.digests import sha256_hex
from builder.applier.versions import normalize
from builder.common.console import counted
from builder.common.document import plain
from builder.images.engines.metadata import (
    BIN,
    ENTRY_POINTS,
    OWNERS,
    SHARE,
    WRITTEN,
    command_text,
    device_data,
    indented,
    scripts,
)
from builder.images.engines.toolfiles import (
    COMMAND,
    COMMAND_TEXT,
    digest_of_files,
    maker,
)
from builder.images.rootfs.python import DEFAULT_PATH
from builder.probes import TERMS
from builder.proof.checks import Check, few

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from builder.proof.target import VerifyTarget

_NAME = "files of spark-build"
_EXPECTED = "the verifier, its commands and its settings are as spark-build wrote them"
#: Files that other checks compare, or that no program runs.
_COMPARED = {f"{SHARE}/plan.json", f"{SHARE}/layers.json", OWNERS}
#: How the names of programs begin without which an image cannot be checked from inside.
_PROGRAM = "spark_"


def check_own_files(target: VerifyTarget) -> Check | None:
    """The check for a target with a baked-in plan whose files outside the packages can be read."""
    build = target.plan.build
    if target.outside is None or target.label is None or build is None:
        return None
    held = target.outside(SHARE)
    listed = _listed(held.get(WRITTEN), build.files)
    if listed is None and (WRITTEN in held or build.files == maker().files):
        return _check("fail", f"{WRITTEN} does not have the digest that the plan states", WRITTEN)
    if listed is None:
        reason = f"spark-build {build.version} made this image, and wrote no list of its files"
        return _check("not-run", reason, SHARE, reason=f"{reason}: build the image again")
    wrong = sorted({*_in_share(target, held, listed), *_commands(target, listed)})
    if not wrong:
        return _check("pass", f"{counted(len(held), 'file')} as written", SHARE)
    seen = f"{counted(len(wrong), 'file')} changed, missing or added: {few(wrong)}"
    return _check("fail", seen, wrong[0], reason="changed after the image was built")


def _check(status: str, seen: str, where: str, reason: str = "") -> Check:
    return Check(
        level="static",
        name=_NAME,
        status=status,  # type: ignore[arg-type]
        expected=_EXPECTED,
        seen=seen,
        where=where,
        reason=reason or ("changed after the image was built" if status == "fail" else ""),
    )


def _listed(data: bytes | None, digest: str) -> dict[str, str] | None:
    """The files that the image lists, if their digest is the one in its plan."""
    try:
        value = json.loads(data or b"")
        return value if isinstance(value, dict) and digest_of_files(value) == digest else None
    except (ValueError, TypeError, RecursionError):
        return None


def _in_share(
    target: VerifyTarget, held: Mapping[str, bytes], listed: Mapping[str, str]
) -> Iterator[str]:
    """The files in spark-build's own folder that differ, or are missing."""
    for path, data in held.items():
        if path == WRITTEN or path in _COMPARED:
            continue
        name = path.removeprefix(f"{SHARE}/")
        if path in (settings := _settings(target)):
            if data != settings[path]:
                yield path
        elif path == f"{SHARE}/device.json":
            continue  # of a spark-build with other tables
        elif listed.get(name) != sha256_hex(data):
            yield path
    needed = [name for name in listed if name.startswith(_PROGRAM)]
    for name in (*needed, *TERMS):
        if f"{SHARE}/{name}" not in held:
            yield f"{SHARE}/{name}"
    yield from (path for path in _settings(target) if path not in held)


def _settings(target: VerifyTarget) -> dict[str, bytes]:
    """The files that follow from the plan."""
    plan = target.plan
    flags = {"serve_flags": plan.serve_flags, "moe_serve_flags": plan.moe_serve_flags}
    found = {f"{SHARE}/serve-flags.json": indented(flags)}
    if plan.build.files == maker().files:
        found[f"{SHARE}/device.json"] = indented(plain(device_data(plan)))
    return found


def own_paths(target: VerifyTarget) -> set[str]:
    """The files that spark-build adds outside of site-packages and of its own folder."""
    names = (COMMAND, *_scripts_of(target))
    return {"/workspace/build-metadata.yaml", *(f"{BIN}/{name}" for name in names)}


def _scripts_of(target: VerifyTarget) -> dict[str, bytes]:
    """The commands of distributions that the base does not have."""
    found: dict[str, bytes] = {}
    plan = target.plan
    for layer in plan.layers:
        for file in layer.files:
            match = ENTRY_POINTS.fullmatch(file.path)
            if match and file.after and normalize(match["name"]) not in plan.base.packages:
                text = (target.tree.read(file.path) or b"").decode("utf-8", "replace")
                found.update(scripts(text, plan.base.interpreter))
    return found


def _commands(target: VerifyTarget, listed: Mapping[str, str]) -> Iterator[str]:
    """The commands that differ, and others that a shell would find before them."""
    assert target.outside is not None
    interpreter = target.plan.base.interpreter
    for name, script in _scripts_of(target).items():
        if target.outside(f"{BIN}/{name}").get(f"{BIN}/{name}") != script:
            yield f"{BIN}/{name}"
    path = f"{BIN}/{COMMAND}"
    data = target.outside(path).get(path, b"")
    template = data.replace(interpreter.encode(), b"{interpreter}").replace(
        SHARE.encode(), b"{share}"
    )
    same = data == command_text(interpreter) and COMMAND_TEXT.encode() == template
    if not same and listed.get(COMMAND) != sha256_hex(template):
        yield path
    for folder in target.env.get("PATH", DEFAULT_PATH).split(":"):
        other = f"{folder.rstrip('/')}/{COMMAND}"
        if other == path:
            break
        if folder.startswith("/") and target.outside(other):
            yield other
