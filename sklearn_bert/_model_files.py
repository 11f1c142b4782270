"""Where a model's files are, which of them matter, and who they are.

A model is a folder, given by its path or fetched from the Hugging Face hub into its local cache.
Only these files are ever read from it: ``config.json``, safetensors weights, and the tokenizer's
files. Nothing in a folder is executed, and weights in pickle formats are refused.

The fingerprint of a model is a digest of exactly those files. It changes if and only if one of
them does, so it says whether two folders give the same features.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from .exceptions import ModelFilesError, UnsupportedModelError

__all__ = [
    "ModelFolder",
    "PortableModel",
    "fetch_model",
    "file_sha256",
    "find_model",
    "fingerprint",
    "open_model",
    "read_portable",
    "weight_shapes",
]

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_ADAPTER = "adapter_config.json"
_WEIGHTS_INDEX = "model.safetensors.index.json"
# A tokenizer can be built from any one of these ...
_VOCABULARIES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spiece.model",
    "spm.model",
    "tokenizer.model",
)
# ... and is changed by these.
_TOKENIZER_SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
)
_PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_WANTED = (
    _CONFIG,
    "model*.safetensors",
    _WEIGHTS_INDEX,
    *_VOCABULARIES,
    *_TOKENIZER_SETTINGS,
)
_CONVERT = (
    "can run code when it is read. If you trust their source, convert them once: "
    "transformers.AutoModel.from_pretrained(model).save_pretrained(folder) writes safetensors."
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Errors of this machine's disk, which are not the network's.
_CANNOT_WRITE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class ModelFolder:
    """A folder with model files.

    Attributes
    ----------
    path : str
        Absolute path.
    revision : str or None
        Commit of the hub repository; None for a folder given by its path.
    """

    path: str
    revision: str | None


class PortableModel:
    """The files of a model as a value, for an estimator that carries them wherever it goes.

    It stands for `model`, and is made by :func:`sklearn_bert.with_weights`. Copies are the same
    object, so a pickle holds the files once, however many estimators share them.

    Parameters
    ----------
    files : dict of str to bytes
        Content of each file that matters, by name.
    fingerprint : str
        Their fingerprint.
    """

    def __init__(self, files: dict[str, bytes], fingerprint: str) -> None:
        self.files = files
        self.fingerprint = fingerprint

    def __copy__(self) -> PortableModel:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> PortableModel:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PortableModel) and other.fingerprint == self.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        megabytes = sum(map(len, self.files.values())) / 1e6
        return f"PortableModel({self.fingerprint[:12]}, {megabytes:.1f} MB)"


def read_portable(folder: str) -> PortableModel:
    """Read the files of a model folder that matter."""
    files = {name: Path(folder, name).read_bytes() for name in _files_that_matter(folder)}
    return PortableModel(files, fingerprint(folder))


@contextmanager
def open_model(
    model: str | os.PathLike[str] | PortableModel,
    revision: str | None = None,
    local_files_only: bool = False,
) -> Iterator[ModelFolder]:
    """Find the folder of a model; that of a portable one exists as long as it is open.

    Parameters and errors are those of :func:`find_model`.
    """
    if not isinstance(model, PortableModel):
        yield find_model(model, revision, local_files_only)
        return
    with tempfile.TemporaryDirectory(prefix="sklearn_bert-") as folder:
        for name, content in model.files.items():
            if os.path.basename(name) != name:
                raise ModelFilesError(f"{model!r} has a file named {name!r}.")
            Path(folder, name).write_bytes(content)
        yield ModelFolder(folder, None)


def find_model(
    model: str | os.PathLike[str], revision: str | None = None, local_files_only: bool = False
) -> ModelFolder:
    """Find the folder of a model, fetching it from the hub if it is not on this machine.

    Parameters
    ----------
    model : str or path-like
        A folder, or the id of a repository on the hub. A folder that exists goes before the hub.
    revision : str, optional
        Branch, tag or commit of a hub repository.
    local_files_only : bool, default=False
        If True, nothing is fetched.

    Returns
    -------
    ModelFolder
        With all the files that are needed.

    Raises
    ------
    TypeError, ValueError
        If `model` cannot name a model.
    ModelFilesError
        If the folder, or a file in it, does not exist or cannot be fetched.
    UnsupportedModelError
        If the weights are only there in a pickle format.
    """
    if not isinstance(model, str | os.PathLike):
        raise TypeError(f"model must be a folder or a hub id; got {model!r}.")
    name = os.fspath(model)
    if not name.strip():
        raise ValueError("model is empty; pass a folder or a hub id.")
    path = Path(name).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ValueError(
                f"revision={revision!r} is for models on the hub, but {name!r} is a local folder."
            )
        folder = ModelFolder(str(path.resolve()), None)
    elif path.exists():
        raise ModelFilesError(f"model={name!r} is a file; pass the folder that holds it.")
    elif isinstance(model, str) and _HUB_ID.fullmatch(name):
        return fetch_model(name, revision, local_files_only)
    else:
        raise ModelFilesError(f"model={name!r}: there is no such folder.")
    _check_files(folder, name)
    return folder


def fetch_model(
    name: str, revision: str | None, local_files_only: bool, *, known: bool = False
) -> ModelFolder:
    """Find the files of a hub repository in the hub's cache, fetching what is missing.

    Parameters
    ----------
    name : str
        Id of the repository.
    revision : str or None
        Branch, tag or commit.
    local_files_only : bool
        If True, nothing is fetched.
    known : bool, default=False
        Whether the caller compares fingerprints. Then a commit that is in the cache is used without
        asking the hub: a copy that is not complete would be noticed.

    Raises
    ------
    ModelFilesError
        If there is no such repository or revision, or it cannot be fetched.
    """
    where = f"model={name!r}" + (f", revision={revision!r}" if revision else "")
    if local_files_only:
        folder = _in_cache(name, revision)
        if folder is None:
            raise ModelFilesError(
                f"{where} is neither a local folder nor complete in the hub's cache, and "
                "local_files_only=True forbids fetching it."
            )
        return folder
    is_commit = revision is not None and _COMMIT.fullmatch(revision) is not None
    if is_commit and known and (folder := _in_cache(name, revision)) is not None:
        return folder
    try:
        folder = _download(name, revision, offline=False)
    except ModelFilesError:
        # a commit never changes: what the cache has of it is right, if the hub is out of reach
        cached = _in_cache(name, revision) if is_commit else None
        if cached is None:
            raise
        return cached
    _check_files(folder, name)
    return folder


def _in_cache(name: str, revision: str | None) -> ModelFolder | None:
    try:
        folder = _download(name, revision, offline=True)
        _check_files(folder, name)
    except ModelFilesError:
        return None
    return folder


def _download(name: str, revision: str | None, offline: bool) -> ModelFolder:
    """Call the hub's client, in words of this library if it fails."""
    from huggingface_hub import model_info, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"model={name!r}" + (f", revision={revision!r}" if revision else "")
    try:
        if not offline and revision is not None and _COMMIT.fullmatch(revision):
            # for a branch the client asks once, for a commit it would try again for half a minute
            model_info(name, revision=revision)
        path = snapshot_download(
            name,
            revision=revision,
            local_files_only=offline,
            allow_patterns=list(_WANTED),
            ignore_patterns=["*/*"],
            tqdm_class=_silent_tqdm(),
        )
    except GatedRepoError as error:
        raise ModelFilesError(f"{where}: access is gated; accept its terms and log in.") from error
    except RepositoryNotFoundError as error:
        raise ModelFilesError(
            f"{where} is neither a local folder nor a repository that the hub lets you read."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelFilesError(f"{where}: the hub has no such branch, tag or commit.") from error
    except Exception as error:  # the client raises whatever the library of its requests raises
        if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
            raise ModelFilesError(f"{where} cannot be stored on this machine: {error}") from error
        raise ModelFilesError(
            f"{where} is not a local folder, and the hub could not be reached to fetch it "
            f"({type(error).__name__}). Check the spelling and the network, or pass a folder."
        ) from error
    return ModelFolder(path, Path(path).name)


def _silent_tqdm() -> type:
    from tqdm.auto import tqdm

    class SilentTqdm(tqdm):
        def __init__(self, *args: object, **kwargs: object) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})

    return SilentTqdm


def _check_files(folder: ModelFolder, name: str) -> None:
    path = Path(folder.path)
    if not (path / _CONFIG).is_file():
        raise ModelFilesError(
            f"model={name!r}: the folder {path} was found, but it has no {_CONFIG}."
        )
    if not (path / _WEIGHTS).is_file() and not (path / _WEIGHTS_INDEX).is_file():
        if any((path / pickled).is_file() for pickled in _PICKLED_WEIGHTS):
            raise UnsupportedModelError(
                f"model={name!r}: the weights in {path} are a pickle, which {_CONVERT}"
            )
        raise ModelFilesError(
            f"model={name!r}: the folder {path} has no {_WEIGHTS}. Weights in a pickle format "
            f"(pytorch_model.bin) are not read, for a pickle {_CONVERT}"
        )
    if not any((path / vocabulary).is_file() for vocabulary in _VOCABULARIES):
        raise ModelFilesError(
            f"model={name!r}: the folder {path} has no tokenizer (one of "
            f"{', '.join(_VOCABULARIES)})."
        )
    if (path / _ADAPTER).exists():
        raise UnsupportedModelError(
            f"model={name!r}: the folder {path} has an {_ADAPTER}, which refers to weights outside "
            "it. Merge the adapter into the model and save that."
        )
    _weight_files(folder.path)


def _weight_files(folder: str) -> list[str]:
    path = Path(folder)
    if (path / _WEIGHTS).is_file():
        return [_WEIGHTS]
    try:
        shards = json.loads((path / _WEIGHTS_INDEX).read_text("utf-8"))["weight_map"].values()
        names = sorted(set(shards))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelFilesError(f"{path / _WEIGHTS_INDEX} is not a valid weights index.") from error
    for name in names:
        if os.path.basename(name) != name or not (path / name).is_file():
            raise ModelFilesError(f"{path / _WEIGHTS_INDEX} names {name!r}, which is not there.")
    return names


def weight_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in the weight files, without reading the tensors.

    Raises
    ------
    ModelFilesError
        If a file is cut off, damaged, or not safetensors.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(folder):
        path = os.path.join(folder, file)
        try:
            with safe_open(path, framework="numpy") as weights:
                for name in weights.keys():  # noqa: SIM118 - not a dict
                    shapes[name] = tuple(weights.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise ModelFilesError(f"{path} cannot be read as safetensors: {error}.") from error
    return shapes


def fingerprint(folder: str) -> str:
    """Digest of the files that determine the features.

    Parameters
    ----------
    folder : str
        Model folder.

    Returns
    -------
    str
        SHA-256 in hexadecimal of the names and SHA-256 digests of the weights, the configuration
        and the tokenizer's files. The digest of a file is remembered until its size, one of its
        times or its inode changes.
    """
    total = hashlib.sha256()
    for name in _files_that_matter(folder):
        total.update(f"{name} {file_sha256(os.path.join(folder, name))}\n".encode())
    return total.hexdigest()


def _files_that_matter(folder: str) -> list[str]:
    names = [*_weight_files(folder), _CONFIG, *_VOCABULARIES, *_TOKENIZER_SETTINGS]
    if not os.path.isfile(os.path.join(folder, _WEIGHTS)):
        names.append(_WEIGHTS_INDEX)
    return [name for name in sorted(names) if os.path.isfile(os.path.join(folder, name))]


_known_digests: dict[tuple[str, int, int, int, int], str] = {}


def file_sha256(path: str) -> str:
    """SHA-256 of a file, remembered in this process for as long as its stat does not change."""
    try:
        stat = os.stat(path)
        # a copy may carry the time of what it replaces; the time of the change it cannot
        key = (path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        if key not in _known_digests:
            with open(path, "rb") as file:
                _known_digests[key] = hashlib.file_digest(file, "sha256").hexdigest()
        return _known_digests[key]
    except OSError as error:
        raise ModelFilesError(f"{path} cannot be read: {error.strerror}.") from error
