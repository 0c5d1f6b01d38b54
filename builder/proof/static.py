"""Level ``static``: reads files; checks that every layer is complete, and no other file changed."""

from __future__ import annotations

import ast
from posixpath import join, normpath
from typing import TYPE_CHECKING

from builder.applier.digests import sha256_hex
from builder.applier.receipts import (
    explained,
    final_digests,
    kept_true,
    receipt_path,
    receipts_of,
    unexplained,
)
from builder.applier.records import parse_record
from builder.common.console import counted
from builder.images.engines.metadata import SHARE
from builder.proof.checks import Check, few
from builder.proof.ownfiles import check_own_files, own_paths
from builder.proof.shadows import shadows_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from typing import Any

    from builder.applier.receipts import Receipt
    from builder.common.documents.plan import PlannedLayer
    from builder.proof.finders import Shadow
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
        yield _modules(shadows_of(target))
    if target.unrecorded is not None:
        found = target.unrecorded()
        yield _startup(found)
        yield _later(found)


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


def _modules(shadows: Sequence[Shadow]) -> Check:
    """Check that Python imports the patched and the recorded files."""
    return Check(
        level="static",
        name="imported modules",
        status="fail" if shadows else "pass",
        expected="Python imports the file of every module that a RECORD or a receipt lists",
        seen=f"Python runs {few(shadows)}" if shadows else "no file hides a recorded module",
        where=shadows[0].path if shadows else "",
        reason="the recorded file is there, but has no effect" if shadows else "",
    )


def _startup(found: Unrecorded) -> Check:
    """Check that everything that Python runs at startup is from a package or a layer."""
    others = (*found.of_base, *found.files)
    said = []
    if found.hooks:
        said.append(f"{counted(len(found.hooks), 'hook')} recorded nowhere: {few(found.hooks)}")
    if found.of_base:
        said.append(f"in the base already: {few(found.of_base)}")
    if found.files:
        said.append(f"{counted(len(found.files), 'other file')} unrecorded: {few(found.files)}")
    return Check(
        level="static",
        name="startup hooks",
        status="fail" if found.hooks else "pass",
        expected="every file that Python runs at startup is in a RECORD or a receipt",
        seen="; ".join(said) or "every file is recorded",
        where=found.hooks[0] if found.hooks else "",
        reason="Python would run this at every start, but it belongs to no package"
        if found.hooks
        else "",
        unrecorded=(*found.hooks, *others),
    )


def _later(found: Unrecorded) -> Check:
    """Check that no layer above the base replaces recorded files, or adds code to our packages."""
    seen = f"{counted(len(found.changed), 'file')}, such as {few(found.changed)}"
    return Check(
        level="static",
        name="files above the base",
        status="fail" if found.changed else "pass",
        expected="layers above the base replace no recorded file, and add no code to the packages "
        "that spark-build changes",
        seen=seen if found.changed else "none replaced, none added",
        where=found.changed[0] if found.changed else "",
        reason="changed after the image was built" if found.changed else "",
    )


def _unaccounted(target: VerifyTarget, receipts: Sequence[Receipt]) -> list[str]:
    """Files that an overlay adds without a receipt; elsewhere only spark-build's own may be."""
    known = {path for receipt in receipts for path in receipt.files}
    known |= {receipt_path(receipt.layer) for receipt in receipts} | kept_true(receipts)
    prefix = f"{target.plan.base.site_packages}/"
    own = own_paths(target)
    found = [
        path.removeprefix(prefix)
        for path in target.brought
        if path not in own and not path.startswith(f"{SHARE}/")
    ]
    return sorted(path for path in found if path not in known)


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
    if target.outside is None or target.brought:
        return False
    place = normpath(join(target.plan.base.site_packages, path))
    data = target.outside(place).get(place)
    return data is not None and sha256_hex(data) not in digests


def _laid_out(dist: Any, receipts: Sequence[Receipt]) -> bool:
    return any(f"{dist.info_dir}/RECORD" in receipt.files for receipt in receipts)
