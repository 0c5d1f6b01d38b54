"""The command line. Each command parses its options, calls one function, and prints."""

#: Options of the program that people also write after the command.
COMMON = ("-q", "--quiet", "-v", "--verbose", "--debug")
