"""``spark-build lint``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from builder.cli.command import command
from builder.common.console import console, counted, print_json, tell
from builder.common.hints import again
from builder.common.options import Argument, Json, ModelFolders, Option
from builder.errors import Exit, SparkBuildError, UsageError

if TYPE_CHECKING:
    from builder.serving.lint import Finding, LintReport


@command(
    "lint",
    "spark-build lint serve.sh --release 0.33.0",
    "spark-build lint compose.yaml recipe.yaml --image me/vllm:1",
    "spark-build lint serve.sh --release 0.33.0 --ask",
    "spark-build lint k8s/*.yaml --sarif > lint.sarif",
    "spark-build lint --rules",
    detail="Reads scripts, compose files, recipes and manifests. Exit 5: a server would not "
    'start, or not as configured. A comment "# spark-build: ignore[rule]" keeps a line as it is.',
)
def lint(
    files: Annotated[
        tuple[Path, ...],
        Argument(
            "Shell scripts, compose files, Kubernetes manifests, recipes of sparkrun or eugr, "
            "Dockerfiles; - is a shell script on stdin.",
            "FILE",
        ),
    ] = (),
    release: Annotated[
        str | None,
        Option(
            "The vLLM release that they run (default: from the tag of an official image).",
            "VERSION",
        ),
    ] = None,
    image: Annotated[
        str | None,
        Option("The image that they run; its vLLM release is read from it.", "IMAGE"),
    ] = None,
    *,
    ask: Annotated[
        bool,
        Option(
            "Let the release's own code parse the flags and build the model, as preflight does."
        ),
    ] = False,
    strict: Annotated[bool, Option("Fail on warnings too.")] = False,
    sarif: Annotated[bool, Option("Print SARIF 2.1.0.")] = False,
    rules: Annotated[bool, Option("Print the rules and their sources.")] = False,
    models: ModelFolders = (),
    json: Json = False,
) -> None:
    """Lint files and print what was found; exit 5 if a command has a problem."""
    from json import dumps

    from builder.serving.lint import Linter, read_file
    from builder.serving.lint import lint as linted
    from builder.serving.lint import sarif as as_sarif
    from builder.serving.models import Models
    from builder.serving.preflight import preflight

    if rules:
        _print_rules(files, sarif=sarif, json=json)
        return
    if sarif and json:
        raise UsageError("--json and --sarif print different documents", hint="leave --json out")
    if not files:
        raise UsageError("no file to lint (- is standard input)", hint=again("FILE"))
    texts = [(str(path), read_file(path)) for path in files]
    known = Models.discover(models)
    linter = Linter(release=release, image=image, ask=preflight if ask else None, models=known)
    report = linted(texts, linter, known)
    _say(report)
    if sarif:
        print(dumps(as_sarif(report), indent=2))
    elif json:
        print_json(report)
    else:
        _print(report)
        if not ask:
            command = again("--ask")
            console.say(f"note: only the release's source was read; to ask it: {command}")
    failing = ("error", "warning") if strict else ("error",)
    serious = [one for one in report.findings if one.severity in failing]
    if serious or report.cut:
        raise SparkBuildError(
            f"{counted(len(serious), 'serve setting')} to change", Exit.VERIFY_FAILED, _fix(serious)
        )


def _say(report: "LintReport") -> None:
    for name in report.skipped:
        console.say(f"note: {name} has no serve command")
    for text in report.notes:
        console.say(f"note: {text}")
    for name in report.cut:
        console.warn(f"{name} has more findings than are listed")


def _print_rules(files: Sequence[Path], *, sarif: bool, json: bool) -> None:
    """Print the rules.

    Raises:
        UsageError: files to lint or another output format are given too.
    """
    from builder.serving.lintrules import RULES, RuleList

    if files:
        raise UsageError("--rules prints the rules and lints no file", hint="leave --rules out")
    if sarif:
        raise UsageError("--rules is not printed as SARIF", hint="leave --sarif out")
    if json:
        print_json(RuleList(rules=tuple(RULES.values())))
        return
    for rule in RULES.values():
        tell(f"{rule.id:<21}{rule.severity:<9}{rule.summary}\n  {'':<28}({rule.source})")
        ends = dict.fromkeys(filter(None, (rule.first, rule.last)))
        releases = rule.vllm or "every release"
        tell(f"  {'':<28}{releases}: {'; '.join(ends) or 'nothing shows where it ends'}")


def _fix(findings: Sequence["Finding"]) -> str:
    """The first finding's fix, or where all that is valid is shown."""
    fixed = next((one for one in findings if one.help), None)
    if fixed is None:
        return "spark-build lint --rules"
    return f"{fixed.file}:{fixed.line}: {fixed.help}"


def _print(report: "LintReport") -> None:
    for one in report.findings:
        tell(f"{one.file}:{one.line}: {one.severity}: {one.message} [{one.rule}]")
        if one.help:
            tell(f"    {one.help}")
    for answer in report.asked:
        left = "".join(f"; not asked: {words}" for words in answer.left_out)
        asked = f", with the configuration of {answer.configuration}" * bool(answer.configuration)
        asked = f", assumed: {answer.assumed}" if answer.assumed else asked
        tell(f"{answer.file}:{answer.line}: vLLM {answer.vllm}: {answer.answer}{asked}{left}")
    ignored = f", {report.ignored} ignored" if report.ignored else ""
    release = f" for vLLM {report.vllm}" if report.vllm else ""
    tell(
        f"{counted(len(report.findings), 'finding')} in "
        f"{counted(report.commands, 'serve command')}{release}{ignored}"
    )
