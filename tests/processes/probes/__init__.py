"""Tests of ``builder/probes``."""
