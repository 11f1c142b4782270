"""How far a call has come: a bar in the terminal or notebook, scikit-learn's callbacks, or nothing.

Whoever computes says how many texts are done and how many tokens that took; who looks on is none of
its business.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

__all__ = ["Progress", "watched_by"]


class Progress(Protocol):
    """Something that is told how far a call has come."""

    def update(self, n_texts: int, n_tokens: int) -> None:
        """Note that `n_texts` more texts are done, which took `n_tokens` computed tokens."""


class _Several:
    """Tells everyone who looks on; usually nobody does."""

    def __init__(self, observers: Sequence[Progress]) -> None:
        self._observers = observers

    def update(self, n_texts: int, n_tokens: int) -> None:
        for observer in self._observers:
            observer.update(n_texts, n_tokens)


class _Bar:
    """A tqdm bar with texts, time left, and tokens per second."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._n_tokens = 0
        self._start = time.perf_counter()
        self._is_first_batch = True

    def update(self, n_texts: int, n_tokens: int) -> None:
        now = time.perf_counter()
        self._n_tokens += n_tokens
        if self._n_tokens and now > self._start:
            rate = self._n_tokens / (now - self._start)
            self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        if n_tokens and self._is_first_batch:
            # its time has the loading of the model in it; from the next on it no longer counts
            self._is_first_batch, self._n_tokens, self._start = False, 0, now
        self._bar.update(n_texts)


@contextmanager
def watched_by(n_texts: int, verbose: bool | int, *observers: Progress) -> Iterator[Progress]:
    """Return what to tell the progress of a call on `n_texts` texts.

    Parameters
    ----------
    n_texts : int
        Number of texts of the call.
    verbose : bool or int
        Whether a bar is shown.
    *observers : Progress
        Who else wants to know.
    """
    with ExitStack() as stack:
        if verbose:
            from tqdm.auto import tqdm  # a widget in a notebook, text elsewhere

            bar = stack.enter_context(tqdm(total=n_texts, unit="text"))
            observers = (_Bar(bar), *observers)
        yield _Several(observers)
