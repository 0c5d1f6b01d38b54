"""Layers and profiles: reading them, selecting them, checking them, and exporting them as mods."""
