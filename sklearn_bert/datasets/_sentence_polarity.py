"""The sentence polarity dataset of Pang and Lee."""

from __future__ import annotations

import gzip
from importlib.resources import files
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray
from sklearn.utils import Bunch

__all__ = ["load_sentence_polarity"]

_DESCR = """\
Sentence polarity dataset v1.0 (Pang and Lee, 2005): 10662 sentences or snippets from film reviews,
all lower case, 5331 positive (1) and 5331 negative (0), in a fixed random order. A snippet was
labelled by the rating of the review it is from. Licence: CC BY 4.0.
"""


@overload
def load_sentence_polarity(*, return_X_y: Literal[False] = False) -> Bunch: ...
@overload
def load_sentence_polarity(*, return_X_y: Literal[True]) -> tuple[list[str], NDArray[np.int_]]: ...
def load_sentence_polarity(
    *, return_X_y: bool = False
) -> Bunch | tuple[list[str], NDArray[np.int_]]:
    """Load 10662 sentences from film reviews, half of them positive.

    The data are part of this package; nothing is fetched. The order is random and fixed, so a
    slice is a sample.

    Parameters
    ----------
    return_X_y : bool, default=False
        Whether to return ``(data, target)`` only.

    Returns
    -------
    Bunch
        With ``data`` (list of 10662 str), ``target`` (ndarray of shape ``(10662,)``, 1 is
        positive), ``target_names`` and ``DESCR``; or the first two as a tuple.

    References
    ----------
    B. Pang, L. Lee (2005). Seeing stars: Exploiting class relationships for sentiment
    categorization with respect to rating scales. ACL.

    Examples
    --------
    >>> from sklearn_bert.datasets import load_sentence_polarity
    >>> X, y = load_sentence_polarity(return_X_y=True)
    >>> len(X), int(y.sum())
    (10662, 5331)
    """
    packed = files(__package__).joinpath("data/sentence_polarity.tsv.gz").read_bytes()
    rows = gzip.decompress(packed).decode("utf-8").splitlines()
    labels, texts = zip(*(row.split("\t", 1) for row in rows), strict=True)
    data, target = list(texts), np.array(labels, dtype=int)
    if return_X_y:
        return data, target
    return Bunch(
        data=data, target=target, target_names=np.array(["negative", "positive"]), DESCR=_DESCR
    )
