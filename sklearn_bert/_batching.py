"""Which texts go through the model together.

Batches are made of groups of texts of equal length. So on a CPU no attention mask is needed, no
token is computed that nobody asked for, and (with the kernels of ``_packed_linear``) a text gets
the same bits whatever its neighbours are. How different the lengths in a batch may be depends on
what runs it: all alike, or any (``_fast_bert`` computes on rows of tokens, whichever text they
belong to), or nearly alike (an accelerator would rather compute a little padding than many small
batches).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["TextGroup", "chunks", "known_types", "plan_batches"]


@dataclass(frozen=True)
class TextGroup:
    """Token ids of texts of one length, whose counted tokens stand at the same positions.

    Attributes
    ----------
    ids : ndarray of shape (n_texts, n_tokens)
        Token ids, int64.
    counted : slice or list of int
        Positions of the tokens that count.
    types : ndarray of shape (n_texts, n_tokens) or None
        Token types, int64; None if all are 0.
    """

    ids: NDArray[np.int64]
    counted: slice | list[int]
    types: NDArray[np.int64] | None = None

    def __getitem__(self, texts: slice) -> TextGroup:
        types = None if self.types is None else self.types[texts]
        return TextGroup(self.ids[texts], self.counted, types)


def known_types(groups: Sequence[TextGroup], n_types: int) -> list[NDArray[np.int64]] | None:
    """Return the token types of each group, or None if the model has no use for them.

    A tokenizer may tell the texts of a pair apart where the model does not.
    """
    given = [group.types for group in groups if group.types is not None]
    if not given or max(int(types.max()) for types in given) >= n_types:
        return None
    return [np.zeros_like(g.ids) if g.types is None else g.types for g in groups]


def plan_batches(
    lengths: Sequence[int] | NDArray[np.intp], budget: int, spread: float = 0.0
) -> Iterator[NDArray[np.intp]]:
    """Group texts into batches of at most `budget` tokens.

    Parameters
    ----------
    lengths : sequence of int
        Number of tokens of each text.
    budget : int
        Most tokens in a batch; a text longer than that is a batch by itself.
    spread : float, default=0.0
        Most share of padding in a batch, if its texts were padded to the longest: 0 puts only
        texts of equal length together. ``math.inf`` puts any together, and pads none.

    Yields
    ------
    ndarray of shape (n_rows,)
        Positions of the texts of a batch. Every position is in exactly one batch. The longest
        texts come first, so that the peak of memory is reached at once.

    Examples
    --------
    >>> [batch.tolist() for batch in plan_batches([3, 5, 3, 3, 5], budget=7)]
    [[1], [4], [0, 2], [3]]
    >>> [batch.tolist() for batch in plan_batches([3, 5, 3, 3, 5], budget=8, spread=math.inf)]
    [[1], [4, 0], [2, 3]]
    """
    if len(lengths) == 1:
        yield np.zeros(1, np.intp)
        return
    n_tokens = np.asarray(lengths, dtype=np.intp)
    order = np.argsort(-n_tokens, kind="stable")
    start = 0
    while start < len(order):
        ahead = n_tokens[order[start : start + max(1, budget)]]
        padded = ahead[0] * np.arange(1, len(ahead) + 1)
        true = np.cumsum(ahead)
        cost = true if math.isinf(spread) else padded
        fits = (cost <= budget) & (padded <= (1 + spread) * true)
        n_rows = max(1, len(ahead) if fits.all() else int(np.argmin(fits)))
        yield order[start : start + n_rows]
        start += n_rows


def chunks(sizes: Sequence[int], max_items: int, max_size: int) -> Iterator[slice]:
    """Cut a sequence into consecutive pieces that are bounded in number and total size.

    Examples
    --------
    >>> [(c.start, c.stop) for c in chunks([1, 1, 9, 1], max_items=2, max_size=5)]
    [(0, 2), (2, 3), (3, 4)]
    """
    start, total = 0, 0
    for position, size in enumerate(sizes):
        if position > start and (position - start == max_items or total + size > max_size):
            yield slice(start, position)
            start, total = position, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))
