"""Small helpers for every package: console, paths, locks, disk space, hints, signals."""
