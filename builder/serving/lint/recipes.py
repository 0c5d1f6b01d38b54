"""Makes a recipe, and checks the user's settings in it with ``lint``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from builder.errors import UsageError
from builder.serving.lint.checks import Checked, check
from builder.serving.lint.commands import GivenVariable, ServeCommand, Word
from builder.serving.recipe import recipe_of
from builder.serving.reciperequest import SET

if TYPE_CHECKING:
    from builder.serving.documents import Recipe, Setting
    from builder.serving.lint.rules import Finding
    from builder.serving.reciperequest import RecipeRequest


def linted_recipe(request: RecipeRequest) -> Recipe:
    """Make a recipe; warnings of ``lint`` become notes in it.

    Raises:
        UsageError: there is no such recipe, or ``lint`` finds an error in the user's settings.
    """
    made = recipe_of(request)
    node = made.nodes[0]
    flags, variables = (*made.flags, *node.flags), (*made.env, *node.env)
    settings = (*flags, *variables)
    command = ServeCommand(  # the line of a setting is its number here
        file=made.model,
        line=0,
        words=(
            Word(made.id, 0),
            *(Word(w, n) for n, flag in enumerate(flags, 1) for w in flag.words),
        ),
        env=tuple(
            GivenVariable(name=one.name, value=one.value or "", line=n)
            for n, one in enumerate(variables, 1 + len(flags))
        ),
        image=made.image.ref,
    )
    notes = []
    models = {made.id: request.model}
    findings = check(Checked.of(command, request.served.interface, models))
    for finding in sorted(findings, key=lambda finding: finding.line):
        if finding.severity == "error" and finding.line:
            _refuse(finding, settings[finding.line - 1])
        notes.append("; ".join(filter(None, (finding.message, finding.help))))
    return msgspec.structs.replace(made, notes=(*made.notes, *notes))


def _refuse(finding: Finding, setting: Setting) -> None:
    """Refuse an error that the user's settings cause.

    Raises:
        UsageError: a setting of the user causes it.
    """
    if setting.origin.startswith(SET):
        text = "=".join(setting.words).removeprefix("--")
        raise UsageError(f"{SET} {text}: {finding.message}", hint=finding.help)
