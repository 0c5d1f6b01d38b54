"""Runs the jobs of a workflow on this machine: every `run:` step for real, in bash.

What only GitHub has is done by hand: checkout copies this checkout, artifacts are folders,
expressions are evaluated from a table of contexts.  An expression or an action that is not known
here is an error, so that a workflow cannot grow a step that no test has run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTION = ROOT / "action.yml"

_TOKEN = re.compile(
    r"\s*(?P<text>'(?:[^']|'')*')|\s*(?P<sign>==|!=|&&|\|\||!|\(|\))|\s*(?P<name>[A-Za-z_][\w.-]*)"
)
_STATUS = ("always", "cancelled", "failure", "success")
_SIGNS = {"&&": " and ", "||": " or ", "!": " not "}


def load(path: Path) -> dict[str, Any]:
    """A workflow or action; YAML 1.1 reads the key `on` as true."""
    value: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {"on" if key is True else str(key): item for key, item in value.items()}


def evaluate(expression: str, contexts: dict[str, Any]) -> Any:
    """An expression without its braces: comparisons, and/or/not, dotted names, some functions."""
    words, names, position = [], [], 0
    expression = expression.strip()
    while position < len(expression):
        found = _TOKEN.match(expression, position)
        if found is None:
            raise ValueError(f"cannot read expression {expression!r} at {expression[position:]!r}")
        position = found.end()
        if found["text"]:
            words.append(repr(found["text"][1:-1].replace("''", "'")))
        elif found["sign"]:
            words.append(_SIGNS.get(found["sign"], found["sign"]))
        elif found["name"] in ("fromJSON", *_STATUS):
            words.append(found["name"])
        else:
            names.append(_lookup(found["name"], contexts))
            words.append(f"names[{len(names) - 1}]")
    failed = bool(contexts.get("failed"))
    status = {"always": True, "cancelled": False, "failure": failed, "success": not failed}
    known = {name: (lambda value=value: value) for name, value in status.items()}
    return eval(
        " ".join(words),
        {"__builtins__": {}},
        {**known, "names": names, "fromJSON": yaml.safe_load},
    )


def applies(condition: object, contexts: dict[str, Any]) -> bool:
    """Whether a job or step runs; without a status function, only where nothing has failed."""
    text = str(condition)
    if not any(f"{name}()" in text for name in _STATUS) and contexts.get("failed"):
        return False
    return bool(evaluate(text, contexts))


def _lookup(name: str, contexts: dict[str, Any]) -> Any:
    head, *rest = name.split(".")
    if head in ("true", "false"):
        return head == "true"
    value: Any = contexts[head]
    for key in rest:
        value = value.get(key, "") if isinstance(value, dict) else ""
    return value


def fill(text: Any, contexts: dict[str, Any]) -> Any:
    """A value with every `${{ }}` in it evaluated; a lone expression keeps its type."""
    if not isinstance(text, str):
        return text
    whole = re.fullmatch(r"\$\{\{((?:(?!\}\}).)*)\}\}", text.strip(), re.DOTALL)
    if whole:
        return evaluate(whole[1], contexts)
    return re.sub(r"\$\{\{(.*?)\}\}", lambda m: str(evaluate(m[1], contexts)), text)


@dataclass
class Machine:
    """A runner: a workspace that is a copy of this checkout, a temporary folder, artifacts."""

    home: Path
    env: dict[str, str] = field(default_factory=dict)
    contexts: dict[str, Any] = field(default_factory=dict)
    #: (file, job, step) of every `run:` step that ran here
    ran: list[tuple[str, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("workspace", "temp", "artifacts", "bin"):
            (self.home / name).mkdir(parents=True)
        if shutil.which("sudo") is None and os.geteuid() == 0:
            shim = self.home / "bin" / "sudo"
            shim.write_text('#!/bin/sh\nexec "$@"\n')
            shim.chmod(0o755)
        self.contexts = {
            "github": {
                "actor": "somebody",
                "repository": "Somebody/Spark-Build",
                "repository_owner": "Somebody",
                "server_url": "https://forge.example",
                "event_name": "push",
                "ref": "refs/heads/main",
                "action_path": str(self.home / "workspace"),
            },
            "runner": {"temp": str(self.home / "temp")},
            "secrets": {"GITHUB_TOKEN": "a-secret-of-the-test"},
            "inputs": {},
            "needs": {},
            **self.contexts,
        }

    @property
    def workspace(self) -> Path:
        """Where the checkout lies."""
        return self.home / "workspace"

    @property
    def summary(self) -> str:
        """The job summary so far."""
        page = self.home / "summary.md"
        return page.read_text(encoding="utf-8") if page.exists() else ""

    def checkout(self) -> None:
        """What git would check out of this working tree: tracked and new files."""
        shutil.rmtree(self.workspace)
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, check=True, text=True,
        ).stdout  # fmt: skip
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                target = self.workspace / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)

    def job(self, workflow: Path, name: str, **contexts: Any) -> dict[str, Any] | None:
        """Run a job; its outputs, or None when its condition keeps it from running."""
        document = load(workflow)
        job = document["jobs"][name]
        known = {**self.contexts, **contexts}
        known["failed"] = any(
            need.get("result", "success") != "success" for need in known["needs"].values()
        )
        if not applies(job.get("if", "true"), known):
            return None
        env = {**document.get("env", {}), **job.get("env", {}), **self.env}
        known["steps"], known["env"], known["failed"] = {}, env, None
        for number, step in enumerate(job["steps"]):
            try:
                self._step((workflow.name, name, str(number)), step, known, env)
            except StepFailed as error:
                known["failed"] = known["failed"] or error
        if known["failed"]:
            raise known["failed"]
        return {key: fill(value, known) for key, value in job.get("outputs", {}).items()}

    def _step(
        self,
        where: tuple[str, str, str],
        step: dict[str, Any],
        contexts: dict[str, Any],
        env: dict[str, str],
    ) -> None:
        if not applies(step.get("if", "true"), contexts):
            return
        extra = {k: str(fill(v, contexts)) for k, v in step.get("env", {}).items()}
        outputs: dict[str, Any]
        if "run" in step:
            outputs = self._run(where, step["run"], {**env, **extra})
        else:
            given = {k: fill(v, contexts) for k, v in step.get("with", {}).items()}
            outputs = self._use(str(step["uses"]), given, contexts, env)
        if "id" in step:
            contexts["steps"][step["id"]] = {"outputs": outputs}

    def _run(self, where: tuple[str, str, str], script: str, env: dict[str, str]) -> dict[str, Any]:
        assert "${{" not in script, "an expression in a script is a way to inject one"
        output = self.home / "output"
        output.write_text("")
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
            cwd=self.workspace,
            env={
                **os.environ,
                "GITHUB_OUTPUT": str(output),
                "GITHUB_STEP_SUMMARY": str(self.home / "summary.md"),
                "RUNNER_TEMP": str(self.home / "temp"),
                "SPARK_BUILD_VENV": str(self.home / "temp" / "spark-build-venv"),
                **env,
                "PATH": f"{env.get('PATH', os.environ['PATH'])}:{self.home / 'bin'}",
            },
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        self.ran.append(where)
        if done.returncode:
            raise StepFailed(where, done.returncode, done.stdout, done.stderr)
        return dict(row.split("=", 1) for row in output.read_text().splitlines() if row)

    def _use(
        self, uses: str, given: dict[str, Any], contexts: dict[str, Any], env: dict[str, str]
    ) -> dict[str, Any]:
        action = uses.partition("@")[0]
        if action == "actions/checkout":
            assert given == {"persist-credentials": False}
            self.checkout()
        elif action == "actions/upload-artifact":
            kept = self.home / "artifacts" / given["name"]
            if given.get("overwrite"):
                shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(given["path"], kept)
        elif action == "actions/download-artifact":
            kept = self.home / "artifacts" / given["name"]
            if not kept.is_dir():
                raise StepFailed(("uses", action, given["name"]), 1, "", "Artifact not found")
            shutil.rmtree(given["path"], ignore_errors=True)
            shutil.copytree(kept, given["path"])
        elif action == "actions/deploy-pages":
            if not (self.home / "artifacts" / "github-pages" / "artifact.tar").is_file():
                raise StepFailed(("uses", action, "github-pages"), 1, "", "Artifact not found")
            return {"page_url": "https://somebody.example/spark-build/"}
        elif action == "./":
            return self.composite(given, contexts, env)
        else:
            raise ValueError(f"no test knows what {uses} does")
        return {}

    def composite(
        self, given: dict[str, Any], contexts: dict[str, Any], env: dict[str, str]
    ) -> dict[str, Any]:
        """Run this repository's own action, as `uses: OWNER/spark-build@v1` does."""
        document = load(self.workspace / ACTION.name)
        unknown = set(given) - set(document["inputs"])
        assert not unknown, f"no such inputs: {unknown}"
        defaults = {k: fill(v.get("default", ""), contexts) for k, v in document["inputs"].items()}
        inner = {**contexts, "inputs": {**defaults, **given}, "steps": {}}
        for number, step in enumerate(document["runs"]["steps"]):
            self._step((ACTION.name, "runs", str(number)), step, inner, env)
        return {k: fill(v["value"], inner) for k, v in document["outputs"].items()}


class StepFailed(AssertionError):
    """A step ended with a status other than 0."""

    def __init__(self, where: tuple[str, str, str], code: int, out: str, err: str) -> None:
        super().__init__(f"{' '.join(where)} exited {code}\n{out[-2000:]}\n{err[-4000:]}")
        self.code, self.out, self.err = code, out, err


def run_steps(path: Path) -> set[tuple[str, str, str]]:
    """Every `run:` step of a workflow or action, as the runner names them."""
    document = load(path)
    jobs = document.get("jobs") or {"runs": document["runs"]}
    return {
        (path.name, name, str(number))
        for name, job in jobs.items()
        for number, step in enumerate(job["steps"])
        if "run" in step
    }
