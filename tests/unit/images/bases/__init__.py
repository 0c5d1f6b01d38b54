"""Unit tests of ``builder/images/bases``."""
