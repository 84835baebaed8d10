"""BERT's tokenizer: words and punctuation marks, each cut into the longest pieces that the vocabulary has."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

from pinpool.demo import DemoError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

LONGEST_WORD = 100


class WordPiece:
    """Turns sentences into token ids. For text that puts spaces between words, as English does.

    Args:
        vocabulary: the file with one token a line; a token's id is its line number.
        lower: lower-case the text and drop accents first, as uncased models want it.

    Raises:
        DemoError: one of the four special tokens is not in the vocabulary.
        OSError: the file cannot be read.

    """

    def __init__(self, vocabulary: Path, *, lower: bool = True) -> None:
        try:
            tokens = vocabulary.read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise DemoError(f"{vocabulary} is not a BERT vocabulary: {error}") from None
        self._ids = {token.rstrip("\r"): index for index, token in enumerate(tokens) if token}
        self._lower = lower
        missing = [token for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]") if token not in self._ids]
        if missing:
            raise DemoError(f"{vocabulary} is not a BERT vocabulary: it has no {', '.join(missing)}")
        self.padding = self._ids["[PAD]"]

    @property
    def largest_id(self) -> int:
        """The largest id that `encode` can give."""
        return max(self._ids.values())

    def encode(self, sentence: str, max_tokens: int) -> list[int]:
        """Return the ids of `sentence` between [CLS] and [SEP], cut to `max_tokens` ids in all."""
        pieces = [piece for word in self._words(sentence) for piece in self._pieces(word)]
        return [self._ids["[CLS]"], *pieces[: max_tokens - 2], self._ids["[SEP]"]]

    def encode_batch(self, sentences: Sequence[str], max_tokens: int) -> tuple[list[list[int]], list[list[bool]]]:
        """Return ids padded to one length, and a mask that is true where an id is a token and not padding."""
        encoded = [self.encode(sentence, max_tokens) for sentence in sentences]
        width = max(map(len, encoded))
        ids = [row + [self.padding] * (width - len(row)) for row in encoded]
        mask = [[column < len(row) for column in range(width)] for row in encoded]
        return ids, mask

    def _words(self, sentence: str) -> Iterator[str]:
        if self._lower:
            sentence = _without_accents(sentence.lower())
        for run in sentence.split():
            word = ""
            for character in run:
                if _is_punctuation(character):
                    yield from filter(None, (word, character))
                    word = ""
                elif unicodedata.category(character) not in ("Cc", "Cf"):
                    word += character
            yield from filter(None, (word,))

    def _pieces(self, word: str) -> list[int]:
        pieces: list[int] = []
        start = 0
        while start < len(word) <= LONGEST_WORD:
            prefix = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if prefix + word[start:end] in self._ids), None)
            if end is None:
                break
            pieces.append(self._ids[prefix + word[start:end]])
            start = end
        return pieces if start == len(word) else [self._ids["[UNK]"]]


def _without_accents(text: str) -> str:
    return "".join(char for char in unicodedata.normalize("NFD", text) if unicodedata.category(char) != "Mn")


def _is_punctuation(character: str) -> bool:
    # BERT counts every printable ASCII mark, so "$" and "+" too, which Unicode calls symbols.
    is_ascii_mark = "!" <= character <= "~" and not character.isalnum()
    return is_ascii_mark or unicodedata.category(character).startswith("P")
