"""Make the engine's cache ahead of the tests that need it: ``python -m tests.engine.prepare``."""

from __future__ import annotations

import sys

from .cache import MachineError
from .machine import Engine, base_image, toolkit_image


def main() -> int:
    """Build the images once; a failure is reported here and again by the tests themselves."""
    try:
        with Engine() as engine:
            print(f"engine base image: {base_image(engine)}", file=sys.stderr)
            print(f"engine toolkit image: {toolkit_image(engine)}", file=sys.stderr)
    except MachineError as error:
        print(f"engine base image: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
