"""Tests against released wheels, read from the package index: minutes cold, seconds warm."""
