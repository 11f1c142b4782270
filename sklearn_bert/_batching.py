"""Which texts go through the model together: integers in, integers out.

A batch holds only texts with the same number of tokens. So there is no padding and no attention
mask, no token is computed that nobody asked for, and (with the kernels of ``_packed_linear``) a
text gets the same bits whatever its neighbours are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["chunks", "equal_length_batches"]


def equal_length_batches(lengths: Sequence[int], budget: int) -> Iterator[NDArray[np.intp]]:
    """Group texts of equal length into batches of at most `budget` tokens.

    Parameters
    ----------
    lengths : sequence of int
        Number of tokens of each text.
    budget : int
        Most tokens in a batch; a text longer than that is a batch by itself.

    Yields
    ------
    ndarray of shape (n_rows,)
        Positions of the texts of a batch. Every position is in exactly one batch. The longest
        texts come first, so that the peak of memory is reached at once.

    Examples
    --------
    >>> [batch.tolist() for batch in equal_length_batches([3, 5, 3, 3, 5], budget=7)]
    [[1], [4], [0, 2], [3]]
    """
    n_tokens = np.asarray(lengths, dtype=np.intp)
    order = np.argsort(-n_tokens, kind="stable")
    starts = np.flatnonzero(np.diff(n_tokens[order], prepend=-1))
    for group in np.split(order, starts[1:]):
        if len(group):
            n_rows = max(1, budget // max(1, int(n_tokens[group[0]])))
            yield from (group[start : start + n_rows] for start in range(0, len(group), n_rows))


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
