"""The command line: ``apply|revert|status|finish [--layers FILE] [--root DIR]``."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from builder.applier.applying import apply_layers, finish
from builder.applier.edits import ENV_PTH
from builder.applier.files import read_regular
from builder.applier.layers import Layer
from builder.applier.receipts import env_of, receipts_of
from builder.applier.sources import VENDORED, Keeper, PipSources, cache_folders
from builder.applier.states import NEEDED, Outcome, Target
from builder.applier.store import Store
from builder.applier.trees import DirTree, find_site_packages, versions
from builder.applier.values import (
    EXIT_USAGE,
    ApplyError,
    all_match,
    part,
    read_value,
    say,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Bytes of a bundle of layers; the largest has 0.5 MB.
_BUNDLE_BYTES = 64 << 20


@dataclass(frozen=True)
class _Bundle:
    """The layers of a mod, and their packages."""

    name: str
    layers: Sequence[Layer] = field(metadata=part(lambda rendered, _: Layer.read(rendered)))
    needs: Mapping[str, str] = field(default_factory=dict)
    needs_reason: str = field(default="", metadata={"key": "needs_reason"})


def _apply(options: argparse.Namespace, bundle: _Bundle, root: Path) -> None:
    def report(outcome: Outcome) -> None:
        say(f"  {outcome.state:<15}{outcome.layer}: {outcome.reason}")
        for note in outcome.notes if outcome.state == NEEDED else []:
            say(f"  {'':<15}note: {note}")

    folders = [Path(options.cache)] if options.cache else cache_folders(os.environ)
    vendored = Path(options.layers).resolve().parent / VENDORED
    sources = PipSources(keeper=Keeper(folders, vendored))
    say(f"spark-build: {bundle.name}, {len(bundle.layers)} layers, on {root}")
    packages = versions(DirTree(root))
    if not all_match(bundle.needs, packages):
        wanted = ", ".join(f"{name} {spec}" for name, spec in bundle.needs.items())
        raise ApplyError(
            f"{bundle.name} needs {wanted}, this is vllm {packages.get('vllm')}: "
            f"{bundle.needs_reason}",
            EXIT_USAGE,
        )
    outcomes = apply_layers(root, bundle.layers, sources, Target.here(), report)
    for name, value in env_of(DirTree(root)).items():
        if os.environ.get(name, value) != value:
            say(
                f"warning: {name}={os.environ[name]} is set in this environment and overrides "
                f"{value}"
            )
        say(f"  default        {name}={value}  (by {ENV_PTH}, for every Python that starts here)")
    flags = [flag for outcome in outcomes for flag in outcome.serve_flags]
    moe = [flag for outcome in outcomes for flag in outcome.moe_serve_flags]
    if flags:
        say(f"  start vLLM with: {' '.join(flags)}")
    if moe:
        say(f"  and, for MoE models whose experts it supports: {' '.join(moe)}")


def _read_bundle(path: str | None) -> _Bundle:
    if path is None:
        raise ApplyError("no layers named", EXIT_USAGE, "--layers layers.json")
    try:
        raw = json.loads(read_regular(path, _BUNDLE_BYTES))
        json.dumps(raw, ensure_ascii=False).encode()  # half characters are in no file
    except (OSError, ValueError, RecursionError) as error:
        raise ApplyError(f"{path} cannot be read: {error}", EXIT_USAGE) from None
    bundle: _Bundle = read_value(_Bundle, raw, path)
    return bundle


def main(argv: Sequence[str] | None = None) -> int:
    """Run the applier's command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="spark_apply.pyz",
        description="apply spark-build layers to site-packages",
    )
    parser.add_argument("command", choices=("apply", "revert", "status", "finish"))
    parser.add_argument("--layers", help="bundle: JSON object with the rendered layers")
    parser.add_argument("--root", help="site-packages directory (default: where vLLM is)")
    parser.add_argument(
        "--cache", help="directory for downloaded wheels (default: the first that takes them)"
    )
    parser.add_argument("--owners", help="finish: JSON object, path to [mode, uid, gid]")
    options = parser.parse_args(argv)
    try:
        root = Path(options.root) if options.root else find_site_packages()
        if options.command == "finish":
            removed = finish(root, Path(options.owners) if options.owners else None)
            say(f"spark-build: {len(removed)} files removed, the others match their records")
            return 0
        if options.command == "apply":
            _apply(options, _read_bundle(options.layers), root)
        elif options.command == "revert":
            named = [layer.name for layer in _read_bundle(options.layers).layers]
            with Store(root) as store:
                for name in store.revert(named):
                    say(f"  reverted       {name}")
        else:
            for receipt in receipts_of(DirTree(root)):
                print(f"{receipt.layer}\t{receipt.variant}\t{len(receipt.files)} files")
    except ApplyError as error:
        say(f"error: {error}")
        if error.hint:
            say(f"  try: {error.hint}")
        return error.code
    except OSError as error:
        say(f"error: cannot use {error.filename or 'a file'}: {error.strerror or error}")
        return EXIT_USAGE
    except KeyboardInterrupt:
        say("interrupted; the layer in progress was rolled back")
        return 130
    return 0
