"""Numbers that decoding and execution share: lanes, special registers, address windows."""

from __future__ import annotations

LANES = 32
#: The bytes of a mask without any lane, and with all of them.
NO_LANES, ALL_LANES = bytes(LANES), b"\1" * LANES
#: The position of a lane that has ended.
EXIT = 1 << 30
#: The first address of the parameter space.
PARAMETERS = 1 << 60
#: The windows of shared and local memory in the generic address space.
SHARED_WINDOW, LOCAL_WINDOW = 1 << 56, 1 << 55
#: The offset of a block's own shared memory in the shared window: the first KiB is reserved.
SHARED_BASE = 1024

#: Special registers that are set when a warp is created ("Special Registers").
SPECIAL = (
    *(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"),
    "%laneid", "%warpid", "%nwarpid", "%lanemask_eq", "%lanemask_le", "%lanemask_lt",
    "%lanemask_ge", "%lanemask_gt",
)  # fmt: skip
