"""Tests of ``builder/rootfs``."""
