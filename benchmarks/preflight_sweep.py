"""How many architectures of a release ``preflight`` can answer for, and why not for the rest.

    python -m benchmarks.preflight_sweep 0.33.0 0.24.0 [--form FP8] [--only NAME,...] [--json FILE]

Each architecture of the release's registry that Transformers knows gets a small configuration, made
from its Transformers class in the release's sandbox, with a quantisation in the form that is asked.
An answer is the release's (it starts, or it refuses) or ours: a part that stands in was called, or
the sandbox lacks something.  The share of ours is the figure to bring down.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.common.pypi import PackageIndex
from builder.common.reference import Ref
from builder.layers.catalog import Selection
from builder.pipeline.bases import identify_base
from builder.proof.sandbox import lay_out
from builder.proof.trust import TrustedSources
from builder.proof.wholemodel import ModelAnswer, Release, Target, sentence
from builder.serving.configurations import FORMS

if TYPE_CHECKING:
    from collections.abc import Collection

#: Run in the sandbox: architectures by the release's registry, with a configuration of two layers.
CONFIGURATIONS = """
import ast, json, sys
from pathlib import Path
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto as auto

tree = ast.parse((Path(sys.argv[1]) / "vllm/model_executor/models/registry.py").read_text())
names = {"_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS"}
registered = []
for node in tree.body:
    if isinstance(node, ast.Assign) and node.targets[0].id in names:
        registered += [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
kinds = {}
for task in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "MULTIMODAL_LM"):
    for kind, names in getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).items():
        for name in [names] if isinstance(names, str) else names:
            kinds.setdefault(name, []).append(kind)
def small(config):  # two layers, where it is easy; a validation may want more
    lengths = {key: config.get(key) for key in ("num_hidden_layers", "n_layer", "n_layers")}
    for key, value in list(config.items()):
        if isinstance(value, dict):
            small(value)
        elif key in lengths and isinstance(value, int) and value > 2:
            config[key] = 2
        elif isinstance(value, list) and len(value) > 2 and len(value) in lengths.values():
            config[key] = value[:2]
    return config
made = {}
for name in registered:
    made[name] = None
    for kind in kinds.get(name, ()):
        try:
            config = small(CONFIG_MAPPING[kind]().to_dict())
        except Exception:
            continue
        made[name] = {**config, "architectures": [name], "torch_dtype": "bfloat16"}
        break
print(json.dumps(made, default=str))
"""


def release_of(vllm: str) -> tuple[Release, Any]:
    """A release, and its base, which must be closed."""
    base = identify_base(
        Ref(f"pypi:vllm=={vllm}"), Selection((), ()), PackageIndex(), platform=None
    )
    return Release(Target.of(base), TrustedSources()), base


#: Of the releases that were asked, since a sweep of each form needs the same ones.
_configurations: dict[str, dict[str, dict[str, Any] | None]] = {}


def configurations(vllm: str, release: Release) -> dict[str, dict[str, Any] | None]:
    """Architectures of a release, with a configuration; None where Transformers has none."""
    if vllm not in _configurations:
        _configurations[vllm] = _from_transformers(release)
    return _configurations[vllm]


def _from_transformers(release: Release) -> dict[str, dict[str, Any] | None]:
    lay_out(release.target.tree)
    paths = release.paths
    done = subprocess.run(
        [str(release.python), "-c", CONFIGURATIONS, paths[0]], capture_output=True, text=True,
        check=True, env={"PYTHONPATH": ":".join(paths[1:]), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    return dict(json.loads(done.stdout))


#: Errors that Python raises where a configuration lacks a value, or has one of another form.
OPEN = (
    "AttributeError", "KeyError", "TypeError", "IndexError", "AssertionError", "ValidationError",
)  # fmt: skip


def outcome(answer: ModelAnswer) -> tuple[str, str]:
    """Whether it starts, is refused or says nothing, and why."""
    if answer.error is None:
        return "starts", ""
    if answer.not_run:
        return "ours", answer.not_run
    why = f"{answer.error.type}: {sentence(answer.error)} ({answer.error.where})"
    # what a class of Transformers leaves open, and a checkpoint's configuration says
    unfit = answer.error.type in OPEN or answer.error.type.startswith("StrictDataclass")
    return "unfit configuration" if unfit else "refused", why


def sweep(
    vllm: str, form: str, folder: Path, only: Collection[str] = ()
) -> dict[str, tuple[str, str]]:
    """The outcome of each architecture of a release, or of those that are named."""
    release, base = release_of(vllm)
    found: dict[str, tuple[str, str]] = {}
    with closing(base):
        for name, config in configurations(vllm, release).items():
            if only and name not in only:
                continue
            if config is None:
                found[name] = "no configuration", ""
                continue
            own = folder / name
            own.mkdir(exist_ok=True)
            quantisation = FORMS[form]
            more = {} if quantisation is None else {"quantization_config": quantisation}
            (own / "config.json").write_text(json.dumps({**config, **more}))
            (answer,) = release.ask(own, [()])
            found[name] = outcome(answer)
    return found


def main() -> None:
    """Ask each release, and print a line for each with the reasons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="+")
    parser.add_argument("--form", choices=FORMS, default="NVFP4")
    parser.add_argument("--only", default="", help="architectures, separated by commas")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for vllm in options.releases:
        with tempfile.TemporaryDirectory() as folder:
            only = [name for name in options.only.split(",") if name]
            found = sweep(vllm, options.form, Path(folder), only)
        results[f"{vllm} {options.form}"] = found
        counts = collections.Counter(word for word, _ in found.values())
        asked = sum(counts.values()) - counts["no configuration"]
        print(
            f"{vllm} {options.form}: {asked} asked, {counts['starts']} start, "
            f"{counts['refused']} refused, {counts['ours']} ours "
            f"({100 * counts['ours'] / max(asked, 1):.1f} %), {counts['unfit configuration']} with "
            f"an unfit configuration; {counts['no configuration']} not known to Transformers"
        )
        reasons = collections.Counter((w, why[:160]) for w, why in found.values() if why)
        for (word, why), count in reasons.most_common():
            print(f"  {count:>3} {word}: {why}")
        if options.json is not None:
            with contextlib.suppress(FileNotFoundError):
                results = {**json.loads(options.json.read_text()), **results}
            options.json.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
