"""The lock of a project: its file, what an entry pins, and what it knows of base images."""
