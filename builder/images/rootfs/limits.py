"""Limits of a layer; every value is far above real images.

The largest vLLM images have about 35 GB and 200 000 files in 40 layers.
"""

from __future__ import annotations

#: Bytes of one layer's tar.
TAR_BYTES = 256 << 30
#: Unpacked bytes that are always allowed, and the allowed ratio above that.
#: Deflate's maximum is 1032 to 1; real layers are below 20 to 1.
FREE_BYTES = 1 << 30
RATIO = 200
#: Entries of one layer, and the bytes of all their names together.
ENTRIES = 2_000_000
NAME_BYTES = 256 << 20
#: Bytes of one path with its NUL (Linux: PATH_MAX) and of one name in it (NAME_MAX),
#: and names in a path.
PATH_BYTES = 4096
COMPONENT_BYTES = 255
DEPTH = 200
#: Bytes of one pax or GNU extension header; the limit of Go's reader, which runtimes use.
EXTENSION_BYTES = 1 << 20
#: Extension headers in front of one entry.
EXTENSIONS = 8
#: User and group IDs: Linux has 32 bits, and the last value means "unchanged".
IDS = (1 << 32) - 1
#: Modes: permissions and, from some writers, the file type (Linux: S_IFMT).
MODES = 1 << 16
#: Links followed for one path; the same limit as in Linux.
LINKS = 40
#: Bytes of a file that is read into memory.
FILE_BYTES = 1 << 30
#: Layers of an image (overlayfs supports 500), and bytes of its configuration.
LAYERS = 500
CONFIG_BYTES = 8 << 20
#: Memory for one zstd frame: 2 to this power, the maximum of ``zstd --long``.
ZSTD_WINDOW_LOG = 27
