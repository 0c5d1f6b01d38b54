"""Numbers that decoding and execution share: lanes, special registers, address windows."""

from __future__ import annotations

LANES = 32
#: Where a lane goes that has ended.
EXIT = 1 << 30
#: Where addresses of the parameter space begin.
PARAMETERS = 1 << 60
#: Where shared and local memory lie in the generic address space.
SHARED_WINDOW, LOCAL_WINDOW = 1 << 56, 1 << 55
#: Where a block's own shared memory begins in the shared window: the first KiB is the system's.
SHARED_BASE = 1024

#: Special registers that a warp is made with ("Special Registers").
SPECIAL = (
    *(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"),
    "%laneid", "%warpid", "%nwarpid", "%lanemask_eq", "%lanemask_le", "%lanemask_lt",
    "%lanemask_ge", "%lanemask_gt",
)  # fmt: skip
