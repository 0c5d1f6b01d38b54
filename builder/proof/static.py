"""Level ``static``: reads files; checks that every layer is complete, and no other file changed."""

from __future__ import annotations

import ast
import contextlib
import csv
import json
from posixpath import join, normpath
from typing import TYPE_CHECKING

from builder.applier.receipts import (
    explained,
    final_digests,
    kept_true,
    parse_record,
    receipt_path,
    receipts_of,
    recorded_paths,
    unexplained,
)
from builder.applier.values import normalize, sha256_hex
from builder.common.console import counted
from builder.common.document import plain
from builder.images.engines.baked import BIN, OWNERS, SHARE, WRITTEN
from builder.images.engines.devicedata import device_data
from builder.images.engines.maker import COMMAND, COMMAND_TEXT, digest_of_files, maker
from builder.images.engines.metadata import ENTRY_POINTS, command_text, indented, scripts
from builder.images.rootfs.view import DEFAULT_PATH
from builder.probes import TERMS
from builder.proof.checks import Check, few
from builder.proof.unrecorded import (
    Finder,
    Naming,
    Shadow,
    changed_packages,
    folders_below,
    is_unchecked,
    may_run,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from typing import Any

    from builder.applier.receipts import Receipt
    from builder.applier.trees import Tree
    from builder.common.plan import PlannedLayer
    from builder.images.subject import OpenImage
    from builder.proof.target import VerifyTarget
    from builder.proof.unrecorded import Unrecorded


def check_static(target: VerifyTarget) -> Iterator[Check]:
    """Check the baked-in plan, receipts, environment, syntax and RECORD."""
    receipts = receipts_of(target.tree)
    if target.label is not None:
        yield _plan(target, target.label)
    for decision in target.plan.layers:
        if decision.state in ("needed", "applied"):
            yield _layer(target, decision, receipts)
        elif decision.state in ("drift", "ambiguous", "needs-rebuild"):
            yield Check(
                level="static",
                name=f"layer {decision.name}",
                status="fail",
                expected="the change is present",
                seen=f"{decision.state}: {decision.reason}",
                reason=f"layer {decision.name} does not apply: {decision.state}",
            )
    if target.plan.env:
        yield _environment(target)
    if receipts:
        yield _syntax(target, receipts)
    yield _record(target, receipts)
    own = check_own_files(target)
    if own is not None:
        yield own
    if receipts:
        yield _modules(target)
    yield from _starts(target)


def _starts(target: VerifyTarget) -> Iterator[Check]:
    """Check what runs at a start; what the target does not show of it is named."""
    if target.unrecorded is not None:
        yield _startup(target.unrecorded)
        yield _later(target.unrecorded)
    elif reason := _not_searched(target):
        yield _no_startup(reason)


def _plan(target: VerifyTarget, label: str) -> Check:
    """Check that the plan is unchanged since the build."""
    stated = target.plan.plan_digest
    wrong = ""
    if target.recomputed != stated:
        wrong = f"the digest of plan.json is {target.recomputed}, but it states {stated}"
    elif label not in ("", stated):
        wrong = f"plan.json states {stated}, but the label of the image states {label}"
    else:
        digests = {layer.name: layer.digest for layer in target.layers}
        planned = {layer.name: layer.digest for layer in target.plan.layers}
        names = sorted(n for n in digests | planned if digests.get(n) != planned.get(n))
        if names:
            wrong = f"layers.json has another {', '.join(names)} than the plan"
    return Check(
        level="static",
        name="plan",
        status="fail" if wrong else "pass",
        expected="the plan and its layers match their digests",
        seen=wrong or stated,
        where=SHARE,
        reason="changed after the image was built" if wrong else "",
    )


def _layer(target: VerifyTarget, decision: PlannedLayer, receipts: Sequence[Receipt]) -> Check:
    name = decision.name
    receipt = next((r for r in receipts if r.layer == name), None)
    expected = "receipt present and every file matches it"
    if receipt is None and decision.state == "applied":
        return Check(
            level="static",
            name=f"layer {name}",
            status="pass",
            expected="the change is present",
            seen=decision.reason,
        )
    if receipt is None:
        return Check(
            level="static",
            name=f"layer {name}",
            status="fail",
            expected=expected,
            seen="no receipt: the layer is not applied",
            where=receipt_path(name),
            reason=f"layer {name} is missing",
        )
    planned = {file.path: file.after for file in decision.files}
    wrong = unexplained(receipt, receipts, target.tree)
    wrong += [
        path
        for path, entry in receipt.files.items()
        if planned.get(path, entry.after) != entry.after and path not in wrong
    ]
    count = len(receipt.files)
    seen = f"{count} file{'s' if count != 1 else ''} as recorded"
    if wrong:
        seen = f"{counted(len(wrong), 'file')} changed, such as {wrong[0]}"
    return Check(
        level="static",
        name=f"layer {name}",
        status="fail" if wrong else "pass",
        expected=expected,
        seen=seen,
        where=wrong[0] if wrong else receipt_path(name),
        reason="changed after the layer was applied" if wrong else "",
    )


def _environment(target: VerifyTarget) -> Check:
    wanted = target.plan.env
    wrong = {k: v for k, v in wanted.items() if target.env.get(k) != v}
    expected = " ".join(f"{k}={v}" for k, v in sorted(wanted.items()))
    seen = " ".join(f"{k}={target.env.get(k, '(unset)')}" for k in sorted(wanted))
    return Check(
        level="static",
        name="environment",
        status="fail" if wrong else "pass",
        expected=expected,
        seen=seen,
        where=f"environment of {target.name}",
        reason=f"{', '.join(sorted(wrong))} differs" if wrong else "",
    )


def _syntax(target: VerifyTarget, receipts: Sequence[Receipt]) -> Check:
    paths = sorted(
        {
            path
            for receipt in receipts
            for path, entry in receipt.files.items()
            if path.endswith(".py") and entry.after and set(entry.ops) - {"wheel"}
        }
    )
    broken = []
    for path in paths:
        data = target.tree.read(path)
        try:
            ast.parse(data or b"")
        except SyntaxError as error:
            broken.append(f"{path}:{error.lineno}: {error.msg}")
    return Check(
        level="static",
        name="patched modules parse",
        status="fail" if broken else "pass",
        expected="every patched .py file is valid Python",
        seen=broken[0] if broken else f"{counted(len(paths), 'file')} parsed",
        where=broken[0].split(":")[0] if broken else "",
    )


def _record(target: VerifyTarget, receipts: Sequence[Receipt]) -> Check:
    """Check that every file matches a RECORD, or that a receipt explains the difference."""
    claims: dict[str, set[str]] = {}
    outside: dict[str, set[str]] = {}
    # an overlay's RECORD is updated when it is put on its image
    true = {} if target.brought else final_digests(r for r in receipts if r.records is not None)
    for dist in target.tree.distributions().values():
        data = target.tree.read(f"{dist.info_dir}/RECORD")
        if dist.name not in target.plan.base.packages and not _laid_out(dist, receipts):
            continue
        for row in parse_record(data or b""):
            if row.sha256:
                elsewhere = row.path.startswith(("/", "../"))
                (outside if elsewhere else claims).setdefault(row.path, set()).add(row.sha256)
    same = other = 0
    strange: list[str] = []
    for path, digests in claims.items():
        current = target.tree.digest(path)
        if path in true and digests != {current}:
            strange.append(f"{path} (differs from RECORD)")
        elif current in digests:
            same += 1
        elif any(explained(path, digest, current, receipts) for digest in digests):
            other += 1
        else:
            strange.append(path)
    strange += [f"{path} (in no RECORD)" for path in _unlisted(target, true, claims)]
    strange += _unaccounted(target, receipts)
    files = {p for r in receipts for p, entry in r.files.items() if entry.after} | claims.keys()
    gone = {path for path, digest in true.items() if digest is None}
    strange += dict.fromkeys(_in_place_of_folders(files - gone))
    strange += [path for path, digests in outside.items() if _outside(target, path, digests)]
    seen = f"{counted(same, 'file')} match RECORD, {other} changed as in receipts"
    if strange:
        seen += f", {len(strange)} neither: {', '.join(strange[:3])}"
    return Check(
        level="static",
        name="no other file touched",
        status="fail" if strange or not same else "pass",
        expected="every file matches its RECORD or a receipt",
        seen=seen,
        where=strange[0].partition(" ")[0] if strange else "",
        reason="a file was changed outside of the layers" if strange else "",
    )


def _unlisted(
    target: VerifyTarget, true: Mapping[str, str | None], claims: Mapping[str, set[str]]
) -> list[str]:
    """New files of layers that no RECORD lists."""
    missing = {path for path, digest in true.items() if digest is not None and path not in claims}
    for dist in target.tree.distributions().values() if missing else ():
        data = target.tree.read(f"{dist.info_dir}/RECORD") or b""
        missing -= {f"{dist.info_dir}/RECORD", *(row.path for row in parse_record(data))}
    return sorted(missing)


def _modules(target: VerifyTarget) -> Check:
    """Check that Python imports the patched and the recorded files."""
    shadows = shadows_of(target)
    none = "no file hides a recorded module"
    if target.unrecorded is None:
        none = "no file of site-packages hides a recorded module"
    return Check(
        level="static",
        name="imported modules",
        status="fail" if shadows else "pass",
        expected="Python imports the file of every module that a RECORD or a receipt lists",
        seen=f"Python runs {few(shadows)}" if shadows else none,
        where=shadows[0].path if shadows else "",
        reason="the recorded file is there, but has no effect" if shadows else "",
    )


_RECORDED_HOOKS = "every file that Python runs at startup is in a RECORD or a receipt"


def _startup(unrecorded: Unrecorded) -> Check:
    """Check that everything that Python runs at startup is from a package or a layer."""
    others = (*unrecorded.of_base, *unrecorded.files)
    parts = []
    if unrecorded.hooks:
        parts.append(
            f"{counted(len(unrecorded.hooks), 'hook')} recorded nowhere: {few(unrecorded.hooks)}"
        )
    if unrecorded.of_base:
        parts.append(f"in the base already: {few(unrecorded.of_base)}")
    if unrecorded.files:
        parts.append(
            f"{counted(len(unrecorded.files), 'other file')} unrecorded: {few(unrecorded.files)}"
        )
    return Check(
        level="static",
        name="startup hooks",
        status="fail" if unrecorded.hooks else "pass",
        expected=_RECORDED_HOOKS,
        seen="; ".join(parts) or "every file is recorded",
        where=unrecorded.hooks[0] if unrecorded.hooks else "",
        reason="this would be run or loaded at every start, but it belongs to no package"
        if unrecorded.hooks
        else "",
        unrecorded=(*unrecorded.hooks, *others),
    )


def _not_searched(target: VerifyTarget) -> str:
    """Why the files and the search path of a start are not looked at; empty if there is none."""
    if target.subject.is_planned:
        return ""
    if target.subject.in_engine:
        return "the layers of an image in a Docker Engine are not read, those of oci:DIR are"
    if target.brought:
        return "the base of these files is not read"
    if target.subject.identity.is_installed:
        return "of a directory, only site-packages is read, and not what starts Python with it"
    return ""


def _no_startup(reason: str) -> Check:
    return Check(
        level="static",
        name="startup hooks",
        status="not-run",
        moot=True,
        expected=_RECORDED_HOOKS,
        seen="",
        reason=f"{reason}: unrecorded files, startup hooks and sys.path are not judged",
    )


def _later(unrecorded: Unrecorded) -> Check:
    """Check that no layer above the base replaces recorded files, or adds code to our packages."""
    seen = f"{counted(len(unrecorded.changed), 'file')}, such as {few(unrecorded.changed)}"
    return Check(
        level="static",
        name="files above the base",
        status="fail" if unrecorded.changed else "pass",
        expected="layers above the base replace no recorded file, and add no code to the packages "
        "that spark-build changes",
        seen=seen if unrecorded.changed else "none replaced, none added",
        where=unrecorded.changed[0] if unrecorded.changed else "",
        reason="changed after the image was built" if unrecorded.changed else "",
    )


def _unaccounted(target: VerifyTarget, receipts: Sequence[Receipt]) -> list[str]:
    """Files that an overlay adds without a receipt; elsewhere only spark-build's own may be."""
    known = {path for receipt in receipts for path in receipt.files}
    known |= {receipt_path(receipt.layer) for receipt in receipts} | kept_true(receipts)
    prefix = f"{target.plan.base.site_packages}/"
    own = own_paths(target)
    paths = [
        path.removeprefix(prefix)
        for path in target.brought
        if path not in own and not path.startswith(f"{SHARE}/")
    ]
    return sorted(path for path in paths if path not in known)


def _in_place_of_folders(paths: Collection[str]) -> Iterator[str]:
    """Paths of files that are at the same time folders of others."""
    for path in paths:
        above = path.rpartition("/")[0]
        while above:
            if above in paths:
                yield f"{above} (a file, and {path} needs a folder there)"
            above = above.rpartition("/")[0]


def _outside(target: VerifyTarget, path: str, digests: set[str]) -> bool:
    """Whether a file that a RECORD lists outside of site-packages, such as a command, differs."""
    image = target.subject.image
    if image is None or target.brought:
        return False
    digest = image.digest(normpath(join(target.plan.base.site_packages, path)))
    return digest is not None and digest not in digests


def _laid_out(dist: Any, receipts: Sequence[Receipt]) -> bool:
    return any(f"{dist.info_dir}/RECORD" in receipt.files for receipt in receipts)


# -------------------------------------------------------- modules that Python would import instead

#: Packages that level ``dispatch`` imports, whether or not a layer changes them.
_RUN = ("vllm", "flashinfer", "b12x")


def shadows_of(target: VerifyTarget) -> list[Shadow]:
    """The shadows in a target: in the packages that layers change, and earlier on ``sys.path``.

    A patched file must be what Python imports.  Of other modules, a file in a RECORD may not be
    hidden by one in no RECORD.
    """
    base = target.plan.base
    finder = Finder(target.tree, Naming.of(base.python, base.platform))
    shadows = list(_in_packages(target, finder))
    if target.unrecorded is not None:
        shadows += target.unrecorded.shadows
    return list(dict.fromkeys(shadows))


def _in_packages(target: VerifyTarget, finder: Finder) -> Iterator[Shadow]:
    tree = target.tree
    receipts = receipts_of(tree)
    patched = {path for r in receipts for path, entry in r.files.items() if entry.after}
    listed = patched | _recorded(tree)
    folders = {name.rpartition("/")[0] + "/" for name in listed}
    listed |= {folder[:end] for folder in folders for end in _ends(folder)}
    tops = changed_packages(tree) | {name for name in tree.children("") if name in _RUN}
    for folder in ("", *folders_below(tree, tops)):
        for first, *others in finder.contested(folder):
            if not folder and first.partition("/")[0] not in tops:
                continue
            hidden = [path for path in others if path in patched]
            if first not in listed:
                hidden += [path for path in others if path in listed]
            if first not in patched and hidden:
                yield Shadow(first, hidden[0])
    for path in sorted(patched):
        for compiled in finder.compiled(path):
            if _runs(target, compiled, path):
                yield Shadow(compiled, path)


def _runs(target: VerifyTarget, compiled: str, path: str) -> bool:
    """Whether Python may run a compiled file instead of a patched one.

    A layer removes the compiled files of what it patches.  In an environment of this machine Python
    has written new ones since then, always with a time stamp.
    """
    data = target.tree.read(compiled) or b""
    if target.subject.identity.is_installed:
        return is_unchecked(data)
    return may_run(data, target.tree.read(path))


def _ends(folder: str) -> Iterator[int]:
    return (end + 1 for end, letter in enumerate(folder) if letter == "/")


def _recorded(tree: Tree) -> set[str]:
    """The paths in every RECORD of a tree; a damaged one names none."""
    paths: set[str] = set()
    for dist in tree.distributions().values():
        with contextlib.suppress(ValueError, csv.Error):
            paths.update(recorded_paths(tree.read(f"{dist.info_dir}/RECORD") or b""))
    return paths


# ------------------------------------------------------------------------ the files of spark-build

_NAME = "files of spark-build"
_EXPECTED = "the verifier, its commands and its settings are as spark-build wrote them"
#: Files that other checks compare, or that no program runs.
_COMPARED = {f"{SHARE}/plan.json", f"{SHARE}/layers.json", OWNERS}
#: How the names of programs begin without which an image cannot be checked from inside.
_PROGRAM = "spark_"


def check_own_files(target: VerifyTarget) -> Check | None:
    """The check for a target with a baked-in plan whose files outside the packages can be read."""
    build, image = target.plan.build, target.subject.image
    if image is None or target.label is None or build is None:
        return None
    written = image.files_at(SHARE)
    listed = _listed(written.get(WRITTEN), build.files)
    if listed is None and (WRITTEN in written or build.files == maker().files):
        return _check("fail", f"{WRITTEN} does not have the digest that the plan states", WRITTEN)
    if listed is None:
        reason = f"spark-build {build.version} made this image, and wrote no list of its files"
        return _check("not-run", reason, SHARE, reason=f"{reason}: build the image again")
    wrong = sorted({*_in_share(target, written, listed), *_commands(target, image, listed)})
    if not wrong:
        return _check("pass", f"{counted(len(written), 'file')} as written", SHARE)
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
    target: VerifyTarget, written: Mapping[str, bytes], listed: Mapping[str, str]
) -> Iterator[str]:
    """The files in spark-build's own folder that differ, or are missing."""
    for path, data in written.items():
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
        if f"{SHARE}/{name}" not in written:
            yield f"{SHARE}/{name}"
    yield from (path for path in _settings(target) if path not in written)


def _settings(target: VerifyTarget) -> dict[str, bytes]:
    """The files that follow from the plan."""
    plan = target.plan
    flags = {"serve_flags": plan.serve_flags, "moe_serve_flags": plan.moe_serve_flags}
    settings = {f"{SHARE}/serve-flags.json": indented(flags)}
    if plan.build.files == maker().files:
        settings[f"{SHARE}/device.json"] = indented(plain(device_data(plan)))
    return settings


def own_paths(target: VerifyTarget) -> set[str]:
    """The files that spark-build adds outside of site-packages and of its own folder."""
    names = (COMMAND, *_scripts_of(target))
    return {"/workspace/build-metadata.yaml", *(f"{BIN}/{name}" for name in names)}


def _scripts_of(target: VerifyTarget) -> dict[str, bytes]:
    """The commands of distributions that the base does not have."""
    commands: dict[str, bytes] = {}
    plan = target.plan
    for layer in plan.layers:
        for file in layer.files:
            match = ENTRY_POINTS.fullmatch(file.path)
            if match and file.after and normalize(match["name"]) not in plan.base.packages:
                text = (target.tree.read(file.path) or b"").decode("utf-8", "replace")
                commands.update(scripts(text, plan.base.interpreter))
    return commands


def _commands(target: VerifyTarget, image: OpenImage, listed: Mapping[str, str]) -> Iterator[str]:
    """The commands that differ, and others that a shell would find before them."""
    interpreter = target.plan.base.interpreter
    for name, script in _scripts_of(target).items():
        if image.digest(f"{BIN}/{name}") != sha256_hex(script):
            yield f"{BIN}/{name}"
    path = f"{BIN}/{COMMAND}"
    data = image.files_at(path).get(path, b"")
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
        if folder.startswith("/") and image.files_at(other):
            yield other
