"""BertLayerFeaturizer: texts in, features from the layers of a BERT model out."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from inspect import Parameter, signature
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import sklearn
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, TransformerMixin, _fit_context
from sklearn.utils._param_validation import (
    Interval,
    StrOptions,
    validate_parameter_constraints,
)
from sklearn.utils._set_output import _get_output_config
from sklearn.utils.fixes import parse_version
from sklearn.utils.validation import _check_feature_names, check_is_fitted

from ._cache import CacheParameter, resolve_cache
from ._callbacks import CallbackProgress, CallbackSupportMixin, begin_fit
from ._documents import check_documents, check_pairs, check_words
from ._extract import FeatureSpec, extract_features
from ._layers import LAYER_COMBINATIONS, LayersParameter, resolve_layers
from ._model_files import PortableModel, fingerprint, open_model
from ._pooling import Pooling, resolve_poolings
from ._text_states import Execution, StateSpec
from ._token_features import SUBWORD_POOLINGS, TokenFeatures, extract_token_features
from ._tokenization import Text, TextLayout
from .exceptions import (
    ConstantFeaturesWarning,
    FingerprintMismatchError,
    ParameterChangedError,
    warn_caller,
)

if TYPE_CHECKING:
    from ._model_loading import ModelFacts
    from ._models import ModelReference

__all__ = ["BertLayerFeaturizer"]

# Raise it when the meaning of an attribute changes, and give __setstate__ a way to read the older
# format. A new parameter or attribute needs neither, if its absence means its default. Format 0,
# before there was a number, is read as it is.
_STATE_FORMAT = 1
_TOKEN_OPTIONS = {
    "level": [StrOptions({"token", "word"})],
    "subwords": [StrOptions(set(SUBWORD_POOLINGS))],
}
_SKLEARN_KEEPS_INDEX = parse_version(sklearn.__version__) >= parse_version("1.7.1")
# Parameters that decide the features. Changed after fit, they raise until the next fit.
_WHAT = (
    "layers",
    "layer_combination",
    "pooling",
    "special_tokens",
    "norm",
    "max_length",
    "long_documents",
    "window_overlap",
    "missing",
    "text_pair",
    "dtype",
)
# Parameters that decide only how they are computed. They take effect at the next call.
_HOW = ("device", "batch_tokens", "cache", "local_files_only", "verbose")


class BertLayerFeaturizer(CallbackSupportMixin, TransformerMixin, BaseEstimator):
    """Features from the hidden layers of a BERT model.

    Every text is run through a pretrained encoder (BERT, DistilBERT, RoBERTa, ELECTRA, MPNet,
    ALBERT, DeBERTa-v2, ModernBERT, XLM-R and relatives), the states of the layers asked for are
    pooled over the tokens, and the result is one row of numbers for a classifier or regressor.
    Nothing is trained here: ``fit`` checks the parameters against the model and remembers which
    model it was. Weights are loaded at the first ``transform`` of a process and shared by all
    estimators in it; a fitted estimator pickles to kilobytes.

    On CPU a text gets the same bits whatever else is in the call: batch size, order, neighbours
    and number of threads do not matter.

    Parameters
    ----------
    model : str or path-like, default="google-bert/bert-base-uncased"
        A folder with ``config.json``, safetensors weights and tokenizer files, or the id of such
        a repository on the Hugging Face hub. A folder that exists goes before the hub.
    revision : str, default=None
        Branch, tag or commit of a hub repository. ``fit`` pins the commit.
    layers : int, sequence of int, range, array or "all", default=-1
        Layers to read: 0 is the embedding output, ``k`` the output of block ``k``, the number of
        blocks (or -1) the last hidden state. Only the blocks up to the highest layer run.
    layer_combination : {"concat", "mean", "sum", "max"}, default="concat"
        How several layers become one row: side by side in the order given, or element by element.
    pooling : str, Pooling, or sequence of them, default="mean"
        How the tokens of a text become one vector; several stand side by side in the order given.
        With h the states of the tokens that count and n their number: ``"mean"`` is Σh/n,
        ``"mean_sqrt_len"`` Σh/√n, ``"max"`` and ``"min"`` are taken for each dimension, ``"cls"``
        and ``"last"`` are the states at the first and the last position (``[CLS]`` and
        ``[SEP]``), and ``"pooler"`` is tanh(W·cls + b) of the last layer, for checkpoints that
        have trained weights for it. See :class:`Pooling` for your own.
    special_tokens : {"include", "exclude"}, default="include"
        Whether special tokens such as ``[CLS]`` and ``[SEP]`` count in mean, mean_sqrt_len, max
        and min. They always take part in attention.
    norm : {"l2"}, default=None
        Divide each row by its Euclidean length.
    max_length : int, default=None
        Most tokens of a text, special tokens included. None is the model's own limit.
    long_documents : {"truncate", "window", "error"}, default="truncate"
        What happens to texts with more tokens. ``"truncate"`` cuts the end off, with one
        :class:`~sklearn_bert.exceptions.TruncationWarning` per call. ``"window"`` reads the whole
        text in windows of `max_length` tokens, each with its own special tokens, and merges their
        vectors as the pooling says: with ``"mean"``, ``"mean_sqrt_len"``, ``"max"`` and ``"min"``
        as if all tokens of the text had been pooled at once, with ``"cls"``, ``"last"`` and
        ``"pooler"`` as the mean over windows. ``"error"`` makes ``transform`` raise.
    window_overlap : int, default=0
        Tokens that neighbouring windows share. Each counts once, in the window where it has more
        context: the first half in the earlier one, the second half in the later one.
    missing : {"error", "empty"}, default="error"
        Whether missing values (None, nan, NaT, pandas.NA) are refused or read as the empty text.
    text_pair : bool, default=False
        If True, `X` has two columns, and each row is read as a BERT sentence pair: ``[CLS]``
        first ``[SEP]`` second ``[SEP]``, with token types where the model has them. A pair that is
        too long is cut at the end of its longer text first.
    dtype : {"float32", "bfloat16", "float16"}, default="float32"
        Precision of the model; features are float32 always. On a CPU without arithmetic for a
        half precision, its rounded weights are computed with in float32.
    device : str or torch.device, default="auto"
        Where the model runs: ``"auto"`` is the accelerator if there is one, else ``"cpu"``.
    batch_tokens : int or "auto", default="auto"
        Most tokens in a batch. It decides memory and speed, never the features.
    cache : None, "memory", path-like or FeatureCache, default=None
        Where vectors are kept once computed: in the memory of the process, in a folder that
        processes share (a relative path is that of the working directory at each call), or as a
        :class:`FeatureCache` says. A search over layers and the poolings cls, mean and max, or
        those that a :class:`FeatureCache` names, then runs the model once for each distinct text:
        once per process with "memory", once in all with a folder. The features are those of a
        pretrained model and depend on no label and no other text, so sharing them between folds
        leaks nothing.
    local_files_only : bool, default=False
        If True, nothing is fetched from the hub.
    verbose : bool, default=False
        Whether a progress bar is shown, with texts, tokens per second and time left. In a
        Pipeline or GridSearchCV, ``sklearn.callback.ProgressBar`` shows the progress of
        ``fit_transform`` too (scikit-learn 1.9).

    Attributes
    ----------
    layers_ : tuple of int
        Layer numbers, counted from 0.
    n_layers_ : int
        Number of blocks of the model.
    hidden_size_ : int
        Length of a state of the model.
    max_length_ : int
        Most tokens of a text, special tokens included.
    model_fingerprint_ : str
        SHA-256 over the model's weights, configuration and tokenizer files. Other files are
        refused later.
    model_path_ : str or None
        Absolute path of the model, if it was given as a folder.
    revision_ : str or None
        Commit of the model, if it came from the hub.
    feature_names_in_ : ndarray of shape (2,)
        Names of the two columns, if pairs of texts were given as a frame. They must come again in
        the same order.
    n_truncated_ : int
        How many of the texts given to ``fit_transform`` were cut. ``fit`` alone does not read
        them, so it does not set this.

    See Also
    --------
    sklearn.feature_extraction.text.TfidfVectorizer : Features from word counts.
    sklearn_bert.with_weights : A copy of a fitted pipeline that carries its model's files.
    sklearn_bert.datasets.load_sentence_polarity : Sentences to try it on.

    Notes
    -----
    ``[CLS]`` at layer 0 is the same vector for every text, and at the lower layers it hardly
    varies; put a ``StandardScaler`` before a linear model that reads it.

    Unlike transformers, special tokens that stand in a text, such as a literal ``"[SEP]"``, are
    read as text.

    References
    ----------
    .. [1] J. Devlin, M.-W. Chang, K. Lee, K. Toutanova (2019). BERT: Pre-training of Deep
       Bidirectional Transformers for Language Understanding. NAACL. (Section 5.3 compares
       layers as features.)
    .. [2] N. Reimers, I. Gurevych (2019). Sentence-BERT. EMNLP. (Section 6 compares mean, max
       and CLS pooling.)

    Examples
    --------
    >>> from sklearn.linear_model import LogisticRegression
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn_bert import BertLayerFeaturizer
    >>> from sklearn_bert.testing import make_bert
    >>> folder = make_bert()  # a tiny random model; use a real one for real features
    >>> X = ["a good film", "a bad film", "good", "bad"]
    >>> pipe = make_pipeline(
    ...     BertLayerFeaturizer(folder, layers=[-2, -1], pooling="mean"), LogisticRegression()
    ... )
    >>> pipe.fit(X, [1, 0, 1, 0]).predict(["good film"]).shape
    (1,)
    >>> pipe[0].get_feature_names_out()[[0, -1]].tolist()
    ['layer2_mean_00', 'layer3_mean_31']
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        # checked against the model, in fit, with messages of their own
        "model": "no_validation",
        "layers": "no_validation",
        "pooling": "no_validation",
        "device": "no_validation",
        "cache": "no_validation",
        "revision": [str, None],
        "layer_combination": [StrOptions(set(LAYER_COMBINATIONS))],
        "special_tokens": [StrOptions({"include", "exclude"})],
        "norm": [StrOptions({"l2"}), None],
        "max_length": [Interval(Integral, 1, None, closed="left"), None],
        "long_documents": [StrOptions({"truncate", "window", "error"})],
        "window_overlap": [Interval(Integral, 0, None, closed="left")],
        "missing": [StrOptions({"error", "empty"})],
        "text_pair": ["boolean"],
        "dtype": [StrOptions({"float32", "bfloat16", "float16"})],
        "batch_tokens": [Interval(Integral, 1, None, closed="left"), StrOptions({"auto"})],
        "local_files_only": ["boolean"],
        "verbose": ["verbose"],
    }

    def __init__(
        self,
        model: str | os.PathLike[str] | PortableModel = "google-bert/bert-base-uncased",
        *,
        revision: str | None = None,
        layers: LayersParameter = -1,
        layer_combination: str = "concat",
        pooling: str | Pooling | Sequence[str | Pooling] = "mean",
        special_tokens: str = "include",
        norm: str | None = None,
        max_length: int | None = None,
        long_documents: str = "truncate",
        window_overlap: int = 0,
        missing: str = "error",
        text_pair: bool = False,
        dtype: str = "float32",
        device: Any = "auto",
        batch_tokens: int | str = "auto",
        cache: CacheParameter = None,
        local_files_only: bool = False,
        verbose: bool | int = False,
    ) -> None:
        self.model = model
        self.revision = revision
        self.layers = layers
        self.layer_combination = layer_combination
        self.pooling = pooling
        self.special_tokens = special_tokens
        self.norm = norm
        self.max_length = max_length
        self.long_documents = long_documents
        self.window_overlap = window_overlap
        self.missing = missing
        self.text_pair = text_pair
        self.dtype = dtype
        self.device = device
        self.batch_tokens = batch_tokens
        self.cache = cache
        self.local_files_only = local_files_only
        self.verbose = verbose

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: ArrayLike | None = None) -> Self:
        """Check the parameters against the model and pin its identity; nothing is trained.

        Parameters
        ----------
        X : iterable of str of length n_samples
            Texts: a list, an array, a column, or a frame with one column. With ``text_pair=True``
            two texts a row: a list of tuples, an array or a frame with two columns.
        y : ignored
            Present for scikit-learn's conventions.

        Returns
        -------
        BertLayerFeaturizer
            The estimator itself.

        Raises
        ------
        TypeError, ValueError
            If a parameter does not fit the model, or `X` is not texts.
        ModelFilesError
            If model files are missing or damaged.
        UnsupportedModelError
            If the model is not a bidirectional encoder with its weights and tokenizer.
        RuntimeError
            If the device is not there.
        """
        texts = self._read(X, fitting=True)
        progress = begin_fit(self, "fit", ())
        self._fit_texts(texts)
        if progress is not None:
            progress.end()
        return self

    @_fit_context(prefer_skip_nested_validation=True)
    def fit_transform(self, X: Any, y: ArrayLike | None = None) -> NDArray[np.float32]:
        """Fit, then transform the same texts; an iterator is consumed once.

        Parameters
        ----------
        X : iterable of str of length n_samples
            Texts.
        y : ignored
            Present for scikit-learn's conventions.

        Returns
        -------
        ndarray of shape (n_samples, n_features)
            As of :meth:`transform`.
        """
        texts = self._read(X, fitting=True)
        progress = begin_fit(self, "fit_transform", texts)
        spec = self._fit_texts(texts)._fitted_spec()
        features, self.n_truncated_ = self._transform_texts(texts, spec, progress)
        if progress is not None:
            progress.end()
        return _keep_index(self, features, X)

    def transform(self, X: Any) -> NDArray[np.float32]:
        """Return the features of texts.

        Parameters
        ----------
        X : iterable of str of length n_samples
            Texts: a list, an array, a column, or a frame with one column. With ``text_pair=True``
            two texts a row: a list of tuples, an array or a frame with two columns.

        Returns
        -------
        ndarray of shape (n_samples, n_features)
            float32. The columns are, for each layer and each pooling in the order given,
            `hidden_size_` numbers (with another `layer_combination` than "concat", for each
            pooling only).

        Raises
        ------
        NotFittedError
            Before ``fit``, or (:class:`~sklearn_bert.exceptions.ParameterChangedError`) if a
            parameter that decides the features was changed since.
        FingerprintMismatchError
            If the model files are not those of ``fit``.
        """
        check_is_fitted(self)
        spec = self._fitted_spec()
        return _keep_index(self, self._transform_texts(self._read(X, fitting=False), spec)[0], X)

    def transform_tokens(
        self, X: Any, *, level: str = "token", subwords: str = "first"
    ) -> TokenFeatures:
        """Return the features of every token or word, for tagging and other token-level work.

        The parameters of the estimator hold, but for `pooling` and `cache`, which are not used.
        With ``special_tokens="exclude"`` rows of ``[CLS]`` and ``[SEP]`` are left out, and with
        ``long_documents="window"`` every token has its state from the window that counts it.

        Parameters
        ----------
        X : iterable of str, or of lists of str, of length n_samples
            Texts; or the words of each, as a list or tuple. Words are read as if joined by
            spaces.
        level : {"token", "word"}, default="token"
            What a row is. Words are those given, or else what the tokenizer splits a text into
            before it looks for tokens: at spaces and, in most models, around punctuation.
        subwords : {"first", "mean", "last"}, default="first"
            For words: which of the word's tokens the row is, or the mean of all. Every word has
            its row; it is zeros if the word has no token (such as ``""``), or none within
            `max_length`.

        Returns
        -------
        TokenFeatures
            With ``vectors`` of shape (n_rows, n_features), and for each row ``tokens``,
            ``offsets``, ``document`` and ``word``, in the order of the texts. A column stands for
            a layer and dimension, as in ``get_feature_names_out`` without the pooling.

        Raises
        ------
        NotFittedError, FingerprintMismatchError
            As in :meth:`transform`.
        TypeError, ValueError
            If `X` is not texts or lists of words, or an option is unknown.

        Examples
        --------
        >>> from sklearn_bert import BertLayerFeaturizer
        >>> from sklearn_bert.testing import make_bert
        >>> featurizer = BertLayerFeaturizer(make_bert(), special_tokens="exclude").fit(["film"])
        >>> features = featurizer.transform_tokens(["a good film", "bad"])
        >>> features.vectors.shape, features.tokens.tolist(), features.document.tolist()
        ((4, 32), ['a', 'good', 'film', 'bad'], [0, 0, 0, 1])
        """
        check_is_fitted(self)
        validate_parameter_constraints(
            _TOKEN_OPTIONS, {"level": level, "subwords": subwords}, "transform_tokens"
        )
        spec = self._fitted_spec()
        if self.text_pair:
            raise ValueError("transform_tokens reads texts or lists of words, not pairs of texts.")
        return extract_token_features(
            check_words(X, self.missing),
            spec,
            self._reference(),
            self._execution(),
            level=level,
            subwords=subwords,
        )

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[np.object_]:
        """Return a name for each column, such as ``layer11_mean_007``.

        Parameters
        ----------
        input_features : ignored
            Present for scikit-learn's conventions.

        Returns
        -------
        ndarray of str objects of shape (n_features,)
            ``layer{number}_{pooling}_{dimension}``, or ``layers_{combination}_...`` if the layers
            are not concatenated.
        """
        check_is_fitted(self)
        spec = self._fitted_spec()
        width = len(str(self.n_layers_))
        if spec.layer_combination == "concat":
            blocks = [f"layer{layer:0{width}d}" for layer in spec.states.layers]
        else:
            blocks = [f"layers_{spec.layer_combination}"]
        digits = len(str(self.hidden_size_ - 1))
        names = [
            f"{block}_{pooling.name}_{dimension:0{digits}d}"
            for block in blocks
            for pooling in spec.states.poolings
            for dimension in range(self.hidden_size_)
        ]
        return np.array(names, dtype=object)

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_state_format": _STATE_FORMAT}
        if type(self.device).__module__ == "torch":
            state["device"] = str(self.device)  # so that reading it does not import torch
        if "_fitted_params" in state:
            state["_fitted_params"] = {**state["_fitted_params"], "device": state["device"]}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        written = state.get("_state_format", 0)
        if written > _STATE_FORMAT:
            raise ValueError(
                f"this {type(self).__name__} was saved in format {written} by a newer version of "
                f"sklearn_bert; this one reads formats up to {_STATE_FORMAT}. Upgrade it."
            )
        # parameters that did not exist yet when it was saved have their defaults
        defaults = {
            name: parameter.default
            for name, parameter in signature(type(self).__init__).parameters.items()
            if parameter.default is not Parameter.empty
        }
        state = {**defaults, **state}
        if "_fitted_params" in state:
            state["_fitted_params"] = {**defaults, **state["_fitted_params"]}
        state.pop("_state_format", None)
        super().__setstate__(state)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.one_d_array = not self.text_pair
        tags.input_tags.two_d_array = bool(self.text_pair)
        tags.input_tags.string = True
        tags.transformer_tags.preserves_dtype = []
        return tags

    def _read(self, X: Any, fitting: bool) -> Sequence[Text]:
        """Return what `X` holds: a text or a pair of texts per row."""
        if not self.text_pair:
            was_fitted_on_pairs = getattr(self, "_fitted_params", {}).get("text_pair")
            if fitting and was_fitted_on_pairs and hasattr(self, "feature_names_in_"):
                del self.feature_names_in_
            return check_documents(X, self.missing)
        pairs = check_pairs(X, self.missing)
        _check_feature_names(self, X, reset=fitting)
        return pairs

    def _fit_texts(self, texts: Sequence[Text]) -> Self:
        if not texts:
            raise ValueError(
                "Found array with 0 sample(s) while a minimum of 1 is required by fit."
            )
        from ._devices import resolve_device  # torch is imported here, not before
        from ._models import inspect_model

        with open_model(self.model, self.revision, self.local_files_only) as folder:
            identity = fingerprint(folder.path)
            facts = inspect_model(folder, identity)
        resolve_device(self.device)
        resolve_cache(self.cache)
        spec = self._spec(facts.n_layers, self._check_lengths(facts))
        _check_poolings(spec.states, facts)
        self.layers_ = spec.states.layers
        self.n_layers_ = facts.n_layers
        self.hidden_size_ = facts.hidden_size
        self.max_length_ = spec.states.layout.max_length
        self.model_fingerprint_ = identity
        given_as_folder = folder.revision is None and not isinstance(self.model, PortableModel)
        self.model_path_ = folder.path if given_as_folder else None
        self.revision_ = folder.revision
        names = (*_WHAT, *_HOW, "model", "revision")
        self._fitted_params = {name: getattr(self, name) for name in names}
        self._fitted_poolings = spec.states.poolings
        if hasattr(self, "n_truncated_"):
            del self.n_truncated_  # of an earlier fit_transform
        return self

    def _transform_texts(
        self, texts: Sequence[Text], spec: FeatureSpec, progress: CallbackProgress | None = None
    ) -> tuple[NDArray[np.float32], int]:
        return extract_features(texts, spec, self._reference(), self._execution(progress))

    def _execution(self, progress: CallbackProgress | None = None) -> Execution:
        return Execution(
            device=self.device,
            batch_tokens=self.batch_tokens,
            cache=resolve_cache(self.cache),
            verbose=self.verbose,
            observers=() if progress is None else (progress,),
        )

    def _check_lengths(self, facts: ModelFacts) -> int:
        """Return the maximum length to use, or say why the parameters cannot be met."""
        n_special = facts.n_special_tokens
        if self.text_pair:
            if facts.n_pair_tokens is None:
                raise ValueError(f"the tokenizer of model={self.model!r} takes no pairs of texts.")
            n_special = facts.n_pair_tokens
        max_length = facts.max_length if self.max_length is None else int(self.max_length)
        if max_length > facts.position_limit:
            raise ValueError(
                f"max_length={max_length} is more than the {facts.position_limit} tokens this "
                "model has positions for."
            )
        if max_length <= n_special:
            raise ValueError(
                f"max_length={max_length} leaves no room for text beside the {n_special} special "
                f"tokens; use {n_special + 1} or more."
            )
        if self.long_documents == "window" and self.text_pair:
            raise ValueError("pairs of texts are not read in windows; use 'truncate' or 'error'.")
        if self.long_documents != "window" and self.window_overlap:
            raise ValueError(
                f"window_overlap={self.window_overlap} has a meaning with long_documents='window' "
                f"only; got {self.long_documents!r}."
            )
        if self.window_overlap >= max_length - n_special:
            raise ValueError(
                f"window_overlap={self.window_overlap} leaves no room for new tokens: a window "
                f"has {max_length - n_special} beside its {n_special} special tokens."
            )
        return max_length

    def _spec(self, n_layers: int, max_length: int) -> FeatureSpec:
        """Return what the parameters ask for, of a model with `n_layers` blocks."""
        states = StateSpec(
            layers=resolve_layers(self.layers, n_layers),
            poolings=resolve_poolings(self.pooling),
            layout=_layout(vars(self), max_length),
            dtype=self.dtype,
        )
        return FeatureSpec(states, self.layer_combination, self.norm, self.long_documents)

    def _fitted_spec(self) -> FeatureSpec:
        """Return what ``fit`` was asked for; raise if the parameters now ask for something else.

        A list that was changed in place is not a parameter that was set, so it changes nothing.
        """
        given = self._fitted_params
        if any(getattr(self, name) is not value for name, value in given.items()):
            self._validate_params()
        meant = {**given, "layers": self.layers_, "pooling": self._fitted_poolings}
        changed = [
            name
            for name in _WHAT
            if getattr(self, name) is not given[name] and self._meaning(name) != meant[name]
        ]
        if changed:
            changes = ", ".join(f"{n}={given[n]!r} to {getattr(self, n)!r}" for n in changed)
            raise ParameterChangedError(f"changed since fit: {changes}; call fit again.")
        states = StateSpec(
            layers=self.layers_,
            poolings=self._fitted_poolings,
            layout=_layout(given, self.max_length_),
            dtype=given["dtype"],
        )
        return FeatureSpec(
            states, given["layer_combination"], given["norm"], given["long_documents"]
        )

    def _meaning(self, name: str) -> Any:
        """Return a parameter in the form in which ``fit`` remembers it."""
        if name == "layers":
            return resolve_layers(self.layers, self.n_layers_)
        if name == "pooling":
            return resolve_poolings(self.pooling)
        return getattr(self, name)

    def _reference(self) -> ModelReference:
        """Return the fitted model: as it was in ``fit``, or where `model` was set to since."""
        if isinstance(self.model, PortableModel):
            self._check_same_model(self.model.fingerprint)
            return self._reference_to(self.model, None)
        if all(getattr(self, n) == self._fitted_params[n] for n in ("model", "revision")):
            return self._reference_to(self.model_path_ or os.fspath(self.model), self.revision_)
        with open_model(self.model, self.revision, self.local_files_only) as folder:
            self._check_same_model(fingerprint(folder.path))
            return self._reference_to(folder.path, None)

    def _check_same_model(self, identity: str) -> None:
        if identity != self.model_fingerprint_:
            raise FingerprintMismatchError(
                f"model={self.model!r} was set after fit and is another model than the one fitted: "
                f"its fingerprint is {identity[:12]}, not {self.model_fingerprint_[:12]}. Set "
                "model to a copy of the fitted one, or call fit again."
            )

    def _reference_to(self, name: str | PortableModel, revision: str | None) -> ModelReference:
        from ._models import ModelReference

        return ModelReference(
            name,
            revision,
            self.local_files_only,
            self.model_fingerprint_,
            self.n_layers_,
            self.hidden_size_,
        )


def _keep_index(estimator: BaseEstimator, features: NDArray[np.float32], X: Any) -> Any:
    """Give frames the index of `X` where scikit-learn does not.

    Before 1.7.1 it numbers the rows of a Series anew, and a ColumnTransformer that joins its frames
    by index then pairs features with the wrong rows.
    """
    if _SKLEARN_KEEPS_INDEX:
        return features
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(X, pandas.Series):
        return features
    if _get_output_config("transform", estimator)["dense"] != "pandas":
        return features
    return pandas.DataFrame(features, index=X.index, copy=False)


def _layout(parameters: Mapping[str, Any], max_length: int) -> TextLayout:
    """Return how a text becomes token ids under `parameters`."""
    in_windows = parameters["long_documents"] == "window"
    return TextLayout(
        max_length=max_length,
        special_tokens=parameters["special_tokens"],
        window_overlap=int(parameters["window_overlap"]) if in_windows else None,
        text_pair=bool(parameters["text_pair"]),
    )


def _check_poolings(spec: StateSpec, facts: ModelFacts) -> None:
    """Refuse the pooler where there is none, and warn of features that cannot vary."""
    pooler = [pooling.name for pooling in spec.poolings if pooling.reads == "pooler"]
    if pooler and not facts.has_pooler:
        raise ValueError(
            f"pooling {pooler[0]!r} needs trained pooler weights, which this {facts.model_type} "
            "checkpoint does not have; use 'cls' or 'mean'."
        )
    if pooler and spec.layers != (facts.n_layers,):
        raise ValueError(
            f"pooling {pooler[0]!r} is made from the last layer, {facts.n_layers}; got layers "
            f"{list(spec.layers)}. Use layers=-1."
        )
    if 0 in spec.layers and any(pooling.name == "cls" for pooling in spec.poolings):
        warn_caller(
            "layer 0 with pooling 'cls' is one constant vector: before the first block, [CLS] "
            "has not seen the text.",
            ConstantFeaturesWarning,
        )
