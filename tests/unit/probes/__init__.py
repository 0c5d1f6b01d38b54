"""Unit tests of ``builder/probes``."""
