"""Read, check and select layers and profiles, and export them as mods."""
