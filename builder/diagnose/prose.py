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
    speakers: collections.Counter[str] = field(default_factory=collections.Counter)

    def feed(self, text: str) -> None:
        """Read one line without a prefix; it may be several that were joined."""
        match = _SPEAKER.match(text)
        if match and not _PROGRAMS.fullmatch(match["name"]):
            self.speakers[match["name"]] += 1
        for piece in _END.split(text[:2000]):
            self.lines += 1
            said = _SENTENCE.match(piece) and len(_WORDS.findall(piece[:400])) >= _FEW
            self.sentences += bool(said or _ITEM.match(piece))

    def is_talk(self) -> bool:
        """Whether half of it are sentences, or two people say most of it."""
        own = [count for count in self.speakers.values() if count >= _FEW]
        talk = len(own) >= _FEW and sum(own) * 5 >= self.lines * 3
        return talk or (self.sentences >= _FEW and self.sentences * 2 >= self.lines)
