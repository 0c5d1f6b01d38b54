"""A layer as a change to send to its project: a patch of the repository, and a pull request's text.

The patch has the paths of the repository and the contents of a release, so ``git apply`` takes it
there, and ``git apply --3way`` on later commits.  The text is the layer's ``upstream.md``, or
else what ``layer.toml`` says.
"""

from __future__ import annotations

import posixpath
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from builder.applier.judging import judge
from builder.applier.layers import Copy, Diff, Graft, Hook, Pull, Replace
from builder.applier.states import NEEDED
from builder.applier.trees import versions
from builder.applier.values import ApplyError, all_match
from builder.common.console import console
from builder.common.document import Document, Text
from builder.common.files import write_atomically
from builder.common.hints import again
from builder.common.plan import Platform
from builder.common.pypi import PackageIndex
from builder.errors import UsageError
from builder.layers.catalog import Catalog, Selection
from builder.layers.edited import EditedFile, unified
from builder.layers.layerfile import description
from builder.layers.pinned import IndexSources
from builder.layers.pulls import Project, described_projects, without_pulls
from builder.pipeline.bases import ReleasedTrees
from builder.pipeline.checking import before_of
from builder.pipeline.options import EXPORT_FORMATS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from builder.applier.layers import Layer
    from builder.applier.trees import Content, Tree
    from builder.pipeline.options import LayerExportOptions

#: The text of a pull request in a layer's folder, written by hand.
PAGE = "upstream.md"
#: The ops that change the text of a project's files.
_TEXTUAL = (Copy, Diff, Graft, Hook, Pull, Replace)
#: Where links of a page lead, below the address of a repository.
_BRANCH = "blob/main/"


class ExportedLayer(Document, frozen=True, kw_only=True):
    """A layer as a patch of its project's repository, with the text of a pull request."""

    name: Text
    repository: Annotated[Text, Meta(description="OWNER/REPO of the project")]
    release: Annotated[Text, Meta(description="the release that the patch was made on")]
    format: Annotated[Text, Meta(description="patch or pr")]
    files: Annotated[tuple[Text, ...], Meta(description="paths in the repository")]
    text: Annotated[Text, Meta(description="the patch, or the pull request in Markdown")]


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a layer changes in a release of its package."""

    layer: Layer
    project: Project
    release: str
    #: text before and after by path in the repository; None where there is no such file
    files: Mapping[str, tuple[str | None, str | None]]

    @cached_property
    def patch(self) -> str:
        """The change as git prints it, below a line that says what it was made from.

        Raises:
            UsageError: a file's change has no place of its own.
        """
        edits = (EditedFile(path=p, before=a, after=b) for p, (a, b) in self.files.items())
        origin = f"{self.layer.digest}, made on {self.layer.package} {self.release}"
        head = f"Layer {self.layer.name}, {origin}\n\n"
        return head + "".join(unified(edit, blobs=True) for edit in edits)


# ------------------------------------------------------------------------------------- the change


def change_of(
    layer: Layer, before: Sequence[Layer], index: PackageIndex, release: str | None = None
) -> Change:
    """A layer's change in a release of its package, or in the newest that needs it.

    Args:
        layer: the layer, which is judged alone: its project has none of the others.
        before: the layers that it comes after, which the error names if it needs one of them.
        index: where the release's wheels are.
        release: a version of the layer's package.

    Raises:
        UsageError: the layer changes no text of a known project, or no release needs it alone.
    """
    project = next((p for p in described_projects() if p.package == layer.package), None)
    if project is None:
        known = ", ".join(p.package for p in described_projects())
        raise UsageError(
            f"layer {layer.name} changes {layer.package}, whose repository is not known; "
            f"known are those of {known}"
        )
    if not any(isinstance(op, _TEXTUAL) for op in layer.ops):
        kinds = ", ".join(sorted({op.kind for op in layer.ops}))
        raise UsageError(
            f"layer {layer.name} changes no text of {project.repository}: its ops are {kinds}",
            hint="spark-build layers list",
        )
    whole = without_pulls(Selection((layer,), ())).layers[0]
    released = ReleasedTrees(package=layer.package, selection=Selection((whole,), ()), index=index)
    sources = IndexSources(index)
    states: dict[str, str] = {}
    for version in reversed(released.versions(release)):
        with suppress(UsageError):
            tree = released.tree(version)
            console.detail(f"judging {layer.name} on {layer.package} {version}")
            try:
                outcome = judge(whole, tree, sources, Platform().target, {})
            except ApplyError as error:
                states[version] = str(error)
                continue
            if outcome.state == NEEDED:
                return _change(whole, project, version, tree, outcome.changes)
            states[version] = outcome.state
    raise _no_release(layer, before, states)


def _no_release(layer: Layer, before: Sequence[Layer], states: Mapping[str, str]) -> UsageError:
    newest = next(iter(states), "")
    words = f"{layer.package} {newest}: {states[newest]}" if newest else "no release was found"
    names = ", ".join(one.name for one in before)
    return UsageError(
        f"no release needs layer {layer.name} alone ({words})"
        + (f"; it comes after {names}, which may be needed first" if names else ""),
        hint=f"spark-build matrix -l {layer.name} --package {layer.package}",
    )


def _change(
    layer: Layer, project: Project, version: str, tree: Tree, changes: Mapping[str, Content | None]
) -> Change:
    packages = {**versions(tree), layer.package: version}
    roots = [
        root for layout in project.layouts if all_match(layout.when, packages)
        for root in layout.roots
    ]  # fmt: skip
    roots.sort(key=lambda root: len(root[1]), reverse=True)  # flashinfer/data/csrc/ before all
    files: dict[str, tuple[str | None, str | None]] = {}
    for path, content in sorted(changes.items()):
        root = next(((a, b) for a, b in roots if path.startswith(b)), None)
        if root is None:
            console.warn(f"{path} is no file of {project.repository}; the patch is without it")
            continue
        data = (tree.read(path), None if content is None else content.read())
        try:
            texts = [None if side is None else side.decode() for side in data]
        except UnicodeDecodeError:
            raise UsageError(f"{path} is not UTF-8 text, which a patch needs") from None
        files[root[0] + path.removeprefix(root[1])] = (texts[0], texts[1])
    if not files:
        raise UsageError(
            f"layer {layer.name} changes no file of {project.repository} in {layer.package} "
            f"{version}",
            hint=again("--release", "VERSION"),
        )
    return Change(layer=layer, project=project, release=version, files=files)


# --------------------------------------------------------------------------------------- the text


def pull_request(layer: Layer, home: Path, patch: str, repository: str) -> str:
    """The text of a pull request, or of an issue with a patch, in Markdown.

    Args:
        layer: what is sent.
        home: the layer's folder, whose ``upstream.md`` is the text.
        patch: :attr:`Change.patch`.
        repository: the address of this project, to which relative links are made to lead.
    """
    page = home / PAGE
    if page.is_file():
        text = _absolute(page.read_text("utf-8"), f"patches/{layer.name}", repository)
    else:
        text = _from_layer(layer, description(home), patch)
    return f"{text.rstrip()}\n\n{_applied(patch)}"


def is_current(layer: Layer, patch: str) -> bool:
    """Whether a patch was made from the layer as it is now."""
    return patch.startswith(f"Layer {layer.name}, {layer.digest}, ")


def _absolute(text: str, folder: str, repository: str) -> str:
    """A page of this project with links that work on another's pages."""
    text = text.replace("https://github.com/OWNER/spark-build", repository)

    def lead(match: re.Match[str]) -> str:
        target = match[1]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        return f"]({repository}/{_BRANCH}{path})"

    return re.sub(r"\]\(([^)\s]+)\)", lead, text)


def _from_layer(layer: Layer, words: str, patch: str) -> str:
    """The parts that every report has, from ``layer.toml`` alone."""
    notes = [note for variant in layer.variants for note in variant.notes]
    bug = layer.provenance.get("bug", ())
    threads = [str(one) for one in (bug if isinstance(bug, (list, tuple)) else (bug,)) if one]
    evidence = [*dict.fromkeys(notes), *(f"reported in {thread}" for thread in threads)]
    release = made_on(patch)[1]
    base = f"pypi:vllm=={release if layer.package == 'vllm' else 'VERSION'}"
    parts = [
        f"# {layer.summary}",
        "## What",
        words.strip(),
        "## Evidence",
        "\n".join(f"- {line}" for line in evidence) or "- none is recorded in the layer",
        "## How to reproduce, without a GPU",
        f"```sh\nspark-build plan --layers {layer.name} --base {base}\n```",
    ]
    return "\n\n".join(parts)


def made_on(patch: str) -> tuple[str, str]:
    """The package and the release that a patch was made on."""
    package, _, release = patch.partition("\n")[0].rpartition("made on ")[2].partition(" ")
    return package, release


def _applied(patch: str) -> str:
    """The part with the patch, which every text ends with."""
    package, release = made_on(patch)
    diff = patch.partition("\n\n")[2]
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", diff)), default=0))
    return (
        f"## The patch\n\nMade on {package} {release}, with the paths of the repository; "
        f"`git apply --3way` also takes it on later commits.\n\n{fence}diff\n{diff}{fence}\n"
    )


# ------------------------------------------------------------------------------------ the command


def export_layer(options: LayerExportOptions) -> ExportedLayer:
    """A layer as a patch or as the text of a pull request.

    Raises:
        UsageError: the format is unknown, or as of :func:`change_of`.
    """
    if options.format not in EXPORT_FORMATS:
        raise UsageError(f"--format {options.format} is not one of {', '.join(EXPORT_FORMATS)}")
    catalog = Catalog.discover(options.patches)
    catalog.say_shadows([options.name])
    layer = catalog.layer(options.name)
    index = PackageIndex(refresh=options.refresh)
    change = change_of(layer, before_of(catalog, layer), index, options.release)
    for op in layer.ops:
        if not isinstance(op, _TEXTUAL):
            console.warn(f"{op.kind} {op.subject}: no text, so the patch is without it")
    home = catalog.folders[layer.name]
    text = change.patch
    if options.format == "pr":
        text = pull_request(change.layer, home, text, options.repository.rstrip("/"))
    return ExportedLayer(
        name=layer.name,
        repository=change.project.repository,
        release=change.release,
        format=options.format,
        files=tuple(change.files),
        text=text,
    )


def reports(catalog: Catalog) -> list[str]:
    """The layers with a text for their project."""
    return [name for name, home in catalog.folders.items() if (home / PAGE).is_file()]


def write_patches(folder: Path) -> None:
    """Write ``change.patch`` of each layer with a text, below a folder of the layer's name."""
    catalog = Catalog.discover()
    index = PackageIndex()
    for name in reports(catalog):
        layer = catalog.layer(name)
        change = change_of(layer, before_of(catalog, layer), index)
        write_atomically(folder / name / "change.patch", change.patch.encode())


if __name__ == "__main__":
    write_patches(Path("docs") / "upstream")
