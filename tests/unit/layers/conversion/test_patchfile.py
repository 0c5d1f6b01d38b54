import pytest

from builder.errors import UsageError
from builder.layers.conversion import patch_ops, read_patch

HUNK = "@@ -1,4 +1,4 @@\n one\n two\n-three\n+drei\n four\n"


def plain(path: str, old: str | None = None) -> bytes:
    return f"--- {old or path}\n+++ {path}\n{HUNK}".encode()


def git(path: str) -> bytes:
    return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n{HUNK}".encode()


@pytest.mark.parametrize(
    "data",
    [
        git("vllm/x.py"),
        plain("b/vllm/x.py", "a/vllm/x.py"),
        plain("vllm-0.20.1/vllm/x.py", "vllm-0.20.1.orig/vllm/x.py"),
        git("usr/local/lib/python3.12/dist-packages/vllm/x.py"),
        plain("/usr/lib/python3/site-packages/vllm/x.py"),
        b"From: someone\nSubject: [PATCH] fix\n\n---\n 1 file\n\n"
        + git("vllm/x.py")
        + b"-- \n2.4\n",
        plain("vllm/x.py").replace(b"\n", b"\r\n"),
    ],
)
def test_paths_become_those_of_the_installed_package(data: bytes) -> None:
    patch = read_patch("x.patch", data)
    assert patch.package == "vllm"
    ((keys, text),) = patch_ops(patch)
    assert keys == {"op": "diff", "file": "x.patch"}
    assert text.startswith(b"diff --git a/vllm/x.py b/vllm/x.py\n--- a/vllm/x.py\n")
    assert b"-three\n+drei\n" in text


def test_new_and_deleted_files_without_a_git_header() -> None:
    new = b"--- /dev/null\n+++ b/vllm/new.py\n@@ -0,0 +1,1 @@\n+x = 1\n"
    gone = b"--- a/vllm/old.py\n+++ /dev/null\n@@ -1,1 +0,0 @@\n-x = 1\n"
    ((_, text),) = patch_ops(read_patch("x.patch", new + gone))
    assert b"new file mode 100644" in text
    assert b"deleted file mode 100644" in text


def test_compiled_sources_become_an_op_of_their_own() -> None:
    ops = patch_ops(read_patch("x.patch", git("vllm/x.py") + git("csrc/k.cu")))
    assert [keys["op"] for keys, _ in ops] == ["diff", "compile"]
    assert b"csrc/k.cu" in ops[1][1]


def test_tests_and_documents_are_dropped_with_a_reason() -> None:
    patch = read_patch("x.patch", git("vllm/x.py") + git("tests/t.py") + git("docs/a.md"))
    assert patch.parts.dropped == (("docs/a.md", "documentation"), ("tests/t.py", "a test"))


def test_flashinfer_has_other_roots() -> None:
    patch = read_patch("x.patch", git("flashinfer/a.py") + git("csrc/k.cu"))
    ((_, text),) = patch_ops(patch)
    assert patch.package == "flashinfer-python"
    assert b"flashinfer/data/csrc/k.cu" in text


def test_cutlass_as_installed_and_as_in_its_repository() -> None:
    repository = read_patch("x.patch", git("python/CuTeDSL/cutlass/a.py"))
    assert [sorted(keys) for keys, _ in patch_ops(repository)] == [["file", "if", "op"]] * 2
    installed = read_patch("x.patch", git("nvidia_cutlass_dsl/python_packages/cutlass/a.py"))
    ((keys, _),) = patch_ops(installed)
    assert keys["if"] == {"nvidia-cutlass-dsl": "<4.6.0a0"}


def test_other_packages_need_a_name() -> None:
    with pytest.raises(UsageError, match="cannot tell which package"):
        read_patch("x.patch", git("lib/thing/a.py"))
    assert read_patch("x.patch", git("thing/a.py"), package="The_Thing").package == "the-thing"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"hello\n", "not a unified diff"),
        (b"", "not a unified diff"),
        (git("vllm/x.py") + git("vllm/x.py"), "twice"),
        (git("vllm/x.py") + git("flashinfer/x.py"), "changes vllm and flashinfer-python"),
        (git("vllm/../x.py"), "not a path"),
    ],
)
def test_what_is_not_one_diff_of_one_package_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_patch("x.patch", data)
