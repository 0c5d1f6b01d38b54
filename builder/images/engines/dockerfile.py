"""Renders the templates in ``dockerfiles/``, and quotes values for them."""

from __future__ import annotations

import re

from builder.common.paths import data_dir
from builder.errors import UsageError


def quoted(value: str) -> str:
    """A value for ENV and LABEL: in double quotes, with no expansion.

    JSON is not enough, because Dockerfiles do not support ``\\u`` escapes.

    Raises:
        UsageError: it has a line break, after which a Dockerfile's next instruction begins.
    """
    if "\n" in value or "\0" in value:
        raise UsageError(f"a Dockerfile cannot hold a value with a line break: {value!r:.200}")
    return '"' + re.sub(r'([\\"$])', r"\\\1", value) + '"'


def render(template: str, **values: object) -> str:
    """Render a template in ``dockerfiles/``; a missing value is an error."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(data_dir("dockerfiles")),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - a Dockerfile, not HTML
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quoted"] = quoted
    return environment.get_template(template).render(**values)
