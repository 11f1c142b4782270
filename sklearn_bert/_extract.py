"""The whole way of the data, from texts to features.

::

    texts -> distinct texts -> token ids -> batches of equal length -> states of the layers asked
    for -> pooled -> layers combined -> norm -> one row per text

Tokens are pooled in torch, batch by batch, so that no state outlives its batch; layers are
combined in NumPy at the end. What is told apart here: a :class:`FeatureSpec` is *what* the
features are; everything else is *how* they are computed and does not change a bit of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from ._batching import chunks, equal_length_batches
from ._documents import unique_documents
from ._layers import LAYER_COMBINATIONS
from ._pooling import Pooling
from ._tokenization import tokenize
from .exceptions import LongDocumentError, TruncationWarning, warn_caller

if TYPE_CHECKING:
    from ._models import ModelReference

__all__ = ["FeatureSpec", "extract_features"]

# Texts tokenized at a time: enough to fill batches of every length, few enough to hold.
_CHUNK_TEXTS = 8192
_CHUNK_CHARACTERS = 2**24
# Tokens in a batch. On a CPU the states of a batch should stay in the cache.
_CPU_BATCH_TOKENS = 1024
_ACCELERATOR_BATCH_TOKENS = 16384
_ROWS_SHOWN = 5


@dataclass(frozen=True)
class FeatureSpec:
    """What the features of a text are; all that decides their values besides the model.

    Attributes
    ----------
    layers : tuple of int
        Layer numbers, 0 to the number of blocks.
    layer_combination : str
        Key of ``LAYER_COMBINATIONS``.
    poolings : tuple of Pooling
        Their vectors stand side by side.
    special_tokens : {"include", "exclude"}
        Whether special tokens count in poolings that read the tokens that count.
    norm : {"l2"} or None
        Norm that rows are divided by.
    max_length : int
        Most tokens of a text, special tokens included.
    long_documents : {"truncate", "error"}
        What happens to a text with more.
    dtype : {"float32", "bfloat16", "float16"}
        Precision of the model.
    """

    layers: tuple[int, ...]
    layer_combination: str
    poolings: tuple[Pooling, ...]
    special_tokens: str
    norm: str | None
    max_length: int
    long_documents: str
    dtype: str


def extract_features(
    texts: Sequence[str],
    spec: FeatureSpec,
    reference: ModelReference,
    *,
    hidden_size: int,
    device: Any = "auto",
    batch_tokens: int | str = "auto",
    verbose: bool | int = False,
) -> NDArray[np.float32]:
    """Compute the features of texts.

    Parameters
    ----------
    texts : sequence of str
        One per row.
    spec : FeatureSpec
        What to compute.
    reference : ModelReference
        What to compute it with.
    hidden_size : int
        Length of a state of the model.
    device, batch_tokens, verbose
        How to compute it, as in :class:`~sklearn_bert.BertLayerFeaturizer`.

    Returns
    -------
    ndarray of shape (n_texts, n_features)
        C-contiguous float32 that owns its memory.
    """
    distinct, row_of = unique_documents(texts)
    if spec.long_documents == "error":
        _refuse_long(_count_tokens(distinct, spec, reference)[row_of], spec.max_length)
    vectors = np.empty((len(distinct), len(spec.layers), len(spec.poolings), hidden_size), "f4")
    n_tokens = np.zeros(len(distinct), np.intp)
    with tqdm(total=len(distinct), unit="text", disable=not verbose) as progress:
        for chunk in _text_chunks(distinct):
            n_tokens[chunk] = _compute(
                distinct[chunk], spec, reference, device, batch_tokens, vectors[chunk],
                progress.update,
            )  # fmt: skip
    _warn_truncated(n_tokens[row_of], spec.max_length)
    features = combine(vectors, spec)
    features = features[row_of] if len(distinct) < len(texts) else features
    return features if features.base is None else features.copy()


def _compute(
    texts: Sequence[str],
    spec: FeatureSpec,
    reference: ModelReference,
    device: Any,
    batch_tokens: int | str,
    out: NDArray[np.float32],
    progress: Callable[[int], object],
) -> list[int]:
    """Fill `out` with the pooled states of distinct texts; return their numbers of tokens."""
    from ._models import get_encoder, get_tokenizer, resolve_device  # torch only from here on

    target = resolve_device(device)
    encodings = tokenize(get_tokenizer(reference), texts, spec.max_length)
    encoder = get_encoder(reference, target, spec.dtype)
    for rows in equal_length_batches(encodings.lengths, _budget(batch_tokens, target.type)):
        ids = encodings.batch(rows)
        counted = (
            encodings.counted(ids.shape[1]) if spec.special_tokens == "exclude" else slice(None)
        )
        out[rows] = encoder.pooled_states(ids, counted, spec.layers, spec.poolings)
        progress(len(rows))
    return encodings.n_tokens


def combine(vectors: NDArray[np.float32], spec: FeatureSpec) -> NDArray[np.float32]:
    """Combine pooled states of several layers into rows.

    Parameters
    ----------
    vectors : ndarray of shape (n_texts, n_layers, n_poolings, hidden_size)
        Pooled states.
    spec : FeatureSpec
        How to combine them.

    Returns
    -------
    ndarray of shape (n_texts, n_features)
        Layer-major: for each layer (one, if they are not concatenated), for each pooling,
        `hidden_size` columns.
    """
    n_texts, n_layers, n_poolings, hidden_size = vectors.shape
    blocks = vectors.reshape(n_texts, n_layers, n_poolings * hidden_size)
    features = LAYER_COMBINATIONS[spec.layer_combination](blocks)
    if spec.norm == "l2":
        lengths = np.linalg.norm(features, axis=1, keepdims=True)
        lengths[lengths == 0] = 1  # a row of zeros stays zeros
        features = np.divide(features, lengths)
    return features


def _text_chunks(texts: Sequence[str]) -> list[slice]:
    return list(chunks([len(text) for text in texts], _CHUNK_TEXTS, _CHUNK_CHARACTERS))


def _budget(batch_tokens: int | str, device_type: str) -> int:
    if batch_tokens == "auto":
        return _CPU_BATCH_TOKENS if device_type == "cpu" else _ACCELERATOR_BATCH_TOKENS
    return int(batch_tokens)


def _count_tokens(
    texts: Sequence[str], spec: FeatureSpec, reference: ModelReference
) -> NDArray[np.intp]:
    from ._models import get_tokenizer

    tokenizer = get_tokenizer(reference)
    counts = [tokenize(tokenizer, texts[c], spec.max_length).n_tokens for c in _text_chunks(texts)]
    return np.array([n for chunk in counts for n in chunk], np.intp)


def _refuse_long(n_tokens: NDArray[np.intp], max_length: int) -> None:
    rows = np.flatnonzero(n_tokens > max_length)
    if len(rows):
        shown = ", ".join(f"{row} ({n_tokens[row]} tokens)" for row in rows[:_ROWS_SHOWN])
        raise LongDocumentError(
            f"{len(rows)} of {len(n_tokens)} texts are longer than max_length={max_length} tokens: "
            f"rows {shown}{', ...' if len(rows) > _ROWS_SHOWN else ''}."
        )


def _warn_truncated(n_tokens: NDArray[np.intp], max_length: int) -> None:
    cut = n_tokens[n_tokens > max_length]
    if len(cut):
        warn_caller(
            f"{len(cut)} of {len(n_tokens)} texts were cut to max_length={max_length} tokens (the "
            f"longest has {cut.max()}); the rest of them did not reach the model.",
            TruncationWarning,
        )
