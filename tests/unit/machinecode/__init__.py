"""Unit tests of ``builder/machinecode``."""
