"""Every `run:` step of the workflows and of the action, run for real on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requests

from builder.common.pypi import PackageIndex, vllm_releases
from tests.actions.runner import ACTION, ROOT, WORKFLOWS, Machine, StepFailed, load, run_steps
from tests.engine.cache import MachineError
from tests.engine.machine import Registry, ensure_engine
from tests.loopback import LoopbackHandler, LoopbackServer
from tests.registry import overlays
from tests.unit.fakes import REPLACE, layer_text

if TYPE_CHECKING:
    from collections.abc import Iterator

IMAGES, NUMBERS, OUTDATED, PAGES = (
    ROOT / ".github" / "workflows" / f"{name}.yml"
    for name in ("images", "numbers", "outdated", "pages")
)
#: Steps that other tests are: the first is this very test run, the others need a Docker Engine.
ELSEWHERE = {
    ("ci.yml", "test", "0"): "installs packages on the machine; the step after it is this run",
    ("ci.yml", "test", "2"): "is this run",
    ("images.yml", "docker", "1"): "tests/engine/test_actions.py",
    ("gb10.yml", "device", "1"): "tests/engine/test_actions.py",
}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("runner") / "home")


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    try:
        tools = ensure_engine()
    except MachineError as error:
        pytest.fail(f"no registry: {error}", pytrace=False)
    with Registry(tools) as running:
        yield running


def only_release(workspace: Path) -> None:
    """The list of images, shortened to what can be had without Docker Hub."""
    path = workspace / ".github" / "images.json"
    path.write_text(
        json.dumps({"profiles": ["marlin"], "bases": ["pypi:vllm==0.20.1"], "docker": []})
    )


@pytest.fixture(scope="module")
def listed(machine: Machine) -> dict[str, Any]:
    """The first job, run on the real list."""
    outputs = machine.job(IMAGES, "list")
    assert outputs is not None
    return outputs


@pytest.fixture(scope="module")
def entry() -> dict[str, str]:
    return {"name": "marlin-0.20.1", "profile": "marlin", "base": "pypi:vllm==0.20.1"}


@pytest.fixture(scope="module")
def built(machine: Machine, listed: dict[str, Any], entry: dict[str, str]) -> Path:
    """The build job: the action's own steps."""
    contexts = {"matrix": entry, "needs": {"list": {"outputs": listed}}}
    assert machine.job(IMAGES, "build", **contexts) is not None
    return machine.home / "artifacts" / entry["name"]


@dataclass(frozen=True)
class Small:
    """A machine with a small image in a registry and two layers: one fits the image, one does not.

    What those leave unproven is not required: there is no vLLM in it that could select anything.
    """

    machine: Machine
    base: str
    digests: frozenset[str]

    def entry(self, profile: str) -> dict[str, str]:
        tags = f"1-{profile} {profile}"
        return {"name": f"{profile}-v1", "profile": profile, "base": self.base, "tags": tags}

    def build(self, profile: str, **given: str) -> Path:
        """The action alone, then what the build job does with its folder."""
        entry = self.entry(profile)
        words = {"layers": profile, "base": self.base, "require": "static,imports", **given}
        contexts = {"matrix": entry, "steps": {}, **self.machine.contexts}
        folder = Path(self.machine.composite(words, contexts, self.machine.env)["folder"])
        kept = self.machine.home / "artifacts" / entry["name"]
        shutil.rmtree(kept, ignore_errors=True)
        return Path(shutil.copytree(folder, kept))

    def of_the_base(self, kept: Path) -> set[str]:
        """The base's blobs among what was kept."""
        return {blob.name for blob in kept.glob("image/blobs/sha256/*")} & self.digests


@pytest.fixture(scope="module")
def small(
    machine: Machine,
    listed: dict[str, Any],
    registry: Registry,
    tmp_path_factory: pytest.TempPathFactory,
) -> Small:
    assert listed, "that job has checked out"
    folder = tmp_path_factory.mktemp("small")
    name = overlays.put_base(folder / "base", f"{registry.address}/small/vllm:v1")
    for layer, old in (("fits", "cutlass"), ("drifts", "another")):
        file = folder / "layers" / layer / "layer.toml"
        file.parent.mkdir(parents=True)
        file.write_text(layer_text(REPLACE.replace("cutlass", old)))
    machine.env |= {"SPARK_BUILD_PATCHES": str(folder / "layers"), "REGISTRY": registry.address}
    blobs = (folder / "base" / "blobs" / "sha256").iterdir()
    return Small(machine, f"docker://{name}", frozenset(blob.name for blob in blobs))


@pytest.fixture(scope="module")
def published(small: Small, registry: Registry, listed: dict[str, Any]) -> str:
    """The publish job of an image that passed, where another one failed."""
    small.build("fits")
    needs = {"list": {"outputs": listed}, "build": {"result": "failure"}}
    assert small.machine.job(IMAGES, "publish", matrix=small.entry("fits"), needs=needs) is not None
    return f"{registry.url}/v2/somebody/spark-build"


def test_the_base_stays_in_its_registry(small: Small) -> None:
    """The blobs of a released image are larger than a runner's disk, and than an artifact."""
    kept = small.build("fits")
    assert (kept / "evidence.json").is_file()
    assert not small.of_the_base(kept)


def test_a_locked_base_stays_in_its_registry(small: Small) -> None:
    lock = small.machine.workspace / "spark-build.lock"
    venv = str(small.machine.home / "temp" / "spark-build-venv")
    command = ["python3", "builder/bootstrap.py", "lock", "--platform", "linux/arm64"]
    command += ["--layers", "fits", "--base", small.base]
    env = {**os.environ, **small.machine.env, "SPARK_BUILD_VENV": venv}
    subprocess.run(command, cwd=small.machine.workspace, env=env, check=True)
    try:
        assert not small.of_the_base(small.build("fits", base="", locked="true"))
    finally:
        lock.unlink()


def test_failed_image_is_kept_but_not_published(small: Small, listed: dict[str, Any]) -> None:
    needs: dict[str, Any] = {"list": {"outputs": listed}}
    with pytest.raises(StepFailed, match="drift"):
        small.machine.job(IMAGES, "build", matrix=small.entry("drifts"), needs=needs)
    artifacts = small.machine.home / "artifacts"
    assert (artifacts / "drifts-v1-failed" / "image.json").is_file(), "for whoever looks"
    needs["build"] = {"result": "failure"}
    with pytest.raises(StepFailed, match="Artifact not found"):
        small.machine.job(IMAGES, "publish", matrix=small.entry("drifts"), needs=needs)


def test_no_build_publishes_nothing(machine: Machine, entry: dict[str, str]) -> None:
    """An empty list of images is no matrix for the job that would publish them."""
    needs = {"list": {"outputs": {"thin": "[]"}}, "build": {"result": "skipped"}}
    assert machine.job(IMAGES, "publish", matrix=entry, needs=needs) is None


def test_a_checkout_of_another_owner(machine: Machine, tmp_path: Path) -> None:
    """As in a container job: the checkout is the runner's user's, and the job runs as root.

    The test run itself is replaced by what in it meets git.
    """
    machine.checkout()
    there = tmp_path / "checkout"
    shutil.copytree(machine.workspace, there)
    author = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    for words in (("init", "-q"), ("add", "-A"), (*author, "commit", "-q", "-m", "one")):
        subprocess.run(["git", *words], cwd=there, check=True)
    (there / "builder" / "bootstrap.py").write_text(
        "import subprocess\nsubprocess.run(['git', 'ls-files', '--error-unmatch', 'action.yml'],"
        " check=True)\n"
    )
    env = {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    if os.geteuid() == 0:
        for path in (there, *there.rglob("*")):
            os.chown(path, 4242, 4242, follow_symlinks=False)
    else:
        env["GIT_TEST_ASSUME_DIFFERENT_OWNER"] = "1"  # git's own, for its own tests
    alone = subprocess.run(
        ["git", "ls-files"], cwd=there, env=env, capture_output=True, text=True, check=False
    )
    assert "dubious ownership" in alone.stderr
    done = subprocess.run(
        [".ci/run"], cwd=there, env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "action.yml\n"), done.stderr


def test_list_has_every_profile_on_every_base(listed: dict[str, Any]) -> None:
    wanted = json.loads((ROOT / ".github" / "images.json").read_text())
    rows = json.loads(listed["thin"])
    assert len(rows) == len(wanted["profiles"]) * len(wanted["bases"])
    assert len({row["name"] for row in rows}) == len(rows)


def test_each_image_moves_a_different_tag(listed: dict[str, Any]) -> None:
    rows = json.loads(listed["thin"])
    tags = {tag: row["base"] for row in rows for tag in row["tags"].split()}
    assert len(tags) == sum(len(row["tags"].split()) for row in rows)
    assert tags["0.22.1-marlin"] == "docker://vllm/vllm-openai:v0.22.1"
    assert tags["marlin"] == rows[-1]["base"], "the newest"


def test_a_filter_that_matches_nothing_fails(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "home", contexts={"inputs": {"only": "no-such-profile"}})
    with pytest.raises(StepFailed) as failed:
        machine.job(IMAGES, "list")
    assert "no image" in failed.value.err


def test_build_leaves_image_and_evidence(built: Path, machine: Machine) -> None:
    evidence = json.loads((built / "evidence.json").read_text())
    assert evidence["passed"]
    assert {check["level"] for check in evidence["checks"]} >= {"static", "dispatch"}
    assert (built / "image" / "index.json").is_file()
    assert "<html" in (built / "evidence.html").read_text()
    assert "Using MarlinNvFp4LinearKernel" in machine.summary
    assert "Proven without hardware: NVFP4 linear and MoE use Marlin" in machine.summary


def test_a_build_that_fails_verification_fails_the_job(
    machine: Machine, built: Path, entry: dict[str, str]
) -> None:
    """The level that this release cannot prove here is required."""
    assert built.is_dir()
    contexts = {"matrix": entry, "steps": {}, **machine.contexts}
    given = {"layers": "marlin", "base": entry["base"], "require": "device", "compile": "true"}
    with pytest.raises(StepFailed) as failed:
        machine.composite(given, contexts, {})
    assert failed.value.code == 5
    assert "::error title=spark-build::NOT PROVEN: whether the kernels run on" in failed.value.out
    assert "**NOT PROVEN**" in machine.summary


def test_numbers_are_required_of_a_release(machine: Machine, listed: dict[str, Any]) -> None:
    """What it asks for if nothing else is said; of a profile that has no kernel to run."""
    assert listed, "that job has checked out"
    given = load(NUMBERS)["on"]["workflow_dispatch"]["inputs"]
    inputs = {name: str(value["default"]) for name, value in given.items()}
    assert inputs["layers"] == "b12x-full", "whose kernels the level runs"
    inputs |= {"release": "0.20.1", "layers": "marlin"}
    assert machine.job(NUMBERS, "verify", inputs={**inputs, "require": "static"}) is not None
    with pytest.raises(StepFailed) as failed:
        machine.job(NUMBERS, "verify", inputs=inputs)
    assert failed.value.code == 5
    assert "the profile expects no b12x kernel" in failed.value.out
    evidence = machine.home / "artifacts" / "numbers-evidence" / "evidence.json"
    levels = {check["level"] for check in json.loads(evidence.read_text())["checks"]}
    assert levels >= {"static", "dispatch", "numbers"}, "kept though it failed"


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        ({"locked": "true"}, 9, "--locked, and there is no spark-build.lock"),
        ({"to": "ghcr.io/somebody/image"}, 2, "become an overlay, not an image"),
        ({"with-pr": "vllm-project/vllm#1@0123abc\n  not-a-pull"}, 2, "not-a-pull"),
    ],
    ids=["locked", "overlay", "with-pr"],
)
def test_action_inputs_reach_the_command(
    machine: Machine, entry: dict[str, str], given: dict[str, str], code: int, said: str
) -> None:
    contexts = {"matrix": entry, "steps": {}, **machine.contexts}
    with pytest.raises(StepFailed) as failed:
        machine.composite({"layers": "marlin", "base": entry["base"], **given}, contexts, {})
    assert failed.value.code == code
    assert said in failed.value.out + failed.value.err


def test_passed_images_are_published_when_another_failed(published: str, machine: Machine) -> None:
    tags = requests.get(f"{published}/tags/list", timeout=600).json()["tags"]
    image = json.loads((machine.home / "artifacts" / "fits-v1" / "image.json").read_text())
    plan = image["plan_digest"].removeprefix("sha256:")[:12]
    assert {f"0.20.1-fits-{plan}", "1-fits", "fits"} <= set(tags)
    assert "Published `" in machine.summary
    assert "a-secret-of-the-test" not in machine.summary


@pytest.mark.parametrize("event", [{"event_name": "pull_request"}, {"ref": "refs/heads/other"}])
@pytest.mark.parametrize("job", ["publish", "docker"])
def test_nothing_is_published_for_a_pull_request(
    machine: Machine, entry: dict[str, str], event: dict[str, str], job: str
) -> None:
    github = {**machine.contexts["github"], **event}
    needs = {"list": {"outputs": {"thin": "[1]", "docker": "[1]"}}}
    assert machine.job(IMAGES, job, github=github, matrix=entry, needs=needs) is None


class Pulls(LoopbackServer):
    """The requests of GitHub's API that a pull request is opened and updated with."""

    def __init__(self) -> None:
        self.commits = {"start": {"tree": "files", "parents": []}}
        self.heads = {"main": "start"}
        self.pulls: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.listen(_PullsHandler)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.asked.append(f"{method} {path.partition('?')[0]}")
        rest = path.removeprefix("/repos/somebody/spark-build/")
        name = rest.rpartition("/")[2]
        if (method, rest) == ("GET", "git/ref/heads/main"):
            return 200, {"object": {"sha": self.heads["main"]}}
        if method == "GET" and rest.startswith("git/commits/"):
            return 200, {"tree": {"sha": self.commits[name]["tree"]}}
        if (method, rest) == ("POST", "git/trees"):
            return 201, {"sha": body["tree"][0]["content"]}
        if (method, rest) == ("POST", "git/commits"):
            sha = f"commit-{len(self.commits)}"
            self.commits[sha] = body
            return 201, {"sha": sha}
        if method == "PATCH" and rest.startswith("git/refs/heads/") and name not in self.heads:
            return 422, {"message": "Reference does not exist"}
        if rest.startswith("git/refs"):
            self.heads[body.get("ref", rest).rpartition("/")[2]] = body["sha"]
            return 200, {}
        if method == "GET" and rest == "pulls?state=open&base=main&head=somebody:outdated":
            return 200, self.pulls
        if (method, rest) == ("POST", "pulls"):
            self.pulls.append({"number": 3, "html_url": "https://forge.example/3", **body})
            return 201, self.pulls[-1]
        if (method, rest) == ("PATCH", "pulls/3"):
            self.pulls[0] |= body
            return 200, self.pulls[0]
        return 403, {"message": "Resource not accessible"}


class _PullsHandler(LoopbackHandler):
    owner: Pulls

    def do_GET(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size)) if size else None
        status, value = self.owner.answer(self.command, self.path, body)
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_PATCH = do_GET  # noqa: N815 - names that the library calls


@pytest.fixture
def upstream(machine: Machine) -> Iterator[Pulls]:
    """GitHub, for the workflow that watches releases."""
    with Pulls() as running:
        there = {"GITHUB_API_URL": running.url, "GITHUB_REPOSITORY": "somebody/spark-build"}
        machine.env |= {**there, "SPARK_BUILD_FORGE": running.url}
        yield running
    for name in (*there, "SPARK_BUILD_FORGE"):
        del machine.env[name]


def test_new_releases_become_one_pull_request(machine: Machine, upstream: Pulls) -> None:
    outputs = machine.job(OUTDATED, "report", inputs={"since": "0.32.0"})
    assert outputs == {"changed": "true"}
    assert "# vLLM since 0.32.0" in machine.summary
    needs = {"report": {"outputs": outputs}}
    for _ in range(2):
        assert machine.job(OUTDATED, "propose", needs=needs) is not None
    (pull,) = upstream.pulls
    assert (pull["title"], pull["head"], pull["base"]) == ("vLLM since 0.32.0", "outdated", "main")
    assert "**0.33.0**" in pull["body"]
    last = upstream.commits[upstream.heads["outdated"]]
    assert last["parents"] == [upstream.heads["main"]] == ["start"]
    assert upstream.asked.count("POST /repos/somebody/spark-build/pulls") == 1
    assert not any("merge" in line for line in upstream.asked)


def test_without_new_releases_nothing_is_proposed(machine: Machine, upstream: Pulls) -> None:
    newest = vllm_releases(PackageIndex())[-1]
    outputs = machine.job(OUTDATED, "report", inputs={"since": newest})
    assert not (outputs or {}).get("changed")


def test_a_refused_pull_request_fails_the_job(machine: Machine, upstream: Pulls) -> None:
    report = machine.home / "artifacts" / "outdated"
    report.mkdir(parents=True, exist_ok=True)
    (report / "outdated.md").write_text("# vLLM since 0.32.0\n")
    upstream.pulls.append({"number": 4})
    with pytest.raises(StepFailed) as failed:
        machine.job(OUTDATED, "propose", needs={"report": {"outputs": {"changed": "true"}}})
    assert "PATCH pulls/4: 403" in failed.value.err


@pytest.fixture(scope="module")
def site(machine: Machine) -> Path:
    """The site as the workflow builds it, unpacked."""
    assert machine.job(PAGES, "build") is not None
    folder = machine.home / "site"
    with tarfile.open(machine.home / "artifacts" / "github-pages" / "artifact.tar") as tar:
        tar.extractall(folder, filter="data")
    return folder


def test_the_site_has_every_page_and_the_picture_in_front(site: Path) -> None:
    pages = [path.with_suffix("") for path in (ROOT / "docs").rglob("*.md")]
    missing = [p for p in pages if not (site / p.relative_to(ROOT)).with_suffix(".html").is_file()]
    assert not missing
    front = (site / "index.html").read_text("utf-8")
    assert "What each release needs on SM121" in front
    assert "0.33.0" in front
    links = re.findall(r'href="(\./[^"#]+)"', front)
    assert len(links) > 5
    assert [link for link in links if not (site / link).is_file()] == []
    assert "flashinfer" in (site / "searchindex.js").read_text("utf-8")


def test_the_site_loads_and_tells_nothing_of_others(site: Path, machine: Machine) -> None:
    """No script, style or picture of another host, and nothing of the machine that built it."""
    for path in site.rglob("*.html"):
        text = path.read_text("utf-8")
        assert not re.findall(r'<(?:script|img|iframe)[^>]* src="(?:https?:)?//', text), path
        assert not re.findall(r'<link[^>]* href="(?:https?:)?//', text), path
    told = (str(machine.home), str(ROOT), "a-secret-of-the-test", "github.com/OWNER/spark-build")
    for path in site.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        assert not [word for word in told if word.encode() in data], path


@pytest.mark.parametrize("link", ["no-such-page.md", "matrix.md#no-such-heading"])
def test_a_broken_link_fails_the_build(site: Path, machine: Machine, link: str) -> None:
    page = machine.workspace / "docs" / "lock.md"
    before = page.read_text("utf-8")
    page.write_text(f"{before}\n[broken]({link})\n", "utf-8")
    temp = machine.home / "temp"
    done = subprocess.run(
        [temp / "generator/bin/python", ".github/site/build.py", "--picture",
         temp / "matrix.html", temp / f"broken-{len(link)}"],
        cwd=machine.workspace, capture_output=True, text=True, check=False,
    )  # fmt: skip
    page.write_text(before, "utf-8")
    assert done.returncode != 0
    assert link.rpartition("#")[2] in done.stderr


def test_the_site_is_deployed_only_from_main(site: Path, machine: Machine) -> None:
    needs = {"build": {"result": "success"}}
    assert machine.job(PAGES, "deploy", needs=needs) is not None
    for event in ({"event_name": "pull_request"}, {"ref": "refs/heads/other"}):
        github = {**machine.contexts["github"], **event}
        assert machine.job(PAGES, "deploy", github=github, needs=needs) is None


def test_every_run_step_is_tested(machine: Machine, published: str, site: Path) -> None:
    assert published
    assert site.is_dir()
    steps = set().union(*(run_steps(path) for path in [*WORKFLOWS, ACTION]))
    publishes = {step for step in steps if step[0] == ACTION.name} - set(machine.ran)
    assert set(ELSEWHERE) <= steps
    missing = steps - set(machine.ran) - set(ELSEWHERE) - publishes
    assert not missing, f"no test runs {missing}"
    assert len(publishes) <= 1, "only the action's own publish step is left to the Docker lane"


def test_ci_runs_what_the_readme_says() -> None:
    assert ".ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
