"""The documents that ``--json`` prints, with their types, by command."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from builder.common.document import Document, Part, Text, always, json_schema
from builder.errors import UsageError, did_you_mean


class Setting(Part, frozen=True):
    """One setting, as printed."""

    name: Text
    value: str
    source: Text
    meaning: Text


class Settings(Document, frozen=True, kw_only=True):
    """Every effective setting."""

    schema: Literal[2] = always(2)  # type: ignore[assignment]
    settings: tuple[Setting, ...]


class Names(Document, frozen=True, kw_only=True):
    """The documents that have a schema."""

    names: Annotated[tuple[Text, ...], Meta(min_length=1)]


class Entry(NamedTuple):
    """A document: its title, and the ``module:Type`` of each form that a command may print."""

    title: str
    forms: tuple[str, ...]


DOCUMENTS = {
    "apply": Entry(
        "`apply --json`: a plan, and whether it was applied",
        ("builder.common.plan:AppliedPlan",),
    ),
    "audit": Entry(
        "`audit --json`: the modules of a model by quantisation method; with --inside, the files "
        "that audit a model beside vLLM",
        (
            "builder.serving.audit:Audit",
            "builder.serving.audit:InsideFiles",
        ),
    ),
    "audit-loaded": Entry(
        "The modules of the model that vLLM loaded, as spark_build_audit.py writes them",
        ("builder.serving.audit:LoadedModel",),
    ),
    "bake": Entry(
        "`bake --json`: what docker buildx bake can build; with --matrix, the list of images",
        ("builder.pipeline.bake:Bake", "builder.pipeline.bake:Jobs"),
    ),
    "bench": Entry("`bench --json`: what a running server does", ("builder.serving.bench:Bench",)),
    "cache-clean": Entry(
        "`cache clean --json`: what was removed; with --dry-run, what would be removed",
        ("builder.common.cache:Removal",),
    ),
    "cache-prune": Entry(
        "`cache prune --json`: what was removed; with --dry-run, what would be removed",
        ("builder.common.cache:Removal",),
    ),
    "cache-servers": Entry(
        "`cache servers --json`: the processes that wait for questions about models",
        ("builder.proof.modelserver:Processes",),
    ),
    "cache-show": Entry(
        "`cache show --json`: the contents of the cache",
        ("builder.common.cache:CacheContents",),
    ),
    "compile-run": Entry(
        "`compile run --json`: compiled units and their machine code; with --dry-run, the plan",
        (
            "builder.compile.plans:CompileRun",
            "builder.compile.plans:CompiledRelease",
        ),
    ),
    "compile-show": Entry(
        "`compile show --json`: what would be compiled, and for which architectures",
        ("builder.compile.plans:CompiledRelease",),
    ),
    "compile-wheel": Entry(
        "`compile wheel --json`: the wheel and its checks; with --dry-run, the plan",
        (
            "builder.compile.extensionwheel:WheelReport",
            "builder.compile.extensionwheel:PlannedWheel",
        ),
    ),
    "compile-wheel-plan": Entry(
        "`compile wheel --dry-run --json`: what would be compiled",
        ("builder.compile.extensionwheel:PlannedWheel",),
    ),
    "config-show": Entry(
        "`config show --json`: settings and where each comes from",
        ("builder.cli.documents:Settings",),
    ),
    "diagnose": Entry(
        "`diagnose --json`: what a log shows", ("builder.diagnose.report:Diagnosed",)
    ),
    "diagnose-list": Entry(
        "`diagnose list --json` and `diagnose show ID --json`: entries of the catalogue",
        ("builder.diagnose.report:Entries",),
    ),
    "dispatch-ask": Entry(
        "`dispatch ask --json`: the kernels that releases select, as recorded in docs/evidence",
        ("builder.proof.recorded:Records",),
    ),
    "dispatch-table": Entry(
        "`dispatch table --json`: the release table",
        ("builder.proof.recorded:TableFile",),
    ),
    "distribute": Entry(
        "`distribute --json`: what each host lacked and fetched",
        ("builder.publishing.distribute:Deliveries",),
    ),
    "error": Entry(
        "What every command prints with `--json` when it fails before it has a result",
        ("builder.common.document:Failed",),
    ),
    "image": Entry(
        "`image --json`: what was built, and its verification; or with --dry-run the plan, with "
        "--print-dockerfile the text",
        (
            "builder.pipeline.image:VerifiedImage",
            "builder.pipeline.image:UnverifiedImage",
            "builder.common.plan:PlanDocument",
            "builder.pipeline.image:DockerfileText",
            "builder.pipeline.image:IndexDocument",
            "builder.pipeline.image:IndexPlans",
        ),
    ),
    "image-index": Entry(
        "`image --all-platforms --json`: an index, each entry planned by itself; with --dry-run "
        "only the plans",
        ("builder.pipeline.image:IndexDocument", "builder.pipeline.image:IndexPlans"),
    ),
    "layers-check": Entry("`layers check --json`", ("builder.pipeline.checking:CheckedLayers",)),
    "layers-diff": Entry(
        "`layers diff --json`: the files to edit, or the variant that an edit became",
        ("builder.pipeline.layerfix:LayerDiff",),
    ),
    "layers-export": Entry(
        "`layers export --json`: a layer as a patch of its project, or as a pull request",
        ("builder.pipeline.layerexport:ExportedLayer",),
    ),
    "layers-list": Entry("`layers list --json`", ("builder.layers.catalog:LayerList",)),
    "layers-new": Entry(
        "`layers new --json`: the new layer folder", ("builder.layers.catalog:NewLayer",)
    ),
    "layers-pin": Entry(
        "`layers pin --json`: the pinned inputs", ("builder.layers.catalog:PinnedLayer",)
    ),
    "layers-show": Entry(
        "`layers show NAME --json`: a layer as it is applied, or a profile",
        (
            "builder.layers.catalog:LayerShown",
            "builder.layers.catalog:ProfileShown",
        ),
    ),
    "lock": Entry(
        "`lock --json`: the locked inputs, and what changed; with --diff what an upgrade changes",
        ("builder.pipeline.locking:Locked", "builder.pipeline.locking:LockDiff"),
    ),
    "matrix": Entry(
        "`matrix --json`: every layer on every release",
        ("builder.pipeline.matrix:Matrix",),
    ),
    "lint": Entry(
        "`lint --json`: problems in serve commands", ("builder.serving.lint:LintReport",)
    ),
    "lint-rules": Entry(
        "`lint --rules --json`: what lint looks for", ("builder.serving.lintrules:RuleList",)
    ),
    "memory": Entry(
        "`memory --json`: whether a model fits into a GB10's memory, and the contents of its files",
        ("builder.serving.memory:MemoryEstimate",),
    ),
    "models-list": Entry(
        "`models list --json`: the models that recipes exist for",
        ("builder.serving.models:ModelList",),
    ),
    "models-add": Entry(
        "`models add DIR --json`: the model's file that was written",
        ("builder.serving.models:ModelShown",),
    ),
    "models-show": Entry(
        "`models show NAME --json`: a model, with the source of each value",
        ("builder.serving.models:ModelShown",),
    ),
    "mods-export": Entry(
        "`mods export --json`: the mods that were written or are up to date",
        ("builder.layers.catalog:ExportedMods",),
    ),
    "outdated": Entry(
        "`outdated --json`: what the releases since then change",
        ("builder.serving.outdated:Outdated",),
    ),
    "plan": Entry(
        "`plan --json` and `image --dry-run --json`: the state of each layer on a base",
        ("builder.common.plan:PlanDocument",),
    ),
    "preflight": Entry(
        "`preflight --json`: whether a model starts on a release, and with which kernels",
        ("builder.serving.preflight:Preflight", "builder.serving.preflight:ModelMatrix"),
    ),
    "ptx-instructions": Entry(
        "`ptx instructions --json`: the instructions that run, or those of a file that do not",
        ("builder.ptx.supported:Instructions",),
    ),
    "ptx-races": Entry(
        "`ptx races --json`: each race of a kernel once", ("builder.ptx.runs:KernelRaces",)
    ),
    "ptx-run": Entry(
        "`ptx run --json`: the result of each schedule of a kernel",
        ("builder.ptx.runs:KernelRuns",),
    ),
    "publish": Entry(
        "`publish --json`: what was published where",
        ("builder.publishing.run:Published",),
    ),
    "recipe": Entry(
        "`recipe --json`: what serves a model, with where each value comes from",
        ("builder.serving.recipe:RecipeText",),
    ),
    "rebuild": Entry(
        "`rebuild --json`: an image rebuilt from its own metadata, and the differences",
        ("builder.pipeline.rebuild:Rebuild",),
    ),
    "recipes-export": Entry(
        "`recipes export --json`: the recipes that were written or are up to date",
        ("builder.serving.recipefiles:ExportedRecipes",),
    ),
    "revert": Entry(
        "`revert --json`: the layers that were removed, last applied first",
        ("builder.pipeline.apply:Reverted",),
    ),
    "schema": Entry(
        "`schema --json` without a name: the documents that have a schema",
        ("builder.cli.documents:Names",),
    ),
    "sign": Entry(
        "`sign --json`",
        ("builder.publishing.cosign:Signed",),
    ),
    "tags": Entry(
        "`tags --json`: the images of a repository; with --prune, what retention keeps",
        (
            "builder.publishing.tags:Listing",
            "builder.publishing.tags:Retention",
        ),
    ),
    "spark-verify": Entry(
        "`spark-verify --json` in an image", ("builder.proof.checks:VerifierDocument",)
    ),
    "verify": Entry(
        "`verify --json`, and the evidence that `matrix --evidence` keeps",
        ("builder.proof.report:ReportDocument",),
    ),
    "verify-signature": Entry(
        "`verify-signature --json`",
        ("builder.publishing.cosign:SignatureCheck",),
    ),
}


def names() -> list[str]:
    """The documents that have a schema."""
    return sorted(DOCUMENTS)


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema of a document.

    Raises:
        UsageError: there is no document of that name.
    """
    known = names()
    if name not in known:
        raise UsageError(
            f"no schema {name!r}{did_you_mean(name, known)}", hint=f"schemas: {', '.join(known)}"
        )
    entry = DOCUMENTS[name]
    return json_schema(name, entry.title, *(_loaded(form) for form in entry.forms))


def _loaded(form: str) -> Any:
    module, _, name = form.partition(":")
    return getattr(import_module(module), name)
