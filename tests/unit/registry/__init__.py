"""Unit tests of ``builder/registry``."""
