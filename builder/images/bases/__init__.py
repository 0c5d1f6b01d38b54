"""Identify bases: ``pypi:``, ``dir:``, ``oci:``, or an image reference."""
