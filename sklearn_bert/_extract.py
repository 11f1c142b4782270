"""The whole way of the data, from texts to features.

::

    texts -> distinct texts -> those not in the cache -> token ids, in windows -> batches
    -> states of the layers asked for -> pooled -> windows merged -> cache -> layers combined
    -> norm -> rows

Tokens are pooled in torch, batch by batch, so that no state outlives its batch; layers are
combined in NumPy at the end, so that another combination costs no forward pass. What is told apart
here: a :class:`FeatureSpec` is *what* the features are; an ``Execution`` is *how* they are computed
and does not change a bit of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ._documents import unique_documents
from ._layers import LAYER_COMBINATIONS
from ._text_states import Execution, StateSpec, count_tokens, pooled_states
from ._tokenization import Text
from .exceptions import LongDocumentError, TruncationWarning, warn_caller

if TYPE_CHECKING:
    from ._models import ModelReference

__all__ = [
    "FeatureSpec",
    "combine",
    "extract_features",
    "normalized",
    "refuse_long",
    "warn_truncated",
]

_ROWS_SHOWN = 5


@dataclass(frozen=True)
class FeatureSpec:
    """What the features of a text are; all that decides their values besides the model.

    Attributes
    ----------
    states : StateSpec
        The pooled states they are made of.
    layer_combination : str
        Key of ``LAYER_COMBINATIONS``.
    norm : {"l2"} or None
        Norm that rows are divided by.
    long_documents : {"truncate", "window", "error"}
        What happens to a text with more tokens than ``states.layout.max_length``.
    """

    states: StateSpec
    layer_combination: str
    norm: str | None
    long_documents: str


def extract_features(
    texts: Sequence[Text], spec: FeatureSpec, reference: ModelReference, execution: Execution
) -> tuple[NDArray[np.float32], int]:
    """Compute the features of texts.

    Parameters
    ----------
    texts : sequence of str, or of (str, str)
        One per row.
    spec : FeatureSpec
        What to compute.
    reference : ModelReference
        What to compute it with.
    execution : Execution
        How.

    Returns
    -------
    features : ndarray of shape (n_texts, n_features)
        C-contiguous float32 that owns its memory.
    n_truncated : int
        How many texts were cut.
    """
    distinct, row_of = unique_documents(texts)
    layout = spec.states.layout
    if spec.long_documents == "error":
        refuse_long(count_tokens(distinct, layout, reference)[row_of], layout.max_length)
    vectors, n_tokens = pooled_states(distinct, spec.states, reference, execution)
    n_truncated = 0
    if spec.long_documents == "truncate":
        n_truncated = warn_truncated(n_tokens[row_of], layout.max_length)
    features = combine(vectors, spec)
    features = features[row_of] if len(distinct) < len(texts) else features
    if features.base is not None:
        # layers side by side are the vectors as they lie in memory: hand out that array, not a view
        owner = features.base
        features = owner if owner.shape == features.shape else features.copy()
    return features, n_truncated


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
    return normalized(features, spec.norm)


def normalized(features: NDArray[np.float32], norm: str | None) -> NDArray[np.float32]:
    """Divide each row by its norm; a row of zeros stays zeros."""
    if norm is None:
        return features
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    lengths[lengths == 0] = 1
    return np.divide(features, lengths)


def refuse_long(n_tokens: NDArray[np.intp], max_length: int) -> None:
    """Raise if any text has more than `max_length` tokens."""
    rows = np.flatnonzero(n_tokens > max_length)
    if len(rows):
        shown = ", ".join(f"{row} ({n_tokens[row]} tokens)" for row in rows[:_ROWS_SHOWN])
        raise LongDocumentError(
            f"{len(rows)} of {len(n_tokens)} texts are longer than max_length={max_length} tokens: "
            f"rows {shown}{', ...' if len(rows) > _ROWS_SHOWN else ''}. "
            "long_documents='window' reads them whole, 'truncate' cuts them."
        )


def warn_truncated(n_tokens: NDArray[np.intp], max_length: int) -> int:
    """Warn once of all texts with more than `max_length` tokens, and return their number."""
    cut = n_tokens[n_tokens > max_length]
    if len(cut):
        n_lost = int((cut - max_length).sum())
        warn_caller(
            f"{len(cut)} of {len(n_tokens)} texts were cut to max_length={max_length} tokens: "
            f"{n_lost} of {n_tokens.sum()} tokens did not reach the model (the longest text has "
            f"{cut.max()}). long_documents='window' reads them all.",
            TruncationWarning,
        )
    return len(cut)
