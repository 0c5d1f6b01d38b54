"""Where each value of a recipe comes from, and what was measured with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.serving.documents import Recipe, Setting


def explanation(recipe: Recipe) -> str:
    """The recipe for people, each value with its origin."""
    return "".join(f"{line}\n" for line in _lines(recipe))


def _lines(recipe: Recipe) -> Iterator[str]:
    yield f"{recipe.id} on vLLM {recipe.vllm}, profile {recipe.profile}, {recipe.topology}"
    yield f"image {recipe.image.ref}"
    if recipe.image.build:
        yield f"  {recipe.image.build}"
    yield from _settings("flags", recipe.flags)
    yield from _settings("variables", recipe.env)
    for node in recipe.nodes if len(recipe.nodes) > 1 else ():
        yield from _settings(f"node {node.rank}, {node.address}", (*node.flags, *node.env))
    if recipe.left_out:
        yield "left out"
        for one in recipe.left_out:
            yield f"  {' '.join(filter(None, (one.name, one.value)))}"
            yield f"      {one.origin}"
            yield f"      {one.reason}"
    if recipe.unknown:
        yield f"not known of the model: {', '.join(recipe.unknown)}"
    for note in recipe.notes:
        yield f"note: {note}"
    for failure in recipe.failures:
        yield f"known failure: {failure.what}"
        yield f"      helps: {failure.helps} ({failure.source})"
    yield "measured by others, with this profile's kernels and not with this very recipe:"
    for figure in recipe.measured:
        yield f"  {figure.tokens_per_second:g} tokens/s at {figure.concurrency}: {figure.setup}"
        yield f"      {figure.source}"
    if not recipe.measured:
        yield "  nothing is known"


def _settings(title: str, settings: tuple[Setting, ...]) -> Iterator[str]:
    if settings:
        yield title
    for one in settings:
        yield f"  {' '.join(one.words)}"
        yield f"      {one.origin}"
