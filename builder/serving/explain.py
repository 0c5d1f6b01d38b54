"""Where each value of a recipe comes from, and what was measured with it."""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING

from builder.serving.memorydocuments import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.serving.documents import Recipe, RecipeMemory, Setting


def explanation(recipe: Recipe) -> str:
    """The recipe as text, each value with its origin; lines are as wide as the terminal, or 100.

    Commands and settings are not wrapped.
    """
    width = max(40, min(100, shutil.get_terminal_size((100, 24)).columns))
    return "".join(f"{line}\n" for long in _lines(recipe) for line in _wrapped(long, width))


def _wrapped(line: str, width: int) -> list[str]:
    words = line.lstrip(" ")
    indent = " " * (len(line) - len(words))
    if words.startswith(("--", "spark-build ")) or len(line) <= width:
        return [line]
    return textwrap.wrap(
        words, width, initial_indent=indent, subsequent_indent=indent or "  ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _lines(recipe: Recipe) -> Iterator[str]:
    yield f"{recipe.id} on vLLM {recipe.vllm}, profile {recipe.profile}, {recipe.topology}"
    yield f"image {recipe.image.ref}"
    if recipe.image.build:
        yield f"  {recipe.image.build}"
    yield from _settings("flags", recipe.flags)
    yield from _settings("variables", recipe.env)
    yield from _nodes(recipe)
    if recipe.memory:
        yield from _memory(recipe.memory)
    yield from _left_out(recipe)
    if recipe.unknown:
        yield f"unknown about the model: {', '.join(recipe.unknown)}"
    for note in recipe.notes:
        yield f"note: {note}"
    for failure in recipe.failures:
        yield f"known failure: {failure.what}"
        yield f"      helps: {failure.helps} ({failure.source})"
    yield "measured by others with the selected kernels, not with this exact recipe:"
    for figure in recipe.measured:
        yield f"  {figure.tokens_per_second:g} tokens/s at {figure.concurrency}: {figure.setup}"
        yield f"      {figure.source}"
    if not recipe.measured:
        yield "  no measurement is known"


def _nodes(recipe: Recipe) -> Iterator[str]:
    for node in recipe.nodes if len(recipe.nodes) > 1 else ():
        yield from _settings(f"node {node.rank}, {node.address}", (*node.flags, *node.env))


def _left_out(recipe: Recipe) -> Iterator[str]:
    if recipe.left_out:
        yield "left out"
    for one in recipe.left_out:
        yield f"  {' '.join(filter(None, (one.name, one.value)))}"
        yield f"      {one.origin}"
        yield f"      {one.reason}"


def _settings(title: str, settings: tuple[Setting, ...]) -> Iterator[str]:
    if settings:
        yield title
    for one in settings:
        yield f"  {' '.join(one.words)}"
        yield f"      {one.origin}"


def _memory(memory: RecipeMemory) -> Iterator[str]:
    yield f"memory of one Spark, estimated: fits {memory.fits}"
    if memory.weights:
        least = "at least " if memory.weights.at_least else ""
        yield f"  weights {least}{memory.weights.bytes / GIB:.2f} GiB"
        yield f"      {memory.weights.source}"
    if cache := memory.kv_cache:
        yield f"  KV cache {cache.bytes / GIB:.2f} GiB"
        yield f"      {cache.sequences} x {cache.context} tokens, {cache.dtype} ({cache.source})"
    if memory.room is not None:
        yield f"  room for it {memory.room / GIB:.2f} GiB, at {memory.utilization:g} of the memory"
        yield f"      {memory.source}"
