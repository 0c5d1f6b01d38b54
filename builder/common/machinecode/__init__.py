"""Read machine code without a GPU: ELF, fat binaries, SASS, PTX, and what SM121 can run."""
