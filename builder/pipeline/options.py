"""The command-line options as frozen values."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

from builder.common import options as opt
from builder.common.options import Argument, Fields, Option
from builder.common.reference import Ref
from builder.errors import UsageError

#: What `layers export` writes.
EXPORT_FORMATS = ("patch", "pr")
#: This project, as its pages name it.
HOME = "https://github.com/OWNER/spark-build"
#: Packages whose releases `matrix` has as rows.
MATRIX_PACKAGES = ("vllm", "flashinfer-python", "nvidia-cutlass-dsl")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options for layers, base, and the sources of a plan's inputs."""

    #: profiles and layers as given; each may have several names with commas
    layers: opt.LayersOrPulls = ()
    #: pull requests and commits, in the order of application
    with_pr: opt.WithPr = ()
    base: Annotated[
        str | None,
        Option(
            "IMAGE, docker://IMAGE (read from its registry, not pulled), oci:DIR[:NAME], "
            "pypi:vllm==VERSION[,NAME==VERSION...], or dir:SITE_PACKAGES (default: the profile's).",
            "BASE",
            "-b",
        ),
    ] = None
    platform: opt.PlatformName = None
    #: for a ``pypi:`` base
    python: Annotated[str | None, Option("Python of a pypi: base (default: 3.12).", "VERSION")] = (
        None
    )
    site_packages: Annotated[
        str | None, Option("The site-packages path in the image that the overlay is for.", "DIR")
    ] = None
    #: additional folders of layers
    patches: opt.Patches = ()
    #: one image layer for all patches
    single_layer: Annotated[bool, Option("One layer for all patches (oci engine).")] = False
    #: whether missing kernels may be compiled, in which image, and where that runs
    compile_here: opt.Compile = False
    toolkit: opt.Toolkit = None
    builder: opt.Builder = ""
    #: local git clones to use instead of a forge: ``[OWNER/REPO=]DIR``
    forge_clone: opt.ForgeClone = ()
    #: fail unless the project's lock is current
    locked: opt.Locked = False
    #: query the package index instead of the cache
    refresh: opt.Refresh = False
    #: ignore the project's lock
    upgrade: Annotated[bool, Option("Look everything up again, and lock the current state.")] = (
        False
    )

    def __post_init__(self) -> None:
        """Refuse a toolkit without anything to compile."""
        if self.toolkit and not self.compile_here:
            raise UsageError(
                f"--toolkit {self.toolkit} has no effect without --compile", hint="add --compile"
            )

    @classmethod
    def selecting(
        cls,
        layers: Sequence[str] | None,
        with_pr: Sequence[str] | None,
        forge_clone: Sequence[str] | None,
        patches: Sequence[Path] | None,
    ) -> Self:
        """The selection of a command line; None means that the command lacks the option."""
        return cls(
            layers=tuple(layers or ()),
            with_pr=tuple(with_pr or ()),
            forge_clone=tuple(forge_clone or ()),
            patches=tuple(patches or ()),
        )

    @cached_property
    def base_ref(self) -> Ref | None:
        """The base that was named, if one was."""
        return Ref(self.base) if self.base else None

    @property
    def names(self) -> tuple[str, ...]:
        """The single names in ``layers``."""
        words = (word.strip() for text in self.layers for word in text.split(","))
        return tuple(word for word in words if word)


@dataclass(frozen=True, kw_only=True)
class BakeOptions:
    """Profiles, bases, and image names."""

    #: each is one selection, which may list several layers with commas
    layers: Annotated[
        tuple[str, ...],
        Option(
            "A profile, or layers with commas; each of these is one image a base.",
            "L[,L...]",
            "-l",
            complete="layers",
        ),
    ] = ()
    base: Annotated[
        tuple[str, ...],
        Option("An image in a registry; may be repeated.", "[docker://]IMAGE", "-b"),
    ] = ()
    #: a file with both lists; an option replaces its list
    images: Annotated[
        Path | None,
        Option("JSON with the lists profiles and bases; -l or -b replace one of them.", "FILE"),
    ] = None
    #: build only these images; the others still count for names and tags
    target: Annotated[
        tuple[str, ...],
        Option("Only this image of the list; may be repeated (default: all).", "TARGET"),
    ] = ()
    tag_prefix: Annotated[
        str,
        Option(
            "Repository of the images; the tags are RELEASE-PROFILE, and PROFILE for the last "
            "base.",
            "[HOST/]NAME",
        ),
    ] = "spark-build"
    #: options that are the same for all images
    plan: Annotated[PlanOptions, Fields("platform", "patches", "locked", "refresh")]


@dataclass(frozen=True, kw_only=True)
class ModOptions:
    """Which mods to export, and how."""

    names: Annotated[tuple[str, ...], Argument("Mods (default: one for each profile).", "MOD")] = ()
    directory: Annotated[
        Path | None,
        Option(
            "Output directory (default: mods/ of the checkout, or the current directory).",
            "DIR",
            "--in",
        ),
    ] = None
    layers: opt.OptionalLayers = ()
    with_pr: opt.WithPr = ()
    patches: opt.Patches = ()
    forge_clone: opt.ForgeClone = ()
    vendor: Annotated[
        str | None,
        Option(
            "Put in what these vLLM releases need on arm64, to start without network.",
            "VERSION[,...]",
        ),
    ] = None
    zipped: Annotated[bool, Option("Write NAME.zip, for spark-vllm-docker.", names="--zip")] = False
    check: Annotated[bool, Option("Only check whether they are up to date (exit 9 if not).")] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class MatrixOptions:
    """Which layers and releases to look at, and what to ask each release."""

    layers: Annotated[
        tuple[str, ...],
        Option(
            "Profiles and layers, comma-separated (default: your own with --patches or --mods, "
            "else every one).",
            "L[,L...]",
            "--layers -l",
            complete="layers",
        ),
    ] = ()
    releases: opt.Releases = None
    package: Annotated[
        str,
        Option(
            "Rows are releases of this package, each with the layers that change it.",
            "|".join(MATRIX_PACKAGES),
            complete=MATRIX_PACKAGES,
        ),
    ] = "vllm"
    pre: Annotated[bool, Option("Also pre-releases and nightlies that the index has.")] = False
    index_url: Annotated[
        str | None,
        Option("Ask this index first, such as one with nightlies; then the configured one.", "URL"),
    ] = None
    wheels: Annotated[
        Path | None, Option("Look at the wheels in this directory instead of releases.", "DIR")
    ] = None
    mods: Annotated[
        tuple[Path, ...],
        Option(
            "A mod (folder or zip file with run.sh) or a patch file to judge; may be repeated.",
            "PATH",
            "--mods",
        ),
    ] = ()
    dispatch: Annotated[
        bool, Option("Also record which kernels each release selects on SM121.")
    ] = False
    choices: Annotated[bool, Option("Also try every backend that a release offers.")] = False
    evidence: Annotated[
        Path | None, Option("Keep each release's evidence in this directory.", "DIR")
    ] = None
    platform: Annotated[
        str | None,
        Option(
            "linux/arm64 (default) or linux/amd64; both adds rows where amd64 differs.",
            "PLATFORM",
            complete=("linux/arm64", "linux/amd64", "both"),
        ),
    ] = None
    patches: opt.Patches = ()
    refresh: opt.Refresh = False


@dataclass(frozen=True, kw_only=True)
class RebuildOptions:
    """Which image to rebuild, and from what."""

    image: Annotated[
        str, Argument("oci:DIR, HOST/NAME@sha256:..., or an image in a Docker Engine.", "IMAGE")
    ]
    engine: Annotated[
        str, Option("oci, the only engine with reproducible bytes.", "oci", complete=("oci",))
    ] = "oci"
    base: Annotated[
        str | None, Option("Where the base image is now (default: as in the plan).", "BASE")
    ] = None
    allow_host: Annotated[
        tuple[str, ...],
        Option(
            "Contact this registry if the image's plan names it (always allowed: the image's own "
            "and docker.io); may be repeated.",
            "HOST[:PORT]",
        ),
    ] = ()
    patches: opt.Patches = ()
    yes: Annotated[
        bool,
        Option(
            "Run hooks and build files of your own layers, and of the base's vLLM commit, without "
            "confirmation.",
            names="-y",
        ),
    ] = False
    refresh: opt.Refresh = False
    json: opt.Json = False


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    """The layer, the base that it drifted on, and where its files are edited."""

    name: Annotated[str, Argument("The layer.", "NAME", complete="layer")]
    base: Annotated[
        str, Option("The base that it should fit, such as pypi:vllm==VERSION.", "BASE", "-b")
    ]
    edit: Annotated[
        Path | None,
        Option(
            "Edit in this folder: it is written at the first call and read at the second "
            "(default: an editor, EDITOR, opens the files).",
            "DIR",
        ),
    ] = None
    file: Annotated[
        tuple[str, ...],
        Option("Also unpack this file, a path below site-packages; may be repeated.", "PATH"),
    ] = ()
    layers: Annotated[
        tuple[str, ...],
        Option(
            "Profiles and layers to apply first (default: those that the layer comes after).",
            "L[,L...]",
            "--layers -l",
            complete="layers",
        ),
    ] = ()
    releases: Annotated[
        str | None,
        Option(
            "Releases of the layer's package that may get the change (default: all).",
            "VERSION[,...]",
        ),
    ] = None
    platform: opt.PlatformName = None
    patches: opt.Patches = ()
    refresh: opt.Refresh = False


@dataclass(frozen=True, kw_only=True)
class LayerExportOptions:
    """The layer to send to its project, and in which form."""

    name: Annotated[str, Argument("The layer.", "NAME", complete="layer")]
    format: Annotated[
        str,
        Option(
            "patch for git apply, or pr: the text of a pull request with it.",
            "|".join(EXPORT_FORMATS),
            "--format",
            complete=EXPORT_FORMATS,
        ),
    ] = "patch"
    release: Annotated[
        str | None,
        Option(
            "The release of the layer's package to change (default: the newest that needs it).",
            "VERSION",
        ),
    ] = None
    repository: Annotated[
        str, Option("The address of your copy of this project, which links lead to.", "URL")
    ] = HOME
    patches: opt.Patches = ()
    refresh: opt.Refresh = False


@dataclass(frozen=True, kw_only=True)
class OutdatedOptions:
    """What is watched, since when, and whom to ask."""

    layers: Annotated[
        tuple[str, ...],
        Option(
            "Profiles and layers to watch (default: those of the lock, else every profile).",
            "L[,L...]",
            "--layers -l",
            complete="layers",
        ),
    ] = ()
    since: Annotated[
        str | None,
        Option(
            "A release of vLLM, or a day such as 2026-11-20 (default: the locked release, else "
            "the newest that is recorded).",
            "VERSION|DAY",
        ),
    ] = None
    min_age: Annotated[
        str, Option("Go to no release younger than this, for caution; for example 7d.", "DAYS")
    ] = "0d"
    ask: Annotated[
        bool,
        Option("Ask the releases: kernels that are not recorded, and a preflight of each recipe."),
    ] = False
    no_forge: Annotated[bool, Option("Do not ask the forge about commits and threads.")] = False
    evidence: Annotated[Path, Option("Directory of the records, one file per release.", "DIR")] = (
        Path("docs/evidence")
    )
    recipes: Annotated[Path, Option("Directory of recipes to check.", "DIR")] = Path("recipes")
    check: Annotated[bool, Option("Exit 9 if there is a release to go to, or a changed wheel.")] = (
        False
    )
    forge_clone: opt.ForgeClone = ()
    platform: opt.PlatformName = None
    patches: opt.Patches = ()
    refresh: opt.Refresh = False
