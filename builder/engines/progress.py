"""The output of ``docker buildx build``: cached steps, and errors.

``--progress=rawjson`` (buildx 0.13) is a stream of documents with ``vertexes`` and ``logs``; it
alone shows that a layer above a new one came from the cache.  Older clients print
lines in which such a layer looks new.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, field
from typing import Any

#: ``[3/9] COPY --link FOLDER/ /``; BuildKit calls the step that adds a linked layer LINK COPY.
_COPY = re.compile(r"\[(?:\S+ +)?\d+/\d+\] COPY (?:--link )?(\S+)/ /")
_LINE = re.compile(r"#(\d+) (.*)")
#: ``#7 0.412 what a command printed``
_PRINTED = re.compile(r"\d+\.\d+ (.*)")


@dataclass
class Progress:
    """The outcome of a build."""

    #: folder of a layer -> whether it came from the cache
    cached: dict[str, bool] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    #: the output of the steps' commands
    logs: list[str] = field(default_factory=list)

    @property
    def tail(self) -> str:
        """The last lines of output, for an error message."""
        return "\n  ".join(self.lines[-40:])


def read_progress(text: str) -> Progress:
    """Parse the output in either form; text between the documents is kept."""
    found = Progress()
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        if text[at] == "{" and (at == 0 or text[at - 1] in "\n}"):
            try:
                value, at = decoder.raw_decode(text, at)
            except ValueError:
                pass
            else:
                _document(value, found)
                continue
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        if text[at:end].strip():
            found.lines.append(text[at:end])
        at = end + 1
    _plain(found)
    return found


def _document(value: dict[str, Any], found: Progress) -> None:
    for vertex in value.get("vertexes") or ():
        name = str(vertex.get("name", ""))
        folder = _folder(name)
        done = vertex.get("completed") or vertex.get("cached")
        if folder and done:
            found.cached[folder] = bool(vertex.get("cached")) or found.cached.get(folder, False)
        if vertex.get("completed"):
            found.lines.append(f"{name}{' (cached)' if vertex.get('cached') else ''}")
        if vertex.get("error"):
            found.lines.append(f"{name}: {vertex['error']}")
    for log in value.get("logs") or ():
        data = base64.b64decode(log.get("data") or "")
        lines = data.decode("utf-8", "replace").splitlines()
        found.lines += lines
        found.logs += lines
    for warning in value.get("warnings") or ():
        data = base64.b64decode(warning.get("short") or "")
        found.lines.append(data.decode("utf-8", "replace"))


def _folder(name: str) -> str:
    match = _COPY.fullmatch(name)
    return match[1] if match else ""


def _plain(found: Progress) -> None:
    folders: dict[str, str] = {}
    for line in found.lines:
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        if printed := _PRINTED.fullmatch(match[2]):
            found.logs.append(printed[1])
        if folder := _folder(match[2]):
            folders[match[1]] = folder
            found.cached.setdefault(folder, False)
        elif match[2] == "CACHED" and match[1] in folders:
            found.cached[folders[match[1]]] = True
