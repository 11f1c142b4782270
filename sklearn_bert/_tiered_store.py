"""A disk store with the memory of this process before it.

Rows are read from disk once per process, with all their layers, and then found in memory; what is
computed is put in both. Claims are the disk's, for they are shared with other processes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from ._disk_store import DiskStore
from ._memory_store import MemoryStore
from ._store import NOT_FOUND, CacheInfo, Shelf

__all__ = ["MEMORY_BYTES", "TieredStore"]

# Memory that rows read from disk, or about to be written to it, may take in a process.
MEMORY_BYTES = 2**29
# Rows are read in pieces of this size, for they are in memory twice until they are handed out.
_READ_BYTES = 2**26


class TieredStore:
    """Memory before disk.

    Parameters
    ----------
    folder : str
        Folder of the disk store.
    """

    def __init__(self, folder: str) -> None:
        self.memory = MemoryStore()
        self.disk = DiskStore(folder)

    def get(self, shelf: Shelf, texts: Sequence[str], out: NDArray[np.float32]) -> NDArray[np.intp]:
        """Copy rows to `out`; return numbers of tokens, ``NOT_FOUND`` where there is no row."""
        n_tokens = self.memory.get(shelf, texts, out)
        for stored in self.disk.shelves_holding(shelf):
            missing = np.flatnonzero(n_tokens == NOT_FOUND)
            if not len(missing):
                break
            # More than memory is for would push out what it is for: then only what is asked for.
            row_bytes = 4 * len(stored.layers) * stored.hidden_size
            layers = stored.layers if len(missing) * row_bytes < MEMORY_BYTES / 4 else shelf.layers
            at_once = max(1, _READ_BYTES // (4 * len(layers) * stored.hidden_size))
            for start in range(0, len(missing), at_once):
                some = missing[start : start + at_once]
                names = [texts[position] for position in some.tolist()]
                found, counts, states = self.disk.read(stored, layers, names)
                out[some[found]] = states[:, [layers.index(layer) for layer in shelf.layers]]
                n_tokens[some[found]] = counts
                if layers is stored.layers and len(found):
                    kept = [names[position] for position in found]
                    self.memory.put(stored, kept, counts, states, MEMORY_BYTES)
        return n_tokens

    def put(
        self,
        shelf: Shelf,
        texts: Sequence[str],
        n_tokens: NDArray[np.intp],
        states: NDArray[np.float32],
        max_bytes: int,
    ) -> None:
        """Keep rows on disk, and in memory for a while."""
        self.disk.put(shelf, texts, n_tokens, states, max_bytes)
        self.memory.put(shelf, texts, n_tokens, states, min(MEMORY_BYTES, max_bytes))

    def claim(self, namespace: str, texts: Sequence[str]) -> set[str]:
        """Claim those of `texts` that nobody alive has claimed, and return them."""
        return self.disk.claim(namespace, texts)

    def release(self, namespace: str, texts: Collection[str]) -> None:
        """Give up claims."""
        self.disk.release(namespace, texts)

    def pause(self) -> None:
        """Wait a moment for others to put or release something."""
        self.disk.pause()

    def info(self, max_bytes: int) -> CacheInfo:
        """Count what is kept on disk."""
        return self.disk.info(max_bytes)

    def clear(self) -> None:
        """Forget all rows."""
        self.memory.clear()
        self.disk.clear()

    def prune(self, max_bytes: int) -> None:
        """Drop the least recently used rows beyond `max_bytes`."""
        self.memory.prune(min(MEMORY_BYTES, max_bytes))
        self.disk.prune(max_bytes)

    def close(self) -> None:
        """Close the disk store."""
        self.disk.close()
