"""Level ``model``: whole models, built by the target's own vLLM for SM121, from configurations.

Level ``dispatch`` asks for one layer of each kind.  Here the release builds every layer of a model
itself, so a kernel that a shape, an expert's activation or a mixture of formats rules out shows.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from builder.applier.values import canonical_json
from builder.probes.dispatch_expect import describe, limit_of
from builder.proof.checks import Check
from builder.proof.dispatch import own_settings
from builder.proof.flags import WHY, flag_groups, names_code
from builder.proof.isolation import SandboxUnavailable
from builder.proof.wholemodel import (
    Release,
    Target,
    configuration_of,
    own_folder,
    sentence,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from builder.common.plan import ExpectedChoice
    from builder.proof.target import ModelToBuild, VerifyTarget
    from builder.proof.wholemodel import LayerRow, ModelAnswer

NONE = "no model of builder/data/models has such layers, a configuration, and this release"


def check_model(target: VerifyTarget) -> Iterator[Check]:
    """For each model: whether it starts, and one check for each kind of its layers."""
    if not target.models:
        yield _check("models", "not-run", "models start", reason=NONE, moot=True)
        return
    try:
        _refuse_flags_of_code(target)
    except SandboxUnavailable as error:
        yield _check("models", "not-run", "models start", reason=str(error))
        return
    release = _release_of(target)
    for model in target.models:
        try:
            answers = _asked(release, model, _choices(target))
        except SandboxUnavailable as error:
            reason = f"{error}; try: {error.hint}" if error.hint else str(error)
            yield _check(f"{model.name} starts", "not-run", "it starts", reason=reason)
            continue
        yield from judged(target, model, answers)


def _release_of(target: VerifyTarget) -> Release:
    """The target's vLLM, with the plan's variables as the target has them."""
    settings = {**target.plan.env, **own_settings(target)}
    env = {name: value for name, value in settings.items() if value is not None}
    packages = dict(target.plan.base.packages)
    opened = Target(base=target.name, tree=target.tree, packages=packages, env=env)
    return Release(opened, target.trust)


def _refuse_flags_of_code(target: VerifyTarget) -> None:
    """Refuse flags of a plan, which may be a stranger's, with which no release is asked here.

    Raises:
        SandboxUnavailable: a flag names code, a file or an address.
    """
    flags = (*target.plan.serve_flags, *target.plan.moe_serve_flags)
    for flag in flag_groups(flags):
        if names_code(flag):
            text = f"{flag[0]} of its plan is not asked about: {WHY}"
            raise SandboxUnavailable(text)


#: Flags, and what the release said of a model with them.
Answers = Mapping[tuple[str, ...], "ModelAnswer"]


def _choices(target: VerifyTarget) -> list[tuple[str, ...]]:
    """No flags, those of the plan, and those for experts besides."""
    plain = tuple(target.plan.serve_flags)
    return list(dict.fromkeys([(), plain, (*plain, *target.plan.moe_serve_flags)]))


def _asked(release: Release, model: ModelToBuild, choices: Sequence[tuple[str, ...]]) -> Answers:
    """What the release says of a model with each choice of flags."""
    if model.config is not None:
        folder = configuration_of({"config.json": canonical_json(model.config)})
    elif model.folder is not None:
        folder = own_folder(model.folder)
    else:
        folder = release.downloaded(model.name)
    return dict(zip(choices, release.ask(folder, choices), strict=True))


def judged(target: VerifyTarget, model: ModelToBuild, answers: Answers) -> Iterator[Check]:
    """The checks of one model; the flags for experts count only if it has some."""
    plain = tuple(target.plan.serve_flags)
    experts = any(answer.has_experts for answer in answers.values()) or any(
        kind.endswith("-moe") for kind in model.kinds
    )
    flags = (*plain, *target.plan.moe_serve_flags) if experts else plain
    answer = answers[flags]
    name = f"{model.name} starts"
    served = shlex.join(["vllm", "serve", model.name, *flags])
    told = _told(target, answer)
    if answer.not_run:
        yield _check(name, "not-run", served, reason=answer.not_run, **told)
        return
    expected = [one for one in target.plan.expect if not model.kinds or one.kind in model.kinds]
    refused = [one for one in expected if one.refused] if model.kinds else []
    if answer.error is not None:
        yield _refusal(_Asked(model, served, flags, plain, answers), refused, told)
        return
    if refused:
        seen, reason = f"{served} starts", "vLLM takes what the profile says that it refuses"
        yield _check(name, "fail", describe(refused[0]), seen, reason=reason, **told)
    else:
        size = answer.parameter_bytes / 2**30
        seen = f"starts; {sum(row.count for row in answer.layers)} layers, {size:.2f} GiB"
        yield _check(name, "pass", served, seen, **told)
    yield from _kinds(model.name, expected, answer.layers, told)


def _told(target: VerifyTarget, answer: ModelAnswer) -> dict[str, Any]:
    """Where an answer is from: the release's line, if it refused."""
    where = f"vllm in {target.name}{', cached' if answer.kept else ''}"
    raised = answer.error.where if answer.error is not None else ""
    return {"where": f"{raised}, {where}" if raised else where, "simulated": answer.simulated}


@dataclass(frozen=True)
class _Asked:
    """A model with the flags that count, and all answers."""

    model: ModelToBuild
    served: str
    #: with those for experts, and without
    flags: tuple[str, ...]
    plain: tuple[str, ...]
    answers: Answers


def _refusal(asked: _Asked, refused: Sequence[ExpectedChoice], told: Mapping[str, Any]) -> Check:
    """The check of a model that does not start.

    It passes if the profile says so, and if only the flags for experts are refused, and the
    experts are not those that a profile promises kernels for.  A model that the release refuses
    with any flags says nothing of the profile, unless the user named it.
    """
    model, error = asked.model, asked.answers[asked.flags].error
    assert error is not None
    name, seen = f"{model.name} starts", f"{error.type}: {sentence(error)}"
    for one in refused:
        if one.refused and one.refused in error.message:
            limit = limit_of(one.kind, f"refused: {seen}")
            return _check(name, "pass", describe(one), seen, refusal=limit, **told)
    starting = [flags for flags, one in asked.answers.items() if one.error is None]
    if not model.named and not starting and error.stage == "configuration":
        reason = f"vLLM refuses this model with any flags: {seen}"
        return _check(name, "not-run", asked.served, seen, reason=reason, moot=True, **told)
    if not model.named and model.activation != "silu" and asked.plain in starting:
        more = shlex.join(asked.flags[len(asked.plain) :])
        limit = f"Models with {model.activation} experts will not start with {more}: {seen}"
        wanted = f"{model.activation} experts: {more} is taken or refused"
        return _check(name, "pass", wanted, seen, refusal=limit, **told)
    reason = "its configuration is refused" if error.stage != "model" else "it is not built"
    return _check(name, "fail", f"{asked.served} starts", seen, reason=reason, **told)


def _kinds(
    name: str, expected: Sequence[ExpectedChoice], rows: Sequence[LayerRow], told: Mapping[str, Any]
) -> Iterator[Check]:
    """One check for each family of layers that the profile has something to say of."""
    families: dict[tuple[str, ...], list[LayerRow]] = {}
    for row in rows:
        if row.part != "draft" and (kinds := kinds_of(row)):
            families.setdefault(kinds, []).append(row)
    for kinds, layers in families.items():
        ours = [one for one in expected if one.kind in kinds and not one.refused]
        if ours:
            yield _of_family(name, ours, layers, told)


def _of_family(
    name: str,
    expected: Sequence[ExpectedChoice],
    rows: Sequence[LayerRow],
    told: Mapping[str, Any],
) -> Check:
    """Whether each layer of a family has a kernel that the profile expects for its kind."""
    wanted = " or ".join(dict.fromkeys(describe(one) for one in expected))
    kinds = " or ".join(dict.fromkeys(one.kind for one in expected))
    shown = dict.fromkeys(f"{row.count} x {row.pattern}: {_kernels(row)}" for row in rows)
    title = f"{name} {kinds}"
    wrong = [row for row in rows if row.kernels and not any(meets(row, one) for one in expected)]
    if wrong:
        seen = "; ".join(f"{row.count} x {row.pattern}: {_kernels(row)}" for row in wrong)
        reason = f"{sum(row.count for row in wrong)} layers have another kernel"
        return _check(title, "fail", wanted, seen, reason=reason, **told)
    seen = "; ".join(shown)
    unnamed = [row for row in rows if not row.kernels]
    if unnamed:
        reason = "this release's layers name no kernel when they are built; level dispatch asks it"
        return _check(title, "not-run", wanted, seen, reason=reason, moot=True, **told)
    return _check(title, "pass", wanted, seen, **told)


def meets(row: LayerRow, expected: ExpectedChoice) -> bool:
    """Whether all kernels of a layer are those that an expectation names."""
    if expected.line:
        return all(kernel in expected.line for kernel in row.kernels)
    return all(fnmatch.fnmatchcase(kernel, expected.selected or "") for kernel in row.kernels)


def kinds_of(row: LayerRow) -> tuple[str, ...]:
    """The kinds that a layer may be of, by the release's names for its method and kernel.

    The names do not tell weights with 16-bit activations from others: the model's kinds do.
    """
    name = f"{row.quantisation} {' '.join(row.kernels)}"
    if row.attention or re.search(r"mxfp|KVCache", name, re.IGNORECASE):
        return ()
    if re.search(r"fp4", name, re.IGNORECASE):
        return ("nvfp4-moe", "w4a16-moe") if row.experts else ("nvfp4-linear", "w4a16-linear")
    fp8 = re.search(r"fp8", name, re.IGNORECASE) and not row.experts
    return ("fp8-linear", "fp8-block") if fp8 else ()


def _kernels(row: LayerRow) -> str:
    return ", ".join(row.kernels) or row.quantisation


def _check(name: str, status: Any, expected: str, seen: str = "", **more: Any) -> Check:
    return Check(level="model", name=name, status=status, expected=expected, seen=seen, **more)
