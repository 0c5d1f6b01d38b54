"""Read the files of an image from its layers, without unpacking them; write a layer of our own.

Layers are untrusted: everything here is bounded in memory, time and cache space, and
no name out of a layer is ever used as a path on this machine.
"""
