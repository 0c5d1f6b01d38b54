"""The command line: parse, call, print.  Decisions are made elsewhere."""
