"""``spark-build bake`` on images in a registry, and the list that the images workflow has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from builder.images.registry.copy import copy_image
from builder.images.registry.layout import LayoutDirectory
from tests.documents import validated
from tests.memoryregistry import MemoryRegistry
from tests.unit.fakes import write_tree
from tests.unit.imagefiles import SITE, Item, packed, put_vllm, tar_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.caller import Call

ROOT = Path(__file__).parents[3]
IMAGES = ROOT / ".github" / "images.json"
#: A base whose files the layer does not match.
DRIFTED = packed(tar_of(Item(f"{SITE}/vllm/core.py", b"BACKEND = 'other'\n")))


@pytest.fixture
def bases(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Two images of vLLM in a registry, by their tags; a third, ``v3.0``, has other files."""
    layout = tmp_path / "layout"
    with MemoryRegistry() as registry:
        place = registry.repository("me/vllm")
        for number, more in enumerate(((), (packed(tar_of(Item("two", b"2"))),), (DRIFTED,)), 1):
            raw = put_vllm(layout, *more, name=f"v{number}.0")
            copy_image(LayoutDirectory(layout), raw.digest, place, f"v{number}.0")
        name = f"docker://{registry.address}/me/vllm"
        yield f"{name}:v1.0", f"{name}:v2.0"


def bake(call: Call, bases: tuple[str, ...], *words: object) -> Any:
    """Run the command with all these bases."""
    host = bases[0].removeprefix("docker://").partition("/")[0]
    named = [word for base in bases for word in ("-b", base)]
    return call("bake", "-l", "fix", *named, "--plain-http", host, *words)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file with its mode."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mode)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_target_for_each_base(call: Call, bases: tuple[str, str]) -> None:
    done = bake(call, bases, "-o", "out", "--tag-prefix", "h.example/me", "--json")
    assert done.code == 0, done.err
    validated("bake", done.json)
    file = json.loads(Path("out/docker-bake.json").read_bytes())
    names = ["fix-vllm-v1-0", "fix-vllm-v2-0"]
    assert file["group"] == {"default": {"targets": names}}
    assert list(file["target"]) == names
    first, second = file["target"].values()
    assert first["tags"] == ["h.example/me:1.0-fix"]
    assert second["tags"] == ["h.example/me:2.0-fix", "h.example/me:fix"]
    assert first["platforms"] == ["linux/arm64"]
    assert first["args"]["SOURCE_DATE_EPOCH"].isdigit()
    assert [row["target"] for row in done.json["targets"]] == names


def test_every_base_is_named_by_digest(call: Call, bases: tuple[str, str]) -> None:
    done = bake(call, bases, "-o", "out", "--json")
    for row in done.json["targets"]:
        name, _, digest = row["base"].partition("@")
        text = Path("out", row["target"], "Dockerfile").read_text()
        assert text.startswith("FROM ")
        assert f"{name.removeprefix('docker://')}@{digest}\n" in text
        assert "FROM docker://" not in text
        assert row["plan_digest"] in text
        assert (Path("out", row["target"], "layer-fix") / SITE / "vllm/core.py").exists()


def test_the_same_inputs_give_the_same_bytes(call: Call, bases: tuple[str, str]) -> None:
    assert bake(call, bases, "-o", "one").code == 0
    done = bake(call, bases, "-o", "deep/two")
    assert (done.code, done.out) == (0, "deep/two/docker-bake.json\n")
    assert "cd deep/two && docker buildx bake" in done.err
    assert contents(Path("one")) == contents(Path("deep/two"))
    assert len(contents(Path("one"))) > 4


def test_one_target_of_the_list_is_as_in_the_whole(call: Call, bases: tuple[str, str]) -> None:
    assert bake(call, bases, "-o", "all").code == 0
    assert bake(call, bases, "-o", "one", "--target", "fix-vllm-v1-0").code == 0
    whole, one = (
        json.loads(Path(name, "docker-bake.json").read_bytes()) for name in ("all", "one")
    )
    assert one["target"] == {"fix-vllm-v1-0": whole["target"]["fix-vllm-v1-0"]}
    assert one["target"]["fix-vllm-v1-0"]["tags"] == ["spark-build:1.0-fix"]
    assert not Path("one/fix-vllm-v2-0").exists()


def test_one_bad_image_leaves_nothing(call: Call, bases: tuple[str, str]) -> None:
    bad = bases[0].replace(":v1", ":v3")
    done = bake(call, (*bases, bad), "-o", "out")
    assert done.code == 4
    assert f"fix on {bad}: layer fix: drift" in done.err
    assert not list(Path.cwd().iterdir())


def test_a_folder_that_is_there_is_left_alone(call: Call, bases: tuple[str, str]) -> None:
    write_tree(Path.cwd(), {"out/mine": b"1"})
    done = bake(call, bases, "-o", "out")
    assert done.code == 2
    assert "out already exists" in done.err
    assert list(contents(Path("out"))) == ["mine"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-b docker://a/b:1 -o out", "no profile is named"),
        ("-l fix -o out", "no base is named"),
        ("-l fix -b docker://a/b:1", "no folder to write to"),
        ("-l fix -b docker://a/b:1 --matrix -o out", "--matrix writes nothing"),
        ("-l fxi -b docker://a/b:1 --matrix", "did you mean 'fix'"),
        ("-l fix -b pypi:vllm==0.20.1 --matrix", "is not an image in a registry"),
        ("-l fix -b oci:dir --matrix", "is not an image in a registry"),
        ("-l fix -b docker://A --matrix", "A"),
        ("-l fix -b docker://a/b:1 -b docker://h.example/b:1 --matrix", "two images would have"),
        ("-l fix -b docker://a/b:1 --matrix --tag-prefix a:b", "a:b"),
        ("-l fix -b docker://a/b:1 --target fix-b-2 --matrix", "did you mean 'fix-b-1'"),
        ("--images none.json --matrix", "cannot read none.json"),
        ("--images bad.json --matrix", "bad.json: Expected `array`"),
        ("--images no.json --matrix", "no.json: "),
    ],
)
def test_input_that_is_refused(call: Call, words: str, message: str) -> None:
    Path("bad.json").write_text('{"profiles": "fix", "bases": []}')
    Path("no.json").write_text("{")
    done = call("bake", *words.split())
    assert done.code == 2, done.err
    assert message in done.err
    assert not Path("out").exists()


def test_the_list_is_that_of_the_images_workflow(call: Call) -> None:
    listing = (sys.executable, str(ROOT / ".github/scripts/list_images.py"), str(IMAGES))
    said = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    lanes = dict(line.split("=", 1) for line in said.splitlines())
    wanted = [row for lane in lanes.values() for row in json.loads(lane)]
    done = call("bake", "--images", IMAGES, "--matrix", "--tag-prefix", "p")
    rows = json.loads(done.out)
    assert [(row["profile"], row["base"]) for row in rows] == [
        (row["profile"], row["base"]) for row in wanted
    ]
    assert [row["tags"] for row in rows] == [
        [f"p:{tag}" for tag in row["tags"].split()] for row in wanted
    ]
    as_document = call("bake", "--images", IMAGES, "--matrix", "--tag-prefix", "p", "--json")
    assert validated("bake", as_document.json)["include"] == rows


def test_an_option_replaces_its_list(call: Call) -> None:
    rows = json.loads(call("bake", "--images", IMAGES, "-l", "marlin,fix", "--matrix").out)
    assert {row["profile"] for row in rows} == {"marlin,fix"}
    assert rows[-1]["tags"] == ["spark-build:0.33.0-marlin-fix", "spark-build:marlin-fix"]
