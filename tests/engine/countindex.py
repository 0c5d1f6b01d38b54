"""A package index in front of the machine's own, which counts what is downloaded from it."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field

from builder.applier.sources import default_index
from tests.loopback import LoopbackHandler, LoopbackServer

_JSON = "application/vnd.pypi.simple.v1+json"


@dataclass
class CountingIndex(LoopbackServer):
    """``index`` is what pip is told; ``whole`` the names of the files that were fetched whole."""

    whole: list[str] = field(default_factory=list)
    #: all requests, the pages of the index among them
    requests: int = 0
    _files: dict[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.upstream = default_index().rstrip("/")
        self.listen(_Handler)

    @property
    def index(self) -> str:
        """The address of the index."""
        return f"{self.url}/simple"

    def page(self, project: str) -> bytes:
        """A page of the index, with files that are fetched from here."""
        request = urllib.request.Request(f"{self.upstream}/{project}/", headers={"Accept": _JSON})
        with urllib.request.urlopen(request, timeout=60) as answer:
            page = json.load(answer)
        for row in page["files"]:
            self._files[row["filename"]] = urllib.parse.urljoin(answer.url, row["url"])
            row["url"] = f"{self.url}/files/{row['filename']}"
        return json.dumps(page).encode()

    def file(self, name: str) -> str:
        """The address that the other index has for a file."""
        return self._files[name]


class _Handler(LoopbackHandler):
    owner: CountingIndex

    def do_GET(self) -> None:
        self.owner.requests += 1
        kind, _, name = self.path.strip("/").partition("/")
        if kind == "simple":
            try:
                page = self.owner.page(name)
            except urllib.error.HTTPError as error:
                self.send_error(error.code)
                return
            self.send_response(200)
            self.send_header("Content-Type", _JSON)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)
            return
        wanted = {"Range": self.headers["Range"]} if self.headers["Range"] else {}
        if self.command == "GET" and not wanted:
            self.owner.whole.append(name)
        request = urllib.request.Request(self.owner.file(name), headers=wanted, method=self.command)
        with urllib.request.urlopen(request, timeout=120) as answer:
            self.send_response(answer.status)
            for header in ("Content-Length", "Content-Range", "Content-Type"):
                if answer.headers[header]:
                    self.send_header(header, answer.headers[header])
            self.end_headers()
            if self.command == "GET":
                shutil.copyfileobj(answer, self.wfile, 1 << 20)

    def do_HEAD(self) -> None:
        self.do_GET()
