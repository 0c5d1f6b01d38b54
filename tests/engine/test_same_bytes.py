"""One plan, several ways to carry it out, the same files: byte for byte, with the same modes."""

from __future__ import annotations

import json
import subprocess
import tarfile
from typing import TYPE_CHECKING, Any, cast

import pytest

from builder.applier.receipts import parse_record
from builder.images.engines.baked import LABEL_PREFIX

from . import base, cache, support
from .support import PROFILE, WHEELS, Built, Cli, Done, Tree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .machine import Engine

#: What `docker create` puts into every container, and nothing of which is in the image.
CONTAINER_OWN = (
    ".dockerenv", "dev", "proc", "sys", "etc",
)  # fmt: skip
#: What only an installed environment has: where the originals are, and the variables' defaults.
STATE = (".spark-build", "spark_build_env.pth")
#: The parts of site-packages that an `apply` may look at, without the gigabytes that it does not.
EXPORT = (
    f"cd {base.SITE} && find vllm flashinfer nvidia_cutlass_dsl *.dist-info *.pth *.py ! -type d "
    r"\( -size -8M -o -path 'nvidia_cutlass_dsl/*' \) -print0 "
    "| tar --create --null --files-from=- --file=-"
)


# --- buildkit and oci ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layout(cli: Cli) -> Iterator[Path]:
    """The overlay for the default platform, arm64 and Python 3.12, as the oci engine writes it."""
    with cache.scratch("same-bytes") as folder:
        output = f"oci:{folder}/layout"
        words = ("--base", WHEELS, "--engine", "oci", "--output", output, "--no-verify")
        cli("image", "--layers", PROFILE, *words).ok()
        yield folder / "layout"


@pytest.fixture(scope="module")
def loaded(cli: Cli, engine: Engine) -> Iterator[Done]:
    """The same plan built by BuildKit: an image that holds the overlay's files and no others."""
    words = ("--base", WHEELS, "--engine", "buildkit", "--no-verify", "--json")
    done = cli("image", "--layers", PROFILE, *words, "--tag", "same:bytes").ok()
    yield done
    engine.run("image", "rm", "same:bytes")


def test_engines_give_the_same_files(engine: Engine, loaded: Done, layout: Path) -> None:
    exported = support.tree_of_export(engine, "same:bytes", "--platform=linux/arm64")
    of_buildkit = support.without(exported, *CONTAINER_OWN)
    of_oci = {p: entry for p, entry in support.tree_of_layout(layout).items() if "/.wh." not in p}
    assert len(support.files_of(of_oci)) > 150
    assert not support.differences(of_buildkit, of_oci)


def test_engines_give_the_same_configuration(engine: Engine, loaded: Done, layout: Path) -> None:
    seen = support.inspect(engine, "same:bytes")
    _, manifest = support.layout_manifest(layout)
    config = support.layout_json(layout, manifest["config"])
    ours = support.environment_of(config["config"])
    theirs = support.environment_of(seen["Config"])
    theirs.pop("PATH", None)  # BuildKit's own default
    assert theirs == ours
    assert seen["Config"]["Labels"] == config["config"]["Labels"] == manifest["annotations"]
    assert manifest["annotations"][f"{LABEL_PREFIX}.plan"] == loaded.json["plan_digest"]
    assert (seen["Os"], seen["Architecture"]) == (config["os"], config["architecture"])
    assert config["architecture"] == "arm64"
    assert seen["Created"][:19] == config["created"][:19]


# --- an image, a directory, a mod ---------------------------------------------------------------


@pytest.fixture(scope="module")
def base_tree(engine: Engine, base_image: str) -> Tree:
    """Site-packages of the base image."""
    return support.tree_in_image(engine, base_image)


@pytest.fixture(scope="module")
def plan(engine: Engine, patched: str) -> dict[str, Any]:
    """The plan that the image carries."""
    text = support.script(engine, patched, f"cat {support.SHARE}/plan.json")
    return cast("dict[str, Any]", json.loads(text))


def planned_files(plan: dict[str, Any]) -> dict[str, tuple[str | None, str | None]]:
    """Path -> sha256 before the first layer and after the last one."""
    net: dict[str, tuple[str | None, str | None]] = {}
    for layer in plan["layers"]:
        for row in layer["files"]:
            before = net[row["path"]][0] if row["path"] in net else row["before"]
            net[row["path"]] = (before, row["after"])
    return net


def test_image_is_the_base_and_the_plan_and_nothing_else(
    base_tree: Tree, built_tree: Tree, plan: dict[str, Any], built: Done
) -> None:
    assert plan["plan_digest"] == built.json["plan_digest"]
    net = planned_files(plan)
    files = support.files_of(base_tree)
    assert {path: before for path, (before, _) in net.items()} == {
        path: files[path][2] if path in files else None for path in net
    }
    expected = dict(files)
    for path, (_, after) in net.items():
        mode = expected.pop(path, ("file", 0o644, ""))[1]
        if after is not None:
            expected[path] = ("file", mode, after)
    seen = support.files_of(built_tree)
    receipts = {path for path in seen if path.startswith(".spark-build/receipts/")}
    assert len(receipts) == len([la for la in plan["layers"] if la["state"] == "needed"])
    records = {path for path in seen if path.endswith(".dist-info/RECORD")}
    aside = receipts | records
    seen = {path: entry for path, entry in seen.items() if path not in aside}
    expected = {path: entry for path, entry in expected.items() if path not in records}
    assert not support.differences(executables_aside(expected), executables_aside(seen))


def test_record_matches_every_planned_file(
    engine: Engine, patched: str, plan: dict[str, Any]
) -> None:
    text = support.script(engine, patched, f"cat {base.SITE}/*.dist-info/RECORD")
    claims: dict[str, set[str | None]] = {}
    for row in parse_record(text.encode()):
        claims.setdefault(row.path, set()).add(row.sha256)
    net = planned_files(plan)
    files = {path for path in net if not path.endswith(".dist-info/RECORD")}
    wrong = {
        path: claims.get(path)
        for path in files
        if claims.get(path, set()) != ({net[path][1]} if net[path][1] is not None else set())
    }
    assert len(files) > 100
    assert wrong == {}


def executables_aside(tree: Tree) -> Tree:
    """New files may be executable, which the plan does not say: only who may write counts."""
    return {path: (kind, mode & ~0o111, what) for path, (kind, mode, what) in tree.items()}


def test_folders_keep_their_modes(base_tree: Tree, built_tree: Tree) -> None:
    was = {path: entry for path, entry in base_tree.items() if entry[0] == "dir"}
    now = {path: entry for path, entry in built_tree.items() if entry[0] == "dir"}
    both = was.keys() & now.keys()
    assert not support.differences({p: was[p] for p in both}, {p: now[p] for p in both})
    assert {entry[1] for path, entry in now.items() if path not in was} == {0o755}
    gone = was.keys() - now.keys()
    left = [p for p in built_tree if any(p.startswith(f"{folder}/") for folder in gone)]
    assert not left


def export(engine: Engine, image: str, folder: Path) -> None:
    """Copy what an `apply` reads and writes out of an image."""
    words = ("run", "--rm", "--network=none", "--log-driver=none", "--entrypoint", "sh")
    with subprocess.Popen(
        [engine.docker, *words, image, "-c", EXPORT], env=engine.env, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
            tar.extractall(folder, filter="tar")
    assert process.returncode == 0


@pytest.fixture
def exported(engine: Engine, base_image: str) -> Iterator[Path]:
    """A site-packages directory of this machine, as it is in the base image."""
    with cache.scratch("exported") as folder:
        root = folder / "python3.11" / "site-packages"
        root.mkdir(parents=True)
        export(engine, base_image, root)
        yield root


def test_apply_gives_the_same_files_as_the_image(
    cli: Cli, exported: Path, base_tree: Tree, built_tree: Tree, plan: dict[str, Any]
) -> None:
    before = support.files_of(support.tree_of_directory(exported))
    touched = planned_files(plan)
    missing = {path for path, (was, _) in touched.items() if was is not None} - before.keys()
    assert not missing, "the export leaves out what the plan changes"
    done = cli("apply", exported, "--layers", PROFILE, "--json").ok()
    assert done.json["written"] is True
    after = support.without(support.files_of(support.tree_of_directory(exported)), *STATE)
    image = support.without(support.files_of(built_tree), *STATE)
    wanted = {
        path: entry for path, entry in image.items() if path in before or path not in base_tree
    }
    assert not support.differences(after, wanted)


def test_a_mod_gives_the_same_files_as_the_image(built_tree: Tree, modded_tree: Tree) -> None:
    of_mod = support.without(modded_tree, *STATE)
    of_image = support.without(built_tree, *STATE)
    assert len(of_mod) > 40_000
    assert not support.differences(of_mod, of_image)


# --- and that the comparison can fail -----------------------------------------------------------


def test_comparison_detects_a_byte_and_a_mode(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name / "package").mkdir(parents=True)
        (tmp_path / name / "package" / "module.py").write_text("x = 1\n")
        (tmp_path / name / "link").symlink_to("package")
    one, other = tmp_path / "one", tmp_path / "other"
    trees = support.tree_of_directory
    assert not support.differences(trees(one), trees(other))
    (other / "package/module.py").chmod(0o755)
    assert set(support.differences(trees(one), trees(other))) == {"package/module.py"}
    (other / "package/module.py").chmod(0o644)
    (other / "package/module.py").write_text("x = 2\n")
    assert set(support.differences(trees(one), trees(other))) == {"package/module.py"}
    (one / "package/module.py").unlink()
    assert support.differences(trees(one), trees(other))["package/module.py"][0] is None


def test_comparison_detects_a_changed_file_in_an_image(
    engine: Engine, patched: str, built_tree: Tree, build: Built
) -> None:
    text = f"FROM {patched}\nRUN printf '\\n' >> {base.SITE}/vllm/config/kernel.py\n"
    tree = support.tree_in_image(engine, build("same:changed", text), f"{base.SITE}/vllm/config")
    wanted = support.below(built_tree, "vllm/config")
    assert set(support.differences(tree, wanted)) == {"kernel.py"}
