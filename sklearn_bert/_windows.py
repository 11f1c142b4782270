"""Long texts: where windows begin, which tokens each counts, how pooled windows become one vector.

A text that is longer than the model takes is read through windows that may overlap. Every token
counts exactly once: where two windows overlap, the first half of the tokens counts in the earlier
window and the second half in the later one, because that is where a token sees most on its poorer
side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Window", "WindowMerger", "windows"]


@dataclass(frozen=True)
class Window:
    """A piece of a text, in positions of its tokens (special tokens not among them).

    Attributes
    ----------
    start, stop : int
        Tokens that the model is given.
    first, end : int
        Those of them that count.
    """

    start: int
    stop: int
    first: int
    end: int


def windows(n_tokens: int, size: int, overlap: int) -> list[Window]:
    """Cover `n_tokens` tokens with windows of `size`, each sharing `overlap` with the next.

    Examples
    --------
    >>> for window in windows(10, size=6, overlap=3):
    ...     print(window)
    Window(start=0, stop=6, first=0, end=5)
    Window(start=3, stop=9, first=5, end=8)
    Window(start=6, stop=10, first=8, end=10)
    """
    step = size - overlap
    starts = range(0, max(1, n_tokens - overlap), step)
    last = len(starts) - 1
    return [
        Window(
            start,
            min(start + size, n_tokens),
            start + (overlap + 1) // 2 if number > 0 else 0,
            start + step + (overlap + 1) // 2 if number < last else n_tokens,
        )
        for number, start in enumerate(starts)
    ]


class WindowMerger:
    """Collects the vectors of windows until those of a text are all there, then merges them.

    Parameters
    ----------
    text_of : ndarray of shape (n_windows,)
        Text of each window.
    n_counted : sequence of int of length n_windows
        Tokens that count in each window.
    merges : sequence of callable
        For each kind of vector the function that merges those of several windows, of shape
        ``(n_windows, n_layers, hidden_size)``, given how many tokens count in each.
    """

    def __init__(
        self,
        text_of: NDArray[np.intp],
        n_counted: Sequence[int],
        merges: Sequence[Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]],
    ) -> None:
        self._text_of = text_of
        self._n_counted = n_counted
        self._merges = merges
        self._n_windows = np.bincount(text_of)
        self._waiting: dict[int, dict[int, list[NDArray[np.float32]]]] = {}

    def add(
        self, which: NDArray[np.intp], blocks: Sequence[NDArray[np.float32]]
    ) -> tuple[NDArray[np.intp], list[NDArray[np.float32]]]:
        """Take the vectors of some windows, and return those of the texts they complete.

        Parameters
        ----------
        which : ndarray of shape (n_some,)
            Numbers of the windows.
        blocks : sequence of ndarray of shape (n_some, n_layers, hidden_size)
            Their vectors, of each kind.

        Returns
        -------
        texts : ndarray of shape (n_complete,)
            Numbers of the texts. The vectors of a text with one window are passed on as they are.
        blocks : list of ndarray of shape (n_complete, n_layers, hidden_size)
            Their vectors.
        """
        texts = self._text_of[which]
        alone = self._n_windows[texts] == 1
        if alone.all():
            return texts, list(blocks)
        complete = list(texts[alone])
        vectors = [list(block[alone]) for block in blocks]
        for position in np.flatnonzero(~alone):
            text = int(texts[position])
            parts = self._waiting.setdefault(text, {})
            parts[int(which[position])] = [block[position] for block in blocks]
            if len(parts) == self._n_windows[text]:
                complete.append(text)
                for merged, vector in zip(vectors, self._merge(text), strict=True):
                    merged.append(vector)
        shapes = [block.shape[1:] for block in blocks]
        return np.array(complete, np.intp), [
            np.array(rows, np.float32).reshape(-1, *shape)
            for rows, shape in zip(vectors, shapes, strict=True)
        ]

    def _merge(self, text: int) -> list[NDArray[np.float32]]:
        parts = self._waiting.pop(text)
        order = sorted(parts)
        weights = np.array([self._n_counted[number] for number in order], np.float64)
        merged = []
        for merge in self._merges:
            vectors = np.stack([parts[number].pop(0) for number in order], dtype=np.float64)
            merged.append(merge(vectors, weights).astype(np.float32))
        return merged
