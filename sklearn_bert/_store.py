"""What a store of computed states must be able to do.

A store maps texts to pooled states. It never decides what is right: whoever asks knows the digest
of everything that determines the values (the namespace), and a row that is missing, damaged or of
another shape is simply not found.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["NOT_FOUND", "CacheInfo", "NoStore", "Shelf", "Store"]

# Number of tokens of a text that a store does not have.
NOT_FOUND = -1


@dataclass(frozen=True)
class Shelf:
    """What the rows of one kind hold: some layers of a text, under one pooling.

    Attributes
    ----------
    namespace : str
        Digest of all that determines the values, besides text, layer and pooling.
    pooling : str
        Identity of the pooling.
    layers : tuple of int
        Layer numbers, in the order of the states of a row.
    hidden_size : int
        Length of a state.
    """

    namespace: str
    pooling: str
    layers: tuple[int, ...]
    hidden_size: int

    def holds(self, other: Shelf) -> bool:
        """Whether the rows of this shelf have all that rows of another one have."""
        return (
            self.namespace == other.namespace
            and self.pooling == other.pooling
            and self.hidden_size == other.hidden_size
            and set(other.layers) <= set(self.layers)
        )


@dataclass(frozen=True)
class CacheInfo:
    """What a cache holds.

    Attributes
    ----------
    n_texts : int
        Distinct texts, counted once for each model and setting they were computed with.
    n_vectors : int
        Vectors: one for each text, layer and pooling.
    n_bytes : int
        Memory or disk space they take.
    max_bytes : int
        Limit above which the least recently used rows are dropped.
    """

    n_texts: int
    n_vectors: int
    n_bytes: int
    max_bytes: int


class Store(Protocol):
    """A place for rows, shared by those who compute them.

    Claims keep workers from computing the same text at the same time: a text that was claimed is
    being computed, and will be put or released by whoever claimed it, or that one is dead and the
    claim is void.
    """

    def get(self, shelf: Shelf, texts: Sequence[str], out: NDArray[np.float32]) -> NDArray[np.intp]:
        """Copy rows to `out`, of shape ``(n_texts, n_layers, hidden_size)``.

        Returns the number of tokens of each text, or ``NOT_FOUND`` where `out` was not written.
        """

    def put(
        self,
        shelf: Shelf,
        texts: Sequence[str],
        n_tokens: NDArray[np.intp],
        states: NDArray[np.float32],
        max_bytes: int,
    ) -> None:
        """Keep rows, dropping the least recently used ones beyond `max_bytes`.

        `states` is of shape ``(n_texts, n_layers, hidden_size)``.
        """

    def claim(self, namespace: str, texts: Sequence[str]) -> set[str]:
        """Claim those of `texts` that nobody alive has claimed, and return them."""

    def release(self, namespace: str, texts: Collection[str]) -> None:
        """Give up claims."""

    def pause(self) -> None:
        """Wait a moment for others to put or release something."""


class NoStore:
    """The store of who wants none: nothing is ever found, and every claim is granted."""

    def get(self, shelf: Shelf, texts: Sequence[str], out: NDArray[np.float32]) -> NDArray[np.intp]:
        """Find nothing."""
        return np.full(len(texts), NOT_FOUND, np.intp)

    def put(
        self,
        shelf: Shelf,
        texts: Sequence[str],
        n_tokens: NDArray[np.intp],
        states: NDArray[np.float32],
        max_bytes: int,
    ) -> None:
        """Keep nothing."""

    def claim(self, namespace: str, texts: Sequence[str]) -> set[str]:
        """Grant all."""
        return set(texts)

    def release(self, namespace: str, texts: Collection[str]) -> None:
        """Do nothing."""

    def pause(self) -> None:
        """Do not wait; there is nobody to wait for."""
