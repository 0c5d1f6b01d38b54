"""Rebuilding: from what an image carries, the same image again, or where the two differ."""
