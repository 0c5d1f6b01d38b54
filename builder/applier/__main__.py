"""Run the applier: the start of ``spark_apply.pyz``, and of ``python3 -m builder.applier``."""

from builder.applier.commandline import main

raise SystemExit(main())
