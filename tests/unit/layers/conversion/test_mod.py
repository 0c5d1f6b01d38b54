"""Mods: what their run.sh does becomes ops, what cannot be read is named with its line."""

import io
import zipfile
from pathlib import Path

import pytest

from builder.errors import UsageError
from builder.layers.conversion import ModOps, mod_files, read_mod

HUNK = "@@ -1,4 +1,4 @@\n one\n two\n-three\n+drei\n four\n"
PATCH = f"--- a/vllm/x.py\n+++ b/vllm/x.py\n{HUNK}".encode()
SITE = "/usr/local/lib/python3.12/dist-packages"


def read(script: str, **files: bytes) -> ModOps:
    named = {name.replace("_", "."): data for name, data in files.items()}
    return read_mod("my-mod", {"run.sh": script.encode(), **named})


def kinds(found: ModOps) -> list[str]:
    return [str(op.keys["op"]) for op in found.ops]


@pytest.mark.parametrize(
    "script",
    [
        "patch -p1 -d / < a.patch",
        f"cd {SITE}\npatch -p1 -i /workspace/mods/my-mod/a.patch",
        (
            f'D="$(cd "$(dirname "$0")" && pwd)"\nP="$D/a.patch"\ncd "${{ROOT:-{SITE}}}"\n'
            'if git apply --reverse --check "$P" 2>/dev/null; then\n  echo there\n'
            'elif git apply --check "$P"; then\n  git apply "$P"\nfi'
        ),
    ],
)
def test_patch_of_the_mod_becomes_a_diff_op(script: str) -> None:
    found = read(script, a_patch=PATCH)
    assert kinds(found) == ["diff"]
    assert found.files["a.patch"].startswith(b"diff --git a/vllm/x.py")
    assert found.packages == ["vllm"]
    assert not found.unconverted


def test_downloaded_pull_request_becomes_a_pull_op() -> None:
    url = "https://patch-diff.githubusercontent.com/raw/vllm-project/vllm/pull/38909.diff"
    found = read(f"curl -fsL {url} | git apply --exclude='tests/*'")
    (op,) = found.ops
    assert op.keys == {"op": "pull", "pull": "vllm-project/vllm#38909", "exclude": ["tests/*"]}
    assert not found.unconverted


def test_sed_on_an_installed_file_becomes_a_replace_op() -> None:
    found = read(f'S={SITE}\nif grep -q x "$S/vllm/y.py"; then sed -i "s/a/b/" $S/vllm/y.py; fi')
    (op,) = found.ops
    texts = {"old": "a", "new": "b", "count": 1}
    assert op.keys == {"op": "replace", "file": "vllm/y.py", **texts}
    assert op.comments == ("run.sh line 2, the mod does this only inside if",)


def test_copied_files_become_copy_ops() -> None:
    found = read(f"cp *.py {SITE}/\ncp a.py {SITE}/vllm/b.py", a_py=b"x = 1\n")
    rows = [(op.keys["from"], op.keys["to"]) for op in found.ops]
    assert rows == [("a.py", "a.py"), ("a.py", "vllm/b.py")]
    assert found.files == {"a.py": b"x = 1\n"}


def test_exact_wheels_become_wheel_ops_and_others_are_named() -> None:
    found = read("uv pip install -q nvidia-cutlass-dsl==4.4.2 ray 'x>=1'\npip show ray\n")
    (op,) = found.ops
    assert op.keys == {"op": "wheel", "distribution": "nvidia-cutlass-dsl", "version": "4.4.2"}
    assert [text.rpartition("(")[2] for text in found.unconverted] == [
        "ray has no exact version)",
        "x>=1 has no exact version)",
    ]


def test_exported_variables_of_vllm_become_env_ops() -> None:
    found = read("export VLLM_A=1\nexport FLASHINFER_B=2\n")
    (op,) = found.ops
    assert op.keys == {"op": "env", "name": "VLLM_A", "value": "1"}
    assert "FLASHINFER_B" in found.unconverted[0]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ('for f in $(find /x); do sed -i "s/a/b/" "$f"; done', "known only when it runs"),
        (f"sed -i '/x/d' {SITE}/vllm/y.py", "not a plain s/old/new/"),
        ("python3 - x <<'EOF'\nopen(p, 'w')\nEOF", "a Python program"),
        ("python3 -c \"open('x', 'w').write('')\"", "a Python program"),
        ("patch -p1 < missing.patch", "not a file of the mod"),
        ("curl -O https://example.org/x.so", "not pinned"),
        ("git clone https://example.org/x", "no op for it"),
        ("git apply -R a.patch", "reverts a patch"),
        ("apt-get install -y git", "no op for it"),
        ("ln -s a b", "no op for it"),
        ("cp /etc/x /etc/y", "does not copy into an installed package"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(script: str, why: str) -> None:
    found = read(f"#!/bin/bash\nset -e\n{script}\n")
    assert not found.ops
    (line,) = found.unconverted
    assert line.startswith("run.sh line 3: ")
    assert why in line


def test_commands_that_change_nothing_are_not_named() -> None:
    script = (
        'set -e\necho hi\nx=$(python3 -c "import vllm; print(vllm.__file__)")\n[ -f x ] || exit 1\n'
    )
    script += "find . -name __pycache__ -exec rm -rf {} + || true\nsed -n 1p x\n"
    found = read(script)
    assert not found.ops
    assert not found.unconverted


def test_zip_and_folder_hold_the_same(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/run.sh").write_bytes(b"patch -p1 -d / < a.patch\n")
    (tmp_path / "m/a.patch").write_bytes(PATCH)
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in mod_files(tmp_path / "m").items():
            archive.writestr(name, content)
    (tmp_path / "m.zip").write_bytes(data.getvalue())
    assert mod_files(tmp_path / "m.zip") == mod_files(tmp_path / "m")


def test_a_folder_without_run_sh_is_not_a_mod(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a mod: it has no run\.sh"):
        mod_files(tmp_path)
