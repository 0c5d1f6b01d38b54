"""Machine code, read without a GPU: ELF, fat binaries, SASS and PTX, and what SM121 runs."""
