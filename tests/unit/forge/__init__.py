"""Unit tests of ``builder/forge``."""
