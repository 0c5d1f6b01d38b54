"""An image's files, read out of its layers without unpacking them.

Layers are somebody else's bytes: everything here is bounded in memory, time and what it keeps, and
no name out of a layer is ever used as a path on this machine.
"""
