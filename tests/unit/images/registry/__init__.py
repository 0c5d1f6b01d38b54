"""Unit tests of ``builder/images/registry``."""
