"""How builds on a real engine end when they cannot go well, and what they leave behind: nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.common.pypi import PackageIndex
from builder.common.reference import Ref
from builder.errors import BuildFailed, Exit
from builder.images.engines.buildkit import BuildkitEngine
from builder.images.engines.model import BuildRequest
from builder.layers.catalog import Catalog
from builder.layers.pinned import IndexSources
from builder.layers.planner import make_plan
from builder.pipeline.bases import identify_base

from . import base, cache, machine, support
from .support import Built, Cli

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .machine import Engine, Registry

NOBODY = {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}
DEAD_REGISTRY = "127.0.0.1:9"
#: A profile that changes no file, so that a base without kernels and without torch will do.
SETTINGS = ("image", "--layers", "marlin", "--no-verify")
#: Debian, its Python, and vLLM's own Python files: enough to be a base, small enough to be pushed.
SLIM = f"""\
FROM {{base}} AS cut
RUN cd {base.SITE} \
 && find . -mindepth 1 -maxdepth 1 ! -name 'vllm*' ! -name 'packaging*' -exec rm -rf {{{{}}}} + \
 && find . -name '*.so' -delete && find . -name __pycache__ -prune -exec rm -rf {{{{}}}} + \
 && rm -rf /usr/share/doc /usr/share/locale /var/lib/apt /var/cache
FROM scratch
COPY --from=cut / /
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENTRYPOINT ["vllm", "serve"]
"""
#: Python that does something of its own where a word is in its command line or environment.
TRAPPED = f"""\
FROM {{base}}
RUN printf 'import os, sys, time;\"{{word}}\" in str((sys.orig_argv, *os.environ)) and {{action}}' \
> {base.SITE}/trap.pth
"""
#: A layer that takes a file away, so that the build has a step that runs Python.
TAKING_AWAY = """\
summary = "Take a distribution away"
description = "For tests."
order = 10
package = "vllm"

[provenance]
origin = "vendor, tests"
forwarded = "not-needed"
applied-upstream = "no"
last-update = 2026-11-20

[[variant]]
name = "all"
when = { "vllm" = ">=0", "packaging" = ">=0" }

[[variant.op]]
op = "remove"
distribution = "packaging"
"""
#: The same, where nothing but the op names the distribution.
UNNAMED = TAKING_AWAY.replace(', "packaging" = ">=0"', "")
ODD_VALUE = r"""a'b "c" <d> & $HOME ${PATH} \n \\ #e % é"""
ODD_ENV = f"""\
summary = "A value with every character that a Dockerfile, a shell or JSON could trip over"
description = "For tests."
order = 10
package = "vllm"

[provenance]
origin = "vendor, tests"
forwarded = "not-needed"
applied-upstream = "no"
last-update = 2026-11-20

[[variant]]
name = "all"
when = {{ "vllm" = ">=0" }}

[[variant.op]]
op = "env"
name = "VLLM_CACHE_ROOT"
value = {json.dumps(ODD_VALUE, ensure_ascii=False)}
"""


@pytest.fixture(scope="module")
def slim(engine: Engine, base_image: str) -> Iterator[str]:
    """A small base image."""
    build = Built(engine)
    yield build("slim:1", SLIM.format(base=base_image))
    build.remove()


def removed_containers(engine: Engine) -> set[str]:
    """Remove every container, and say which there were."""
    found = support.containers(engine)
    for held in found:
        engine.run("rm", "--force", held)
    return found


@pytest.fixture(autouse=True)
def nothing_left(engine: Engine, slim: str, build: Built) -> Iterator[None]:
    """However a command ends, it leaves no container and no name that was not asked for."""
    before = {*support.tags(engine)}
    yield
    containers = removed_containers(engine)
    left = {*support.tags(engine)} - before - {*build.made}
    for name in left:
        engine.run("image", "rm", name)
    assert not containers
    assert not left


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    """A folder with layers of our own."""
    folder = tmp_path / "patches"
    for name, text in (("taking-away", TAKING_AWAY), ("unnamed", UNNAMED), ("odd-env", ODD_ENV)):
        (folder / name).mkdir(parents=True)
        (folder / name / "layer.toml").write_text(text, "utf-8")
    return folder


def trapped(build: Built, name: str, base: str, word: str, action: str) -> str:
    """A base whose Python does `action` as soon as `word` is in its command line."""
    return build(name, TRAPPED.format(base=base, word=word, action=action))


# --- no engine ------------------------------------------------------------------------------------


def test_a_requested_engine_is_missing(cli: Cli) -> None:
    words = ("--base", "pypi:vllm==0.20.1", "--engine", "buildkit")
    done = cli(*SETTINGS, *words, env=NOBODY)
    assert done.code == Exit.ENGINE
    assert "/nonexistent/docker.sock" in done.err
    assert not done.out


def test_no_engine_for_an_image(cli: Cli, slim: str) -> None:
    """Whoever names an engine wants no other: nothing is looked for in a registry."""
    done = cli(*SETTINGS, "--base", slim, "--json", env=NOBODY)
    assert done.code == Exit.ENGINE
    assert done.json["error"]["code"] == Exit.ENGINE
    assert "/nonexistent/docker.sock" in done.json["error"]["message"]
    assert "--engine oci" in done.json["error"]["hint"]


def test_no_engine_and_released_wheels_make_a_layout(cli: Cli, tmp_path: Path) -> None:
    words = ("--base", "pypi:vllm==0.20.1", "--output", f"oci:{tmp_path}/layout")
    done = cli(*SETTINGS, *words, "--engine", "auto", env=NOBODY).ok()
    digest, _ = support.layout_manifest(tmp_path / "layout")
    assert done.last == f"oci:{tmp_path}/layout@{digest}"


def test_auto_writes_no_layout_if_an_engine_is_named(cli: Cli, tmp_path: Path) -> None:
    here = Cli({**cli.env, **NOBODY}, tmp_path)
    done = here(*SETTINGS, "--base", "pypi:vllm==0.20.1")
    assert done.code == Exit.ENGINE
    assert "/nonexistent/docker.sock" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(
    Path("/var/run/docker.sock").exists(), reason="NOT RUN: a Docker Engine of this machine answers"
)
def test_auto_writes_a_layout_without_an_engine(cli: Cli, tmp_path: Path) -> None:
    here = Cli({**cli.env, "DOCKER_HOST": ""}, tmp_path)
    done = here(*SETTINGS, "--base", "pypi:vllm==0.20.1", "--json").ok()
    assert done.json["engine"] == "oci"
    assert (tmp_path / done.json["image"].removeprefix("oci:") / "oci-layout").is_file()


# --- images that cannot be a base -----------------------------------------------------------------


def test_image_that_does_not_exist(cli: Cli, registry: Registry) -> None:
    done = cli(*SETTINGS, "--base", f"{registry.address}/never/pushed:1")
    assert done.code == Exit.REMOTE
    assert f"{registry.address}/never/pushed:1" in done.err


def test_registry_that_does_not_answer(cli: Cli) -> None:
    done = cli(*SETTINGS, "--base", f"{DEAD_REGISTRY}/some/image:1")
    assert done.code == Exit.REMOTE
    assert "error: " in done.err


def test_image_without_vllm(cli: Cli, slim: str, build: Built) -> None:
    image = build("no-vllm:1", f"FROM {slim}\nRUN rm -r {base.SITE}/vllm-*.dist-info\n")
    done = cli(*SETTINGS, "--base", image)
    assert done.code == Exit.USAGE
    assert f"error: image {image} has no Python with vllm" in done.err


def test_image_without_a_shell(cli: Cli, engine: Engine, build: Built) -> None:
    image = build("empty:1", "FROM scratch\nLABEL empty=yes\n")
    done = cli(*SETTINGS, "--base", image)
    left = removed_containers(engine)
    assert done.code == Exit.USAGE, done.err
    assert image in done.err
    assert not left


def test_a_tag_that_moved_is_refused(
    engine: Engine, slim: str, build: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in engine.env.items():
        monkeypatch.setenv(name, value)
    index = PackageIndex()
    tag = build("moving:1", f"FROM {slim}\nLABEL version=1\n")
    selection = Catalog.discover(()).select(["marlin"])
    identified = identify_base(Ref(tag), selection, index, platform=None)
    try:
        plan = make_plan(identified, selection, IndexSources(index))
    finally:
        identified.close()
    Built(engine)(tag, f"FROM {slim}\nLABEL version=2\n")
    builder = BuildkitEngine()
    assert builder.missing() is None
    with pytest.raises(BuildFailed, match="the tag moved") as caught:
        builder.build(BuildRequest(plan=plan, tag="built-on:old"))
    assert caught.value.code == Exit.BUILD_FAILED
    assert "built-on:old" not in support.tags(engine)


def test_a_distribution_named_only_by_an_op_is_looked_up(
    cli: Cli, slim: str, patches: Path
) -> None:
    words = ("--layers", "unnamed", "--patches", patches, "--base", slim, "--json")
    (layer,) = cli("plan", *words).ok().json["layers"]
    assert layer["state"] == "needed"


# --- builds that fail or are ended ----------------------------------------------------------------


def test_failed_build_leaves_no_tag(
    cli: Cli, engine: Engine, slim: str, build: Built, patches: Path
) -> None:
    image = trapped(build, "broken-at-finish:1", slim, "finish", "os._exit(9)")
    words = ("--layers", "taking-away", "--patches", patches, "--base", image)
    done = cli("image", *words, "--tag", "failed:1", "--no-verify")
    assert done.code == Exit.BUILD_FAILED
    assert "exit code: 9" in done.err
    assert not done.out
    assert "failed:1" not in support.tags(engine)


def _running(engine: Engine, word: str) -> list[str]:
    """Command lines in the containers of this engine, those of builds included, with a word."""
    found = []
    for pid in machine._family(str(engine._work)):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:
            continue
        if word in line.decode(errors="replace"):
            found.append(line.decode(errors="replace"))
    return found


def until_gone(engine: Engine, word: str, seconds: float = 15.0) -> list[str]:
    deadline = time.monotonic() + seconds
    while _running(engine, word) and time.monotonic() < deadline:
        time.sleep(0.1)
    return _running(engine, word)


def interrupt(
    engine: Engine, started: subprocess.Popen[str], word: str, number: int, group: bool
) -> str:
    """Wait until a container runs a command with that word; then end what started it."""
    deadline = time.monotonic() + 600
    while not _running(engine, word):
        assert started.poll() is None, started.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if group:
        os.killpg(started.pid, number)
    else:
        started.send_signal(number)
    return started.communicate(timeout=600)[1]


@pytest.mark.parametrize(
    ("number", "group"),
    [(signal.SIGINT, True), (signal.SIGTERM, False)],
    ids=["ctrl-c", "terminated"],
)
def test_interrupted_build(
    cli: Cli, engine: Engine, slim: str, build: Built, patches: Path, number: int, group: bool
) -> None:
    image = trapped(build, "slow-finish:1", slim, "finish", "time.sleep(50)")
    words = ("--layers", "taking-away", "--patches", patches, "--base", image)
    started = cli.start("image", *words, "--tag", "interrupted:1", "--no-verify")
    said = interrupt(engine, started, "spark_apply.pyz finish", number, group)
    assert started.returncode == (Exit.INTERRUPTED if group else Exit.TERMINATED), said
    assert "no partial output was left" in said
    assert not until_gone(engine, "spark_apply.pyz finish")
    assert "interrupted:1" not in support.tags(engine)


def test_interrupted_while_the_base_is_identified(
    cli: Cli, engine: Engine, slim: str, build: Built
) -> None:
    image = trapped(build, "slow-probe:1", slim, "SPARK_BUILD_TRACKED", "time.sleep(50)")
    started = cli.start(*SETTINGS, "--base", image, "--tag", "interrupted:1")
    said = interrupt(engine, started, 'm.version("vllm")', signal.SIGINT, group=True)
    assert started.returncode == Exit.INTERRUPTED, said
    assert not removed_containers(engine)


# --- what a base is kept in -----------------------------------------------------------------------

OF_A_USER = """\
FROM {base}
RUN mkdir --mode=2775 /workspace && chown 1000:1000 /workspace
USER 1000:1000
"""


def test_user_of_the_base_is_kept(
    cli: Cli, engine: Engine, slim: str, build: Built, patches: Path
) -> None:
    image = build("of-a-user:1", OF_A_USER.format(base=slim))
    words = ("--layers", "taking-away", "--patches", patches, "--base", image)
    cli("image", *words, "--tag", "for-a-user:1", "--no-verify").ok()
    build.made.append("for-a-user:1")
    assert support.inspect(engine, "for-a-user:1")["Config"]["User"] == "1000:1000"
    assert support.script(engine, "for-a-user:1", "id -u").strip() == "1000"
    gone = support.script(engine, "for-a-user:1", f"ls {base.SITE}").split()
    assert not [name for name in gone if name.startswith("packaging")]


def test_folders_keep_their_owner(cli: Cli, engine: Engine, slim: str, build: Built) -> None:
    image = build("of-a-user:2", OF_A_USER.format(base=slim))
    cli(*SETTINGS, "--base", image, "--tag", "for-a-user:2").ok()
    build.made.append("for-a-user:2")
    show = "stat --format='%u:%g %a' /workspace; touch /workspace/mine && echo writable"
    was = support.script(engine, image, show)
    assert was.split() == ["1000:1000", "2775", "writable"]
    assert support.script(engine, "for-a-user:2", show) == was


def test_unusual_environment_values_are_preserved(
    cli: Cli, engine: Engine, slim: str, build: Built, patches: Path
) -> None:
    words = ("--layers", "odd-env", "--patches", patches, "--base", slim)
    cli("image", *words, "--tag", "odd:1", "--no-verify").ok()
    build.made.append("odd:1")
    config = support.inspect(engine, "odd:1")["Config"]
    assert support.environment_of(config)["VLLM_CACHE_ROOT"] == ODD_VALUE


# --- registries -----------------------------------------------------------------------------------


def test_push_ends_with_a_digest_that_the_registry_has(
    cli: Cli, engine: Engine, registry: Registry, slim: str, build: Built
) -> None:
    tag = f"{registry.address}/spark/marlin:1"
    done = cli(*SETTINGS, "--base", slim, "--tag", tag, "--push").ok()
    build.made.append(tag)
    name, _, digest = done.last.partition("@")
    assert name == tag
    skopeo = engine.tools.program("skopeo")
    for reference in (tag, f"{registry.address}/spark/marlin@{digest}"):
        words = ("inspect", "--tls-verify=false", f"docker://{reference}")
        assert json.loads(cache.call(skopeo, *words))["Digest"] == digest


def test_push_to_a_dead_registry(cli: Cli, slim: str, build: Built) -> None:
    tag = f"{DEAD_REGISTRY}/spark/marlin:1"
    done = cli(*SETTINGS, "--base", slim, "--tag", tag, "--push")
    build.made.append(tag)
    assert done.code == Exit.REMOTE
    assert f"pushing {tag} failed" in done.err
    assert not done.out


# --- and that these tests do not pass for want of an engine ---------------------------------------

NO_ROOT = (
    "import os, sys, pytest; os.geteuid = lambda: 1000; "
    "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', sys.argv[1]]))"
)


@pytest.mark.parametrize(("required", "code"), [("1", 1), ("", 0)], ids=["gate", "laptop"])
def test_a_missing_engine_fails_the_gate_and_is_reported_elsewhere(
    required: str, code: int
) -> None:
    one = "tests/engine/test_machine.py::test_engine_and_buildx_answer"
    done = subprocess.run(
        [sys.executable, "-c", NO_ROOT, one],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "CI": "", "SPARK_BUILD_REQUIRE_ENGINE": required},
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert "needs root" in done.stdout
    assert (" did NOT run" in done.stdout) == (not required)
