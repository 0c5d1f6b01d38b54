"""Unit tests of ``builder/images/rootfs``."""
