"""``spark-build config show`` and ``schema``: what is set, and what ``--json`` prints."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from builder import settings
from builder.cli.command import Group, command
from builder.common.console import print_json, tell
from builder.common.options import Argument, Json
from builder.common.paths import cache_dir, data_dir

if TYPE_CHECKING:
    from builder.cli.documents import Setting

_config = Group("config", "spark-build config show", default="show")


@_config.sub("show", "spark-build config show")
def show(*, json: Json = False) -> None:
    """Show the settings in use and where each comes from."""
    from builder.cli.documents import Setting, Settings
    from builder.common.pypi import pip_index_url
    from builder.layers.lock import lock_path

    index = pip_index_url()
    lock = lock_path(Path.cwd())
    cache = settings.CACHE.name if settings.CACHE.value else "the platform's default"
    rows = (
        Setting("cache", str(cache_dir()), cache, settings.CACHE.meaning),
        Setting("patches", str(data_dir("patches")), "spark-build itself", "the built-in layers"),
        Setting(
            "index",
            "configured" if index else "default",
            "pip" if index else "pypi-simple",
            "the package index",
        ),
        Setting("lock", str(lock), "found" if lock.is_file() else "not found", "the lock file"),
        *map(_row, settings.VARIABLES),
    )
    if json:
        print_json(Settings(settings=rows))
        return
    for row in rows:
        tell(f"{row.name:<29} {row.value:<40}  {row.source}: {row.meaning}")


def _row(variable: settings.Variable) -> "Setting":
    from builder.cli.documents import Setting

    value = "***" if variable.secret and variable.value else variable.value
    source = "environment" if variable.is_set else "not set"
    return Setting(variable.name, value, source, variable.meaning)


@command("schema", "spark-build schema", "spark-build schema verify > verify.schema.json")
def schema(
    name: Annotated[
        str | None,
        Argument("Name of a document (default: list all).", "NAME", complete="schemas"),
    ] = None,
    *,
    json: Json = False,
) -> None:
    """Print one schema as JSON, or the names of all."""
    from builder.cli.documents import Names, names
    from builder.cli.documents import schema as schema_of

    if name is None and json:
        print_json(Names(names=tuple(names())))
    elif name is None:
        tell("\n".join(names()))
    else:
        print_json(schema_of(name))
