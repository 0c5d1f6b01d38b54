"""What commands share: ``--plain-http``, and texts that are read as times and sizes."""

import re
from collections.abc import Iterable
from typing import Annotated

from builder.common.options import Option
from builder.errors import UsageError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


def _ask_for_plain_http(hosts: Iterable[str] | None) -> Iterable[str] | None:
    """Called for every command that has the option, given or not: each run starts afresh."""
    from builder.images.registry.reference import ask_for_plain_http

    ask_for_plain_http(hosts or ())
    return hosts


#: Its callback stores it; registry clients read it from ``Options.from_environment``.
PlainHttp = Annotated[
    tuple[str, ...],
    Option(
        "A registry to contact over plain HTTP; may be repeated (also: SPARK_BUILD_PLAIN_HTTP).",
        "HOST[:PORT]",
        callback=_ask_for_plain_http,
    ),
]


def seconds_of(text: str) -> int:
    """``30d`` as seconds; seconds, minutes, hours, days and weeks.

    Raises:
        UsageError: the text is not a duration.
    """
    match = re.fullmatch(r"(\d+)([smhdw])", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a duration such as 90s, 45m, 12h, 30d or 2w")
    return int(match[1]) * _SECONDS[match[2]]


def bytes_of(text: str) -> int:
    """``5GB`` as bytes; units of 1000, or of 1024 as in ``5GiB``.

    Raises:
        UsageError: the text is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].upper() not in _BYTES:
        raise UsageError(f"{text!r} is not a size such as 500MB, 5GB or 2GiB")
    return int(float(match[1]) * _BYTES[match[2].upper()])
