"""What every package uses: the console, paths, locks, disk space, hints, signals."""
