"""How the layers of a plan were judged on a base, kept by the digests of what decides it.

A judgement depends on the layers, the content of the base and who served it, its platform and
variables, and the code that judges: nothing else, so it is never made twice.  The bytes of changed
files are not kept: what needs them judges again, and a file is what its digest in the plan says or
an error.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from builder.applier.judging import Step, judge_in_order
from builder.applier.layers import DonorPin, InputPin, WheelPin
from builder.applier.receipts import RECEIPTS, receipt_bytes, receipts_of
from builder.applier.states import Outcome
from builder.applier.trees import Content
from builder.applier.values import ApplyError, canonical_json, sha256_hex
from builder.common.files import read_entry, write_entry
from builder.common.leftovers import keep_latest
from builder.common.paths import cache_dir, code_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from builder.applier.layers import Layer
    from builder.applier.receipts import Receipt
    from builder.applier.sources import Sources
    from builder.applier.trees import Changes
    from builder.images.subject import Subject

#: Plans that are kept, the latest; one with a whole wheel has 500 kB.
_MOST = 60
#: The code that judges, and that reads what is judged.
_CODE = (
    "applier/*.py",
    "common/machinecode.py",
    "common/files.py",
    "common/pypi.py",
    "common/wheels.py",
    "images/bases/*.py",
    "images/rootfs/*.py",
    "layers/judged.py",
    "layers/pinned.py",
    "layers/planner.py",
)
_PINS: Mapping[str, type[InputPin]] = {
    kind.__name__: kind for kind in (InputPin, WheelPin, DonorPin)
}

#: sha256, bytes, mode, and what it is from.
_File = tuple[str, int, int, str]


class _Outcome(msgspec.Struct, forbid_unknown_fields=True):
    layer: str
    state: str
    reason: str
    variant: str | None
    since: str | None
    env: dict[str, str]
    serve_flags: list[str]
    moe_serve_flags: list[str]
    notes: list[str]
    #: the class of each pin, and its fields
    inputs: list[tuple[str, dict[str, Any]]]
    ops: dict[str, list[str]]
    #: the files that it changes, without RECORD and its receipt
    files: dict[str, _File | None]


class _Step(msgspec.Struct, forbid_unknown_fields=True):
    outcome: _Outcome
    receipt: str | None
    changes: dict[str, _File | None]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    steps: list[_Step]


@cache
def version() -> str:
    """A digest of the code that judges."""
    return code_digest(_CODE)


def judged(
    base: Subject, layers: Sequence[Layer], sources: Sources, indexes: Mapping[str, str]
) -> list[Step]:
    """The steps of :func:`builder.applier.judging.judge_in_order`, from the cache if they are kept.

    ``base`` must have the content that its identity's digest says, and no other layer over it.
    ``indexes``: the key of the index that served each package of the base.  Parts of a wheel are
    read without the whole, so an index that serves other bytes than a hash says is believed for
    itself alone.

    Raises:
        ApplyError: an input is not pinned, cannot be downloaded, or does not match its digest.
    """

    def judge() -> list[Step]:
        identity = base.identity
        target = identity.platform.target
        return list(judge_in_order(layers, base.tree, sources, target, identity.env))

    key = _key(base, layers, indexes)
    entry = _read(key)
    if entry is not None:
        with suppress(ValueError, TypeError, KeyError, ApplyError):
            again = _Again(judge)
            return [
                _step(one, layer, again) for one, layer in zip(entry.steps, layers, strict=True)
            ]
    steps = judge()
    if all(step.outcome.compiled is None for step in steps):
        _write(_Entry(key, [_stored(step) for step in steps]))
    return steps


def _key(base: Subject, layers: Sequence[Layer], indexes: Mapping[str, str]) -> str:
    identity = base.identity
    where = [identity.platform.oci, list(identity.platform.python_version), identity.site_packages]
    parts = [
        version(), identity.kind, identity.digest, where, dict(identity.packages),
        dict(identity.env), dict(indexes), [layer.digest for layer in layers],
    ]  # fmt: skip
    return sha256_hex(canonical_json(parts))


# ------------------------------------------------------------------------------------- on the disk


def _file(key: str) -> Path:
    return cache_dir() / "judged" / f"{key}.json"


def _read(key: str) -> _Entry | None:
    """An entry; None if there is none, or it is damaged."""
    with suppress(OSError, ValueError, RecursionError):
        entry = msgspec.json.decode(read_entry(_file(key)), type=_Entry)
        return entry if entry.key == key else None
    return None


def _write(entry: _Entry) -> None:
    """Keep an entry.

    Raises:
        UsageError: the cache cannot be written.
    """
    file = _file(entry.key)
    write_entry(file, msgspec.json.encode(entry))
    keep_latest(file.parent.glob("*.json"), most=_MOST)


def _stored(step: Step) -> _Step:
    outcome = step.outcome
    return _Step(
        outcome=_Outcome(
            layer=outcome.layer,
            state=outcome.state,
            reason=outcome.reason,
            variant=outcome.variant,
            since=outcome.since,
            env=outcome.env,
            serve_flags=list(outcome.serve_flags),
            moe_serve_flags=list(outcome.moe_serve_flags),
            notes=list(outcome.notes),
            inputs=[(type(pin).__name__, vars(pin)) for pin in outcome.inputs],
            ops=outcome.ops,
            files=_described(outcome.changes),
        ),
        receipt=None if step.receipt is None else receipt_bytes(step.receipt).decode(),
        changes=_described(step.changes),
    )


def _described(changes: Changes) -> dict[str, _File | None]:
    return {
        path: None if one is None else (one.sha256, one.size, one.mode, one.origin)
        for path, one in changes.items()
    }


# ------------------------------------------------------------------------------------- read again


class _Again:
    """Judges again, once, when bytes are needed."""

    def __init__(self, judge: Callable[[], list[Step]]) -> None:
        self._judge = judge
        self._steps: dict[str, Step] = {}

    def content(self, layer: str, path: str) -> bytes:
        """The bytes that a layer gives a file.

        Raises:
            ApplyError: it does not change that file.
        """
        if not self._steps:
            self._steps = {step.layer.name: step for step in self._judge()}
        step = self._steps[layer]
        content = step.changes.get(path) or step.outcome.changes.get(path)
        if content is None:
            raise ApplyError(
                f"layer {layer} does not write {path}, as it did before",
                hint="spark-build cache clean --kind judged",
            )
        return content.read()


def _step(stored: _Step, layer: Layer, again: _Again) -> Step:
    """A step as it was, whose files are read on demand."""

    def changes(files: Mapping[str, _File | None]) -> Changes:
        return {
            path: None if file is None else _content(layer.name, path, file, again)
            for path, file in files.items()
        }

    judgement = stored.outcome
    outcome = Outcome(
        layer=judgement.layer,
        state=judgement.state,
        reason=judgement.reason,
        variant=judgement.variant,
        since=judgement.since,
        changes=changes(judgement.files),
        env=judgement.env,
        serve_flags=judgement.serve_flags,
        moe_serve_flags=judgement.moe_serve_flags,
        notes=judgement.notes,
        inputs=[_PINS[kind](**fields) for kind, fields in judgement.inputs],
        ops=judgement.ops,
    )
    receipt = None if stored.receipt is None else _receipt(layer.name, stored.receipt.encode())
    return Step(layer, outcome, receipt, changes(stored.changes))


def _content(layer: str, path: str, file: _File, again: _Again) -> Content:
    sha256, size, mode, origin = file
    load = lambda: again.content(layer, path)  # noqa: E731
    return Content(sha256=sha256, size=size, mode=mode, load=load, origin=origin or path)


class _OneReceipt:
    """A tree that has one receipt, to read it as any other."""

    def __init__(self, layer: str, data: bytes) -> None:
        self._name, self._data = f"{layer}.json", data

    def children(self, directory: str) -> list[str]:
        return [self._name] if directory == RECEIPTS else []

    def read(self, _path: str) -> bytes:
        return self._data


def _receipt(layer: str, data: bytes) -> Receipt:
    (receipt,) = receipts_of(_OneReceipt(layer, data))  # type: ignore[arg-type]
    return receipt
