"""``spark-build diagnose``."""

from collections.abc import Sequence
from typing import Annotated

from builder.cli.command import command
from builder.common.console import console, print_json, tell
from builder.common.options import Argument, Json, Option
from builder.errors import UsageError

#: First words that are not logs; write ./list for a file of such a name.
WORDS = ("list", "show", "check", "table")


@command(
    "diagnose",
    "docker logs NAME 2>&1 | spark-build diagnose -",
    "spark-build diagnose server.log --vllm 0.25.0",
    "spark-build diagnose head.log worker.log",
    "spark-build diagnose show no-kernel-image",
    note="Exit 5: the log shows a failure, or the server never became ready. "
    "Exit 2: it is empty, or nothing in it looks like a log. Else 0.",
    detail="Shows the selected kernels, and the fix for the release that wrote the log. For a "
    "failure that is not in the catalogue it shows the line, the frame and a search phrase.",
)
def diagnose(
    logs: Annotated[
        tuple[str, ...],
        Argument(
            "Logs of a model server, folders of them, packed or not; - is standard input. "
            "Or the catalogue: list, show ID, check [FILE...], table.",
            "LOG",
        ),
    ] = (),
    vllm: Annotated[
        str | None,
        Option("The vLLM release that wrote the log (default: read from the log).", "VERSION"),
    ] = None,
    *,
    watch: Annotated[
        bool, Option("Follow a growing log until the server is ready or has failed.")
    ] = False,
    json: Json = False,
) -> None:
    """Read logs and explain them; exit 5 if one shows a failure."""
    from builder.diagnose.report import (
        Diagnosed,
        lines_of,
        lines_of_several,
        read_logs,
        refuse_failed,
        refuse_no_log,
    )

    if logs and logs[0] in WORDS:
        _catalogue(logs[0], logs[1:], json)
        return
    results = read_logs(logs, vllm, watch=watch)
    if json:
        print_json(Diagnosed.of(results))
    refuse_no_log(logs, results)
    if not json:
        for line in lines_of(results[0]) if len(results) == 1 else lines_of_several(results):
            tell(line)
        for result in results:
            if len(result.releases) > 1:
                others = ", ".join(v for v in result.releases if v != result.vllm)
                console.warn(f"the log also mentions vLLM {others}; judged as {result.vllm}")
    refuse_failed(results)


def _catalogue(word: str, names: Sequence[str], json: bool) -> None:
    """``diagnose list``, ``show ID``, ``check [FILE...]`` and ``table``."""
    from builder.diagnose import report
    from builder.diagnose.report import Entries, EntryRow, check_entries

    if word == "check":
        tell(check_entries(names))
        return
    if word == "show" and not names:
        raise UsageError("no entry named", hint="spark-build diagnose list")
    entries = (
        [report.find_entry(name) for name in names]
        if word == "show"
        else report.entries_to_check(())
    )
    if json:
        print_json(Entries(entries=tuple(map(EntryRow.of, entries))))
    elif word == "table":
        print(report.page(entries), end="")
    elif word == "show":
        for entry in entries:
            tell("\n".join(report.entry_lines(entry)))
    else:
        for entry in entries:
            tell(f"{entry.id:<36} {entry.severity:<8} {report.releases(entry)}")
