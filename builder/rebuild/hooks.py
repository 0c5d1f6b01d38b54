"""Layers with hooks: a rebuild runs them from local folders, never from an image.

A hook is Python code.  Code in an image is not trusted, so the image only names the text
by digest: the same text must exist locally, and the user must agree to run it.
"""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING

from builder.errors import UsageError
from builder.layers.catalog import Catalog
from builder.verify.trust import has_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from builder.applier.layers import Layer
    from builder.publish.subject import Baked


def with_own_hooks(
    baked: Baked, image: str, patches: Sequence[Path], ask: Callable[[str], None]
) -> Baked:
    """The image's metadata, with the local text of every layer that has a hook.

    Args:
        baked: the image's metadata.
        image: the name that the user gave.
        patches: the user's folders of layers; read only if a layer has a hook.
        ask: asks for confirmation; raises if the answer is no.

    Raises:
        UsageError: a layer is missing, or differs from the plan's.
    """
    if not any(map(has_hook, baked.layers)):
        return baked
    catalog = Catalog.discover(patches)
    digests = {layer.name: layer.digest for layer in baked.plan.layers}
    return dataclasses.replace(
        baked,
        layers=tuple(
            _own(layer, digests, image, catalog, ask) if has_hook(layer) else layer
            for layer in baked.layers
        ),
    )


def _own(
    layer: Layer,
    digests: Mapping[str, str],
    image: str,
    catalog: Catalog,
    ask: Callable[[str], None],
) -> Layer:
    name = layer.name
    what = f"layer {name} of {image} has a hook (Python code)"
    if name not in catalog.folders:
        raise UsageError(
            f"{what}; code from an image is never run, and there is no local layer of this name: "
            f"--patches must name a folder with your copy of {name}/layer.toml",
            hint=f"spark-build rebuild {shlex.quote(image)} --patches DIR",
        )
    folder, own = catalog.folders[name], catalog.layer(name)
    if own.digest != digests.get(name):
        raise UsageError(
            f"{what}, but {folder} differs: the image's plan says layer "
            f"{str(digests.get(name))[:16]}, the folder is {own.digest[:16]}; use the folder that "
            f"the image was made from",
            hint=f"spark-build layers show {name}",
        )
    ask(f"run the hook of {folder} as you")
    return own
