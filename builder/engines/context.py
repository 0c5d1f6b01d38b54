"""A build context: one folder for each layer with its final files."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from builder.engines.contents import content_bytes, image_layers
from builder.errors import BuildFailed
from builder.util.console import console, megabytes
from builder.util.hints import TEMPORARY, os_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from builder.applier.trees import Content
    from builder.model.plan import BuildPlan


def folder_of(name: str) -> str:
    """A layer's folder; it has no number, so that adding a layer keeps the others cached."""
    return f"layer-{name}"


@contextlib.contextmanager
def context_of(plan: BuildPlan) -> Iterator[tuple[Path, int]]:
    """A build context with every layer's files, and their size in bytes."""
    with tempfile.TemporaryDirectory(prefix="spark-build-") as folder:
        yield Path(folder), fill_context(Path(folder), plan)


def fill_context(folder: Path, plan: BuildPlan) -> int:
    """Write every layer's files into a build context; returns their size in bytes."""
    added = 0
    for name, files in image_layers(plan):
        target = folder / folder_of(name)
        with console.progress(f"writing {name}", content_bytes(files), said=False) as bar:
            size = write_context(target, files, plan.epoch, bar.advance)
        console.say(f"  {name:<28}{len(files):>5} files {megabytes(size):>10}")
        added += size
    return added


def write_context(
    root: Path,
    files: Mapping[str, Content | None],
    epoch: int,
    moved: Callable[[int], object] = lambda _size: None,
) -> int:
    """Write a layer's files below ``root`` with fixed times and modes; returns their size in bytes.

    Raises:
        BuildFailed: the disk is full or not writable.
    """
    size = 0
    try:
        root.mkdir()
        for path, content in sorted(files.items()):
            if content is None:
                continue
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.read())
            target.chmod(content.mode)
            os.utime(target, (epoch, epoch))
            size += content.size
            moved(content.size)
        for folder, _, _ in os.walk(root, topdown=False):
            Path(folder).chmod(0o755)
            os.utime(folder, (epoch, epoch))
    except OSError as error:
        shutil.rmtree(root, ignore_errors=True)
        raise BuildFailed(
            f"cannot write the build context below {root.parent}: {error.strerror}",
            hint=os_hint(error, TEMPORARY),
        ) from error
    return size
