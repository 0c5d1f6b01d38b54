"""Turns patches, patch series and mods that users already have into layers."""
