"""Texts -> token ids.

The tokenizer is used without any state that a call could change: no truncation, no padding.
Cutting and adding the special tokens are done here, so that threads with different maximum
lengths can share one tokenizer, and so that a ``[SEP]`` that a user typed stays ordinary text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

# Unicode guarantees that these are no characters.
_NOT_IN_TEXTS = "\ufdd0\ufdd1\ufdd2\ufdd3"

__all__ = [
    "Encodings",
    "SpecialTokens",
    "TextGroup",
    "TextTokenizer",
    "find_special_tokens",
    "stateless_tokenizer",
    "tokenize",
]


@dataclass(frozen=True)
class SpecialTokens:
    """Ids the tokenizer puts around a text, e.g. ``[CLS]`` before and ``[SEP]`` after it."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prefix) + len(self.suffix)


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer, without truncation or padding, and what is known of it.

    Attributes
    ----------
    backend : tokenizers.Tokenizer
        Never changed, so threads share it.
    special_tokens : SpecialTokens
        What stands around every text.
    recorded_length : int or None
        Most tokens of a text, as its files say; None if they do not.
    """

    backend: Tokenizer
    special_tokens: SpecialTokens
    recorded_length: int | None


@dataclass(frozen=True)
class TextGroup:
    """Token ids of texts of one length, whose counted tokens stand at the same positions.

    Attributes
    ----------
    ids : ndarray of shape (n_texts, n_tokens)
        Token ids, int64.
    counted : slice
        Positions of the tokens that count.
    types : ndarray of shape (n_texts, n_tokens) or None
        Token types, int64; None if all are 0.
    """

    ids: NDArray[np.int64]
    counted: slice
    types: NDArray[np.int64] | None = None

    def __getitem__(self, texts: slice) -> TextGroup:
        types = None if self.types is None else self.types[texts]
        return TextGroup(self.ids[texts], self.counted, types)


@dataclass(frozen=True)
class Encodings:
    """Token ids of some texts.

    Attributes
    ----------
    ids : list of list of int
        Ids of each text, cut to the maximum length, special tokens included.
    n_tokens : list of int
        Number of tokens of each text before it was cut, special tokens included.
    special_tokens : SpecialTokens
        What stands around every text.
    """

    ids: list[list[int]]
    n_tokens: list[int]
    special_tokens: SpecialTokens

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each text after cutting."""
        return [len(ids) for ids in self.ids]

    def groups(self, rows: NDArray[np.intp], special_tokens: str) -> list[TextGroup]:
        """Return the ids of some texts, grouped by length.

        Parameters
        ----------
        rows : ndarray of shape (n_rows,)
            Which texts; those of equal length stand together.
        special_tokens : {"include", "exclude"}
            Whether special tokens count.
        """
        groups = []
        for n_tokens, some in groupby(rows, key=lambda row: len(self.ids[row])):
            counted = slice(0, n_tokens)
            if special_tokens == "exclude":
                prefix, suffix = len(self.special_tokens.prefix), len(self.special_tokens.suffix)
                counted = slice(prefix, n_tokens - suffix)
            ids = np.array([self.ids[row] for row in some], dtype=np.int64)
            groups.append(TextGroup(ids, counted))
        return groups


def stateless_tokenizer(original: Tokenizer) -> Tokenizer:
    """Return a copy of a tokenizer that neither cuts nor pads, and reads special tokens as text.

    A SentencePiece vocabulary has its special tokens among the pieces that it spells texts with, so
    there it is not enough that they are not looked for: their pieces are renamed to what no text
    contains. They keep their ids and scores.
    """
    from tokenizers import Tokenizer

    content = json.loads(original.to_str())
    special = {token["content"] for token in content["added_tokens"] if token["special"]}
    if content["model"]["type"] == "Unigram":
        content["model"]["vocab"] = [
            [f"{_NOT_IN_TEXTS}{piece}" if piece in special else piece, score]
            for piece, score in content["model"]["vocab"]
        ]
        content["added_tokens"] = [t for t in content["added_tokens"] if not t["special"]]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    # a tokenizer file can carry its own padding and truncation
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer


def find_special_tokens(tokenizer: Tokenizer) -> SpecialTokens | None:
    """Find what `tokenizer` puts before and after a text; None if it adds nothing."""
    encoding = tokenizer.encode("a")
    mask = encoding.special_tokens_mask
    if 0 not in mask or 1 not in mask:
        return None
    first = mask.index(0)
    last = len(mask) - mask[::-1].index(0)
    return SpecialTokens(tuple(encoding.ids[:first]), tuple(encoding.ids[last:]))


def tokenize(tokenizer: TextTokenizer, texts: Sequence[str], max_length: int) -> Encodings:
    """Encode texts, each by itself, and cut them to `max_length` tokens.

    Parameters
    ----------
    tokenizer : TextTokenizer
        What to encode with.
    texts : sequence of str
        Any text, the empty one included.
    max_length : int
        Most tokens of a text, special tokens included. The beginning of a text is kept.

    Returns
    -------
    Encodings
        In the order of `texts`.
    """
    special_tokens = tokenizer.special_tokens
    room = max_length - len(special_tokens)
    prefix, suffix = list(special_tokens.prefix), list(special_tokens.suffix)
    ids, n_tokens = [], []
    for encoding in _encode(tokenizer.backend, texts):
        n_tokens.append(len(encoding) + len(special_tokens))
        ids.append([*prefix, *encoding.ids[:room], *suffix])
    return Encodings(ids, n_tokens, special_tokens)


# The threads that encode a batch do not survive a fork; a child that waits for them hangs.
_in_forked_child = False


def _after_fork_in_child() -> None:
    global _in_forked_child
    _in_forked_child = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _encode(backend: Tokenizer, texts: Sequence[str]) -> Iterable[Encoding]:
    if _in_forked_child:
        return (backend.encode(text, add_special_tokens=False) for text in texts)
    return backend.encode_batch_fast(list(texts), add_special_tokens=False)
