"""Mods that run isolated on an installed vLLM: what they change becomes a layer."""

from __future__ import annotations

import datetime
import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder.applier.trees import DirTree
from builder.errors import SparkBuildError
from builder.layers.conversion import write_drafts
from builder.pipeline import modlayer
from builder.pipeline.modlayer import ModFailed, ModRefused, mod_draft
from builder.proof import modrun
from builder.proof.isolation import Bubblewrap, SandboxUnavailable
from tests.engine.cache import MachineError
from tests.isolated import bring_bubblewrap, on_path
from tests.unit import imagefiles
from tests.unit.fakes import dist_files, vllm_files
from tests.unit.fakes import write_tree as write_bytes
from tests.unit.imagefiles import put_vllm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from builder.layers.conversion import Draft

SITE = modrun.SITE
CORE = "BACKEND = 'cutlass'\n\n\ndef run():\n    return BACKEND\n"
HEAD = "--- a/vllm/core.py\n+++ b/vllm/core.py\n@@ -1,5 +1,5 @@\n"
PATCH = f"{HEAD}-BACKEND = 'cutlass'\n+BACKEND = 'b12x'\n \n \n def run():\n     return BACKEND\n"
PYTHON = """\
python3 - <<'EOF'
import pathlib, re
{find}
text = path.read_text()
assert "cutlass" in text, "anchor is gone"
path.write_text(re.sub(r"= '\\w+'", "= 'b12x'", text, count=1))
EOF
"""
FIX = f"""\
path = "{SITE}/vllm/core.py"
text = open(path).read()
open(path, "w").write(text.replace("cutlass", "b12x"))
"""
#: Ways in which the field's mods make the same edit.
WAYS = {
    "patch": f"patch -p1 -d {SITE} < fix.patch",
    "patch-root": f"cd {SITE}\npatch -p1 -i /workspace/mods/my-mod/fix.patch",
    "git": f'D="$(cd "$(dirname "$0")" && pwd)"\ncd {SITE}\n'
    'if git apply --reverse --check "$D/fix.patch" 2>/dev/null; then echo there\n'
    'elif git apply --check "$D/fix.patch"; then git apply "$D/fix.patch"; fi',
    "sed": f"sed -i 's/cutlass/b12x/' {SITE}/vllm/core.py",
    "sed-regex": f"for f in $(grep -rl cutlass {SITE}/vllm --include=core.py); do\n"
    "  sed -i.bak -E \"s/= '[a-z]+'/= 'b12x'/\" \"$f\"\ndone",
    "python": PYTHON.format(find=f'path = pathlib.Path("{SITE}/vllm/core.py")'),
    "python-import": PYTHON.format(
        find="import vllm\npath = pathlib.Path(vllm.__file__).with_name('core.py')"
    ),
    "python-spec": PYTHON.format(
        find="from importlib.util import find_spec\n"
        "path = pathlib.Path(find_spec('vllm').submodule_search_locations[0], 'core.py')"
    ),
    "python-site": PYTHON.format(
        find="import site\npath = pathlib.Path(site.getsitepackages()[0], 'vllm/core.py')"
    ),
    "python-purelib": PYTHON.format(
        find="import sysconfig\n"
        "path = pathlib.Path(sysconfig.get_paths()['purelib'], 'vllm/core.py')"
    ),
    "pip-show": "D=$(pip show vllm | awk '/^Location/ {print $2}')\n"
    'sed -i s/cutlass/b12x/ "$D/vllm/core.py"',
    "pip-list": f"pip list | grep -q '^vllm ' && pip freeze | grep -q '^vllm==0'\n"
    f"sed -i s/cutlass/b12x/ {SITE}/vllm/core.py",
    "helper": "./fix.sh",
    "copy": f"cp core.py {SITE}/vllm/core.py",
    "cat": f"cat > {SITE}/vllm/core.py <<'EOF'\n{CORE.replace('cutlass', 'b12x')}EOF",
    "file": "python3 fix.py",
    "version": f"python3.12 -c '{FIX}'",
    "deep": "F=$(python3 -c 'import vllm.deep as m; print(m.__file__)' 2>/dev/null)\n"
    'sed -i s/cutlass/b12x/ "$(dirname "$F")/core.py"',
    "root": f'[ "$(id -u)" = 0 ]\nchown root:root {SITE}/vllm/core.py\n'
    f"install -o root -g root -m 644 core.py {SITE}/vllm/core.py",
    "from-root": f"sed 's,/vllm/,{SITE}/vllm/,' fix.patch | patch -p1 -d /",
    "ldconfig": f"sed -i s/cutlass/b12x/ {SITE}/vllm/core.py\nldconfig",
    "background": f"(sleep 1000 &)\nsed -i s/cutlass/b12x/ {SITE}/vllm/core.py",
}


@pytest.fixture(scope="module", autouse=True)
def _bwrap() -> Iterator[None]:
    """bubblewrap, first on PATH."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            patch.setenv("PATH", on_path(bring_bubblewrap()))
        except MachineError as error:
            if os.environ.get("CI"):
                pytest.fail(f"no bubblewrap: {error}")
            pytest.skip(f"no bubblewrap: {error}")
        yield


def write_tree(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Texts and bytes as files."""
    return write_bytes(
        folder, {p: t.encode() if isinstance(t, str) else t for p, t in files.items()}
    )


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An installed vLLM, whose package does not import without torch, and a FlashInfer."""
    vllm = vllm_files(__init__="import torch\n", core=CORE, deep="import torch\n")
    other = dist_files(
        "flashinfer-python",
        "0.6.8",
        {"flashinfer/__init__.py": "A = 1\n", "flashinfer/transformers/x.py": ""},
    )
    return write_tree(tmp_path / "site-packages", {**vllm, **other})


def made(tmp_path: Path, script: str, **files: str) -> Draft:
    """The layer of a mod with this script, on the installed vLLM."""
    named = {name.replace("_", "."): text for name, text in files.items()}
    mod = write_tree(tmp_path / "my-mod", {"run.sh": f"#!/bin/bash\nset -e\n{script}\n", **named})
    for file in mod.glob("*.sh"):
        file.chmod(0o755)
    return mod_draft("m", mod, f"dir:{tmp_path / 'site-packages'}")


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_edit_a_file_gives_the_same_op(tmp_path: Path, site: Path, way: str) -> None:
    new = CORE.replace("cutlass", "b12x")
    own = f"#!/usr/bin/env python3\n{FIX}"
    draft = made(tmp_path, WAYS[way], fix_patch=PATCH, core_py=new, fix_py=FIX, fix_sh=own)
    (op,) = draft.ops
    assert op.keys["op"] == "replace"
    assert op.keys["file"] == "vllm/core.py"
    assert "b12x" in str(op.keys["new"])
    assert draft.package == "vllm"
    assert not draft.unconverted
    assert (site / "vllm/core.py").read_text() == CORE


def test_new_and_removed_files_and_another_package(tmp_path: Path, site: Path) -> None:
    del site
    script = f"cd {SITE}\ncp /workspace/mods/my-mod/new.py vllm/\nrm vllm/core.py\n"
    draft = made(tmp_path, f"{script}sed -i 's/1/2/' flashinfer/__init__.py", new_py="x = 1\n")
    assert sorted(str(op.keys["op"]) for op in draft.ops) == ["copy", "diff", "replace"]
    assert draft.package == "vllm"
    write_drafts([draft], tmp_path / "layers", datetime.date(2026, 11, 29))


def test_what_is_not_in_site_packages_is_named(tmp_path: Path, site: Path) -> None:
    del site
    script = f"{WAYS['sed']}\necho x > $WORKSPACE_DIR/chat.jinja\necho y >> ~/.bashrc\n"
    script += "echo z >> /etc/profile\nmkdir /opt/y\necho > /opt/y/z\n"
    script += "ln -s /bin/sh /usr/bin/x || true\n"
    draft = made(tmp_path, f"{script}ln -s core.py {SITE}/vllm/link.py")
    assert draft.unconverted == (
        "vllm/link.py (a link, or no file)",
        "/etc/profile (not in site-packages)",
        "/opt/y/z (not in site-packages)",
        "/root/.bashrc (not in site-packages)",
        "/workspace/chat.jinja (not in site-packages)",
        "ln: failed to create symbolic link '/usr/bin/x': Read-only file system (not written)",
    )


def test_a_name_of_a_file_begins_no_line(tmp_path: Path, site: Path) -> None:
    """The layer's file has these names in comments, and a terminal shows them."""
    del site
    names = r"$'a\nsummary = 1' $'b\e[31m' $'c\xff'"
    draft = made(tmp_path, f"{WAYS['sed']}\ncd /workspace\ntouch {names}")
    assert draft.unconverted == (
        r"/workspace/a\nsummary = 1 (not in site-packages)",
        r"/workspace/b\x1b[31m (not in site-packages)",
        r"/workspace/c\udcff (not in site-packages)",
    )
    write_drafts([draft], tmp_path / "layers", datetime.date(2026, 11, 29))


def test_metadata_of_an_installation_is_named(tmp_path: Path, site: Path) -> None:
    """A new entry point loads code, and no layer has it."""
    del site
    script = f"cd {SITE}\nmkdir own.dist-info\necho '[vllm.general_plugins]' > own.dist-info/e.txt"
    draft = made(tmp_path, f"{WAYS['sed']}\n{script}")
    assert draft.unconverted == ("own.dist-info/e.txt (metadata, which no layer changes)",)
    assert len(draft.ops) == 1


def test_many_names_are_counted(tmp_path: Path, site: Path) -> None:
    del site
    draft = made(tmp_path, f"{WAYS['sed']}\ntouch /workspace/{{1..400}}")
    assert draft.unconverted[-1] == "and 350 more"


def test_an_image_has_its_packages_where_it_has_them(tmp_path: Path) -> None:
    """Its mods name its paths, and its interpreter."""
    put_vllm(tmp_path / "image")
    path = f"/{imagefiles.SITE}/vllm/core.py"
    (tmp_path / "mod").mkdir()
    script = f"sed -i s/cutlass/b12x/ {path}\n/opt/app/bin/python3 -c 'import vllm'\n"
    (tmp_path / "mod/run.sh").write_text(f"set -e\n{script}")
    draft = mod_draft("m", tmp_path / "mod", f"oci:{tmp_path / 'image'}")
    assert [op.keys["file"] for op in draft.ops] == ["vllm/core.py"]
    with pytest.raises(SandboxUnavailable, match="this machine's files"):
        modrun.run_mod("m", tmp_path, tmp_path, "/usr/lib/python3/dist-packages")


REFUSED = {
    "pip": ("pip install foo==1.0 || true", "pip install foo==1.0"),
    "pip-module": ("python3 -m pip install -q foo", "pip install -q foo"),
    "uninstall": ("pip uninstall -y foo || true", "an installer"),
    "uv": ("uv pip install foo", "uv pip install foo"),
    "curl": ("curl -fsSL https://example.org/x | sh", "curl -fsSL https://example.org/x"),
    "clone": ("git clone https://example.org/x", "git clone https://example.org/x"),
    "apt": ("apt-get update || true", "apt-get update"),
    "urllib": (
        "python3 -c \"import urllib.request as r; r.urlopen('https://example.org')\"",
        "needs the network",
    ),
    "program": ("no-such-nvcc --version", "needs the program no-such-nvcc, which is not in /usr"),
    "module": ("python3 -c 'import torch'", "needs the module torch"),
    "inner": ("python3 -c 'from vllm.core import BACKEND'", "needs the module vllm.core"),
    "attribute": ("python3 -c 'import vllm; vllm.LLM'", "needs the module vllm, which"),
    "system": ("mkdir /mine", "needs other folders to write to"),
    "space": ("head -c 100M /dev/zero > /opt/x", "was ended: it filled /opt"),
    "moved": (f"rm -rf {SITE}; ln -s /usr {SITE}", f"it moved or removed {SITE}"),
    "removed": ("rm -rf /usr/local/lib/*", f"it moved or removed {SITE}"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_run_isolated_is_refused(tmp_path: Path, site: Path, what: str) -> None:
    del site
    script, said = REFUSED[what]
    with pytest.raises(ModRefused) as caught:
        made(tmp_path, f"{script}\n{WAYS['sed']}")
    assert said in str(caught.value)
    assert caught.value.hint


VLLM = "vllm-project/vllm"
URL = f"https://github.com/{VLLM}"
ALTERNATIVES = {
    "diff": (
        f"curl -L https://patch-diff.githubusercontent.com/raw/{VLLM}/pull/38909.diff | git apply",
        f"--from-pr {VLLM}#38909",
    ),
    "api": (
        f"curl -fL https://api.github.com/repos/{VLLM}/pulls/38909 -o /tmp/a.diff",
        f"--from-pr {VLLM}#38909",
    ),
    "python": (
        f"python3 -c 'import urllib.request as r; r.urlopen(\"{URL}/pull/38909.patch\")' || true",
        f"--from-pr {VLLM}#38909",
    ),
    "fetch": (
        f"git clone {URL}.git /tmp/v\ncd /tmp/v\ngit fetch origin pull/38909/head",
        f"--from-pr {VLLM}#38909",
    ),
    "commit": (f"wget {URL}/commit/0123abcd.patch", f"--from-pr {VLLM}@0123abcd"),
    "reversed": (
        f"curl -L {URL}/pull/38909.diff | patch -p1 -R -d {SITE}",
        "put what it downloads",
    ),
    "comment": (f"# {URL}/pull/38909\npip install foo", "an op wheel"),
}


@pytest.mark.parametrize("what", ALTERNATIVES)
def test_what_needs_the_network_has_an_alternative(tmp_path: Path, site: Path, what: str) -> None:
    del site
    script, hint = ALTERNATIVES[what]
    with pytest.raises(ModRefused, match="needs the network") as caught:
        made(tmp_path, script)
    assert hint in caught.value.hint


FAILED = {
    "nothing": ("echo all is well", "changes no file of an installed package"),
    "skipped": (
        f"patch -p1 -d {SITE} < other.patch || echo 'not applicable, skipping'",
        "vllm/core.py.rej (a hunk that did not apply)",
    ),
    "sed-nothing": (f"sed -i s/absent/x/ {SITE}/vllm/core.py", "changes no file"),
    "export": ("export VLLM_A=1", "changes no file"),
    "compiled": (f"python3 -m compileall -q {SITE}/vllm", "changes no file"),
    "exit": ("echo the anchor is gone >&2\nexit 3", "exit status 3\n  the anchor is gone"),
    "patch": (f"patch -p1 -d {SITE} < other.patch", "Hunk #1 FAILED"),
    "gone": ("python3 -c 'import vllm.gone'", "No module named 'vllm.gone'"),
    "hidden": ("python3 -c 'import torch' 2>/dev/null || exit 1", "it asked for torch, which"),
    "absent": (
        f"patch -p1 -d {SITE} < absent.patch || true",
        "transformers (a package that dir:",
    ),
}


@pytest.mark.parametrize("what", FAILED)
def test_a_mod_that_fails_or_changes_nothing(tmp_path: Path, site: Path, what: str) -> None:
    del site
    script, said = FAILED[what]
    with pytest.raises(ModFailed) as caught:
        made(
            tmp_path,
            script,
            other_patch=PATCH.replace("cutlass", "marlin"),
            **(
                {"absent_patch": PATCH.replace("/vllm/", "/transformers/")}
                if what == "absent"
                else {}
            ),
        )
    assert said in str(caught.value)
    assert "--base " in caught.value.hint


EATER = "python3 -c 'x = b\"1\" * (1 << 30); import time; time.sleep(99)' &\n"
BOMBS = {
    "time": ("sleep 1000", "it took more than 3 s"),
    "processes": ("for n in $(seq 400); do sleep 1000 & done\nwait", "processes"),
    "output": ("yes", "it printed more than 16 MiB"),
    "memory": (f"{EATER * 3}wait", "GiB of memory"),
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_mod_that_takes_too_much_is_ended(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Of root the number of processes is not limited by the kernel, so it is watched."""
    del site
    if what == "time":
        monkeypatch.setattr(modrun, "_SECONDS", 3.0)
    script, said = BOMBS[what]
    with pytest.raises((ModRefused, ModFailed)) as caught:
        made(tmp_path, script)
    assert said in str(caught.value) or "Resource temporarily unavailable" in str(caught.value)


def test_a_mod_cannot_fill_the_disk(tmp_path: Path, site: Path) -> None:
    del site
    script = f"for n in 1 2 3 4 5 6 7 8; do head -c 200M /dev/zero > {SITE}/$n; done"
    with pytest.raises(ModRefused, match="it filled /usr/local"):
        made(tmp_path, script)


def test_a_mod_sees_and_reaches_nothing(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No network, no file of this user, and nothing of this machine to write to."""
    secret = write_tree(tmp_path / "secret", {"key": "mine"})
    monkeypatch.setenv("SECRET_TOKEN", "mine")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = f"""\
if cat /etc/shadow 2>/dev/null; then echo "read it"; fi
for path in {secret}/key {site}/vllm/core.py; do
  if cat "$path" >/dev/null 2>&1; then echo "read $path"; fi
  if echo x 2>/dev/null >> "$path"; then echo "wrote $path"; fi
done
if (echo > /dev/tcp/127.0.0.1/{port}) 2>/dev/null; then echo connected; fi
for path in /usr/x /bin/x /x /proc/sys/kernel/x /dev/x /usr/local/../x; do
  if touch "$path" 2>/dev/null; then echo "made $path"; fi
done
env | grep SECRET || true
exit 3
"""
        with pytest.raises(ModFailed) as caught:
            made(tmp_path, script)
    assert str(caught.value).splitlines()[1:] == []
    assert (site / "vllm/core.py").read_text() == CORE
    assert (secret / "key").read_text() == "mine"


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a\nb", "a//b"])
def test_a_path_that_the_run_says_is_checked(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """What runs there is the mod's user, so it may say anything."""
    answer = {
        "status": 0, "over": "", "files": {path: "eA=="},
        **{key: [] for key in ("tail", "needed", "lacked", "outside", "links", "large")},
    }  # fmt: skip
    monkeypatch.setattr(Bubblewrap, "run", lambda *_: json.dumps(answer))
    with pytest.raises(SandboxUnavailable, match="the mod changed"):
        modrun.run_mod("m", Path("mod"), Path("tree")).changes()


@pytest.mark.parametrize("answer", ["", "[]", "{}", '{"status": "x"}', "hello"])
def test_another_answer_is_no_result(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr(Bubblewrap, "run", lambda *_: answer)
    with pytest.raises(SandboxUnavailable, match="malformed"):
        modrun.run_mod("m", Path("mod"), Path("tree"))


def test_without_bwrap_nothing_runs(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del site
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SparkBuildError, match="a mod runs only isolated") as caught:
        made(tmp_path, WAYS["sed"])
    assert "apt-get install bubblewrap" in caught.value.hint


def test_the_first_release_on_which_it_runs(tmp_path: Path) -> None:
    """The field's mods are for older releases than the newest."""
    script = f"set -e\npatch -p1 -d {SITE} < a.patch"
    mod = write_tree(tmp_path / "mod", {"run.sh": script, "a.patch": PATCH})
    trees = []
    for version, text in (("0.22.1", CORE.replace("cutlass", "x")), ("0.20.1", CORE)):
        folder = write_tree(tmp_path / version, vllm_files(version, core=text))
        trees.append((f"pypi:vllm=={version}", DirTree(folder)))
    draft = modlayer.draft_on_newest("m", mod, trees)
    assert draft.origin.endswith("run on pypi:vllm==0.20.1")
    with pytest.raises(ModFailed, match=r"fails on pypi:vllm==0\.22\.1") as caught:
        modlayer.draft_on_newest("m", mod, trees[:1])
    assert "--releases VERSION" in caught.value.hint


def test_a_mod_of_ours_on_a_release() -> None:
    """Its program compares versions, reads metadata and edits many files."""
    mod = Path(__file__).parents[2] / "mods" / "sm121-b12x-full-enable"
    draft = mod_draft("m", mod, "pypi:vllm==0.33.0")
    assert {op.keys["op"] for op in draft.ops} >= {"replace", "copy"}
