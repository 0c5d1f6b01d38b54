"""From an image to a served model: models, what a release understands, recipes for other tools."""
