"""BERT hidden states as scikit-learn features.

Names are imported when they are first used, so ``import sklearn_bert`` is quick and needs
neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._cache import FeatureCache
    from ._featurizer import BertLayerFeaturizer
    from ._models import unload_models
    from ._pooling import Pooling
    from ._portable import with_weights
    from ._token_features import TokenFeatures

__all__ = [
    "BertLayerFeaturizer",
    "FeatureCache",
    "Pooling",
    "TokenFeatures",
    "datasets",
    "exceptions",
    "testing",
    "unload_models",
    "with_weights",
]
__version__ = "0.1.0"

_HOME = {
    "BertLayerFeaturizer": "._featurizer",
    "FeatureCache": "._cache",
    "Pooling": "._pooling",
    "TokenFeatures": "._token_features",
    "unload_models": "._models",
    "with_weights": "._portable",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name], __name__), name)
    if name in __all__:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
