"""Dockerfiles, rendered from templates without logic: every decision is in the values."""

from __future__ import annotations

from builder.engines import metadata
from builder.util.paths import data_dir


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
    environment.filters["quoted"] = metadata.quoted
    return environment.get_template(template).render(**values)
