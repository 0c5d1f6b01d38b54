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
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.errors import SparkBuildError
from builder.serving.configurations import quantised
from builder.serving.lint import Linter, lint, serve_commands
from builder.serving.modelfile import model_text
from builder.serving.models import Models
from builder.serving.preflight import preflight

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
            if "--omni" not in one and _serves(name, one):  # vLLM-Omni is another server
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
            config["quantization_config"] = quantised(config, form)
        checkpoint = folder / name.replace("/", "--")
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text(json.dumps(config))
        file = folder / f"{checkpoint.name.lower()}.toml"
        file.write_text(model_text(checkpoint, name))
        files = {n: f for n, f in files.items() if n != file.stem} | {file.stem: file}
    return Models(files)


def checked(
    files: list[tuple[str, str]], release: str, models: Models
) -> Iterator[tuple[LintReport, LintReport]]:
    """The report of each file from the release's source, and from the release itself."""
    source, itself = Linter(release=release), Linter(release=release, ask=preflight)
    for file in files:
        yield lint([file], source, models), lint([file], itself, models)


def figures(reports: list[tuple[LintReport, LintReport]]) -> dict[str, Any]:
    """What was asked of how many commands, and the errors and warnings by rule."""
    asked = [one for _, report in reports for one in report.asked]
    stood_in = [one for one in asked if one.assumed and not one.configuration]
    return {
        "commands": len(asked),
        "answers": collections.Counter(one.answer for one in asked),
        "without a configuration": len(stood_in),
        "from the source": _counted(source for source, _ in reports),
        "from the release": _counted(itself for _, itself in reports),
    }


def _counted(reports: Iterable[LintReport]) -> dict[str, int]:
    findings = (one for report in reports for one in report.findings)
    return collections.Counter(f"{one.severity}: {one.rule}" for one in findings)


def _print(source: LintReport, itself: LintReport) -> None:
    for answer in itself.asked:
        print(f"{answer.file}:{answer.line}: {answer.answer}; not asked: {answer.left_out}")
    for title, report in (("source", source), ("release", itself)):
        for one in report.findings:
            print(f"  {title}: line {one.line}: {one.severity}: {one.message} [{one.rule}]")
    sys.stdout.flush()


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
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        models = with_configurations(names, options.configurations, Path(folder))
        for pair in checked(files, options.release, models):
            reports.append(pair)
            _print(*pair)
    result = figures(reports)
    print(json.dumps(result, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
