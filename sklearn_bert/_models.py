"""Models and tokenizers of this process.

**Handles are values, resources are per process.** An estimator holds a :class:`ModelReference`, a
few strings. What it refers to, weights of hundreds of megabytes, is loaded once per process under
a lock and kept here, by fingerprint, for whoever holds an equal reference: clones, copies, folds
and unpickled estimators share it, and an estimator pickles to kilobytes.

The rule for other modules: ask for an encoder or a tokenizer where you use it, never keep it.
"""

from __future__ import annotations

import gc
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ._forward import Encoder, free_memory
from ._model_files import ModelFolder, fetch_model, fingerprint, open_model
from ._model_loading import ModelFacts, inspect_folder, load_encoder, load_tokenizer
from ._tokenization import TextTokenizer
from .exceptions import FingerprintMismatchError

__all__ = ["ModelReference", "get_encoder", "get_tokenizer", "inspect_model", "unload_models"]

# Models kept in memory; the least recently used goes first.
MAX_LOADED_MODELS = 4


@dataclass(frozen=True)
class ModelReference:
    """A value that stands for a model: where it is and who it is.

    Attributes
    ----------
    model : str or PortableModel
        Absolute path of a folder, id of a hub repository, or the files themselves.
    revision : str or None
        Commit, for a hub repository.
    local_files_only : bool
        Whether fetching is forbidden.
    fingerprint : str
        What the files must hash to.
    n_layers, hidden_size : int
        Number of its blocks; length of a state.
    """

    model: Any
    revision: str | None
    local_files_only: bool
    fingerprint: str
    n_layers: int
    hidden_size: int

    @contextmanager
    def open(self) -> Iterator[ModelFolder]:
        """Find the folder, and make sure that its files are the ones meant."""
        with self._open() as folder:
            self.check(folder)
            yield folder

    @contextmanager
    def _open(self) -> Iterator[ModelFolder]:
        if self.revision is not None:
            yield fetch_model(self.model, self.revision, self.local_files_only, known=True)
        else:
            with open_model(self.model, None, self.local_files_only) as folder:
                yield folder

    def check(self, folder: ModelFolder) -> None:
        """Raise if the files in a folder are not the ones meant."""
        found = fingerprint(folder.path)
        if found != self.fingerprint:
            raise FingerprintMismatchError(
                f"the model files in {folder.path} are not the ones this estimator was fitted "
                f"with: their fingerprint is {found[:12]}, not {self.fingerprint[:12]}. Fit again, "
                "or set model= to a folder with the original files."
            )


_lock = threading.RLock()
_facts: dict[str, ModelFacts] = {}
_tokenizers: OrderedDict[str, TextTokenizer] = OrderedDict()
_encoders: OrderedDict[tuple[str, str, str], Encoder] = OrderedDict()


def inspect_model(folder: ModelFolder, identity: str) -> ModelFacts:
    """Check that features can be had from a model, without loading its weights.

    Parameters
    ----------
    folder : ModelFolder
        Where it is.
    identity : str
        Its fingerprint; what was found is remembered under it.

    Raises
    ------
    UnsupportedModelError
        For a model that is not a bidirectional encoder, has no usable tokenizer, or lacks weights.
    ModelFilesError
        If a file is damaged.
    """
    with _lock:
        if identity not in _facts:
            _facts[identity], tokenizer = inspect_folder(folder)
            _remember_tokenizer(tokenizer, identity)
        return _facts[identity]


def get_encoder(reference: ModelReference, device: torch.device, dtype: str) -> Encoder:
    """Return the loaded model of a reference, loading it if this process has not yet.

    Parameters
    ----------
    reference : ModelReference
        What to load.
    device : torch.device
        Where to.
    dtype : {"float32", "bfloat16", "float16"}
        Precision of the weights.
    """
    key = (reference.fingerprint, str(device), dtype)
    with _lock:
        if key not in _encoders:
            _make_room(_encoders)
            with reference.open() as folder:
                encoder = load_encoder(folder, device, getattr(torch, dtype))
                reference.check(folder)  # nobody wrote to the files while they were read
            _encoders[key] = encoder
            free_memory(torch.device("cpu"))  # of the weights as they were read
        _encoders.move_to_end(key)
        return _encoders[key]


def get_tokenizer(reference: ModelReference) -> TextTokenizer:
    """Return the tokenizer of a reference, loading it if this process has not yet."""
    with _lock:
        if reference.fingerprint not in _tokenizers:
            with reference.open() as folder:
                _remember_tokenizer(load_tokenizer(folder), reference.fingerprint)
        _tokenizers.move_to_end(reference.fingerprint)
        return _tokenizers[reference.fingerprint]


def _remember_tokenizer(tokenizer: TextTokenizer, identity: str) -> None:
    _make_room(_tokenizers)
    _tokenizers[identity] = tokenizer


def _make_room(loaded: OrderedDict[Any, Any]) -> None:
    while len(loaded) >= MAX_LOADED_MODELS:
        loaded.popitem(last=False)


def unload_models() -> None:
    """Give back the memory of all models that this process has loaded.

    Estimators stay as they are; the next one that is used loads its model again.

    Examples
    --------
    >>> import sklearn_bert
    >>> sklearn_bert.unload_models()
    """
    with _lock:
        _encoders.clear()
        _tokenizers.clear()
    gc.collect()
    free_memory(torch.device("cpu"))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        free_memory(accelerator)


def _after_fork_in_child() -> None:
    """Make a forked child able to run models that its parent has run.

    The threads that torch computes with do not survive a fork, and a child that waits for them
    hangs; with one thread it does not need them. A lock that another thread of the parent held
    would stay locked for ever.
    """
    global _lock
    _lock = threading.RLock()
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
