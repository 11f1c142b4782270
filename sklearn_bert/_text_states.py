"""Pooled states of texts: found in the cache, or computed, each once on the whole machine.

Several workers may miss the same texts at the same time; with ``n_jobs=2`` they do, for all start
on the same data. So a worker claims some of the missing texts, computes those and puts them in the
store, goes on to the next, and takes from the store what others had claimed. Whoever dies loses
the claims, and whoever fails gives them up, so nobody waits for what will not come.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ._batching import chunks, plan_batches
from ._cache import FeatureCache, open_store
from ._pooling import MERGES, Pooling, Reading, pooling_identity, resolve_poolings
from ._progress import Progress, watched_by
from ._store import NOT_FOUND, NoStore, Shelf, Store
from ._tokenization import Encodings, Text, TextLayout, tokenize
from ._windows import WindowMerger
from .exceptions import CacheWarning, warn_caller

if TYPE_CHECKING:
    from ._forward import Runner
    from ._models import ModelReference

__all__ = [
    "Execution",
    "StateSpec",
    "batch_budget",
    "count_tokens",
    "pooled_states",
]

# Raise it when the same inputs give other numbers than before: old rows are then not found.
_FORMAT = 4
# Texts tokenized at a time: enough to fill batches of every length, few enough to hold.
_CHUNK_TEXTS = 8192
_CHUNK_CHARACTERS = 2**24
# Tokens that a worker claims at a time, on a CPU and elsewhere: seconds of work, which is worth a
# transaction, and nobody waits long for the last piece. On a CPU that is so for blocks of this many
# weights in all; of a larger model fewer tokens are claimed, but at least a few batches.
_CLAIMED_TOKENS, _CLAIMED_TOKENS_ELSEWHERE = 2**15, 2**18
_CLAIMED_WEIGHTS, _FEWEST_CLAIMED = 6 * 12 * 384**2, 2**13
# And at most so much to keep: what is claimed is held until it is put into the store.
_CLAIMED_BYTES = 2**26
# A worker that is alive but makes no progress for so long is no longer waited for.
_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Execution:
    """How states are computed; none of it changes them.

    Attributes
    ----------
    device : str or torch.device
        Where the model runs.
    batch_tokens : int or "auto"
        Most tokens in a batch.
    cache : FeatureCache or None
        Where vectors are kept.
    verbose : bool
        Whether to show a progress bar.
    observers : tuple of Progress
        Who else is told how far a call has come.
    """

    device: Any = "auto"
    batch_tokens: int | str = "auto"
    cache: FeatureCache | None = None
    verbose: bool | int = False
    observers: tuple[Progress, ...] = ()


@dataclass(frozen=True)
class StateSpec:
    """Which states of a text are wanted, and all that decides their values besides the model.

    Attributes
    ----------
    layers : tuple of int
        Layer numbers.
    poolings : tuple of Pooling
        How tokens become one vector.
    layout : TextLayout
        How a text becomes token ids.
    dtype : {"float32", "bfloat16", "float16"}
        Precision of the model.
    """

    layers: tuple[int, ...]
    poolings: tuple[Pooling, ...]
    layout: TextLayout
    dtype: str


def pooled_states(
    texts: Sequence[Text], wanted: StateSpec, reference: ModelReference, execution: Execution
) -> tuple[NDArray[np.float32], NDArray[np.intp]]:
    """Find or compute the pooled states of distinct texts.

    Parameters
    ----------
    texts : sequence of str, or of (str, str)
        All different.
    wanted : StateSpec
        What to return of each.
    reference : ModelReference
        The model.
    execution : Execution
        How to compute what is missing.

    Returns
    -------
    vectors : ndarray of shape (n_texts, n_layers, n_poolings, hidden_size)
        float32.
    n_tokens : ndarray of shape (n_texts,)
        Tokens of each text before it was cut.
    """
    with watched_by(len(texts), execution.verbose, *execution.observers) as progress:
        job = _Job(texts, wanted, reference, execution, progress)
        missing = job.fetch(np.arange(len(texts)))
        for chunk in _text_chunks([texts[row] for row in missing]):
            job.compute(missing[chunk])
    if not job.is_filled.all():  # never hand out memory that nobody wrote to
        raise RuntimeError("states of some texts were neither found nor computed; report this.")
    return job.vectors, job.n_tokens


def count_tokens(
    texts: Sequence[Text], layout: TextLayout, reference: ModelReference
) -> NDArray[np.intp]:
    """Count the tokens of texts, special tokens included, before they are cut."""
    from ._models import get_tokenizer

    tokenizer = get_tokenizer(reference)
    counts = [tokenize(tokenizer, texts[c], layout).n_tokens for c in _text_chunks(texts)]
    return np.array([n for chunk in counts for n in chunk], np.intp)


class _Job:
    """The states of one call under way: what is there, and where the rest comes from."""

    def __init__(
        self,
        texts: Sequence[Text],
        wanted: StateSpec,
        reference: ModelReference,
        execution: Execution,
        progress: Progress,
    ) -> None:
        from ._devices import resolve_device  # torch only from here on

        self.texts = texts
        self.keys = [text if isinstance(text, str) else _pair_key(*text) for text in texts]
        self.wanted = wanted
        self.reference = reference
        self.device = resolve_device(execution.device)
        self.batch_tokens = execution.batch_tokens
        self.progress = progress
        shape = (len(texts), len(wanted.layers), len(wanted.poolings), reference.hidden_size)
        # the view of an array that is two-dimensional, as features are
        self.vectors = np.empty((len(texts), math.prod(shape[1:])), np.float32).reshape(shape)
        self.is_filled = np.zeros(len(texts), bool)
        self.n_tokens = np.zeros(len(texts), np.intp)
        cache = _usable(execution.cache, wanted.poolings)
        self.max_bytes = cache.bytes_allowed if cache is not None else 0
        self.store: Store = open_store(cache)
        self.readings = _readings(wanted, cache, reference.n_layers)
        self.namespace = ""
        if cache is not None:
            self.namespace = _namespace(wanted, reference, self.device)

    def fetch(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Take from the store what it has of `rows`, and return the others."""
        if isinstance(self.store, NoStore) or not len(rows):
            return rows
        everything = np.array_equal(rows, np.arange(len(self.texts)))
        keys = self.keys if everything else [self.keys[row] for row in rows]
        vectors = self.vectors if everything else np.empty_like(self.vectors[: len(rows)])
        found = np.ones(len(rows), bool)
        for position, pooling in enumerate(self.wanted.poolings):
            shelf = self._shelf(Reading(pooling, self.wanted.layers))
            n_tokens = self.store.get(shelf, keys, vectors[:, :, position])
            found &= n_tokens != NOT_FOUND
        self.n_tokens[rows[found]] = n_tokens[found]
        self.is_filled[rows[found]] = True
        if not everything:
            self.vectors[rows[found]] = vectors[found]
        self.progress.update(int(found.sum()), 0)
        return rows[~found]

    def compute(self, rows: NDArray[np.intp]) -> None:
        """Have the states of `rows` computed, by this worker or by others."""
        from ._models import get_tokenizer

        texts = [self.texts[row] for row in rows]
        encodings = tokenize(get_tokenizer(self.reference), texts, self.wanted.layout)
        self.n_tokens[rows] = encodings.n_tokens
        pending = self._claims(encodings.text_sizes)
        last_progress = time.monotonic()
        while pending:
            n_before = sum(map(len, pending))
            patient = time.monotonic() - last_progress < _PATIENCE_SECONDS
            left = [self._advance(rows, encodings, positions, patient) for positions in pending]
            pending = [positions for positions in left if len(positions)]
            if sum(map(len, pending)) < n_before:
                last_progress = time.monotonic()
            else:
                self.store.pause()

    def _claims(self, lengths: NDArray[np.intp]) -> list[NDArray[np.intp]]:
        """Cut texts into pieces to claim, put and fetch at a time, the longest texts first."""
        if isinstance(self.store, NoStore):  # each piece would end in a batch that is not full
            return [np.arange(len(lengths))]
        tokens = _claimed_tokens(self.reference, self.device)
        if self.batch_tokens != "auto":
            tokens = max(tokens, int(self.batch_tokens))  # no batch is cut
        n_states = sum(len(reading.layers) for reading in self.readings)
        bytes_per_text = 4 * n_states * self.reference.hidden_size
        # short texts count as long ones, lest thousands of them with all their layers be one piece
        shortest = math.ceil(tokens * bytes_per_text / _CLAIMED_BYTES)
        return list(plan_batches(np.maximum(lengths, shortest), tokens, math.inf))

    def _advance(
        self,
        rows: NDArray[np.intp],
        encodings: Encodings,
        positions: NDArray[np.intp],
        patient: bool,
    ) -> NDArray[np.intp]:
        """Compute what can be claimed of some texts, fetch the others; return what is left.

        `positions` are those of the texts in `encodings`, whose rows are ``rows[positions]``.
        """
        if isinstance(self.store, NoStore):
            self._run(rows, encodings, positions)
            return positions[:0]
        keys = [self.keys[row] for row in rows[positions]]
        claimed: set[str] = set()
        try:
            claimed = self.store.claim(self.namespace, keys)
            mine = np.array([key in claimed or not patient for key in keys])
            # between our look and our claim, another may have put them there
            missing = self.fetch(rows[positions[mine]])
            self._run(rows, encodings, positions[np.isin(rows[positions], missing)])
        finally:
            if claimed:
                self.store.release(self.namespace, claimed)
        left = self.fetch(rows[positions[~mine]])
        return positions[np.isin(rows[positions], left)]

    def _run(
        self, rows: NDArray[np.intp], encodings: Encodings, positions: NDArray[np.intp]
    ) -> None:
        """Run the model on some texts, and put what it gives into the store."""
        from ._models import get_encoder

        if not len(positions):
            return
        encoder = get_encoder(self.reference, self.device, self.wanted.dtype)
        done: list[NDArray[np.intp]] = []
        kept: list[list[NDArray[np.float32]]] = [[] for _ in self.readings]
        windows = encodings.windows_of(positions)
        merges = [MERGES[reading.pooling.merge] for reading in self.readings]
        merger = WindowMerger(encodings.text_of, encodings.n_counted, merges)
        lengths = [len(encodings.ids[window]) for window in windows]
        budget = batch_budget(self.batch_tokens, encoder.runner)
        for batch in plan_batches(lengths, budget, encoder.runner.spread):
            groups = encodings.groups(windows[batch])
            texts, blocks = merger.add(windows[batch], encoder.pooled_states(groups, self.readings))
            done.append(rows[texts])
            self._take(done[-1], blocks)
            if self.namespace:
                for parts, block in zip(kept, blocks, strict=True):
                    parts.append(block)
            self.progress.update(len(texts), sum(group.ids.size for group in groups))
        if self.namespace:
            self._put(np.concatenate(done), kept)

    def _take(self, rows: NDArray[np.intp], blocks: Sequence[NDArray[np.float32]]) -> None:
        """Copy the blocks of a batch to where they are wanted."""
        self.is_filled[rows] = True
        for reading, block in zip(self.readings, blocks, strict=True):
            if reading.pooling in self.wanted.poolings:
                layers = [reading.layers.index(layer) for layer in self.wanted.layers]
                position = self.wanted.poolings.index(reading.pooling)
                self.vectors[rows, :, position] = block[:, layers]

    def _put(self, rows: NDArray[np.intp], kept: Sequence[Sequence[NDArray[np.float32]]]) -> None:
        """Put what was computed into the store."""
        keys = [self.keys[row] for row in rows]
        for reading, parts in zip(self.readings, kept, strict=True):
            self.store.put(
                self._shelf(reading),
                keys,
                self.n_tokens[rows],
                np.concatenate(parts),
                self.max_bytes,
            )

    def _shelf(self, reading: Reading) -> Shelf:
        identity = pooling_identity(reading.pooling)
        assert identity is not None  # otherwise there is no store
        return Shelf(self.namespace, identity, reading.layers, self.reference.hidden_size)


def _claimed_tokens(reference: ModelReference, device: Any) -> int:
    """Return how many tokens of a model a worker claims at a time."""
    if device.type != "cpu":
        return _CLAIMED_TOKENS_ELSEWHERE
    weights = 12 * reference.n_layers * reference.hidden_size**2
    tokens = max(_FEWEST_CLAIMED, _CLAIMED_TOKENS * _CLAIMED_WEIGHTS // weights)
    return min(_CLAIMED_TOKENS, tokens)


def _usable(cache: FeatureCache | None, poolings: Sequence[Pooling]) -> FeatureCache | None:
    """Return `cache`, or None with a warning if a pooling cannot be told from another one."""
    unknown = [pooling.name for pooling in poolings if pooling_identity(pooling) is None]
    if cache is not None and unknown:
        warn_caller(
            f"pooling {unknown[0]!r} uses things whose changes would go unnoticed, so its vectors "
            "are not cached. Let its function use its argument, numbers, strings, torch, numpy, "
            "math and other such functions only.",
            CacheWarning,
        )
        return None
    return cache


def _readings(wanted: StateSpec, cache: FeatureCache | None, n_layers: int) -> tuple[Reading, ...]:
    """Which layers to read under which poolings when a text is computed."""
    if cache is None or cache.layers == "requested":
        return tuple(Reading(pooling, wanted.layers) for pooling in wanted.poolings)
    also = resolve_poolings(cache.poolings) if cache.poolings else ()
    poolings = dict.fromkeys(
        [*wanted.poolings, *(pooling for pooling in also if pooling_identity(pooling))]
    )
    everything = tuple(range(n_layers + 1))
    return tuple(
        Reading(pooling, (n_layers,) if pooling.reads == "pooler" else everything)
        for pooling in poolings
    )


def _namespace(wanted: StateSpec, reference: ModelReference, device: Any) -> str:
    """Digest of all that decides the bits of a state, besides text, layer and pooling."""
    from ._devices import computing_environment

    parts = {
        "format": _FORMAT,
        "model": reference.fingerprint,
        "layout": asdict(wanted.layout),
        "dtype": wanted.dtype,
        "environment": computing_environment(device),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _text_chunks(texts: Sequence[Text]) -> list[slice]:
    sizes = [len(t) if isinstance(t, str) else sum(map(len, t)) for t in texts]
    return list(chunks(sizes, _CHUNK_TEXTS, _CHUNK_CHARACTERS))


def _pair_key(first: str, second: str) -> str:
    """Return a string that only this pair has."""
    return f"{len(first)} {first}{second}"


def batch_budget(batch_tokens: int | str, runner: Runner) -> int:
    """Return the most tokens in a batch: what the user says, or what suits the runner."""
    return runner.batch_tokens if batch_tokens == "auto" else int(batch_tokens)
