"""Bringing an image to machines: each fetches what it lacks, through its own SSH connection."""
