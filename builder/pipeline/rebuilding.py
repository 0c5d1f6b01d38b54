"""Rebuild every image of a reference from its own metadata, and report the differences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder import __version__, settings
from builder.common.confirm import confirm
from builder.common.console import console, print_json
from builder.common.pypi import PackageIndex
from builder.common.reference import Ref
from builder.compile.executor import toolkit_choice
from builder.compile.link import DISTRIBUTIONS
from builder.compile.toolchain import WHEELS, of_wheels
from builder.errors import Exit, RemoteError, SparkBuildError, UsageError
from builder.images.registry.client import Repository
from builder.images.registry.copy import Locations
from builder.layers.planner import IndexSources
from builder.pipeline import bases
from builder.pipeline.inputs import stages_of
from builder.pipeline.rebuild import (
    Original,
    Rebuild,
    Rebuilt,
    StoredOriginal,
    rebuild,
    with_own_hooks,
)
from builder.publishing.evidence import toolkit_of_layer
from builder.publishing.run import mirrored_base
from builder.publishing.sources import EngineImage, open_source

if TYPE_CHECKING:
    from collections.abc import Iterable

    from builder.common.plan import PlannedLayer
    from builder.compile.executor import ToolkitChoice
    from builder.images.subject import Subject
    from builder.pipeline.options import RebuildOptions
    from builder.pipeline.rebuild import BaseLookup
    from builder.publishing.sources import Opened

#: The most differences that are printed; the JSON document has all.
_SHOWN = 12


def rebuild_all(options: RebuildOptions) -> None:
    """Rebuild an image from its own metadata; exit 5 if the result differs."""
    index = PackageIndex(refresh=options.refresh)
    compiled = False

    def identify(wanted: BaseLookup) -> Subject:
        return bases.identify_base(
            wanted.reference,
            wanted.selection,
            index,
            platform=wanted.platform,
            python=wanted.python,
            site_packages=wanted.site_packages,
            in_engine=False,
            libraries=DISTRIBUTIONS if compiled else (),
        )

    def agreed(action: str) -> None:
        if not options.yes:
            confirm(action, "", "nothing was rebuilt")

    moved = Ref(options.base) if options.base else None
    with Locations() as places, open_source(Ref(options.image), places) as opened:
        results = []
        for original in _originals(opened, options.image):
            baked = with_own_hooks(original.baked, options.image, options.patches, agreed)
            sections = [row.compile for row in original.baked.plan.layers if row.compile]
            compiled = any(row.stage or row.sources for row in sections)
            made = [row.stage for row in sections if row.stage]
            nvcc = WHEELS if any(of_wheels(stage.inputs) for stage in made) else None
            toolkit = _toolkit(original.baked.plan.layers)
            stages = stages_of(index, nvcc=nvcc, toolkit=toolkit) if compiled else None
            sources = IndexSources(index, stages)
            with console.step(f"rebuild {original.digest}"):
                try:
                    again = rebuild(original, baked, identify, sources, moved)
                except RemoteError as error:
                    mirror = None if moved else _mirror(original)
                    if mirror is None:
                        raise
                    console.say(f"  {error}\n  using the mirrored copy: {mirror}")
                    again = rebuild(original, baked, identify, sources, Ref(mirror))
                results.append(again)
        _report(options.image, results, json=options.json)


def _toolkit(layers: Iterable[PlannedLayer]) -> ToolkitChoice | None:
    """The exact image in which the plan was compiled."""
    for layer in layers:
        if toolkit := toolkit_of_layer(layer):
            image = f"{toolkit.image}@{toolkit.digest}"
            return toolkit_choice(image, settings.BUILDER.value or None)
    return None


def _originals(opened: Opened, text: str) -> list[Original]:
    if isinstance(opened, EngineImage):
        from builder.pipeline.rebuild import EngineOriginal

        return [EngineOriginal(opened.image, opened.baked)]
    originals: list[Original] = [
        StoredOriginal(opened.source, image, opened.baked[image.digest])
        for image in opened.subject.ours
    ]
    if not originals:
        raise UsageError(f"{text} was not made by spark-build, so it has no plan to rebuild from")
    return originals


def _mirror(original: Original) -> str | None:
    """The copy of the base that ``publish --mirror-base`` made."""
    if isinstance(original, StoredOriginal) and isinstance(original.source, Repository):
        return mirrored_base(original.source, original.image)
    return None


def _report(text: str, results: list[Rebuilt], *, json: bool) -> None:
    same = all(result.same for result in results)
    if json:
        print_json(Rebuild(image=text, same=same, images=tuple(results)))
    for result in results:
        for difference in result.differences[:_SHOWN]:
            console.say(f"  {difference.blob}  {difference.where}: {difference.what}")
        if len(result.differences) > _SHOWN:
            console.say(f"  and {len(result.differences) - _SHOWN} more (--json has all of them)")
        if result.same and not json:
            print(f"same {result.digest}")
    if same:
        return
    wrong = next(result for result in results if not result.same)
    first = wrong.differences[0]
    count = len(wrong.differences)
    raise SparkBuildError(
        f"{wrong.digest} does not match its plan: the rebuilt image is {wrong.rebuilt}; "
        f"{count} {'difference' if count == 1 else 'differences'}, "
        f"first {first.blob} {first.where}: {first.what}",
        Exit.VERIFY_FAILED,
        hint=_hint(wrong),
    )


def _hint(wrong: Rebuilt) -> str:
    """The hint for an image of another spark-build, which adds other files."""
    if wrong.made_by != __version__:
        return f"rebuild it with spark-build {wrong.made_by}, not {__version__}"
    if any((d.blob, d.where) == ("plan", "build.files") for d in wrong.differences):
        return f"another build of spark-build {__version__} made it: its files differ"
    return ""
