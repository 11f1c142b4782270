"""Texts -> token ids.

The tokenizer is used without any state that a call could change: no truncation, no padding.
Cutting and adding the special tokens are done here, so that threads with different maximum
lengths can share one tokenizer, and so that a ``[SEP]`` that a user typed stays ordinary text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from ._batching import TextGroup
from ._windows import Window, windows

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

# Unicode guarantees that these are no characters.
_NOT_IN_TEXTS = "\ufdd0\ufdd1\ufdd2\ufdd3"

__all__ = [
    "Encodings",
    "PairTokens",
    "Spans",
    "SpecialTokens",
    "Text",
    "TextLayout",
    "TextTokenizer",
    "TokenizedText",
    "Words",
    "arrange",
    "find_pair_tokens",
    "find_special_tokens",
    "stateless_tokenizer",
    "tokenize",
    "tokenize_words",
]


@dataclass(frozen=True)
class SpecialTokens:
    """Ids the tokenizer puts around a text, e.g. ``[CLS]`` before and ``[SEP]`` after it."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prefix) + len(self.suffix)


@dataclass(frozen=True)
class PairTokens:
    """Ids the tokenizer puts around and between the texts of a pair, and the type of each part."""

    prefix: tuple[int, ...]
    middle: tuple[int, ...]
    suffix: tuple[int, ...]
    types: tuple[int, int, int, int, int]  # of prefix, first text, middle, second text, suffix

    def __len__(self) -> int:
        return len(self.prefix) + len(self.middle) + len(self.suffix)


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer, without truncation or padding, and what is known of it.

    Attributes
    ----------
    backend : tokenizers.Tokenizer
        Never changed, so threads share it.
    special_tokens : SpecialTokens
        What stands around every text.
    pair_tokens : PairTokens or None
        What stands around and between the texts of a pair; None if it takes no pairs.
    recorded_length : int or None
        Most tokens of a text, as its files say; None if they do not.
    """

    backend: Tokenizer
    special_tokens: SpecialTokens
    pair_tokens: PairTokens | None
    recorded_length: int | None

    def names(self, ids: Iterable[int]) -> list[str]:
        """Return how the tokenizer writes some tokens."""
        return [str(self.backend.id_to_token(i)).removeprefix(_NOT_IN_TEXTS) for i in ids]


@dataclass(frozen=True)
class TextLayout:
    """How a text becomes token ids; part of what decides its features.

    Attributes
    ----------
    max_length : int
        Most tokens of a text or window, special tokens included.
    special_tokens : {"include", "exclude"}
        Whether special tokens count.
    window_overlap : int or None
        Tokens that the windows of a longer text share; None cuts its end off.
    text_pair : bool
        Whether a text is a pair of texts.
    """

    max_length: int
    special_tokens: str = "include"
    window_overlap: int | None = None
    text_pair: bool = False


# A text, or a pair of texts.
Text = str | tuple[str, str]
# Positions (start, stop) of tokens that count; two such ranges for a pair without special tokens.
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Encodings:
    """Token ids of some texts, in one or several windows each.

    Attributes
    ----------
    ids : list of ndarray of shape (n_tokens,)
        Ids of each window, special tokens included; int32, for lists take ten times the memory.
    spans : list of tuple
        Which tokens of each window count.
    text_of : ndarray of shape (n_windows,)
        Text of each window; the windows of a text follow each other.
    n_tokens : list of int
        Number of tokens of each text before it was cut, special tokens included.
    types : list of ndarray of shape (n_tokens,) or None
        Token types of each window; None if all are 0.
    """

    ids: list[NDArray[np.int32]]
    spans: list[Spans]
    text_of: NDArray[np.intp]
    n_tokens: list[int]
    types: list[NDArray[np.int8]] | None = None

    @property
    def n_counted(self) -> list[int]:
        """Number of tokens of each window that count."""
        return [sum(stop - start for start, stop in spans) for spans in self.spans]

    @property
    def text_sizes(self) -> NDArray[np.intp]:
        """Number of tokens in the windows of each text."""
        sizes = np.zeros(len(self.n_tokens), np.intp)
        np.add.at(sizes, self.text_of, [len(ids) for ids in self.ids])
        return sizes

    def windows_of(self, texts: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return the windows of some texts, those with the same positions counted together."""
        is_wanted = np.zeros(len(self.n_tokens), bool)
        is_wanted[texts] = True
        chosen = np.flatnonzero(is_wanted[self.text_of])
        return np.array(sorted(chosen, key=lambda window: self.spans[window]), np.intp)

    def groups(self, windows: NDArray[np.intp]) -> list[TextGroup]:
        """Return the ids of some windows, grouped; those of equal length stand together."""

        def layout(window: int) -> tuple[int, Spans]:
            return len(self.ids[window]), self.spans[window]

        groups = []
        for (_, spans), some in groupby(windows, key=layout):
            members = list(some)
            ids = np.array([self.ids[window] for window in members], np.int64)
            types = None
            if self.types is not None:
                types = np.array([self.types[window] for window in members], np.int64)
            counted = [position for span in spans for position in range(*span)]
            groups.append(TextGroup(ids, slice(*spans[0]) if len(spans) == 1 else counted, types))
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


def find_pair_tokens(tokenizer: Tokenizer) -> PairTokens | None:
    """Find what `tokenizer` puts around and between two texts; None if it does not tell them."""
    encoding = tokenizer.encode("a", "a")
    sequence = encoding.sequence_ids
    if 0 not in sequence or 1 not in sequence:
        return None
    first = [i for i, of in enumerate(sequence) if of == 0]
    second = [i for i, of in enumerate(sequence) if of == 1]
    parts = (
        slice(0, first[0]),
        slice(first[0], first[-1] + 1),
        slice(first[-1] + 1, second[0]),
        slice(second[0], second[-1] + 1),
        slice(second[-1] + 1, None),
    )
    prefix, _, middle, _, suffix = (tuple(encoding.ids[part]) for part in parts)
    if not middle:
        return None
    types = [(encoding.type_ids[part] or [0])[0] for part in parts]
    return PairTokens(prefix, middle, suffix, (types[0], types[1], types[2], types[3], types[4]))


def tokenize(tokenizer: TextTokenizer, texts: Sequence[Text], layout: TextLayout) -> Encodings:
    """Encode texts, each by itself, and cut them to length or into windows.

    Parameters
    ----------
    tokenizer : TextTokenizer
        What to encode with.
    texts : sequence of str, or of (str, str)
        Any text, the empty one included; pairs if `layout` says so.
    layout : TextLayout
        How.

    Returns
    -------
    Encodings
        In the order of `texts`.
    """
    if layout.text_pair:
        return _tokenize_pairs(tokenizer, cast("Sequence[tuple[str, str]]", texts), layout)
    encoded = _encode(tokenizer.backend, cast("Sequence[str]", texts))
    return arrange((encoding.ids for encoding in encoded), tokenizer.special_tokens, layout)


def arrange(
    contents: Iterable[list[int]], special_tokens: SpecialTokens, layout: TextLayout
) -> Encodings:
    """Put special tokens around the ids of texts, after cutting them to length or into windows."""
    prefix, suffix = list(special_tokens.prefix), list(special_tokens.suffix)
    room = layout.max_length - len(special_tokens)
    counts_all = layout.special_tokens == "include"
    ids: list[NDArray[np.int32]] = []
    spans: list[Spans] = []
    text_of: list[int] = []
    n_tokens: list[int] = []
    for text, content in enumerate(contents):
        n_tokens.append(len(content) + len(special_tokens))
        if layout.window_overlap is None:
            n_kept = min(len(content), room)
            pieces = [Window(0, n_kept, 0, n_kept)]
        else:
            pieces = windows(len(content), room, layout.window_overlap)
        for piece in pieces:
            kept = content[piece.start : piece.stop]
            ids.append(np.array([*prefix, *kept, *suffix], np.int32))
            offset = len(prefix) - piece.start
            # the special tokens of a text count once: the first before it, the last after it
            start = 0 if counts_all and piece is pieces[0] else piece.first + offset
            last = counts_all and piece is pieces[-1]
            spans.append(((start, len(ids[-1]) if last else piece.end + offset),))
            text_of.append(text)
    return Encodings(ids, spans, np.array(text_of, np.intp), n_tokens)


def _tokenize_pairs(
    tokenizer: TextTokenizer, pairs: Sequence[tuple[str, str]], layout: TextLayout
) -> Encodings:
    special = tokenizer.pair_tokens
    assert special is not None  # fit has seen to it
    prefix, middle, suffix = list(special.prefix), list(special.middle), list(special.suffix)
    room = layout.max_length - len(special)
    encoded = (
        encoding.ids for encoding in _encode(tokenizer.backend, [t for p in pairs for t in p])
    )
    ids, n_tokens, types = [], [], []
    spans: list[Spans] = []
    for first, second in zip(encoded, encoded, strict=True):  # one after the other
        n_tokens.append(len(first) + len(second) + len(special))
        n_first, n_second = _cut_longest_first(len(first), len(second), room)
        parts = (prefix, first[:n_first], middle, second[:n_second], suffix)
        ids.append(np.array([token for part in parts for token in part], np.int32))
        types.append(np.repeat(np.array(special.types, np.int8), [len(part) for part in parts]))
        if layout.special_tokens == "include":
            spans.append(((0, len(ids[-1])),))
        else:
            start = len(prefix) + n_first + len(middle)
            spans.append(((len(prefix), len(prefix) + n_first), (start, start + n_second)))
    return Encodings(
        ids, spans, np.arange(len(ids)), n_tokens, types if any(special.types) else None
    )


# A text, or the words of a text.
Words = str | tuple[str, ...]


@dataclass(frozen=True)
class TokenizedText:
    """Tokens of a text, without special tokens, and where they stand.

    Attributes
    ----------
    ids, tokens : list
        Numbers of the tokens, and how the tokenizer writes them.
    offsets : list of (int, int)
        Where each token begins and ends, in characters: in the text, or in its word if the text
        was given as words.
    words : list of int
        Word of each token; never falls.
    word_texts, word_offsets : list
        All words, with or without tokens, and where they stand.
    """

    ids: list[int]
    tokens: list[str]
    offsets: list[tuple[int, int]]
    words: list[int]
    word_texts: list[str]
    word_offsets: list[tuple[int, int]]


def tokenize_words(tokenizer: TextTokenizer, texts: Sequence[Words]) -> list[TokenizedText]:
    """Encode texts, or lists of words, remembering where each token stands.

    Words are joined by spaces and encoded as one text, because some tokenizers write a word after a
    space in another way than at the beginning.
    """
    joined = [
        text if isinstance(text, str) else " ".join(word for word in text if word.strip())
        for text in texts
    ]
    encoded = _encode(tokenizer.backend, joined, with_offsets=True)
    return [
        _with_own_words(encoding, tokenizer.names(encoding.ids), text)
        if isinstance(text, str)
        else _with_given_words(encoding, tokenizer.names(encoding.ids), text)
        for encoding, text in zip(encoded, texts, strict=True)
    ]


def _with_own_words(encoding: Encoding, tokens: list[str], text: str) -> TokenizedText:
    """Take as words what the tokenizer splits a text into before it looks for tokens."""
    offsets = []
    for start, stop in encoding.offsets:
        part = text[start:stop]
        offsets.append((start + len(part) - len(part.lstrip()), stop))
    words: list[int] = []
    word_offsets: list[tuple[int, int]] = []
    previous: object = None
    for own, (start, stop) in zip(encoding.word_ids, offsets, strict=True):
        if not words or own is None or own != previous:
            word_offsets.append((start, stop))
        else:
            word_offsets[-1] = (min(word_offsets[-1][0], start), max(word_offsets[-1][1], stop))
        words.append(len(word_offsets) - 1)
        previous = own
    word_texts = [text[start:stop] for start, stop in word_offsets]
    return TokenizedText(encoding.ids, tokens, offsets, words, word_texts, word_offsets)


def _with_given_words(
    encoding: Encoding, tokens: list[str], given: tuple[str, ...]
) -> TokenizedText:
    """Find the word of each token of a text that was joined from words."""
    joined = [number for number, word in enumerate(given) if word.strip()]
    stops = np.cumsum([len(given[number]) + 1 for number in joined]) - 1
    # where a token ends tells its word; where it begins can be the space before
    places = np.searchsorted(stops, [stop for _, stop in encoding.offsets]).tolist()
    words = [joined[place] for place in places]
    offsets = []
    for place, word, (start, stop) in zip(places, words, encoding.offsets, strict=True):
        begin = int(stops[place]) - len(given[word])
        offsets.append((max(0, start - begin), max(0, stop - begin)))
    word_offsets = [(0, len(word)) for word in given]
    return TokenizedText(encoding.ids, tokens, offsets, words, list(given), word_offsets)


def _cut_longest_first(n_first: int, n_second: int, room: int) -> tuple[int, int]:
    """Cut the longer of two texts, and then both alike, until they have `room` tokens.

    The rule is that of the tokenizers library.
    """
    shorter, longer = sorted((n_first, n_second))
    if shorter + longer > room:
        longer = max(shorter, room - shorter)
        if shorter + longer > room:
            shorter = room // 2
            longer = shorter + room % 2
    return (shorter, longer) if n_first <= n_second else (longer, shorter)


# Texts encoded at a time: enough for all threads, few because the library keeps kilobytes of each.
_ENCODED_TOGETHER = 512
# The threads that encode a batch do not survive a fork; a child that waits for them hangs.
_in_forked_child = False


def _after_fork_in_child() -> None:
    global _in_forked_child
    _in_forked_child = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _encode(
    backend: Tokenizer, texts: Sequence[str], with_offsets: bool = False
) -> Iterator[Encoding]:
    """Yield what the tokenizers library makes of each text, without special tokens."""
    if _in_forked_child:
        yield from (backend.encode(text, add_special_tokens=False) for text in texts)
        return
    encode = backend.encode_batch if with_offsets else backend.encode_batch_fast
    for first in range(0, len(texts), _ENCODED_TOGETHER):
        some = texts[first : first + _ENCODED_TOGETHER]
        yield from encode(list(some), add_special_tokens=False)
