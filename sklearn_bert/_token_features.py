"""The token-level sister of ``_extract``: texts -> one row of features per token or word.

::

    texts or lists of words -> tokens and where they stand -> windows -> batches -> states of the
    layers asked for -> layers combined -> (tokens of a word pooled) -> norm -> rows

Rows are not cached: a text has as many as it has tokens, and they are seldom asked for twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ._batching import plan_batches
from ._documents import unique_documents
from ._extract import FeatureSpec, combine, normalized, refuse_long, warn_truncated
from ._progress import Progress, watched_by
from ._text_states import Execution, batch_budget
from ._tokenization import Encodings, TokenizedText, Words, arrange, tokenize_words

if TYPE_CHECKING:
    from ._models import ModelReference

__all__ = ["SUBWORD_POOLINGS", "TokenFeatures", "extract_token_features"]


def _first(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return rows[0]


def _mean(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return rows.mean(axis=0)


def _last(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return rows[-1]


# How the rows of the tokens of a word become one.
SUBWORD_POOLINGS = {"first": _first, "mean": _mean, "last": _last}


@dataclass(frozen=True, eq=False)
class TokenFeatures:
    """Features of the tokens, or of the words, of some texts; one row each.

    Attributes
    ----------
    vectors : ndarray of shape (n_rows, n_features)
        float32. For each layer in the order asked for `hidden_size` columns (with another
        `layer_combination` than "concat" for all layers together).
    tokens : ndarray of shape (n_rows,)
        Tokens as the tokenizer writes them, such as ``"##ing"``; or words.
    offsets : ndarray of shape (n_rows, 2)
        Where in its text a row stands, in characters, from start to before end; in its word, if
        the texts were given as lists of words. A special token has (0, 0).
    document : ndarray of shape (n_rows,)
        Number of the text.
    word : ndarray of shape (n_rows,)
        Number of the word within its text; -1 for a special token.
    """

    vectors: NDArray[np.float32]
    tokens: NDArray[np.object_]
    offsets: NDArray[np.intp]
    document: NDArray[np.intp]
    word: NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.vectors)

    def __repr__(self) -> str:
        n_texts = len(np.unique(self.document))
        return (
            f"TokenFeatures({len(self)} rows of {n_texts} texts, {self.vectors.shape[1]} columns)"
        )


def extract_token_features(
    texts: Sequence[Words],
    spec: FeatureSpec,
    reference: ModelReference,
    execution: Execution,
    *,
    level: str,
    subwords: str,
) -> TokenFeatures:
    """Compute the features of the tokens or words of texts.

    Parameters
    ----------
    texts : sequence of str, or of tuple of str
        Texts, or their words.
    spec : FeatureSpec
        What to compute; its poolings are not used.
    reference : ModelReference
        What to compute it with.
    execution : Execution
        How.
    level : {"token", "word"}
        What a row is.
    subwords : {"first", "mean", "last"}
        Key of ``SUBWORD_POOLINGS``: how the tokens of a word become one row.

    Returns
    -------
    TokenFeatures
        Rows in the order of the texts and of the tokens in them.
    """
    from ._models import get_tokenizer

    tokenizer = get_tokenizer(reference)
    distinct, row_of = unique_documents(texts)
    tokenized = tokenize_words(tokenizer, distinct)
    counts_special = level == "token" and spec.states.layout.special_tokens == "include"
    layout = replace(spec.states.layout, special_tokens="include" if counts_special else "exclude")
    special = tokenizer.special_tokens
    encodings = arrange([text.ids for text in tokenized], special, layout)
    n_tokens = np.array(encodings.n_tokens, np.intp)[row_of]
    if spec.long_documents == "error":
        refuse_long(n_tokens, layout.max_length)
    elif spec.long_documents == "truncate":
        warn_truncated(n_tokens, layout.max_length)
    with watched_by(len(distinct), execution.verbose, *execution.observers) as progress:
        vectors = _token_vectors(encodings, spec, reference, execution, progress)
    n_rows = np.zeros(len(distinct), np.intp)
    np.add.at(n_rows, encodings.text_of, encodings.n_counted)
    by_text = [vectors[end - n : end] for n, end in zip(n_rows, n_rows.cumsum(), strict=True)]
    if level == "word":
        reduce = SUBWORD_POOLINGS[subwords]
        features = _word_features(tokenized, by_text, vectors.shape[1], spec, reduce)
    else:
        around = (special.prefix, special.suffix) if counts_special else ((), ())
        features = _features(
            normalized(vectors, spec.norm),
            [
                _token_rows(text, len(rows), *map(tokenizer.names, around))
                for text, rows in zip(tokenized, by_text, strict=True)
            ],
        )
    return features if len(distinct) == len(texts) else _repeated(features, row_of)


def _token_vectors(
    encodings: Encodings,
    spec: FeatureSpec,
    reference: ModelReference,
    execution: Execution,
    progress: Progress,
) -> NDArray[np.float32]:
    """Compute the combined layers of all tokens that count, in their order."""
    from ._devices import resolve_device
    from ._models import get_encoder

    device = resolve_device(execution.device)
    without_norm = replace(spec, norm=None)
    n_blocks = len(spec.states.layers) if spec.layer_combination == "concat" else 1
    stops = np.cumsum(encodings.n_counted, dtype=np.intp)
    n_tokens = int(stops[-1]) if len(stops) else 0
    vectors = np.empty((n_tokens, n_blocks * reference.hidden_size), np.float32)
    if n_tokens == 0:
        return vectors
    encoder = get_encoder(reference, device, spec.states.dtype)
    budget = batch_budget(execution.batch_tokens, encoder.runner)
    windows = encodings.windows_of(np.arange(len(encodings.n_tokens)))
    ends_text = np.diff(encodings.text_of, append=-1) != 0
    lengths = [len(encodings.ids[window]) for window in windows]
    for batch in plan_batches(lengths, budget, encoder.runner.spread):
        groups = encodings.groups(windows[batch])
        states = encoder.token_states(groups, spec.states.layers)
        for window, rows in zip(windows[batch], states, strict=True):
            stop = stops[window]
            vectors[stop - len(rows) : stop] = combine(rows[:, :, None], without_norm)
        n_done = int(ends_text[windows[batch]].sum())
        progress.update(n_done, sum(group.ids.size for group in groups))
    return vectors


def _repeated(features: TokenFeatures, row_of: NDArray[np.intp]) -> TokenFeatures:
    """Give every text the rows of the distinct text that it is."""
    n_rows = np.bincount(features.document, minlength=int(row_of.max()) + 1)
    stops = n_rows.cumsum()
    rows = np.concatenate([np.arange(stops[i] - n_rows[i], stops[i]) for i in row_of])
    return TokenFeatures(
        vectors=features.vectors[rows],
        tokens=features.tokens[rows],
        offsets=features.offsets[rows],
        document=np.repeat(np.arange(len(row_of)), n_rows[row_of]),
        word=features.word[rows],
    )


# What stands beside the vectors of a text: tokens or words, offsets, and numbers of words.
_Labels = tuple[list[str], list[tuple[int, int]], list[int]]


def _features(vectors: NDArray[np.float32], labels: Sequence[_Labels]) -> TokenFeatures:
    tokens = np.empty(len(vectors), object)
    tokens[:] = [token for text in labels for token in text[0]]
    return TokenFeatures(
        vectors=vectors,
        tokens=tokens,
        offsets=np.array([o for text in labels for o in text[1]], np.intp).reshape(-1, 2),
        document=np.repeat(np.arange(len(labels)), [len(text[0]) for text in labels]),
        word=np.array([w for text in labels for w in text[2]], np.intp),
    )


def _token_rows(text: TokenizedText, n_rows: int, prefix: list[str], suffix: list[str]) -> _Labels:
    n_kept = n_rows - len(prefix) - len(suffix)
    nowhere = (0, 0)
    return (
        [*prefix, *text.tokens[:n_kept], *suffix],
        [nowhere] * len(prefix) + text.offsets[:n_kept] + [nowhere] * len(suffix),
        [-1] * len(prefix) + text.words[:n_kept] + [-1] * len(suffix),
    )


def _word_features(
    tokenized: Sequence[TokenizedText],
    by_text: Sequence[NDArray[np.float32]],
    width: int,
    spec: FeatureSpec,
    reduce: Callable[[NDArray[np.float32]], NDArray[np.float32]],
) -> TokenFeatures:
    """Pool the tokens of each word; a word without tokens has a row of zeros."""
    n_words = sum(len(text.word_texts) for text in tokenized)
    vectors = np.zeros((n_words, width), np.float32)
    labels: list[_Labels] = []
    first = 0
    for text, rows in zip(tokenized, by_text, strict=True):
        words = np.array(text.words[: len(rows)], np.intp)
        edges = [*np.flatnonzero(np.diff(words, prepend=-1)), len(words)]
        for start, stop in pairwise(edges):
            vectors[first + words[start]] = reduce(rows[start:stop])
        labels.append((text.word_texts, text.word_offsets, list(range(len(text.word_texts)))))
        first += len(text.word_texts)
    return _features(normalized(vectors, spec.norm), labels)
