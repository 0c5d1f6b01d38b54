"""The time in the prefix of a log line."""

from __future__ import annotations

import re

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
#: vLLM's own format first: a container's timestamp may be in another time zone.
_OWN = re.compile(r"\b(?:INFO|WARNING|ERROR|CRITICAL|DEBUG) (\d\d-\d\d) (\d\d:\d\d:\d\d)")
_ISO = re.compile(r"\d{4}-(\d\d-\d\d)[T ](\d\d:\d\d:\d\d)")
_SYSLOG = re.compile(rf"({'|'.join(_MONTHS)}) ([ \d]\d) (\d\d:\d\d:\d\d)")


def when(head: str) -> str:
    """``MM-DD HH:MM:SS``, or ``""``."""
    if match := _OWN.search(head) or _ISO.search(head):
        return f"{match[1]} {match[2]}"
    if match := _SYSLOG.search(head):
        return f"{_MONTHS.index(match[1]) + 1:02d}-{int(match[2]):02d} {match[3]}"
    return ""
