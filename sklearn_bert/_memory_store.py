"""Computed states in the memory of this process.

A search over layers and poolings asks for the same few thousand texts hundreds of times, so finding
one must cost next to nothing: a shelf keeps, for each layer, one array with a row per text, and a
table from text to row number. Python remembers the hash of a string, so looking a text up takes
some tens of nanoseconds, and the rows are gathered by NumPy at the speed of memory.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from ._store import NOT_FOUND, CacheInfo, Shelf

__all__ = ["MemoryStore"]

# What Python needs for a row beside its states: the text, its place in the table, its counters.
_ROW_OVERHEAD = 300
_FIRST_ROWS = 256
# When the limit is reached, so much of it is emptied, so that it is not reached with every row.
_EMPTIED_SHARE = 0.1


class MemoryStore:
    """Rows in arrays, shared by the threads of a process."""

    def __init__(self) -> None:
        self._shelves: dict[Shelf, _Rows] = {}
        self._claims: set[tuple[str, str]] = set()
        self._clock = 0
        self._changed = threading.Condition()

    def get(self, shelf: Shelf, texts: Sequence[str], out: NDArray[np.float32]) -> NDArray[np.intp]:
        """Copy rows to `out`; return numbers of tokens, ``NOT_FOUND`` where there is no row."""
        with self._changed:
            self._clock += 1
            n_tokens = np.full(len(texts), NOT_FOUND, np.intp)
            for stored, rows in self._shelves.items():
                if stored.holds(shelf):
                    layers = [stored.layers.index(layer) for layer in shelf.layers]
                    rows.read(texts, layers, out, n_tokens, self._clock)
                    if (n_tokens != NOT_FOUND).all():
                        break
            return n_tokens

    def put(
        self,
        shelf: Shelf,
        texts: Sequence[str],
        n_tokens: NDArray[np.intp],
        states: NDArray[np.float32],
        max_bytes: int,
    ) -> None:
        """Keep copies of rows, dropping the least recently used ones beyond `max_bytes`."""
        with self._changed:
            self._clock += 1
            if shelf not in self._shelves:
                self._shelves[shelf] = _Rows(len(shelf.layers), shelf.hidden_size)
            self._shelves[shelf].write(texts, n_tokens, states, self._clock)
            self._shrink(max_bytes)
            self._changed.notify_all()

    def claim(self, namespace: str, texts: Sequence[str]) -> set[str]:
        """Claim those of `texts` that no other thread has claimed, and return them."""
        with self._changed:
            mine = {text for text in texts if (namespace, text) not in self._claims}
            self._claims.update((namespace, text) for text in mine)
            return mine

    def release(self, namespace: str, texts: Collection[str]) -> None:
        """Give up claims."""
        with self._changed:
            self._claims.difference_update((namespace, text) for text in texts)
            self._changed.notify_all()

    def pause(self) -> None:
        """Wait until another thread puts or releases something, half a second at most."""
        with self._changed:
            self._changed.wait(0.5)

    def info(self, max_bytes: int) -> CacheInfo:
        """Count what is kept."""
        with self._changed:
            texts = {
                (s.namespace, text) for s, rows in self._shelves.items() for text in rows.row_of
            }
            n_vectors = sum(len(s.layers) * len(rows.row_of) for s, rows in self._shelves.items())
            return CacheInfo(len(texts), n_vectors, self._n_bytes(), max_bytes)

    def clear(self) -> None:
        """Forget all rows."""
        with self._changed:
            self._shelves.clear()

    def prune(self, max_bytes: int) -> None:
        """Drop the least recently used rows beyond `max_bytes`."""
        with self._changed:
            self._shrink(max_bytes)

    def _n_bytes(self) -> int:
        return sum(rows.n_bytes for rows in self._shelves.values())

    def _shrink(self, max_bytes: int) -> None:
        """Drop the rows that were not used for the longest time, on all shelves."""
        if self._n_bytes() <= max_bytes:
            return
        shelves = list(self._shelves.values())
        used = np.concatenate([rows.used[list(rows.row_of.values())] for rows in shelves])
        sizes = np.repeat(
            [rows.row_bytes for rows in shelves], [len(rows.row_of) for rows in shelves]
        )
        oldest_first = np.argsort(used, kind="stable")
        kept_bytes = sizes.sum() - np.cumsum(sizes[oldest_first])
        # arrays may be twice as long as what is in them
        goal = (1 - _EMPTIED_SHARE) * max_bytes / 2
        n_dropped = int(np.argmax(kept_bytes <= goal)) + 1 if len(sizes) else 0
        dropped = np.zeros(len(used), bool)
        dropped[oldest_first[:n_dropped]] = True
        start = 0
        for shelf, rows in list(self._shelves.items()):
            n_rows = len(rows.row_of)
            rows.drop(dropped[start : start + n_rows])
            start += n_rows
            if not rows.row_of:
                del self._shelves[shelf]


class _Rows:
    """The rows of one shelf."""

    def __init__(self, n_layers: int, hidden_size: int) -> None:
        self.row_of: dict[str, int] = {}
        self.row_bytes = n_layers * hidden_size * 4 + _ROW_OVERHEAD
        self.states = [np.empty((0, hidden_size), np.float32) for _ in range(n_layers)]
        self.n_tokens = np.empty(0, np.intp)
        self.used = np.empty(0, np.int64)

    @property
    def n_bytes(self) -> int:
        """Memory taken, room for rows to come included."""
        return len(self.used) * self.row_bytes

    def read(
        self,
        texts: Sequence[str],
        layers: Sequence[int],
        out: NDArray[np.float32],
        n_tokens: NDArray[np.intp],
        clock: int,
    ) -> None:
        """Copy the rows that are here and were not found yet."""
        row_of = self.row_of.get
        rows = np.fromiter((row_of(text, -1) for text in texts), np.intp, len(texts))
        wanted = (rows >= 0) & (n_tokens == NOT_FOUND)
        if wanted.all():
            for position, layer in enumerate(layers):
                np.take(self.states[layer], rows, axis=0, out=out[:, position], mode="clip")
        else:
            rows = rows[wanted]
            for position, layer in enumerate(layers):
                out[wanted, position] = self.states[layer][rows]
        n_tokens[wanted] = self.n_tokens[rows]
        self.used[rows] = clock

    def write(
        self,
        texts: Sequence[str],
        n_tokens: NDArray[np.intp],
        states: NDArray[np.float32],
        clock: int,
    ) -> None:
        """Add rows, or replace them."""
        rows = np.array([self.row_of.setdefault(text, len(self.row_of)) for text in texts], np.intp)
        self._resize(len(self.row_of))
        for layer, array in enumerate(self.states):
            array[rows] = states[:, layer]
        self.n_tokens[rows] = n_tokens
        self.used[rows] = clock

    def drop(self, dropped: NDArray[np.bool_]) -> None:
        """Drop rows, given in the order of ``row_of``, and move the others together."""
        if not dropped.any():
            return
        kept = [row for row, gone in zip(self.row_of, dropped, strict=True) if not gone]
        old = np.array([self.row_of[text] for text in kept], np.intp)
        self.row_of = {text: row for row, text in enumerate(kept)}
        self.states = [array[old] for array in self.states]
        self.n_tokens, self.used = self.n_tokens[old], self.used[old]

    def _resize(self, n_rows: int) -> None:
        if n_rows <= len(self.used):
            return
        room = max(_FIRST_ROWS, n_rows, 2 * len(self.used))
        self.states = [_longer(array, room) for array in self.states]
        self.n_tokens, self.used = _longer(self.n_tokens, room), _longer(self.used, room)


def _longer(array: NDArray, n_rows: int) -> NDArray:
    longer = np.empty((n_rows, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
