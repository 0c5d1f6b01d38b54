"""A good target, broken in one way each: exactly the checks that should flip do, and no others.

The target is b12x-full on vLLM 0.20.1, as its image carries it.  What vLLM and the compiler are
asked depends on files and settings alone, and the same question is asked once in a session, so a
change that neither of them can see costs no second.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from builder.applier.receipts import receipt_path
from builder.applier.trees import Content, OverlayTree
from builder.common.document import plain, read
from builder.common.plan import BakedPlan, digest_of
from builder.common.wheels import WheelTree
from builder.images.engines.baked import BIN, SHARE, read_plan
from builder.images.engines.maker import COMMAND, VERIFIER
from builder.images.engines.metadata import baked_files
from builder.images.subject import InFiles, Subject
from builder.proof.opening import target_of_plan
from builder.proof.run import verify
from builder.proof.runners import InSandbox
from builder.proof.trust import TrustedSources
from tests.unit.fakes import of_env, of_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from builder.applier.trees import Changes
    from builder.proof.target import VerifyTarget

    from .support import Planned, Planner

    Checks = dict[tuple[str, str], str]

FILES = ("static", "imports")
ASKED = (*FILES, "dispatch")
ALL = (*ASKED, "codegen")
#: The files below an overlay are not read.
NOT_READ = ("static", "startup hooks")

LINEAR = "vllm/model_executor/kernels/linear/__init__.py"
KERNELS = "vllm/model_executor/kernels/linear/nvfp4/flashinfer.py"
MMA = "nvidia_cutlass_dsl/python_packages/cutlass/cute/nvgpu/warp/mma.py"
MOE = "flashinfer/fused_moe/cute_dsl/blackwell_sm12x"
GEMM = "flashinfer/gemm/kernels/dense_blockscaled_gemm_sm120.py"
RECORD = "vllm-0.20.1.dist-info/RECORD"
BACKEND = "vllm-b12x-backend"

#: Every kind whose kernels the module LINEAR knows; experts are chosen elsewhere.
LAYERS = {
    f"dispatch {kind}" for kind in ("nvfp4-linear", "fp8-linear", "fp8-block", "w4a16-linear")
}
COMPILED = {f"codegen b12x GEMM, {which}" for which in ("tile 128x128", "1 token", "every tile")}
COMPILED |= {"codegen b12x MoE, 64 tokens", "codegen b12x MoE, 1 token"}
GATE = {"codegen NVFP4 warp MMA"}
DSL_LAYERS = {"static layer cutlass-dsl-cu13", "static layer cutlass-dsl-sm121a"}
BACKEND_LAYER = {f"static layer {BACKEND}"}
UNTOUCHED = {"static no other file touched"}
OWN = {"static files of spark-build"}


# ------------------------------------------------------------------------------------- the target


@pytest.fixture(scope="module")
def made(planned: Planner) -> Planned:
    """The plan."""
    return planned("pypi:vllm==0.20.1")


@pytest.fixture(scope="module")
def good(made: Planned) -> VerifyTarget:
    """The target as a layout of it is opened: plan and layers read back, a label, its files."""
    plan = read_plan(json.dumps(made.plan.as_json()).encode(), "oci:out")
    target = target_of_plan(made.plan, made.base, "oci:out", patched=True)
    site = plan.document.base.site_packages
    patched = [f"{site}/{path}" for path, content in made.plan.changes.items() if content]
    own = {path: content.read() for path, content in baked_files(made.plan).items()}
    return dataclasses.replace(
        target,
        subject=overlay_with(target.subject, dict.fromkeys(patched, b"") | own),
        plan=plan.document,
        label=plan.document.plan_digest,
        recomputed=plan.digest,
    )


def overlay_with(subject: Subject, files: Mapping[str, bytes]) -> Subject:
    """A subject that brings these files; those of packages are read from its tree."""
    return dataclasses.replace(subject, image=InFiles(files=files, env={}), is_planned=False)


def checks(target: VerifyTarget, levels: Sequence[str]) -> Checks:
    """Status by level and name; names are unique within their level."""
    found = verify(target, levels).checks
    by_name: Checks = {(check.level, check.name): check.status for check in found}
    assert len(by_name) == len(found)
    return by_name


@pytest.fixture(scope="module")
def before(good: VerifyTarget) -> Checks:
    """The good target, which passes everything that its files show."""
    found = checks(good, ALL)
    assert {k: v for k, v in found.items() if v != "pass"} == {NOT_READ: "not-run"}
    return found


# ------------------------------------------------------------------------------- ways to break it


def with_files(target: VerifyTarget, changes: Changes) -> VerifyTarget:
    """The target with other files, asked like the good one."""
    tree = OverlayTree(target.tree)
    tree.update(changes)
    packages = target.plan.base.packages
    trust = TrustedSources(everything=True)  # the mutations are ours
    return of_files(target, tree, runner=InSandbox(tree, packages, trust))


def edited(path: str, old: str, new: str, count: int = 1) -> Callable[..., VerifyTarget]:
    """A file in which a text is another one."""

    def mutate(target: VerifyTarget, _made: Planned) -> VerifyTarget:
        text = (target.tree.read(path) or b"").decode()
        assert text.count(old) == count, f"{path}: {text.count(old)} of {old!r}"
        return with_files(target, {path: Content.of(text.replace(old, new).encode())})

    return mutate


def appended(path: str, data: bytes) -> Callable[..., VerifyTarget]:
    """A file with more at its end."""

    def mutate(target: VerifyTarget, _made: Planned) -> VerifyTarget:
        return with_files(target, {path: Content.of((target.tree.read(path) or b"") + data)})

    return mutate


def as_before(layer: str, path: str) -> Callable[..., VerifyTarget]:
    """A file as the layers before this one leave it: a patch that somebody took back."""

    def mutate(target: VerifyTarget, made: Planned) -> VerifyTarget:
        return with_files(target, {path: Content.of(made.before(layer).read(path) or b"")})

    return mutate


def reinstalled(distribution: str, wanted: str = "") -> Callable[..., VerifyTarget]:
    """Files of a wheel of the base (those ending so) laid over all others, as pip leaves them."""

    def mutate(target: VerifyTarget, made: Planned) -> VerifyTarget:
        tree = made.base.tree
        assert isinstance(tree, WheelTree)
        wheel = next(w for w in tree.wheels if w.file.distribution == distribution)
        files: Changes = {
            path: Content(sha256=str(m.sha256), size=m.size, load=partial(wheel.read, path))
            for path, m in wheel.members.items()
            if m.sha256 and path.endswith(wanted) and ".dist-info/" not in path
        }
        assert files
        record = (
            f"{wheel.info_dir}/RECORD"  # which a layer has made true for the other wheel's files
        )
        return with_files(target, {**files, record: Content.of(wheel.read(record))})

    return mutate


def without_variable(name: str) -> Callable[..., VerifyTarget]:
    """The image no longer sets a variable."""

    def mutate(target: VerifyTarget, _made: Planned) -> VerifyTarget:
        env = {key: value for key, value in target.env.items() if key != name}
        return of_env(target, env)

    return mutate


def with_variable(name: str, value: str) -> Callable[..., VerifyTarget]:
    """The image sets a variable to something else."""

    def mutate(target: VerifyTarget, _made: Planned) -> VerifyTarget:
        return of_env(target, {**target.env, name: value})

    return mutate


def bring(path: str, data: bytes) -> Callable[..., VerifyTarget]:
    """A file along with ours that nothing speaks of."""

    def mutate(target: VerifyTarget, _made: Planned) -> VerifyTarget:
        site = target.plan.base.site_packages
        return with_own(with_files(target, {path: Content.of(data)}), f"{site}/{path}", b"")

    return mutate


def with_own(target: VerifyTarget, path: str, data: bytes) -> VerifyTarget:
    """The target whose image has another file at this absolute path."""
    image = target.subject.image
    assert isinstance(image, InFiles)
    subject = overlay_with(target.subject, {**image.files, path: data})
    return dataclasses.replace(target, subject=subject)


def own_file(path: str, data: bytes) -> Callable[..., VerifyTarget]:
    """A file of spark-build's own is another."""

    def mutate(target: VerifyTarget, _made: Planned) -> VerifyTarget:
        assert path in target.brought
        return with_own(target, path, data)

    return mutate


def record_hash(path: str) -> Callable[..., VerifyTarget]:
    """RECORD says another sha256 of a file than it has."""

    def mutate(target: VerifyTarget, made: Planned) -> VerifyTarget:
        lines = (target.tree.read(RECORD) or b"").decode().splitlines(keepends=True)
        (row,) = [line for line in lines if line.startswith(f"{path},sha256=")]
        digest = row.split("=")[1].split(",")[0]
        return edited(RECORD, digest, f"A{digest[1:]}" if digest[0] != "A" else f"B{digest[1:]}")(
            target, made
        )

    return mutate


def receipt(layer: str, change: Callable[[Any], None]) -> Callable[..., VerifyTarget]:
    """A layer's receipt is rewritten."""

    def mutate(target: VerifyTarget, _made: Planned) -> VerifyTarget:
        value = json.loads(target.tree.read(receipt_path(layer)) or b"")
        change(value)
        return with_files(target, {receipt_path(layer): Content.of(json.dumps(value).encode())})

    return mutate


def claim(path: str, digest: str = "0" * 64) -> Callable[[Any], None]:
    """A receipt that speaks of another content."""

    def change(value: Any) -> None:
        value["files"][path]["after"] = digest

    return change


def lose_receipt(layer: str) -> Callable[..., VerifyTarget]:
    """A layer's receipt is not there, its files are."""
    return lambda target, _made: with_files(target, {receipt_path(layer): None})


def plan_says(change: Callable[[Any], None], *, forged: bool) -> Callable[..., VerifyTarget]:
    """The baked plan is another; ``forged`` makes its own digest fit again."""

    def mutate(target: VerifyTarget, _made: Planned) -> VerifyTarget:
        plan = plain(target.plan)
        change(plan)
        digest = digest_of(plan)
        if forged:
            plan["plan_digest"] = digest
        return dataclasses.replace(target, plan=read(plan, BakedPlan), recomputed=digest)

    return mutate


def expect_less(plan: Any) -> None:
    """The plan is content with a part of the line."""
    plan["expect"][0]["line"] = "FlashInferB12x"


# ---------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Mutation:
    """One way to break the target, the checks that fail then, and those that are not made."""

    mutate: Callable[..., VerifyTarget]
    flipped: set[str]
    levels: Sequence[str] = ASKED
    #: nothing says any more that a layer edited its modules, so they are not followed
    unread: bool = False


def imports_of(*paths: str) -> set[str]:
    """The checks of what modules import and call."""
    return {f"imports names used by {path}" for path in paths}


MUTATIONS: Mapping[str, Mutation] = {
    # ------------------------------------------------------------------------- layers undone
    # two layers change this file, one after the other, and neither's receipt leads to what it is
    "a patch is taken back": Mutation(
        as_before("cutlass-dsl-sm121a", MMA), DSL_LAYERS | UNTOUCHED | GATE | COMPILED, ALL
    ),
    "libs-base is laid over libs-cu13": Mutation(
        reinstalled("nvidia-cutlass-dsl-libs-base"), DSL_LAYERS | GATE | COMPILED, ALL
    ),
    "the libraries of libs-base alone": Mutation(
        reinstalled("nvidia-cutlass-dsl-libs-base", ".so"),
        {"static layer cutlass-dsl-cu13"} | GATE | COMPILED,
        ALL,
    ),
    # -------------------------------------------------------------------- kernels and their names
    "the kernel is off the list": Mutation(
        edited(LINEAR, '    "flashinfer-b12x": FlashInferB12xNvFp4LinearKernel,\n', ""),
        BACKEND_LAYER | UNTOUCHED | {"dispatch nvfp4-linear"},
    ),
    "a line of the log is another": Mutation(
        edited(LINEAR, '"Using %s for NVFP4 GEMM", force', '"Took %s for NVFP4 GEMM", force'),
        BACKEND_LAYER | UNTOUCHED | {"dispatch nvfp4-linear"},
    ),
    "the kernel's class has another name": Mutation(
        edited(GEMM, "\nSm120BlockScaledDenseGemmKernel = ", "\nOtherKernel = "),
        {"static layer flashinfer-b12x", "static layer flashinfer-sm121"}
        | {"static layer flashinfer-b12x-store-wait"}
        | {f"imports names used by {MOE}/moe_{k}_kernel.py" for k in ("micro", "static", "dynamic")}
        | UNTOUCHED
        | {"dispatch nvfp4-linear"}
        | COMPILED,
        ALL,
    ),
    "a name that a module imports is another": Mutation(
        edited(KERNELS, "class FlashInferB12xNvFp4LinearKernel(", "class OtherKernel("),
        BACKEND_LAYER | UNTOUCHED | imports_of(LINEAR) | LAYERS,
    ),
    "a module no longer parses": Mutation(
        edited(LINEAR, "def init_nvfp4_linear_kernel()", "def init_nvfp4_linear_kernel("),
        BACKEND_LAYER | UNTOUCHED | {"static patched modules parse"} | imports_of(LINEAR) | LAYERS,
    ),
    # ------------------------------------------------------------------------------- settings
    "a variable is gone": Mutation(
        without_variable("VLLM_NVFP4_GEMM_BACKEND"),
        {"static environment", "dispatch nvfp4-linear"},
    ),
    "a variable is another": Mutation(
        with_variable("VLLM_NVFP4_GEMM_BACKEND", "marlin"),
        {"static environment", "dispatch nvfp4-linear"},
    ),
    "a variable that only the compiler reads is gone": Mutation(
        without_variable("CUTE_DSL_ARCH"), {"static environment"}, FILES
    ),
    # ------------------------------------------------------------------- what nobody answers for
    "a file comes along": Mutation(bring("extra.pth", b"import os\n"), UNTOUCHED),
    "a file of vLLM's is edited": Mutation(
        appended("vllm/version.py", b"\n# edited\n"), UNTOUCHED, FILES
    ),
    "RECORD says another hash": Mutation(record_hash("vllm/version.py"), UNTOUCHED, FILES),
    # -------------------------------------------------------------------- receipts and the plan
    "a receipt claims another content": Mutation(
        receipt(BACKEND, claim("vllm/envs.py")), BACKEND_LAYER
    ),
    "a receipt is lost": Mutation(lose_receipt(BACKEND), BACKEND_LAYER | UNTOUCHED, unread=True),
    # what the verifier in the image looks for follows from the plan, and says what it said before
    "the plan expects less": Mutation(plan_says(expect_less, forged=False), {"static plan"} | OWN),
    "the plan expects less, and its digest fits": Mutation(
        plan_says(expect_less, forged=True), {"static plan"} | OWN
    ),
    # ---------------------------------------------------------------- files of spark-build's own
    "the verifier is another": Mutation(own_file(f"{SHARE}/{VERIFIER}", b"PK"), OWN, FILES),
    "the command is another": Mutation(own_file(f"{BIN}/{COMMAND}", b"#!/bin/sh\n"), OWN, FILES),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_exactly_these_checks_flip(
    made: Planned, good: VerifyTarget, before: Checks, name: str
) -> None:
    mutation = MUTATIONS[name]
    broken = mutation.mutate(good, made)
    after = checks(broken, mutation.levels)
    assert after.pop(NOT_READ) == "not-run"
    assert {f"{level} {name}" for (level, name), s in after.items() if s != "pass"} == (
        mutation.flipped
    )
    assert set(after.values()) == {"pass", "fail"}, "each was asked, and answered"
    asked = {key for key in before if key[0] in mutation.levels} - {NOT_READ}
    assert asked - set(after) == (followed(made) if mutation.unread else set())
    assert not set(after) - asked


def followed(made: Planned) -> set[tuple[str, str]]:
    """The checks of the modules that the backend layer edits, and no layer after it."""
    others = {path for one in made.plan.needed if one.name != BACKEND for path in one.changes}
    paths = [
        path
        for path in made.decision(BACKEND).changes
        if path.endswith(".py") and path not in others
    ]
    return {("imports", f"names used by {path}") for path in paths}
