"""The options of a verification, as a frozen value."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from builder.common import options as opt
from builder.common.options import Argument, Fields, Option
from builder.pipeline.options import PlanOptions

if TYPE_CHECKING:
    from builder.proof.gpuoptions import GpuOptions


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Options for verification: target, comparison, and levels."""

    target: Annotated[
        str, Argument("IMAGE, oci:DIR, pypi:vllm==VERSION, or dir:SITE_PACKAGES.", "TARGET")
    ]
    plan: Annotated[
        PlanOptions,
        Fields(
            "layers", "with_pr", "platform", "patches", "forge_clone", "locked", "refresh",
            layers=opt.OptionalLayers,
        ),
    ]  # fmt: skip
    level: Annotated[
        tuple[str, ...],
        Option(
            "static, imports, dispatch (by default), model, codegen, numbers, binaries, device, "
            "serve. Named levels must run.",
            "LEVEL[,LEVEL...]",
            complete="levels",
        ),
    ] = ()
    require: Annotated[
        tuple[str, ...],
        Option("Also run these levels; they must run.", "LEVEL[,LEVEL...]", complete="levels"),
    ] = ()
    #: additional outputs of the evidence: an HTML page, and a Markdown file to append to
    html: Annotated[
        Path | None, Option("Also write the evidence as a self-contained HTML page.", "FILE")
    ] = None
    summary: Annotated[
        Path | None, Option("Append the evidence as Markdown, for CI summaries.", "FILE")
    ] = None
    prove_necessary: Annotated[
        bool,
        Option("Remove each layer in turn and show which check then fails (adds codegen)."),
    ] = False
    bench: Annotated[
        bool, Option("Level serve: also measure tokens/s and time to first token.")
    ] = False
    against: Annotated[
        Path | None, Option("Evidence (JSON) with a benchmark to compare with.", "FILE")
    ] = None
    model: Annotated[
        str | None,
        Option(
            "Level model: a folder with config.json, a model's name or its id, instead of the "
            "known ones. Level serve: this model instead of the tiny generated ones.",
            "MODEL",
        ),
    ] = None
    models: opt.ModelFolders = ()
    serve_args: Annotated[
        str, Option("Level serve: extra arguments for vllm serve, as one string.", "ARGS")
    ] = ""
    #: whether unknown code from the target may run here as the user
    trust_image: opt.TrustImage = False

    @property
    def gpu(self) -> "GpuOptions":
        """The options of the levels that need a GPU."""
        from builder.proof.gpuoptions import GpuOptions

        return GpuOptions(
            bench=self.bench,
            against=self.against,
            model=self.model,
            serve_args=self.serve_args,
        )
