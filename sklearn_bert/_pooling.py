"""Token axis: from the states of the tokens of a text to one vector.

A :class:`Pooling` says what it reads and how it reduces it. It is given texts of one length at a
time (see ``_batching``), so a reduction sees a dense array and needs no mask.
No function here imports torch: they call methods of the tensors they are given.
"""

from __future__ import annotations

import dis
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "MERGES",
    "POOLINGS",
    "Pooling",
    "Reading",
    "pooling_identity",
    "pooling_named",
    "resolve_poolings",
]


def _merge_mean(vectors: NDArray[Any], n_counted: NDArray[Any]) -> NDArray[Any]:
    return vectors.mean(axis=0)


def _merge_token_mean(vectors: NDArray[Any], n_counted: NDArray[Any]) -> NDArray[Any]:
    return np.average(vectors, axis=0, weights=n_counted)


def _merge_token_sum_sqrt(vectors: NDArray[Any], n_counted: NDArray[Any]) -> NDArray[Any]:
    return np.tensordot(np.sqrt(n_counted), vectors, axes=1) / np.sqrt(n_counted.sum())


def _merge_max(vectors: NDArray[Any], n_counted: NDArray[Any]) -> NDArray[Any]:
    return vectors.max(axis=0)


def _merge_min(vectors: NDArray[Any], n_counted: NDArray[Any]) -> NDArray[Any]:
    return vectors.min(axis=0)


# How vectors of shape (n_windows, ...) become one, given how many tokens count in each window.
MERGES: dict[str, Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]] = {
    "mean": _merge_mean,
    "token_mean": _merge_token_mean,
    "token_sum_sqrt": _merge_token_sum_sqrt,
    "max": _merge_max,
    "min": _merge_min,
}


@dataclass(frozen=True)
class Pooling:
    """How the token states of a text become one vector.

    Parameters
    ----------
    name : str
        Name used in the feature names, e.g. ``"mean"`` in ``layer11_mean_007``.
    reduce : callable
        Function of a float32 tensor of shape ``(n_texts, n_tokens, hidden_size)`` that returns
        a tensor of shape ``(n_texts, hidden_size)``. It must treat every text by itself and not
        change its argument. To pickle an estimator that uses it, define it in an importable
        module.
    reads : {"counted", "all", "pooler"}, default="counted"
        What `reduce` is given: the tokens that count (all of them, or without the special tokens
        when ``special_tokens="exclude"``; a text without such tokens gives zeros), always all
        tokens, or the model's trained pooler output of shape ``(n_texts, hidden_size)``.

    merge : {"mean", "token_mean", "token_sum_sqrt", "max", "min"}, default="mean"
        How the vectors v of the windows of a long text become one, with n the number of tokens
        that count in each: ``"mean"`` is their plain mean, ``"token_mean"`` is Σnv/Σn, so that
        the mean of windows is that of their tokens, ``"token_sum_sqrt"`` is Σ(v√n)/√Σn, which
        does the same for sums divided by √n, and ``"max"`` and ``"min"`` are taken for each
        dimension.

    Examples
    --------
    A custom pooling is a function and a name:

    >>> from sklearn_bert import Pooling
    >>> def spread(states):
    ...     return states.amax(dim=1) - states.amin(dim=1)
    >>> Pooling("spread", spread)
    Pooling(name='spread', reads='counted', merge='mean')
    """

    name: str
    reduce: Callable[[Tensor], Tensor]
    reads: Literal["counted", "all", "pooler"] = "counted"
    merge: str = "mean"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not callable(self.reduce):
            raise TypeError(
                "a Pooling is a name and a function, Pooling(name, reduce); got "
                f"{self.name!r} and {self.reduce!r}."
            )
        if self.reads not in ("counted", "all", "pooler"):
            raise ValueError(f"reads must be 'counted', 'all' or 'pooler'; got {self.reads!r}.")
        if self.merge not in MERGES:
            raise ValueError(f"merge must be one of {', '.join(MERGES)}; got {self.merge!r}.")

    def __repr__(self) -> str:
        # without the function's address, so that the same pooling always prints the same
        return f"Pooling(name={self.name!r}, reads={self.reads!r}, merge={self.merge!r})"

    def __reduce__(self) -> tuple[Callable[..., Pooling], tuple[object, ...]]:
        # those of this library by name, so that a pickle does not depend on private functions
        if POOLINGS.get(self.name) == self:
            return pooling_named, (self.name,)
        return Pooling, (self.name, self.reduce, self.reads, self.merge)

    def __getstate__(self) -> dict[str, object]:
        # skops asks for the state instead
        return {"name": self.name} if POOLINGS.get(self.name) == self else dict(vars(self))

    def __setstate__(self, state: dict[str, object]) -> None:
        state = vars(POOLINGS[str(state["name"])]) if len(state) == 1 else state
        vars(self).update({"merge": "mean", **state})


@dataclass(frozen=True)
class Reading:
    """What to read of a text: some layers, under one pooling."""

    pooling: Pooling
    layers: tuple[int, ...]


def _mean(states: Tensor) -> Tensor:
    return states.mean(dim=1)


def _max(states: Tensor) -> Tensor:
    return states.amax(dim=1)


def _min(states: Tensor) -> Tensor:
    return states.amin(dim=1)


def _mean_sqrt_len(states: Tensor) -> Tensor:
    return states.sum(dim=1) / sqrt(states.shape[1])


def _first(states: Tensor) -> Tensor:
    return states[:, 0]


def _last(states: Tensor) -> Tensor:
    return states[:, -1]


def _pooler(output: Tensor) -> Tensor:
    return output


POOLINGS: dict[str, Pooling] = {
    pooling.name: pooling
    for pooling in (
        Pooling("cls", _first, reads="all"),
        Pooling("mean", _mean, merge="token_mean"),
        Pooling("max", _max, merge="max"),
        Pooling("min", _min, merge="min"),
        Pooling("mean_sqrt_len", _mean_sqrt_len, merge="token_sum_sqrt"),
        Pooling("last", _last, reads="all"),
        Pooling("pooler", _pooler, reads="pooler"),
    )
}


def pooling_named(name: str) -> Pooling:
    """Return a pooling of this library."""
    return POOLINGS[name]


def resolve_poolings(pooling: str | Pooling | Sequence[str | Pooling]) -> tuple[Pooling, ...]:
    """Turn the `pooling` parameter into a tuple of :class:`Pooling`.

    Parameters
    ----------
    pooling : str, Pooling, or sequence of them
        Names are looked up in ``POOLINGS``.

    Returns
    -------
    tuple of Pooling
        In the order given.

    Raises
    ------
    TypeError
        If an entry is neither a name nor a :class:`Pooling`.
    ValueError
        For an unknown name, no entry at all, or the same name twice.
    """
    entries = [pooling] if isinstance(pooling, str | Pooling) else pooling
    if isinstance(entries, set | frozenset | dict) or not hasattr(entries, "__iter__"):
        raise TypeError(
            f"pooling must be a name, a Pooling, or a list or tuple of them; got {pooling!r}."
        )
    resolved = tuple(_resolve_one(entry) for entry in entries)
    if not resolved:
        raise ValueError(f"pooling is empty; choose from {', '.join(POOLINGS)}.")
    names = [entry.name for entry in resolved]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"pooling has {', '.join(repeated)} more than once: {pooling!r}.")
    return resolved


def _resolve_one(entry: object) -> Pooling:
    if isinstance(entry, Pooling):
        return entry
    if not isinstance(entry, str):
        raise TypeError(f"pooling must hold names or Pooling objects; got {entry!r}.")
    if entry not in POOLINGS:
        raise ValueError(f"unknown pooling {entry!r}; choose from {', '.join(POOLINGS)}.")
    return POOLINGS[str(entry)]


def pooling_identity(pooling: Pooling) -> str | None:
    """Return a string that changes when the pooling's definition does.

    Poolings of this library are known by name. Of another one the function's code is digested, with
    its defaults, what it encloses, and the functions and constants it refers to by name.

    Returns
    -------
    str or None
        None if the function refers to something whose changes could not be seen.
    """
    if POOLINGS.get(pooling.name) == pooling:
        return pooling.name
    try:
        definition = repr(_definition(pooling.reduce, set()))
    except _CannotBeSeenError:
        return None
    parts = f"{pooling.reads} {pooling.merge} {definition}"
    digest = hashlib.sha256(parts.encode()).hexdigest()
    return f"{pooling.name}:{digest}"


# What is in these changes with their versions only, which are part of a cache's keys.
_KNOWN_MODULES = ("math", "numpy", "torch")


class _CannotBeSeenError(Exception):
    """A definition depends on an object that has no visible definition itself."""


def _definition(thing: object, seen: set[int]) -> object:
    """Return a nested tuple of plain values that says how `thing` is defined."""
    if thing is None or isinstance(thing, bool | int | float | complex | str | bytes):
        return thing
    if isinstance(thing, tuple):
        return tuple(_definition(part, seen) for part in thing)
    if isinstance(thing, ModuleType) and thing.__name__.split(".")[0] in _KNOWN_MODULES:
        return ("module", thing.__name__)
    if isinstance(thing, CodeType):
        constants = tuple(_definition(part, seen) for part in thing.co_consts)
        return (thing.co_code, thing.co_names, thing.co_varnames, constants)
    if not isinstance(thing, FunctionType):
        raise _CannotBeSeenError
    if id(thing) in seen:  # recursion
        return ("function", thing.__qualname__)
    seen.add(id(thing))
    if any(_imports(code) for code in _all_code(thing.__code__)):
        raise _CannotBeSeenError
    try:
        enclosed = [cell.cell_contents for cell in thing.__closure__ or ()]
    except ValueError as error:  # a cell that is not filled yet
        raise _CannotBeSeenError from error
    cells = tuple(_definition(value, seen) for value in enclosed)
    names = {name for code in _all_code(thing.__code__) for name in code.co_names}
    used = sorted(names & thing.__globals__.keys())
    return (
        _definition(thing.__code__, seen),
        _definition(thing.__defaults__, seen),
        tuple((n, _definition(v, seen)) for n, v in sorted((thing.__kwdefaults__ or {}).items())),
        cells,
        tuple((name, _definition(value, seen)) for name, value in sorted(vars(thing).items())),
        tuple((name, _definition(thing.__globals__[name], seen)) for name in used),
    )


def _imports(code: CodeType) -> bool:
    return any(instruction.opname == "IMPORT_NAME" for instruction in dis.get_instructions(code))


def _all_code(code: CodeType) -> list[CodeType]:
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    return [code, *(nested for part in inner for nested in _all_code(part))]
