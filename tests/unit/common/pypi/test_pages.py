"""Pages of the package index: what is taken from them, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from builder.common.pypi import WheelFile, is_filename, parse_page

JSON = "application/vnd.pypi.simple.v1+json"
PAGE = "https://index.example.invalid/simple/vllm/"
NAME = "vllm-1.0.0-py3-none-any.whl"
SHA256 = "0123456789abcdef" * 4


def as_json(**changes: Any) -> bytes:
    """A page with one wheel, some of whose values are others."""
    url = f"https://files.example.invalid/{NAME}"
    row = {"filename": NAME, "url": url, "hashes": {"sha256": SHA256}, "size": 5} | changes
    return json.dumps({"meta": {"api-version": "1.1"}, "name": "vllm", "files": [row]}).encode()


def as_html(href: str = f"{NAME}#sha256={SHA256}", name: str = NAME, more: str = "") -> bytes:
    return f"<!DOCTYPE html><html><body><a {more} href='{href}'>{name}</a><br/></body>".encode()


def wheel(data: bytes, kind: str = JSON, page: str = PAGE) -> WheelFile:
    ((found,), _) = parse_page(data, kind, page)
    return found


def test_a_page_in_json() -> None:
    assert wheel(as_json()) == WheelFile(
        filename=NAME, url=f"https://files.example.invalid/{NAME}", sha256=SHA256, size=5,
        uploaded="",
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["", "text/html", "text/html; charset=utf-8"])
def test_a_page_in_html(kind: str) -> None:
    assert wheel(as_html(), kind) == WheelFile(
        filename=NAME, url=f"{PAGE}{NAME}", sha256=SHA256, uploaded=""
    )


def test_html_has_a_base_attributes_of_every_form_and_entities() -> None:
    text = (
        "<base href='https://files.example.invalid/x/'>"
        f'<A class=plain data-requires-python="&gt;=3.8" HREF = "a&amp;b/{NAME}#sha256={SHA256}">'
        f"\n {NAME} </A><a>no link</a><a href='other.txt'>other.txt</a>"
    )
    found = wheel(text.encode(), "text/html")
    assert found.url == f"https://files.example.invalid/x/a&b/{NAME}"
    assert found.sha256 == SHA256


def test_archives_are_apart() -> None:
    wheels, archives = parse_page(as_html(name="vllm-1.0.tar.gz"), "text/html", PAGE)
    assert not wheels
    assert archives[0].filename == "vllm-1.0.tar.gz"
    assert archives[0].release == "vllm-1.0"


@pytest.mark.parametrize(
    "sha256",
    ["../../../out/x", "/abs/dir", SHA256.upper(), SHA256[:-1], SHA256 + "\n", "0" * 65, "%2e%2e"],
)
def test_a_sha256_that_is_none_is_refused(sha256: str) -> None:
    """It becomes a path in the cache."""
    with pytest.raises(ValueError, match="is not a sha256"):
        parse_page(as_json(hashes={"sha256": sha256}), JSON, PAGE)
    with pytest.raises(ValueError, match="is not a sha256"):
        parse_page(as_html(f"{NAME}#sha256={sha256.strip()}x"), "text/html", PAGE)


def test_a_file_without_a_sha256_is_listed() -> None:
    assert wheel(as_json(hashes={})).sha256 == ""
    assert wheel(as_html(NAME), "text/html").sha256 == ""


@pytest.mark.parametrize(
    "name",
    [
        "a-1-py3-none-../../x.whl", "a-1-py3-none-any/../x.whl", "../a-1-py3-none-any.whl",
        "/a-1-py3-none-any.whl", ".whl", "a-1-py3-none-any\0.whl", "a-1-py3-none-a\\b.whl",
        f"a-1-{'x' * 300}-none-any.whl", f"a-1-{'.'.join('a' * 50)}-{'.'.join('b' * 9)}-any.whl",
    ],
)  # fmt: skip
def test_a_name_that_is_none_is_left_out(name: str) -> None:
    assert parse_page(as_json(filename=name), JSON, PAGE) == ([], [])
    assert not is_filename(name)
    with pytest.raises(ValueError, match="is not the file name"):
        WheelFile(filename=name, url="", sha256=SHA256)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://[::1", "is not a URL"),
        ("http://127.0.0.1:99999/x", "is not a URL"),
        ("file:///etc/passwd", "is not a URL of HTTP"),
        ("ftp://files.example.invalid/x", "is not a URL of HTTP"),
        ("http://files.example.invalid/x", "is plain http"),
        ("HTTP://files.example.invalid/x", "is plain http"),
    ],
)
def test_a_url_that_is_none_is_refused(url: str, why: str) -> None:
    for data, kind in ((as_json(url=url), JSON), (as_html(url), "text/html")):
        with pytest.raises(ValueError, match=why):
            parse_page(data, kind, PAGE)


def test_a_plain_index_may_name_plain_urls() -> None:
    assert wheel(as_json(url="x"), page="http://127.0.0.1/simple/vllm/").url.startswith("http://")


@pytest.mark.parametrize(
    ("data", "kind", "why"),
    [
        (as_json(), "application/json", "content type"),
        (as_json(), "image/png; charset=x", "content type"),
        (b'{"meta":{"api-version":"99.0"},"files":[]}', JSON, "version '99.0'"),
        (b'<meta name="pypi:repository-version" content="2.0">', "text/html", "version '2.0'"),
        (b"<a href=x>", "text/html; charset=klingon", "character set"),
        (b"<base href='http://[::1'>", "text/html", "is not a URL"),
        (b'{"files":' + b"[" * 100_000 + b"]" * 100_000 + b"}", JSON, "."),
        (b'{"meta":{},"x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", JSON, "too deep"),
        (b"[]", JSON, "object"),
        (b"", JSON, "."),
        (b"\xff\xfe", JSON, "."),
        (as_json(size=-1), JSON, "is not a number of bytes"),
        (as_json(size=10**30), JSON, "."),
        (as_json(hashes=[]), JSON, "."),
        (b'{"meta":{},"files":[' + b'{"filename":"","url":"","hashes":{}},' * 50_000
         + b'{"filename":"","url":"","hashes":{}}]}', JSON, "more than 50000 files"),
    ],
    ids=range(15),
)  # fmt: skip
def test_an_odd_page_is_refused(data: bytes, kind: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_page(data, kind, PAGE)


def test_what_was_yanked_has_the_reason() -> None:
    assert wheel(as_json(yanked=False)).yanked is None
    assert wheel(as_json(yanked=True)).yanked == ""
    assert wheel(as_json(yanked="broken")).yanked == "broken"
    assert wheel(as_html(more='data-yanked="a &quot;b&quot;"'), "text/html").yanked == 'a "b"'
    assert wheel(as_html(more="data-yanked"), "text/html").yanked == ""


@pytest.mark.parametrize(
    "text", ["<a " * 300_000, "<a>" * 300_000, '<a "' * 300_000, "<a '\"" * 200_000,
             "<a href='" + "x" * 1_000_000, "<a x=" * 200_000, "<a href=x>" + "&" * 1_000_000,
             "<a " + "x " * 500_000 + ">x", "<a" + " x='y'" * 200_000 + ">x</a>"],
    ids=range(9),
)  # fmt: skip
def test_unusual_html_is_read_in_one_pass(text: str) -> None:
    """A quadratic reader would take minutes for each."""
    assert parse_page(text.encode(), "text/html", PAGE)[1] == []


def test_the_day_of_an_upload() -> None:
    assert wheel(as_json(**{"upload-time": "2026-05-04T10:00:00.1Z"})).uploaded == "2026-05-04"
    assert wheel(as_json(**{"upload-time": "yesterday"})).uploaded == ""
    assert wheel(as_json(**{"upload-time": None})).uploaded == ""
