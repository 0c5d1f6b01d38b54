"""The command line: parse, call, print.  Decisions are made elsewhere."""

#: Options of the program that people also write after the command.
COMMON = ("-q", "--quiet", "-v", "--verbose", "--debug")
