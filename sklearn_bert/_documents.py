"""What users pass as X -> a list of str, one per row.

Every container that holds one text per row is read the same way: by position, never by index
label. What is not one text per row is refused with a sentence that says what was found where.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from typing import Any, TypeVar

import narwhals as nw
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import issparse

__all__ = ["check_documents", "check_pairs", "check_words", "unique_documents"]

_ROWS_SHOWN = 5
_Hashable = TypeVar("_Hashable", bound=Hashable)


def check_documents(X: Any, missing: str = "error") -> list[str]:
    """Return the texts of `X` as a list of str.

    Parameters
    ----------
    X : iterable of str of length n_samples
        List, tuple, generator, NumPy array of shape ``(n_samples,)`` or ``(n_samples, 1)``,
        pandas, polars or pyarrow column, or a frame with one column. An iterator is consumed.
    missing : {"error", "empty"}, default="error"
        Whether a missing value (None, nan, NaT, pandas.NA) is an error or the empty text.

    Returns
    -------
    list of str of length n_samples
        Plain `str` objects in the order of the rows. Unpaired surrogates, which no encoder can
        read, are replaced by U+FFFD, the replacement character; paired ones are joined.

    Raises
    ------
    TypeError
        If `X` or one of its rows is of a type that is not text.
    ValueError
        If `X` is a bare string, has several columns, or has missing values that it must not have.

    Examples
    --------
    >>> check_documents(np.array([["good film"], ["bad"]]))
    ['good film', 'bad']
    >>> check_documents(["good film", None])
    Traceback (most recent call last):
    ...
    ValueError: X has 1 missing value, in row 1. Drop the row or use missing='empty'.
    >>> check_documents(["good film", None], missing="empty")
    ['good film', '']
    """
    rows = _as_rows(X)
    if all(type(row) is str for row in rows):
        return [_without_surrogates(row) for row in rows]
    rows = _without_missing(rows, missing)
    return [_without_surrogates(_as_str(row, position)) for position, row in enumerate(rows)]


def check_pairs(X: Any, missing: str = "error") -> list[tuple[str, str]]:
    """Return the pairs of texts of `X`.

    Parameters
    ----------
    X : iterable of (str, str) of length n_samples
        List or iterator of tuples or lists of two, NumPy array of shape ``(n_samples, 2)``, or a
        pandas, polars or pyarrow frame with two columns.
    missing : {"error", "empty"}, default="error"
        Whether a missing value is an error or the empty text.

    Returns
    -------
    list of (str, str) of length n_samples
        In the order of the rows.

    Raises
    ------
    TypeError, ValueError
        If `X` is not two texts per row.

    Examples
    --------
    >>> check_pairs(np.array([["a good film", "a fine movie"]]))
    [('a good film', 'a fine movie')]
    """
    first, second = _as_two_columns(X)
    if missing == "error":
        pairs = zip(first, second, strict=True)
        _refuse_missing([_is_missing(one) or _is_missing(other) for one, other in pairs])
    columns = []
    for column in (first, second):
        texts = ["" if _is_missing(text) else text for text in column]
        columns.append([_without_surrogates(_as_str(t, row)) for row, t in enumerate(texts)])
    return list(zip(*columns, strict=True))


def check_words(X: Any, missing: str = "error") -> list[str] | list[tuple[str, ...]]:
    """Return the texts of `X`, or the words of each text.

    Parameters
    ----------
    X : iterable of str, or of lists of str, of length n_samples
        Either all rows are texts, or all are lists or tuples of words.
    missing : {"error", "empty"}, default="error"
        Whether a missing text is an error or the empty text. A missing word is an error always.

    Returns
    -------
    list of str, or of tuple of str
        In the order of the rows.

    Examples
    --------
    >>> check_words([["a", "good", "film"], []])
    [('a', 'good', 'film'), ()]
    """
    rows = _as_rows(X)
    if not any(isinstance(row, list | tuple | np.ndarray) for row in rows):
        return check_documents(rows, missing)
    texts: list[tuple[str, ...]] = []
    gaps = [not isinstance(row, list | tuple | np.ndarray) and _is_missing(row) for row in rows]
    if missing == "error":
        _refuse_missing(gaps)
    for position, (row, gap) in enumerate(zip(rows, gaps, strict=True)):
        if gap:
            texts.append(())
            continue
        if not isinstance(row, list | tuple | np.ndarray):
            raise TypeError(
                f"row {position} of X is of type {type(row).__name__} among lists of words; pass "
                "either texts or lists of words."
            )
        for place, word in enumerate(row):
            if not isinstance(word, str):
                raise TypeError(
                    f"word {place} of row {position} of X is of type {type(word).__name__}, not "
                    "str; leave it out or put '' in its place."
                )
        texts.append(tuple(_without_surrogates(str.__str__(word)) for word in row))
    return texts


def unique_documents(texts: Sequence[_Hashable]) -> tuple[list[_Hashable], NDArray[np.intp]]:
    """Return the distinct texts in order of appearance, and where each row finds its own.

    Examples
    --------
    >>> unique, inverse = unique_documents(["b", "a", "b"])
    >>> unique, inverse.tolist()
    (['b', 'a'], [0, 1, 0])
    """
    positions: dict[_Hashable, int] = {}
    inverse = np.fromiter(
        (positions.setdefault(text, len(positions)) for text in texts), np.intp, len(texts)
    )
    return list(positions), inverse


def _as_rows(X: Any) -> list[Any]:
    if isinstance(X, str | bytes | bytearray):
        raise ValueError(
            f"X is a single {type(X).__name__}; pass a list of texts, for example [text]."
        )
    if type(X) in (list, tuple):  # the usual case, without asking others what they make of it
        return list(X)
    if isinstance(X, np.ndarray):
        return _array_rows(X)
    try:
        native = nw.from_native(X, pass_through=True, allow_series=True)
    except nw.exceptions.DuplicateError:
        _refuse_columns(X.shape[1], "some of the same name")
        raise
    if isinstance(native, nw.LazyFrame) or hasattr(X, "__dask_graph__"):
        raise TypeError(
            f"X is lazy ({type(X).__module__}.{type(X).__name__}); compute or collect it first."
        )
    if isinstance(native, nw.DataFrame):
        _refuse_columns(native.shape[1], f"columns {native.columns}")
        return native[:, 0].to_list()
    if isinstance(native, nw.Series):
        return native.to_list()
    if hasattr(X, "to_pylist"):  # pyarrow.Array, which narwhals leaves alone
        return X.to_pylist()
    if isinstance(X, Mapping | Set) or issparse(X) or not isinstance(X, Iterable):
        raise TypeError(
            f"X is of type {type(X).__name__}; pass one text per row: a list, an array or a column."
        )
    return list(X)


def _array_rows(X: NDArray[Any]) -> list[Any]:
    if X.ndim == 0 or X.ndim > 2:
        raise ValueError(
            f"X is an array of shape {X.shape}; expected (n_samples,), one text a row."
        )
    if X.ndim == 2:
        _refuse_columns(X.shape[1], f"shape {X.shape}")
    if X.size and X.dtype.kind not in "UOT":  # an empty selection is float64
        raise TypeError(f"X is an array of dtype {X.dtype}; expected texts (str).")
    return X.ravel().tolist()


def _refuse_columns(n_columns: int, found: str) -> None:
    if n_columns != 1:
        raise ValueError(
            f"X has {n_columns} columns ({found}); one text column is expected. Select one, or use "
            "a ColumnTransformer with one featurizer per column."
        )


def _is_missing(row: Any) -> bool:
    if row is None or type(row).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(row, np.datetime64 | np.timedelta64):
        return bool(np.isnat(row))
    return isinstance(row, float | np.floating) and bool(np.isnan(row))


def _without_missing(rows: Sequence[Any], missing: str) -> list[Any]:
    is_missing = [_is_missing(row) for row in rows]
    if missing == "error":
        _refuse_missing(is_missing)
    return ["" if gap else row for gap, row in zip(is_missing, rows, strict=True)]


def _refuse_missing(is_missing: Sequence[bool]) -> None:
    missing = [position for position, gap in enumerate(is_missing) if gap]
    if not missing:
        return
    if len(missing) == 1:
        raise ValueError(
            f"X has 1 missing value, in row {missing[0]}. Drop the row or use missing='empty'."
        )
    shown = ", ".join(map(str, missing[:_ROWS_SHOWN]))
    more = ", ..." if len(missing) > _ROWS_SHOWN else ""
    raise ValueError(
        f"X has {len(missing)} missing values, in rows {shown}{more}. Drop these rows or use "
        "missing='empty'."
    )


def _as_two_columns(X: Any) -> tuple[list[Any], list[Any]]:
    """Return the two columns of `X` as lists."""
    if isinstance(X, np.ndarray):
        if X.ndim != 2 or X.shape[1] != 2:
            raise ValueError(f"X is an array of shape {X.shape}; text_pair=True needs (n, 2).")
        if X.size and X.dtype.kind not in "UOT":
            raise TypeError(f"X is an array of dtype {X.dtype}; expected texts (str).")
        return X[:, 0].tolist(), X[:, 1].tolist()
    if isinstance(X, str | bytes | bytearray | Mapping | Set) or issparse(X):
        raise TypeError(f"X is of type {type(X).__name__}; text_pair=True needs two texts per row.")
    try:
        native = nw.from_native(X, pass_through=True, allow_series=True)
    except nw.exceptions.DuplicateError as error:
        raise ValueError("X has columns of the same name; give them different ones.") from error
    if isinstance(native, nw.LazyFrame) or hasattr(X, "__dask_graph__"):
        raise TypeError(f"X is lazy ({type(X).__name__}); compute or collect it first.")
    if isinstance(native, nw.DataFrame):
        if native.shape[1] != 2:
            raise ValueError(
                f"X has {native.shape[1]} columns; text_pair=True needs two, one text each."
            )
        return native[:, 0].to_list(), native[:, 1].to_list()
    if not isinstance(X, Iterable):
        raise TypeError(f"X is of type {type(X).__name__}; text_pair=True needs two texts per row.")
    rows = native.to_list() if isinstance(native, nw.Series) else list(X)
    for position, row in enumerate(rows):
        if not isinstance(row, tuple | list | np.ndarray) or len(row) != 2:
            raise ValueError(
                f"row {position} of X is {_shown(row)}; text_pair=True needs two texts per row."
            )
    return [row[0] for row in rows], [row[1] for row in rows]


def _shown(row: Any) -> str:
    length = f" of {len(row)}" if isinstance(row, tuple | list) else ""
    return f"a {type(row).__name__}{length}"


def _as_str(row: Any, position: int) -> str:
    if isinstance(row, str):  # np.str_ and other subclasses
        return str.__str__(row)
    hint = ""
    if isinstance(row, bytes):
        hint = " Decode it first."
    elif isinstance(row, list | tuple | np.ndarray):
        hint = (
            " Pass one text per row; for pairs of texts use text_pair=True, and for lists of words "
            "transform_tokens."
        )
    raise TypeError(f"row {position} of X is of type {type(row).__name__}, not str.{hint}")


def _without_surrogates(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
