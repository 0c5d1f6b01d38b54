"""Identify what is patched: ``pypi:``, ``dir:``, ``oci:``, or an image reference."""
