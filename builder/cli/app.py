"""The typer application with all commands."""

from builder.cli.root import whole

app = whole()
