"""Tells a text about failures from a log: sentences of people, and who says them."""

from __future__ import annotations

import collections
import re
from dataclasses import dataclass, field

#: The beginning of a sentence, after a name, a list mark or a quotation mark.
_SENTENCE = re.compile(
    r"^[-*>\d.) ]{0,5}(?:\w{2,20}: )?[\"'(]?(?:I|I'm|it|it's|my|the|when|if|in|on|we|you|this|that"
    r"|does|do|did|to|a|an|and|but|what|why|how|has|is|are|can|could|thanks|also|so|yes|yeah|then"
    r"|there|after|before|as|anyone|people|most|usually|just|sorry|ok|please|because|hi|hello|for"
    r"|with|of|at)\b",
    re.IGNORECASE,
)
_WORDS = re.compile(
    r"\b(?:the|is|it|you|and|that|this|with|for|when|if|my|I|we|can|what|why|how|does|anyone|your"
    r"|please|thanks|but|so|was|are|have|me|not|to|of|a|in|on|has|or)\b",
    re.IGNORECASE,
)
#: A few words that are enough in a sentence.
_FEW = 2
#: The end of a sentence, before another one.
_END = re.compile(r"(?<=[a-z\"'`)][.?!]) +(?=[A-Z])")
#: An item of a list.
_ITEM = re.compile(r"^\s*(?:\d{1,2}\.|[-*]) [A-Z`\"']")
#: A sentence that may begin with any word: so many words, and so large a share of small ones.
_LONG = 7
_SHARE = 5
_STOP = re.compile(r"[.?!][\"'`)]?$")
#: The message of an exception may be a whole sentence too.
_RAISED = re.compile(r"^\s*[\w.]*(?:Error|Exception)\b")
#: Markup of a document.
_MARKUP = re.compile(
    r"^\s*\\[a-z]{3,12}\{|\\(?:texttt|emph|textbf|verb|cite|ref)\b"
    r"|^#{1,6} [A-Za-z]|^\*\*\S.{0,200}\*\*|\]\(https?://|^\|.{3,}\|$"
)
#: The ends of a block of code, around a paste too.
_FENCE = re.compile(r"\s{0,3}(?:```|~~~)\w*\s*$")
#: A line that a search found in a file.
_FOUND = re.compile(
    r"(?:^|\s)[^\s:]{1,200}\.(?:md|rst|txt|py|toml|ya?ml|json|sh|c|cc|cpp|cuh?|h|go|rs|ts|js):\d+:"
    r"(?!\d+:)(?=\S)"
)
#: A message of a conversation, as programs store it.
_ROLE = re.compile(r"^\s*[\[{].{0,40}\"role\" ?: ?\"(?:user|assistant|system)\" ?, ?\"content\"")
_SPEAKER = re.compile(r"^(?P<name>[A-Za-z]\w{1,15}(?: [A-Z][a-z]{1,15})?): [A-Za-z\"'`]")
#: Beginnings of lines of programs that look like the name of a speaker.
_PROGRAMS = re.compile(
    r"error|warning|info|debug|note|fatal|kernel|docker|make|ninja|nvcc|main|srv|vllm|python|bash|sh"
    r"|usage|hint|fix|try|caused?|llama|ggml|gguf|trace|exception|reason|message|name|status|type|git"
    r"|critical|launch|image|container|mode|action|mods|worker|head",
    re.IGNORECASE,
)


@dataclass
class Speech:
    """What of a text is as people write it."""

    lines: int = 0
    sentences: int = 0
    #: whether it is a stored conversation
    stored: bool = False
    speakers: collections.Counter[str] = field(default_factory=collections.Counter)

    def feed(self, text: str) -> None:
        """Read one line without a prefix; it may be several that were joined."""
        if _FENCE.match(text):
            return
        match = _SPEAKER.match(text)
        if match and not _PROGRAMS.fullmatch(match["name"]):
            self.speakers[match["name"]] += 1
        self.stored = self.stored or _ROLE.match(text) is not None
        if found := len(_FOUND.findall(text[:2000])):
            self.lines += found
            self.sentences += found
            return
        for piece in _END.split(text[:2000]):
            self.lines += 1
            small = len(_WORDS.findall(piece[:400]))
            said = _SENTENCE.match(piece) and small >= _FEW
            told = said or _ITEM.match(piece) or _MARKUP.search(piece) or _is_said(piece, small)
            self.sentences += bool(told)

    def is_talk(self) -> bool:
        """Whether half of it are sentences, or two people say most of it."""
        own = [count for count in self.speakers.values() if count >= _FEW]
        talk = len(own) >= _FEW and sum(own) * 5 >= self.lines * 3
        return self.stored or talk or (self.sentences >= _FEW and self.sentences * 2 >= self.lines)


def _is_said(piece: str, small: int) -> bool:
    """Whether a piece is a whole sentence, whatever it begins with."""
    words = piece[:400].split()
    if _RAISED.match(piece):
        return False
    return len(words) >= _LONG and small * _SHARE >= len(words) and bool(_STOP.search(piece))
