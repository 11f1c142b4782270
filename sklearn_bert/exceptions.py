"""Errors and warnings of sklearn_bert.

::

    Exception
    ├── OSError
    │   └── ModelFilesError          model files are missing, unreadable or cannot be fetched
    ├── ValueError
    │   ├── UnsupportedModelError    the files are there, but no features can be had from this model
    │   ├── FingerprintMismatchError the weights are not those the estimator was fitted with
    │   ├── LongDocumentError        ``long_documents="error"`` and a text is too long
    │   └── sklearn.exceptions.NotFittedError
    │       └── ParameterChangedError  a parameter that changes the features was set after ``fit``
    └── UserWarning
        ├── CacheWarning             a cache cannot be used; features are computed without it
        ├── TruncationWarning        texts were cut to the maximum length
        ├── ConstantFeaturesWarning  the features asked for are the same for every text
        └── SlowPathWarning          right, but without a faster way

Every error is also an instance of the built-in class it stands under, so code that catches
``ValueError`` or ``OSError`` keeps working.
"""

import os
import sys
import warnings

from sklearn.exceptions import NotFittedError

__all__ = [
    "CacheWarning",
    "ConstantFeaturesWarning",
    "FingerprintMismatchError",
    "LongDocumentError",
    "ModelFilesError",
    "ParameterChangedError",
    "SlowPathWarning",
    "TruncationWarning",
    "UnsupportedModelError",
    "warn_caller",
]


class ModelFilesError(OSError):
    """Model files are missing, unreadable, or cannot be fetched."""


class UnsupportedModelError(ValueError):
    """The model files were found, but this library cannot make features from them."""


class FingerprintMismatchError(ValueError):
    """The model files are not the ones the estimator was fitted with."""


class LongDocumentError(ValueError):
    """A text is longer than ``max_length`` and ``long_documents="error"``."""


class ParameterChangedError(NotFittedError):
    """A parameter that changes the features was changed after ``fit``; fit again."""


class CacheWarning(UserWarning):
    """A cache cannot be used; the features are right, but computed without it."""


class TruncationWarning(UserWarning):
    """Texts were cut to the maximum length; their end did not reach the model."""


class ConstantFeaturesWarning(UserWarning):
    """The layer and pooling asked for give the same vector for every text."""


class SlowPathWarning(UserWarning):
    """The results are right, but a faster way is not available for this model."""


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the line of the user's code that led here.

    scikit-learn wraps estimators' methods in a number of frames that depends on its version and
    on what is called, so no fixed stack level finds that line.
    """
    stacklevel, frame = 2, sys._getframe(1)  # whoever called this
    while frame.f_back is not None and _is_machinery(frame.f_code.co_filename):
        stacklevel, frame = stacklevel + 1, frame.f_back
    warnings.warn(message, category, stacklevel=stacklevel)


def _is_machinery(filename: str) -> bool:
    parts = os.path.dirname(filename).split(os.sep)
    return any(package in parts for package in ("sklearn_bert", "sklearn", "joblib"))
