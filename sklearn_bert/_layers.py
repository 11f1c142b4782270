"""Layer axis: how layers are numbered, and how several layers become one row.

Layer numbers mean one thing everywhere in this library: 0 is the embedding output, ``k`` the
output of block ``k``, and ``n_layers`` (also -1) the model's ``last_hidden_state``. A model with
``n_layers`` blocks therefore has ``n_layers + 1`` layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

__all__ = ["LAYER_COMBINATIONS", "LayersParameter", "resolve_layers"]

LayersParameter = int | Sequence[int] | range | NDArray[np.integer] | str


def resolve_layers(layers: LayersParameter, n_layers: int) -> tuple[int, ...]:
    """Turn the `layers` parameter into layer numbers from 0 to `n_layers`.

    Parameters
    ----------
    layers : int, sequence of int, range, array or "all"
        Negative numbers count from the end, -1 is the last layer.
    n_layers : int
        Number of blocks of the model.

    Returns
    -------
    tuple of int
        In the order given.

    Raises
    ------
    TypeError
        If a number is not an integer (booleans are not).
    ValueError
        If a layer does not exist, appears twice, or there is none.

    Examples
    --------
    >>> resolve_layers([-1, 0], n_layers=12)
    (12, 0)
    >>> resolve_layers(13, n_layers=12)
    Traceback (most recent call last):
    ...
    ValueError: layers=13 asks for layer 13, but this model has layers -13..12 (0 is the embedding
    output, 12 or -1 the last hidden state).
    """
    if isinstance(layers, str):
        if layers != "all":
            raise ValueError(f"layers={layers!r} is not an integer, a sequence of them, or 'all'.")
        return tuple(range(n_layers + 1))
    numbers = [layers] if isinstance(layers, Integral) else _as_list(layers)
    resolved = tuple(_resolve_one(number, layers, n_layers) for number in numbers)
    if not resolved:
        raise ValueError(f"layers={layers!r} is empty; {_valid(n_layers)}.")
    if len(set(resolved)) < len(resolved):
        raise ValueError(
            f"layers={layers!r} names a layer twice (as layer numbers: {list(resolved)})."
        )
    return resolved


def _as_list(layers: object) -> list[object]:
    # a set has no order, so its blocks would have none either
    is_sequence = isinstance(layers, Iterable) and not isinstance(layers, set | frozenset | dict)
    if not is_sequence or getattr(layers, "ndim", 1) != 1:
        raise TypeError(
            f"layers must be an integer, a sequence of integers, a range, a 1-D array or 'all'; "
            f"got {layers!r}."
        )
    return list(layers)  # type: ignore[call-overload]


def _resolve_one(number: object, layers: object, n_layers: int) -> int:
    if isinstance(number, bool | np.bool_) or not isinstance(number, Integral):
        raise TypeError(f"layers={layers!r}: {number!r} is not an integer; {_valid(n_layers)}.")
    if not -(n_layers + 1) <= int(number) <= n_layers:
        raise ValueError(f"layers={layers!r} asks for layer {number}, but {_valid(n_layers)}.")
    return int(number) % (n_layers + 1)


def _valid(n_layers: int) -> str:
    return (
        f"this model has layers {-(n_layers + 1)}..{n_layers} (0 is the embedding output, "
        f"{n_layers} or -1 the last hidden state)"
    )


def _concat(blocks: NDArray[np.float32]) -> NDArray[np.float32]:
    return blocks.reshape(len(blocks), blocks.shape[1] * blocks.shape[2])


def _mean(blocks: NDArray[np.float32]) -> NDArray[np.float32]:
    return blocks.mean(axis=1)


def _sum(blocks: NDArray[np.float32]) -> NDArray[np.float32]:
    return blocks.sum(axis=1)


def _max(blocks: NDArray[np.float32]) -> NDArray[np.float32]:
    return blocks.max(axis=1)


LAYER_COMBINATIONS: dict[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {
    # each takes (n_texts, n_layers, n_columns) and returns (n_texts, n_features)
    "concat": _concat,
    "mean": _mean,
    "sum": _sum,
    "max": _max,
}
