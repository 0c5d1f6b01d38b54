"""Unit tests of ``builder/lock``."""
