"""scikit-learn's callbacks, which show the progress of nested estimators, where it has them (1.9).

A transformer's work is to transform, so it is ``fit_transform`` that reports: its task has up to a
hundred parts, one for each hundredth of the distinct texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

try:
    from sklearn.callback import CallbackSupportMixin
except ImportError:  # before 1.9: nobody can set callbacks, so nobody is told

    class CallbackSupportMixin:  # type: ignore[no-redef]
        """Stands for the mixin that scikit-learn has from 1.9 on."""


__all__ = ["CallbackProgress", "CallbackSupportMixin", "begin_fit"]

_MOST_PARTS = 100


class CallbackProgress:
    """Tells scikit-learn's callbacks how far ``fit_transform`` has come.

    Parameters
    ----------
    estimator : estimator
        Whose task it is.
    context : CallbackContext
        Context of the task.
    n_texts, n_parts : int
        Number of texts, and of the parts that they are counted in.
    """

    def __init__(self, estimator: Any, context: Any, n_texts: int, n_parts: int) -> None:
        self._estimator = estimator
        self._context = context
        self._n_texts = n_texts
        self._n_parts = n_parts
        self._n_done = 0
        self._n_told = 0

    def update(self, n_texts: int, n_tokens: int) -> None:
        """Note that more texts are done."""
        self._n_done += n_texts
        while self._n_told < self._n_done * self._n_parts // self._n_texts:
            part = self._context.subcontext(task_name="texts")
            part.call_on_fit_task_begin(estimator=self._estimator)
            part.call_on_fit_task_end(estimator=self._estimator)
            self._n_told += 1

    def end(self) -> None:
        """Note that all is done."""
        self._context.call_on_fit_task_end(estimator=self._estimator)


def begin_fit(estimator: Any, task_name: str, texts: Sequence[object]) -> CallbackProgress | None:
    """Tell callbacks that a task begins; return what to tell its progress, or None if none is set.

    Parameters
    ----------
    estimator : estimator
        Whose task it is.
    task_name : str
        Name of the task.
    texts : sequence
        What will be transformed; its distinct ones are counted.
    """
    if not getattr(estimator, "_skl_callbacks", None):
        return None
    n_texts = len(set(texts))
    n_parts = min(n_texts, _MOST_PARTS)
    context = estimator._init_callback_context(task_name=task_name, max_subtasks=n_parts)
    context.call_on_fit_task_begin(estimator=estimator)
    return CallbackProgress(estimator, context, n_texts, n_parts)
