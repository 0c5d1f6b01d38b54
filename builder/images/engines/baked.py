"""What an image says of the plan that made it: labels, and files that are read back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from builder.applier.layers import Layer
from builder.applier.values import ApplyError
from builder.common.document import read
from builder.common.plan import PLAN_SCHEMA, BakedPlan, RecordedPlan
from builder.common.reference import Ref
from builder.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping


SHARE = "/usr/share/spark-build"
#: Owners and modes that a copy into an image cannot set.
OWNERS = f"{SHARE}/folders.json"
#: The sha256 of what spark-build adds to every image, by file name; the plan has their digest.
WRITTEN = f"{SHARE}/files.json"
#: Where commands are.
BIN = "/usr/local/bin"
#: Prefix of spark-build's own labels and annotations.
LABEL_PREFIX = "io.github.spark-build"
PLAN_LABEL = f"{LABEL_PREFIX}.plan"
BASE_LABEL = f"{LABEL_PREFIX}.base"
#: Artifact type of an overlay, which is not a runnable image.
OVERLAY_TYPE = "application/vnd.spark-build.overlay.v1"
#: Limit of an image's time: the year 5138.
_EPOCH_LIMIT = 10**11


def is_overlay(labels: Mapping[str, str], artifact_type: str = "") -> bool:
    """Whether the image is an overlay; older ones have no artifact type."""
    return artifact_type == OVERLAY_TYPE or Ref(labels.get(BASE_LABEL, "")).kind.is_wheels


def read_plan(data: bytes, where: str) -> RecordedPlan:
    """Read a plan that was baked into an image.

    Raises:
        UsageError: the bytes are not a plan.
    """
    try:
        plan = _document(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: {SHARE}/plan.json is damaged: {error}") from None
    schema = plan.get("schema", 1) if isinstance(plan, dict) else 1
    if schema not in range(1, PLAN_SCHEMA + 1):
        raise UsageError(
            f"{where}: {SHARE}/plan.json has schema {schema!r}, but this spark-build reads 1 to "
            f"{PLAN_SCHEMA}: a newer one made it",
            hint="install a newer spark-build",
        )
    try:
        document = read(plan, BakedPlan)
        _refuse_incomplete(document)
    except ValueError as error:
        raise UsageError(f"{where}: {SHARE}/plan.json is not a plan: {error}") from None
    return RecordedPlan(document=document, json=plan)


def _refuse_incomplete(plan: BakedPlan) -> None:
    """Refuse errors that the types do not catch.

    Raises:
        ValueError: names the wrong part of the plan.
    """
    if plan.schema > 1 and (plan.build is None or plan.build.epoch >= _EPOCH_LIMIT):
        raise ValueError(f"build is {plan.build!r:.80}")
    if "vllm" not in plan.base.packages:
        raise ValueError("base.packages lacks vllm")


def read_layers(data: bytes | None, where: str) -> list[Layer]:
    """The layers that were baked in; empty if there is no such file.

    Raises:
        UsageError: it is damaged, or has other content.
    """
    try:
        layers = _document(b"[]" if data is None else data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: {SHARE}/layers.json is damaged: {error}") from None
    if not isinstance(layers, list):
        raise UsageError(f"{where}: {SHARE}/layers.json is not a list of layers")
    try:
        return [Layer.read(layer) for layer in layers]
    except ApplyError as error:
        problem = f"{where}: {SHARE}/layers.json is not a list of layers: {error}"
        raise UsageError(problem, hint=error.hint) from None


def _document(data: bytes) -> Any:
    """Parse JSON that can be written again; lone surrogates are refused.

    Raises:
        ValueError, RecursionError: it is not valid.
    """
    value = json.loads(data)
    json.dumps(value, ensure_ascii=False).encode()
    return value
