"""FeatureCache: a value that says where computed vectors are kept.

The features are those of a pretrained model: the row of a text depends on that text and the model
and on nothing else, in particular on no label and no other text. So rows may be shared by the folds
of a cross-validation, by candidates and by later runs, and nothing leaks.

A :class:`FeatureCache` is a handle. The store it stands for is opened once per process and kept
here, by process and place, so clones, copies, unpickled estimators and threads share it. (An
ordinary object would be copied with every clone, and be empty in each.)

Whatever goes wrong with a store, the caller computes: the store that :func:`open_store` returns
turns its first failure into one :class:`~sklearn_bert.exceptions.CacheWarning` and from then on
finds nothing and keeps nothing.

>>> cache = FeatureCache("memory", poolings=["mean"])
>>> cache == FeatureCache("memory", poolings=("mean",))
True
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ._disk_store import StoreFormatError, remove_store
from ._memory_store import MemoryStore
from ._pooling import Pooling, resolve_poolings
from ._store import NOT_FOUND, CacheInfo, NoStore, Shelf, Store
from ._tiered_store import TieredStore
from .exceptions import CacheWarning, warn_caller

__all__ = ["CacheParameter", "FeatureCache", "open_store", "resolve_cache"]

_GIB = 2**30
_MEMORY_BYTES = 1 * _GIB
_DISK_BYTES = 16 * _GIB

T = TypeVar("T")


@dataclass(frozen=True)
class FeatureCache:
    """Where, and how much of, the vectors of texts are kept once they were computed.

    Parameters
    ----------
    location : str or path-like
        A folder, created for its owner only if it does not exist, shared by all processes of the
        machine that are given it; or ``"memory"``, shared by the threads of one process.
    layers : {"all", "requested"}, default="all"
        Which layers to compute and keep for a text that is missing. ``"all"`` runs the whole model
        once, so that a search over layers finds everything; ``"requested"`` runs only the blocks
        that the features asked for need.
    poolings : sequence of str or Pooling, default=("cls", "mean", "max")
        With ``layers="all"``, poolings to keep besides those asked for.
    max_bytes : int, default=None
        Space to take; beyond it the least recently used texts are dropped. None is 1 GiB in
        memory and 16 GiB on disk. An empty store on disk takes 0.3 MB, and each process that uses
        a store on disk keeps up to 512 MiB of it in memory.

    Notes
    -----
    A vector takes ``4 * hidden_size`` bytes, so with all layers of a 12-layer BERT of hidden size
    768 and three poolings a text takes 120 kB, and with those of a 6-layer one of size 384, 32 kB.

    Examples
    --------
    >>> from sklearn_bert import BertLayerFeaturizer, FeatureCache
    >>> from sklearn_bert.testing import make_bert
    >>> import tempfile
    >>> cache = FeatureCache(tempfile.mkdtemp())
    >>> featurizer = BertLayerFeaturizer(make_bert(), layers=2, cache=cache)
    >>> rows = featurizer.fit_transform(["a good film", "a bad film"])
    >>> cache.info().n_vectors  # of 2 texts, 4 layers and 3 poolings
    24
    >>> cache.clear()
    """

    location: str | os.PathLike[str]
    layers: str = "all"
    poolings: Sequence[str | Pooling] = ("cls", "mean", "max")
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.location, str | os.PathLike) or not os.fspath(self.location):
            raise TypeError(f"location must be a folder or 'memory'; got {self.location!r}.")
        if self.layers not in ("all", "requested"):
            raise ValueError(f"layers must be 'all' or 'requested'; got {self.layers!r}.")
        if isinstance(self.poolings, str | Pooling):
            given: tuple[str | Pooling, ...] = (self.poolings,)
        else:
            given = tuple(self.poolings)
        if any(pooling.reads == "pooler" for pooling in (resolve_poolings(given) if given else ())):
            raise ValueError(
                "poolings cannot hold 'pooler', which not every layer has; it is kept when it is "
                "asked for."
            )
        if self.max_bytes is not None and not isinstance(self.max_bytes, Integral):
            raise TypeError(f"max_bytes must be an integer or None; got {self.max_bytes!r}.")
        if self.max_bytes is not None and self.max_bytes <= 0:
            raise ValueError(f"max_bytes must be positive; got {self.max_bytes!r}.")
        if self.location != "memory":
            # means the same after a change of directory and in a worker, and by every other name
            path = os.path.realpath(os.path.expanduser(os.fspath(self.location)))
            object.__setattr__(self, "location", path)
        object.__setattr__(self, "poolings", given)

    @property
    def bytes_allowed(self) -> int:
        """`max_bytes`, or its default."""
        if self.max_bytes is not None:
            return self.max_bytes
        return _MEMORY_BYTES if self.location == "memory" else _DISK_BYTES

    def info(self) -> CacheInfo:
        """Count what the cache holds.

        Returns
        -------
        CacheInfo
            With ``n_texts``, ``n_vectors``, ``n_bytes`` and ``max_bytes``.
        """
        return _store_of(self).info(self.bytes_allowed)

    def clear(self) -> None:
        """Forget everything; also repairs a damaged store on disk, by removing it.

        Call it while no other process is using the store.

        Raises
        ------
        OSError, sqlite3.OperationalError
            If the store is in use or cannot be written.
        FileExistsError
            If the folder holds a database that is not a feature cache.
        """
        try:
            _store_of(self).clear()
        except sqlite3.OperationalError:
            raise
        except (sqlite3.DatabaseError, StoreFormatError) as error:
            if isinstance(error, StoreFormatError) and not error.is_ours:
                raise FileExistsError(f"{error}; nothing was removed.") from error
            _close(self)
            remove_store(os.fspath(self.location))

    def prune(self, max_bytes: int | None = None) -> None:
        """Drop the least recently used texts beyond a size, and give the space back.

        Parameters
        ----------
        max_bytes : int, default=None
            Size to shrink to. None is the cache's own limit.
        """
        _store_of(self).prune(self.bytes_allowed if max_bytes is None else max_bytes)


CacheParameter = str | os.PathLike[str] | FeatureCache | None

_stores: dict[tuple[int, str], MemoryStore | TieredStore] = {}
_lock = threading.RLock()


def _after_fork_in_child() -> None:
    """Replace the lock, which another thread of the parent may have held."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def resolve_cache(cache: Any) -> FeatureCache | None:
    """Turn the `cache` parameter into a :class:`FeatureCache` or None.

    Raises
    ------
    TypeError
        If it is neither of those, nor a path.
    """
    if cache is None or isinstance(cache, FeatureCache):
        return cache
    if not isinstance(cache, str | os.PathLike) or not os.fspath(cache):
        raise TypeError(
            f"cache must be None, 'memory', a folder, or a FeatureCache; got {cache!r}."
        )
    return FeatureCache(cache)


def open_store(cache: FeatureCache | None) -> Store:
    """Open the store of a cache for one call; failures end in a warning and in computing."""
    if cache is None:
        return NoStore()
    return _ForgivingStore(cache)


def _store_of(cache: FeatureCache) -> MemoryStore | TieredStore:
    """Return the open store of this process; a forked child opens its own."""
    location = os.fspath(cache.location)
    key = (os.getpid(), location)
    with _lock:
        if key not in _stores:
            _stores[key] = MemoryStore() if location == "memory" else TieredStore(location)
        return _stores[key]


def _close(cache: FeatureCache) -> None:
    with _lock:
        store = _stores.pop((os.getpid(), os.fspath(cache.location)), None)
    if isinstance(store, TieredStore):
        store.close()


class _ForgivingStore:
    """A store that, after its first failure, warns once and is as good as none."""

    def __init__(self, cache: FeatureCache) -> None:
        self._cache = cache
        nothing: Store = NoStore()
        self._store = nothing
        self._store = self._attempt(self._open, nothing)

    def _open(self) -> Store:
        return _store_of(self._cache)

    def get(self, shelf: Shelf, texts: Sequence[str], out: NDArray[np.float32]) -> NDArray[np.intp]:
        nothing = np.full(len(texts), NOT_FOUND, np.intp)
        return self._attempt(lambda: self._store.get(shelf, texts, out), nothing)

    def put(
        self,
        shelf: Shelf,
        texts: Sequence[str],
        n_tokens: NDArray[np.intp],
        states: NDArray[np.float32],
        max_bytes: int,
    ) -> None:
        self._attempt(lambda: self._store.put(shelf, texts, n_tokens, states, max_bytes), None)

    def claim(self, namespace: str, texts: Sequence[str]) -> set[str]:
        return self._attempt(lambda: self._store.claim(namespace, texts), set(texts))

    def release(self, namespace: str, texts: Collection[str]) -> None:
        self._attempt(lambda: self._store.release(namespace, texts), None)

    def pause(self) -> None:
        self._store.pause()

    def _attempt(self, action: Callable[[], T], otherwise: T) -> T:
        try:
            return action()
        except Exception as error:  # whatever it is, only the store's own code runs here
            if isinstance(self._store, TieredStore):
                # our claims may be left in the store: let others see that nobody works on them
                self._store.disk.abandon_claims()
            self._store = NoStore()
            warn_caller(
                f"the cache in {self._cache.location} cannot be used ({error}); features are "
                "computed without it.",
                CacheWarning,
            )
            return otherwise
