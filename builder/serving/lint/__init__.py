"""Checks serve commands that users already have: scripts, compose files, recipes, manifests."""
