"""Identify a base: ``pypi:``, ``dir:``, or an image reference.  I/O happens here and not later."""
