"""What ``lint`` says of published serve commands: from a release's source, and the release itself.

    python -m benchmarks.lint_field 0.24.0 RECIPES --configurations MODEL_CONFIGS [--json FILE]

RECIPES is a checkout of a collection: recipes of sparkrun and eugr, or vllm-project/recipes, whose
guides have serve commands in Markdown; of these the models with a row for a DGX Spark.
MODEL_CONFIGS is the folder of this name in ai-dynamo/aiconfigurator, which has ``config.json`` of
many checkpoints.  A checkpoint that it lacks may have the shapes of one that it has, in another
quantisation (``LIKE``).
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.preflight_sweep import FORMS
from builder.errors import SparkBuildError
from builder.serving.lint import Linter, lint, serve_commands
from builder.serving.modelfile import model_text
from builder.serving.models import Models
from builder.serving.preflight import preflight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from builder.serving.lint import LintReport

#: A checkpoint -> one with its shapes, and its quantisation, as its name and its card give them.
LIKE: dict[str, tuple[str, str]] = {
    "Intel/Qwen3-Coder-Next-int4-AutoRound": ("Qwen/Qwen3-Coder-Next", "INT4 AutoRound"),
    "Intel/Qwen3.5-122B-A10B-int4-AutoRound": ("Qwen/Qwen3.5-122B-A10B", "INT4 AutoRound"),
    "Intel/Qwen3.5-397B-A17B-int4-AutoRound": ("Qwen/Qwen3.5-397B-A17B", "INT4 AutoRound"),
    "QuantTrio/MiniMax-M2-AWQ": ("MiniMaxAI/MiniMax-M2.5", "AWQ"),
    "Qwen/Qwen3-Coder-Next-FP8": ("Qwen/Qwen3-Coder-Next", "FP8"),
    "Qwen/Qwen3.5-122B-A10B-FP8": ("Qwen/Qwen3.5-122B-A10B", "FP8"),
    "Qwen/Qwen3.5-35B-A3B-FP8": ("Qwen/Qwen3.5-35B-A3B", "FP8"),
    "Qwen/Qwen3.5-397B-A17B-FP8": ("Qwen/Qwen3.5-397B-A17B", "FP8"),
    "Qwen/Qwen3.6-27B": ("Qwen/Qwen3.5-27B", "BF16"),
    "Qwen/Qwen3.6-27B-FP8": ("Qwen/Qwen3.5-27B", "FP8"),
    "Qwen/Qwen3.6-35B-A3B": ("Qwen/Qwen3.5-35B-A3B", "BF16"),
    "Qwen/Qwen3.6-35B-A3B-FP8": ("Qwen/Qwen3.5-35B-A3B", "FP8"),
    "Qwen/Qwen3-VL-Embedding-8B": ("Qwen/Qwen3-VL-8B-Instruct", ""),
    "Qwen/Qwen3-VL-Reranker-8B": ("Qwen/Qwen3-VL-8B-Instruct", ""),
    "cyankiwi/MiniMax-M2.5-AWQ-4bit": ("MiniMaxAI/MiniMax-M2.5", "W4A16"),
    "cyankiwi/MiniMax-M2.7-AWQ-4bit": ("MiniMaxAI/MiniMax-M2.7", "W4A16"),
    "cyankiwi/Qwen3.5-122B-A10B-AWQ-4bit": ("Qwen/Qwen3.5-122B-A10B", "W4A16"),
    "cyankiwi/gemma-4-26B-A4B-it-AWQ-4bit": ("google/gemma-4-26B-A4B", "W4A16"),
    "deepseek-ai/DeepSeek-V4-Flash-0731": ("deepseek-ai/DeepSeek-V4-Flash", ""),
    "google/gemma-4-26B-A4B-it": ("google/gemma-4-26B-A4B", "BF16"),
    "RedHatAI/gemma-4-26B-A4B-it-FP8-dynamic": ("google/gemma-4-26B-A4B", "FP8 per tensor"),
    "RedHatAI/gemma-4-26B-A4B-it-NVFP4": ("nvidia/Gemma-4-26B-A4B-NVFP4", ""),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": (
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
        "BF16",
    ),
}
#: A row for a DGX Spark in a file of vllm-project/recipes.
_SPARK = re.compile(r"dgx_spark_gb10|DGX Spark", re.IGNORECASE)
_FENCED = re.compile(r"^ *```(?:bash|sh|shell|console)?\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def published(folder: Path) -> Iterator[tuple[str, str]]:
    """The names and texts of files with serve commands."""
    for path in sorted(folder.rglob("*.yaml")):
        text = path.read_text("utf-8")
        name = str(path.relative_to(folder))
        guide = re.search(r"^guide: \|\n(.*)", text, re.DOTALL | re.MULTILINE)
        texts = {name: text} if "recipe_version" in text else {}
        if guide and _SPARK.search(text):
            fenced = [
                re.sub(r"^  ", "", one, flags=re.MULTILINE) for one in _FENCED.findall(guide[1])
            ]
            texts = {f"{name}#{number}": one for number, one in enumerate(fenced, 1)}
        for name, one in texts.items():
            if _serves(name, one):
                yield name, one


def _serves(name: str, text: str) -> bool:
    try:
        return bool(serve_commands(name, text))
    except SparkBuildError:  # no script
        return False


def with_configurations(names: set[str], configurations: Path, folder: Path) -> Models:
    """Our models, and one for each other checkpoint whose configuration is known, in a folder."""
    known = Models.discover()
    own = {model.id.value: model.config for model in map(known.model, known.files)}
    files = dict(known.files)
    for name in sorted(names):
        if own.get(name) is not None:
            continue
        like, form = LIKE.get(name, (name, ""))
        given = own.get(like)
        path = configurations / f"{like.replace('/', '--')}_config.json"
        if path.exists():
            config = json.loads(path.read_text("utf-8"))
        elif given is not None:
            config = dict(given.value)
        else:
            continue
        if form:
            config.pop("quantization_config", None)
            config |= {"quantization_config": FORMS[form]} if FORMS[form] else {}
        checkpoint = folder / name.replace("/", "--")
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text(json.dumps(config))
        file = folder / f"{checkpoint.name.lower()}.toml"
        file.write_text(model_text(checkpoint, name))
        files = {n: f for n, f in files.items() if n != file.stem} | {file.stem: file}
    return Models(files)


def figures(report: LintReport, before: LintReport) -> dict[str, Any]:
    """What was asked of how many commands, and the errors and warnings by rule."""
    return {
        "commands": report.commands,
        "answers": collections.Counter(one.answer for one in report.asked),
        "without a configuration": sum(
            any("configuration is not here" in words for words in one.left_out)
            for one in report.asked
        ),
        "from the source": _counted(before),
        "from the release": _counted(report),
    }


def _counted(report: LintReport) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {"error": {}, "warning": {}}
    for one in report.findings:
        of_severity = counts[one.severity]
        of_severity[one.rule] = of_severity.get(one.rule, 0) + 1
    return counts


def main() -> None:
    """Check a collection against a release, and print each finding and the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release")
    parser.add_argument("recipes", type=Path)
    parser.add_argument("--configurations", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    files = list(published(options.recipes))
    names = {command.model for name, text in files for command in serve_commands(name, text)}
    with tempfile.TemporaryDirectory() as folder:
        models = with_configurations(names, options.configurations, Path(folder))
        before = lint(files, Linter(release=options.release), models)
        report = lint(files, Linter(release=options.release, ask=preflight), models)
    for answer in report.asked:
        left = "; ".join(answer.left_out)
        print(
            f"{answer.file}:{answer.line}: {answer.answer}{f' (not asked: {left})' if left else ''}"
        )
    for title, one in (("from the source", before), ("from the release", report)):
        print(f"-- {title}")
        for finding in one.findings:
            place = f"{finding.file}:{finding.line}: {finding.severity}"
            print(f"{place}: {finding.message} [{finding.rule}]")
    result = figures(report, before)
    print(json.dumps(result, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
