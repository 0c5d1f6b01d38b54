"""Serve models from an image: known models, flags of each release, recipes for other tools."""
