"""Finds the fixed text in a regular expression, so that most lines can be skipped quickly.

Most lines of a busy server's log are irrelevant.  Each pattern is therefore
tried only where its longest fixed text occurs, which ``str.find`` finds quickly;
the cost of a catalogue is one plain scan for each text, plus the few lines that contain one.
"""

from __future__ import annotations

#: Minimum length; shorter texts are too common in logs.
MINIMUM = 5

_CLASS_ESCAPES = "dDwWsSbBAZ"


def fixed_text(pattern: str) -> str:
    """The longest text that every match of ``pattern`` contains; empty if there is none.

    It is conservative: groups, classes and anything optional count as unknown text, and a
    choice at the top level has no text that all its branches share.
    """
    best, run, index = "", "", 0
    while index < len(pattern):
        char = pattern[index]
        if char == "|":
            return ""
        if char == "\\":
            char, index = pattern[index + 1 : index + 2], index + 1
            literal = char not in _CLASS_ESCAPES and not char.isdigit()
        else:
            literal = char not in ".^$*+?{}[]()"
        if literal:
            quantifier = pattern[index + 1 : index + 2]
            if quantifier and quantifier in "*?{":
                best, run = max(best, run, key=len), ""
            else:
                run += char
        else:
            best, run = max(best, run, key=len), ""
            index = _past(pattern, index)
            continue
        if pattern[index + 1 : index + 2] == "+":
            best, run = max(best, run, key=len), ""
        index += 1
    return max(best, run, key=len)


def _past(pattern: str, index: int) -> int:
    """The index after the construct that starts at ``index``."""
    char = pattern[index]
    if char == "[":
        end = pattern.index("]", index + (3 if pattern[index + 1] == "^" else 2))
        return end + 1
    if char == "{":
        return pattern.index("}", index) + 1
    if char != "(":
        return index + 1
    depth = 0
    while index < len(pattern):
        char = pattern[index]
        if char == "\\":
            index += 2
            continue
        if char == "[":
            index = _past(pattern, index)
            continue
        depth += {"(": 1, ")": -1}.get(char, 0)
        index += 1
        if depth == 0:
            break
    return index
