"""The catalogue as text: one entry, the list, the page in docs/, and the check."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from builder.diagnose.catalog import load_catalog, load_entry
from builder.diagnose.judging import diagnose
from builder.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from builder.diagnose.entries import Entry, Example

_ENGINES = {
    "vllm": "vLLM",
    "tensorrt-llm": "TensorRT-LLM",
    "sglang": "SGLang",
    "any": "any engine",
}
_PAGE = """\
# The catalogue of `diagnose`

Generated from `builder/data/diagnose/` with `spark-build diagnose table > docs/diagnose.md`.
[Adding an entry](#adding-an-entry) shows how to add one. The confidence of an entry: *certain* was
seen in the code or the wheels of that release, *likely* follows from them, *reported* helped some.

| entry | for | what it means |
|---|---|---|
"""
_ADDING = """
## Adding an entry

An entry is one file, `builder/data/diagnose/NAME.toml`; nothing else changes.

```toml
id = "disk-full"                 # the file's name
severity = "error"               # error, warning, info
engine = "any"                   # vllm (the default), tensorrt-llm, sglang, any
when = ">=0.24.0rc0"             # releases of vLLM; left out: all
sure = "certain"                 # certain, likely, reported
source = "https://..."           # where the cause or fix was published
patterns = ['''No space left on device''']  # regular expressions: one must be in a line
message = "A disk is full."

[[fix]]                          # the first whose `when` matches; {name} is a group of the pattern
text = "df -h; free space where the cache lies, or put it elsewhere with HF_HOME"

[[example]]                      # must be found, in this line, with this text in the fix
log = "OSError: [Errno 28] No space left on device"
fix = "df -h"

[[example]]                      # a near miss must not be found
log = "INFO 07-02 10:00:00 [x.py:1] there is space left on the device"
found = false
```

More keys: `unless` (patterns of lines that do not count), `settings` (`NAME=REGEX` of a setting in
use), `[with]` and `[without]` (`patterns`, `settings` elsewhere in the log), `times` (the minimum
number of lines), `passing` (not a failure if the server becomes ready later), `needs-version`. A
pattern needs five or more characters of fixed text. Write your own examples of one to three lines:
no complete logs, no names of people or hosts. Then:

```sh
spark-build diagnose check builder/data/diagnose/disk-full.toml
spark-build diagnose table > docs/diagnose.md
```
"""


class FailedExample(NamedTuple):
    """A failed example of an entry."""

    entry: str
    example: int
    why: str


def releases(entry: Entry) -> str:
    """The releases of an entry, as text."""
    if entry.when is None or entry.engine != "vllm":
        return _ENGINES[entry.engine]
    bare = {s.operator: re.sub(r"(?:rc|a|\.dev)\d+$", "", s.version) for s in entry.when}
    low, high = bare.get(">=", bare.get("==", "")), bare.get("<", "")
    if low and high:
        return f"vLLM {low} to before {high}"
    return f"vLLM from {low}" if low else f"vLLM before {high}"


def find_entry(name: str) -> Entry:
    """The entry with a name.

    Raises:
        UsageError: it does not exist.
    """
    entries = {entry.id: entry for entry in load_catalog()}
    if name not in entries:
        raise UsageError(
            f"no entry {name!r} in the catalogue{did_you_mean(name, entries)}",
            hint="spark-build diagnose list",
        )
    return entries[name]


def page(entries: Sequence[Entry]) -> str:
    """``docs/diagnose.md``."""
    rows = []
    for entry in entries:
        source = f" [Source]({entry.source})." if entry.source else ""
        meaning = entry.message.replace("|", "\\|").replace("<", "&lt;")
        rows.append(
            f'| <a id="{entry.id}"></a>`{entry.id}` ({entry.severity}) | {releases(entry)} | '
            f"{meaning} *{entry.sure.capitalize()}.*{source} |\n"
        )
    return _PAGE + "".join(rows) + _ADDING


def entry_lines(entry: Entry) -> Iterator[str]:
    """One entry, as ``diagnose show`` prints it."""
    yield f"{entry.id} ({entry.severity}, {releases(entry)}, {entry.sure})"
    yield f"  {entry.message}"
    for pattern in entry.patterns:
        yield f"  line:    {pattern.regex.pattern}"
    for asked in entry.settings:
        yield f"  setting: {asked.name.pattern}={asked.value.pattern}"
    for fix in entry.fixes:
        when = f"vLLM {fix.when}: " if fix.when is not None else ""
        yield f"  fix:     {when}{fix.text}"
    for example in entry.examples:
        if example.found:
            yield f"  example: {example.log.strip().splitlines()[-1]}"
    if entry.source:
        yield f"  see:     {entry.source}"


def entries_to_check(paths: Sequence[str]) -> list[Entry]:
    """The entries to check: from files and folders, or the whole catalogue.

    Raises:
        UsageError: a file is malformed or missing.
    """
    if not paths:
        return list(load_catalog())
    files: list[Path] = []
    for given in paths:
        path = Path(given)
        inside = sorted(path.glob("*.toml")) if path.is_dir() else [path]
        if not inside or not all(p.is_file() for p in inside):
            raise UsageError(f"no entry at {given}", hint="spark-build diagnose check FILE.toml")
        files += inside
    return [load_entry(path) for path in files]


def failed_examples(entries: Sequence[Entry]) -> list[FailedExample]:
    """Examples with another result than stated, and entries without examples."""
    found = []
    for entry in entries:
        kinds = {example.found for example in entry.examples}
        for kind, what in ((True, "an example"), (False, "a near miss (found = false)")):
            if kind not in kinds:
                found.append(FailedExample(entry.id, 0, f"{what} is missing"))
        # with the other entries, which must not match its line
        others = [e for e in load_catalog() if e.id != entry.id]
        for number, example in enumerate(entry.examples, 1):
            if why := _missed(entry, example, [*others, entry]):
                found.append(FailedExample(entry.id, number, why))
    return found


def _missed(entry: Entry, example: Example, entries: Sequence[Entry]) -> str:
    result = diagnose(io.BytesIO(example.log.encode()), example.vllm or None, entries)
    hits = [finding for finding in result.findings if finding.id == entry.id]
    if not example.found:
        return f"a near miss is matched, line {hits[0].line}" if hits else ""
    if not hits:
        return "it is not matched"
    if hits[0].line != example.line:
        return f"it is matched in line {hits[0].line}, not {example.line}"
    if example.fix not in hits[0].fix:
        return f"the fix is {hits[0].fix!r}, without {example.fix!r}"
    return ""
