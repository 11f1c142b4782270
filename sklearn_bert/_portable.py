"""Pipelines that carry the files of their models."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError

from ._featurizer import BertLayerFeaturizer
from ._model_files import PortableModel, read_portable

__all__ = ["with_weights"]

T = TypeVar("T")


def with_weights(estimator: T) -> T:
    """Return a copy of a fitted estimator that carries the files of the models in it.

    A fitted pipeline normally refers to its model by name, and its pickle has some kilobytes. The
    copy holds the model's configuration, safetensors weights and tokenizer files as bytes, so its
    pickle is as large as the model, and works where the model is not: on a machine without the
    folder, the hub, or its cache. It gives the same features, on CPU to the bit.

    Parameters
    ----------
    estimator : estimator
        A fitted featurizer, or a fitted pipeline, search or other estimator with featurizers
        somewhere in it. It is left as it is.

    Returns
    -------
    estimator
        A copy. Featurizers of one model share one copy of its files, also in a pickle.

    Raises
    ------
    NotFittedError
        If there is no fitted featurizer in it.
    FingerprintMismatchError
        If the files found are no longer those of ``fit``.

    Notes
    -----
    The files are written to a temporary folder while the model is loaded. Set ``model`` to a folder
    or a hub id, and fit again, to let go of them.

    Examples
    --------
    >>> import pickle, shutil
    >>> from sklearn_bert import BertLayerFeaturizer, with_weights
    >>> from sklearn_bert.testing import make_bert
    >>> folder = make_bert()
    >>> featurizer = BertLayerFeaturizer(folder).fit(["a good film"])
    >>> artefact = pickle.dumps(with_weights(featurizer))
    >>> shutil.rmtree(folder)
    >>> pickle.loads(artefact).transform(["a good film"]).shape
    (1, 32)
    """
    made: T = copy.deepcopy(estimator)
    models: dict[str, PortableModel] = {}
    found = list(_featurizers(made, set()))
    if not found:
        raise NotFittedError(f"there is no fitted BertLayerFeaturizer in {estimator!r}.")
    for featurizer in found:
        identity = featurizer.model_fingerprint_
        if identity not in models:
            with featurizer._reference().open() as folder:
                models[identity] = read_portable(folder.path)
        featurizer.model = models[identity]
        featurizer.revision = None
    return made


def _featurizers(thing: Any, seen: set[int]) -> Iterator[BertLayerFeaturizer]:
    """Find the fitted featurizers in an estimator, its parts, and the parts of those."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, BertLayerFeaturizer):
        # templates of fitted parts, which ColumnTransformer and GridSearchCV keep, are of no use
        if hasattr(thing, "model_fingerprint_"):
            yield thing
    elif isinstance(thing, BaseEstimator):
        yield from _featurizers(vars(thing), seen)
    elif isinstance(thing, dict):
        for part in thing.values():
            yield from _featurizers(part, seen)
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from _featurizers(part, seen)
