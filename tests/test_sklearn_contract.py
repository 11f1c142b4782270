"""BertLayerFeaturizer keeps the conventions of scikit-learn."""

import ast
import copy
import hashlib
import inspect
import io
import os
import pickle
import pickletools
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import cloudpickle
import joblib
import numpy as np
import pandas as pd
import polars as pl
import pytest
import sklearn
import sklearn.utils.estimator_checks
import skops.io
import torch
import transformers
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import FitFailedWarning, NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import estimator_html_repr, get_tags
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.validation import check_is_fitted, validate_data

from sklearn_bert import BertLayerFeaturizer, FeatureCache, Pooling, _featurizer
from sklearn_bert._pooling import POOLINGS
from sklearn_bert.exceptions import (
    FingerprintMismatchError,
    ModelFilesError,
    ParameterChangedError,
    TruncationWarning,
)
from sklearn_bert.testing import make_bert

PICKLES = Path(__file__).parent / "data" / "pickles"
TEXTS = ["a good film", "bad", "the plot was awful and i hated it very much", "", "bad", "loved it"]
HEAVY = ("torch", "transformers", "tokenizers", "huggingface_hub")


@pytest.fixture(scope="module", autouse=True)
def _on_one_core():
    """The models of these tests are tiny: wait for no other core and no accelerator."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
        yield
    torch.set_num_threads(n_threads)


@pytest.fixture
def unloaded(tmp_path):
    """Folder of a model that no other test has loaded."""
    seed = int.from_bytes(hashlib.sha256(str(tmp_path).encode()).digest()[:4])
    return make_bert(tmp_path / "model", n_layers=2, hidden_size=16, seed=seed)


@pytest.fixture
def loads(monkeypatch):
    """List that grows by one whenever the weights of a model are loaded."""
    seen = []
    load = transformers.AutoModel.from_pretrained

    def counted(*args, **kwargs):
        seen.append(args)
        return load(*args, **kwargs)

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", counted)
    return seen


def run_python(code, env, cwd, *args):
    """Run code in a new Python and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- scikit-learn's own checks


class NumbersAsTexts(BertLayerFeaturizer):
    """Takes a matrix of numbers and reads each of its rows as a text.

    The common checks of scikit-learn pass matrices of numbers, so for an estimator of texts they
    are skipped. This one lets them run against everything but the reading of X.
    """

    def fit(self, X, y=None):
        return super().fit(_as_texts(X, validate_data(self, X)), y)

    def fit_transform(self, X, y=None):
        return super().fit_transform(_as_texts(X, validate_data(self, X)), y)

    def transform(self, X):
        check_is_fitted(self)
        return super().transform(_as_texts(X, validate_data(self, X, reset=False)))

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.string = False
        tags.input_tags.one_d_array = False
        tags.input_tags.two_d_array = True
        return tags


def _as_texts(X, numbers):
    texts = [" ".join(f"{number:.1f}" for number in row[:6]) for row in numbers]
    return pd.DataFrame({"text": texts}, X.index) if isinstance(X, pd.DataFrame) else texts


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers")
    return NumbersAsTexts(make_bert(folder, n_layers=1, hidden_size=8, max_length=128))


def test_all_common_checks_of_scikit_learn_run_and_pass(numbers, monkeypatch):
    monkeypatch.setenv("SCIPY_ARRAY_API", "1")  # or the check with NumPy's namespace is skipped
    results = check_estimator(numbers, on_skip=None, on_fail=None)
    not_passed = {
        result["check_name"]: (result["status"], result["exception"])
        for result in results
        if result["status"] != "passed"
    }
    assert not_passed == {}
    assert len(results) >= 46


@pytest.mark.filterwarnings("ignore:X (has|does not have valid) feature names")
@pytest.mark.parametrize(
    "check",
    [
        "check_set_output_transform",
        "check_set_output_transform_pandas",
        "check_set_output_transform_polars",
        "check_global_output_transform_pandas",
        "check_global_set_output_transform_polars",
        "check_get_feature_names_out_error",
        "check_param_validation",
        "check_dataframe_column_names_consistency",
        "check_inplace_ensure_writeable",
    ],
)
def test_checks_that_scikit_learn_has_for_its_own_transformers_pass(numbers, check):
    getattr(sklearn.utils.estimator_checks, check)("NumbersAsTexts", numbers)


def test_the_tags_say_one_column_of_texts_that_needs_fit(tiny):
    tags = get_tags(BertLayerFeaturizer(tiny))
    assert tags.input_tags.string
    assert tags.input_tags.one_d_array
    assert not tags.input_tags.two_d_array
    assert not tags.input_tags.sparse
    assert not tags.input_tags.allow_nan
    assert not tags.target_tags.required
    assert tags.requires_fit
    assert tags.transformer_tags is not None
    assert not tags.non_deterministic


# --- parameters

# What decides the features: values that change them, and values that mean what was fitted.
FITTED = {"layers": [1, 2], "pooling": ["mean", "cls"]}
CHANGES_FEATURES = {
    "layers": [[2, 1], 1, "all", range(4), np.array([1, 3]), (0, 2)],
    "layer_combination": ["mean", "sum", "max"],
    "pooling": [["cls", "mean"], "mean", "max", ("mean", "last"), POOLINGS["mean"]],
    "special_tokens": ["exclude"],
    "norm": ["l2"],
    "max_length": [4, 64],
    "long_documents": ["error", "window"],
    "missing": ["empty"],
    "dtype": ["bfloat16", "float16"],
}
# They need other values of other parameters, or another X, and have tests of their own.
CHANGE_FEATURES_TOO = {"window_overlap", "text_pair"}
MEANS_THE_SAME = [
    ({"layers": -1}, {"layers": 3}),
    ({"layers": 3}, {"layers": np.int64(-1)}),
    ({"layers": 2}, {"layers": [2]}),
    ({"layers": [1, 2]}, {"layers": (1, 2)}),
    ({"layers": [1, 2]}, {"layers": [-3, -2]}),
    ({"layers": (1, 2)}, {"layers": range(1, 3)}),
    ({"layers": range(1, 3)}, {"layers": np.array([1, 2])}),
    ({"layers": np.array([1, 2])}, {"layers": np.array([1, -2])}),
    ({"layers": "all"}, {"layers": range(4)}),
    ({"pooling": "mean"}, {"pooling": ["mean"]}),
    ({"pooling": "mean"}, {"pooling": POOLINGS["mean"]}),
    ({"pooling": ["mean", "cls"]}, {"pooling": ("mean", POOLINGS["cls"])}),
    ({"norm": None}, {"norm": None}),
]
SAME_FEATURES_HERE = [
    ("long_documents", "error"),
    ("long_documents", "window"),
    ("max_length", 64),
    ("missing", "empty"),
]
IDENTIFIES_THE_MODEL = {"model", "revision"}
CHANGES_SPEED_ONLY = {
    "device": ["cpu", torch.device("cpu"), "auto"],
    "batch_tokens": [1, 7, 100_000, "auto"],
    "cache": ["memory", FeatureCache("memory", layers="requested"), None],
    "local_files_only": [True, False],
    "verbose": [True, 1, False],
}


def test_every_parameter_either_decides_the_features_or_only_the_speed():
    named = IDENTIFIES_THE_MODEL | CHANGES_FEATURES.keys() | CHANGES_SPEED_ONLY.keys()
    named |= CHANGE_FEATURES_TOO
    assert set(BertLayerFeaturizer().get_params()) == named


@pytest.mark.parametrize(
    "params",
    [
        {"model": "some/model"},
        {"model": Path("some") / "model"},
        {"layers": [1, 2]},
        {"layers": (1, 2)},
        {"layers": range(3)},
        {"layers": np.array([1, 2])},
        {"layers": "no layer", "pooling": 17, "max_length": -3, "device": object},
        {"pooling": ["mean", POOLINGS["cls"]]},
        {"device": torch.device("cpu")},
        {"cache": FeatureCache("memory", poolings=["mean"])},
        {"verbose": 2},
    ],
    ids=repr,
)
def test_parameters_are_stored_untouched_and_cloned(params):
    featurizer = BertLayerFeaturizer(**params)
    for name, value in params.items():
        assert getattr(featurizer, name) is value
        assert featurizer.get_params()[name] is value
    cloned = clone(featurizer)
    for name, value in params.items():
        np.testing.assert_array_equal(getattr(cloned, name), value)
        assert type(getattr(cloned, name)) is type(value)
    again = BertLayerFeaturizer().set_params(**params)
    assert all(getattr(again, name) is value for name, value in params.items())


def test_get_params_and_set_params_are_each_others_inverse(tiny):
    featurizer = BertLayerFeaturizer(
        tiny, layers=(1, 2), pooling="cls", norm="l2", max_length=9, verbose=True
    )
    params = featurizer.get_params()
    assert BertLayerFeaturizer().set_params(**params).get_params() == params
    assert BertLayerFeaturizer(**params).get_params() == params
    assert list(params) == sorted(inspect.signature(BertLayerFeaturizer).parameters)
    assert featurizer.set_params(norm=None) is featurizer
    with pytest.raises(ValueError, match="Invalid parameter 'layer'"):
        featurizer.set_params(layer=1)


def test_all_parameters_but_the_model_are_keyword_only():
    parameters = list(inspect.signature(BertLayerFeaturizer).parameters.values())
    assert parameters[0].name == "model"
    assert {parameter.kind for parameter in parameters[1:]} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    "params",
    [{"layers": [1, -1], "pooling": ["mean", "cls"]}, {"layers": np.array([1, 2])}],
    ids=repr,
)
def test_fit_and_transform_change_no_parameter(tiny, params):
    given = copy.deepcopy(params)
    featurizer = BertLayerFeaturizer(tiny, **params)
    before = featurizer.get_params()
    featurizer.fit(TEXTS).transform(TEXTS)
    featurizer.fit_transform(TEXTS)
    after = featurizer.get_params()
    assert before.keys() == after.keys()
    assert all(after[name] is before[name] for name in before)
    for name, value in given.items():
        np.testing.assert_array_equal(params[name], value)


@pytest.mark.parametrize("form", [list, np.array], ids=["list", "array"])
@pytest.mark.parametrize("copied", [False, True], ids=["itself", "unpickled"])
def test_a_list_that_the_caller_changes_after_fit_changes_nothing(tiny, form, copied):
    layers, pooling = form([1, 2]), ["mean", "cls"]
    featurizer = BertLayerFeaturizer(tiny, layers=layers, pooling=pooling).fit(TEXTS)
    features, names = featurizer.transform(TEXTS), featurizer.get_feature_names_out()
    layers[0] = 3
    pooling.reverse()
    if copied:
        featurizer = pickle.loads(pickle.dumps(featurizer))
    np.testing.assert_array_equal(featurizer.transform(TEXTS), features)
    np.testing.assert_array_equal(featurizer.get_feature_names_out(), names)
    assert featurizer.layers_ == (1, 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in CHANGES_FEATURES.items() for value in values],
    ids=repr,
)
def test_a_parameter_that_changes_the_features_raises_until_the_next_fit(tiny, name, value):
    featurizer = BertLayerFeaturizer(tiny, **FITTED).fit(TEXTS)
    features, names = featurizer.transform(TEXTS), featurizer.get_feature_names_out()
    fitted_value = getattr(featurizer, name)

    featurizer.set_params(**{name: value})
    for use in (featurizer.get_feature_names_out, lambda: featurizer.transform(TEXTS)):
        with pytest.raises(ParameterChangedError, match="fit again") as error:
            use()
        assert isinstance(error.value, NotFittedError)
        assert f"{name}={fitted_value!r} to {value!r}" in str(error.value)

    featurizer.set_params(**{name: fitted_value})
    np.testing.assert_array_equal(featurizer.transform(TEXTS), features)
    np.testing.assert_array_equal(featurizer.get_feature_names_out(), names)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruncationWarning)
        warnings.filterwarnings("ignore", "layer 0 with pooling 'cls'")
        refitted = featurizer.set_params(**{name: value}).fit(TEXTS).transform(TEXTS)
    assert len(featurizer.get_feature_names_out()) == refitted.shape[1]
    same = np.array_equal(refitted, features)
    assert same == ((name, value) in SAME_FEATURES_HERE)


def test_all_changed_parameters_are_named_in_one_error(tiny):
    featurizer = BertLayerFeaturizer(tiny).fit(TEXTS).set_params(layers=1, norm="l2")
    with pytest.raises(ParameterChangedError, match="layers=-1 to 1, norm=None to 'l2'"):
        featurizer.transform(TEXTS)


@pytest.mark.parametrize(("fitted", "equal"), MEANS_THE_SAME, ids=repr)
def test_a_parameter_set_to_the_same_meaning_needs_no_fit(tiny, fitted, equal):
    featurizer = BertLayerFeaturizer(tiny, **fitted).fit(TEXTS)
    features, names = featurizer.transform(TEXTS), featurizer.get_feature_names_out()
    featurizer.set_params(**equal)
    np.testing.assert_array_equal(featurizer.transform(TEXTS), features)
    np.testing.assert_array_equal(featurizer.get_feature_names_out(), names)


def test_another_model_is_refused_until_the_next_fit(tiny, unloaded, tmp_path):
    featurizer = BertLayerFeaturizer(tiny).fit(TEXTS)
    features = featurizer.transform(TEXTS)
    featurizer.set_params(model=unloaded)
    with pytest.raises(FingerprintMismatchError, match="fit again"):
        featurizer.transform(TEXTS)
    moved = shutil.copytree(tiny, tmp_path / "moved")
    np.testing.assert_array_equal(featurizer.set_params(model=moved).transform(TEXTS), features)
    np.testing.assert_array_equal(featurizer.set_params(model=str(tiny)).transform(TEXTS), features)
    assert featurizer.set_params(model=unloaded).fit(TEXTS).transform(TEXTS).shape == (6, 16)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in CHANGES_SPEED_ONLY.items() for value in values],
    ids=repr,
)
def test_a_parameter_that_changes_only_the_speed_needs_no_fit(tiny, name, value):
    featurizer = BertLayerFeaturizer(tiny, device="cpu", **FITTED).fit(TEXTS)
    features = featurizer.transform(TEXTS)
    featurizer.set_params(**{name: value})
    np.testing.assert_array_equal(featurizer.transform(TEXTS), features)


def test_a_new_device_takes_effect_at_the_next_call(tiny):
    featurizer = BertLayerFeaturizer(tiny, device="cpu").fit(TEXTS)
    features = featurizer.transform(TEXTS)
    featurizer.set_params(device="meta")  # no machine computes on it
    with pytest.raises(RuntimeError, match=r"device='meta'.*set_params\(device="):
        featurizer.transform(TEXTS)
    np.testing.assert_array_equal(featurizer.set_params(device="cpu").transform(TEXTS), features)


def test_a_new_batch_size_takes_effect_at_the_next_call(tiny, passes):
    featurizer = BertLayerFeaturizer(tiny, device="cpu").fit(TEXTS)
    texts = ["good", "bad", "film", "plot"]  # 3 tokens each
    for batch_tokens, shapes in [
        (3, [[(1, 3)]] * 4),
        (6, [[(2, 3)]] * 2),
        (9, [[(3, 3)], [(1, 3)]]),
    ]:
        featurizer.set_params(batch_tokens=batch_tokens).transform(texts)
        assert passes == shapes
        passes.clear()


def test_a_new_cache_takes_effect_at_the_next_call(unloaded, passes):
    featurizer = BertLayerFeaturizer(unloaded).fit(TEXTS)
    features = featurizer.transform(TEXTS)
    for cache, runs in [("memory", True), ("memory", False), (None, True), (None, True)]:
        passes.clear()
        np.testing.assert_array_equal(featurizer.set_params(cache=cache).transform(TEXTS), features)
        assert bool(passes) == runs


def test_verbose_takes_effect_at_the_next_call(tiny, capfd):
    featurizer = BertLayerFeaturizer(tiny).fit(TEXTS)
    featurizer.transform(TEXTS)
    assert capfd.readouterr() == ("", "")
    featurizer.set_params(verbose=True).transform(TEXTS)
    assert "5/5" in capfd.readouterr().err  # distinct texts
    featurizer.set_params(verbose=False).transform(TEXTS)
    assert capfd.readouterr() == ("", "")


def test_local_files_only_takes_effect_at_the_next_call(unloaded, tmp_path, monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    fetched = shutil.copytree(unloaded, tmp_path / ("0123456789" * 4))

    def snapshot_download(name, *, local_files_only=False, **_):
        if local_files_only:
            raise LocalEntryNotFoundError("nothing in the cache")
        return str(fetched)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.model_info", lambda name, revision: None)
    featurizer = BertLayerFeaturizer("some/model").fit(TEXTS)
    featurizer.set_params(local_files_only=True)
    with pytest.raises(ModelFilesError, match="local_files_only=True"):
        featurizer.transform(TEXTS)
    assert featurizer.set_params(local_files_only=False).transform(TEXTS).shape == (6, 16)


@pytest.mark.parametrize(
    "params",
    [
        {"batch_tokens": 0},
        {"batch_tokens": "all"},
        {"device": 7},
        {"local_files_only": "no"},
        {"cache": 7},
    ],
    ids=repr,
)
def test_a_wrong_value_set_after_fit_is_refused_at_the_next_call(tiny, params):
    featurizer = BertLayerFeaturizer(tiny).fit(TEXTS).set_params(**params)
    with pytest.raises((TypeError, ValueError), match=next(iter(params))):
        featurizer.transform(TEXTS)


# --- fit and transform


@pytest.mark.parametrize("method", ["transform", "get_feature_names_out"])
def test_nothing_can_be_had_before_fit(tiny, method):
    featurizer = BertLayerFeaturizer(tiny)
    fitted_and_cloned = clone(BertLayerFeaturizer(tiny).fit(TEXTS))
    for unfitted in (featurizer, fitted_and_cloned):
        with pytest.raises(NotFittedError, match="not fitted yet"):
            getattr(unfitted, method)(TEXTS)
        assert [name for name in vars(unfitted) if name.endswith("_")] == []


def test_fit_returns_the_estimator_itself(tiny):
    featurizer = BertLayerFeaturizer(tiny)
    assert featurizer.fit(TEXTS) is featurizer
    check_is_fitted(featurizer)


@pytest.mark.parametrize("y", [None, [1, 0], list("abcdef"), np.nan, object(), [[1, 2]] * 6])
def test_y_is_ignored(tiny, y):
    expected = BertLayerFeaturizer(tiny).fit_transform(TEXTS)
    np.testing.assert_array_equal(BertLayerFeaturizer(tiny).fit_transform(TEXTS, y), expected)
    np.testing.assert_array_equal(
        BertLayerFeaturizer(tiny).fit(TEXTS, y).transform(TEXTS), expected
    )


@pytest.mark.parametrize("params", [{}, FITTED, {"norm": "l2", "layers": "all"}], ids=repr)
def test_fit_and_transform_can_be_repeated_and_joined(tiny, params):
    featurizer = BertLayerFeaturizer(tiny, **params)
    joined = featurizer.fit_transform(TEXTS)
    state = pickle.dumps(featurizer)
    np.testing.assert_array_equal(featurizer.transform(TEXTS), joined)
    np.testing.assert_array_equal(featurizer.transform(TEXTS), joined)
    assert pickle.dumps(featurizer) == state
    np.testing.assert_array_equal(featurizer.fit(TEXTS).transform(TEXTS), joined)
    np.testing.assert_array_equal(clone(featurizer).fit(["other"]).transform(TEXTS), joined)


def test_refit_replaces_all_that_was_fitted(tiny, unloaded):
    featurizer = BertLayerFeaturizer(tiny, layers=[1, 2], pooling=["mean", "cls"]).fit(TEXTS)
    assert len(featurizer.get_feature_names_out()) == 2 * 2 * 32
    featurizer.set_params(model=unloaded, layers=-1, pooling="max", max_length=16).fit(TEXTS)
    fresh = BertLayerFeaturizer(unloaded, pooling="max", max_length=16).fit(TEXTS)
    assert vars(featurizer) == vars(fresh)
    features = featurizer.transform(TEXTS)
    np.testing.assert_array_equal(features, fresh.transform(TEXTS))
    assert features.shape == (6, 16)
    assert len(featurizer.get_feature_names_out()) == 16


def test_a_copy_that_is_refitted_leaves_the_original_alone(tiny, loads):
    short = "good film " * 3
    texts = [short * 5, "bad"]
    a = BertLayerFeaturizer(tiny, max_length=8).fit(texts)
    b = copy.deepcopy(a).set_params(max_length=14).fit(texts)
    for _ in range(2):
        with pytest.warns(TruncationWarning, match="max_length=8"):
            np.testing.assert_array_equal(a.transform(texts), a.transform([short, "bad"]))
        with pytest.warns(TruncationWarning, match="max_length=14"):
            np.testing.assert_array_equal(b.transform(texts), b.transform([short * 2, "bad"]))
    assert len(loads) <= 1  # 0 if another test has used this model


def test_fitted_attributes_are_small_plain_values(tiny):
    featurizer = BertLayerFeaturizer(tiny, layers=np.array([1, -1])).fit(TEXTS)
    featurizer.transform(TEXTS)
    fitted = {name: value for name, value in vars(featurizer).items() if name.endswith("_")}
    assert fitted.keys() >= {
        "layers_", "hidden_size_", "n_layers_", "max_length_", "model_fingerprint_", "revision_",
    }  # fmt: skip
    for name, value in fitted.items():
        for item in value if isinstance(value, tuple) else (value,):
            assert type(item) in (int, str, type(None)), name
    assert featurizer.layers_ == (1, 3)
    assert (featurizer.n_layers_, featurizer.hidden_size_, featurizer.max_length_) == (3, 32, 64)


# --- loading only when needed


def test_the_weights_are_loaded_by_the_first_transform_and_then_shared(unloaded, loads, passes):
    featurizer = clone(BertLayerFeaturizer(unloaded).set_params(layers=1)).set_params(layers=-1)
    fitted = featurizer.fit(TEXTS)
    copies = [copy.deepcopy(fitted), pickle.loads(pickle.dumps(fitted)), clone(fitted).fit(TEXTS)]
    assert (loads, passes) == ([], [])
    features = fitted.transform(TEXTS)
    assert len(loads) == 1
    copies += [copy.deepcopy(fitted), clone(fitted).set_params(layers=2).fit(TEXTS)]
    for other in copies:
        np.testing.assert_array_equal(other.transform(TEXTS), features)
    assert len(loads) == 1


def test_fit_transform_runs_the_model_once_per_batch(tiny, passes):
    BertLayerFeaturizer(tiny).fit_transform(["good", "bad film", "bad", "good", "plot"])
    assert passes == [[(1, 4), (3, 3)]]  # distinct texts, grouped by length


def test_looking_at_an_estimator_loads_nothing(unloaded, loads, passes):
    for featurizer in (BertLayerFeaturizer(unloaded), BertLayerFeaturizer(unloaded).fit(TEXTS)):
        _look_at(featurizer)
        _look_at(make_pipeline(featurizer, LogisticRegression()))
    assert (loads, passes) == ([], [])
    featurizer.transform(TEXTS)
    assert len(loads) == 1


def _look_at(estimator):
    assert "BertLayerFeaturizer" in repr(estimator)
    assert "BertLayerFeaturizer" in estimator_html_repr(estimator)
    assert "BertLayerFeaturizer" in estimator._repr_html_()
    assert estimator._repr_mimebundle_()
    for name in dir(estimator):
        getattr(estimator, name, None)


LOOK = (
    inspect.getsource(_look_at)
    + f"""
import sys
from sklearn.base import clone
from sklearn.utils import estimator_html_repr

def heavy():
    return [name for name in {HEAVY} if name in sys.modules]
"""
)


def test_importing_the_package_imports_neither_torch_nor_transformers(subprocess_env, tmp_path):
    code = f"import sys, sklearn_bert; print([m for m in {HEAVY} if m in sys.modules])"
    assert run_python(code, subprocess_env, tmp_path) == "[]"


def test_an_unfitted_estimator_needs_no_torch(subprocess_env, tmp_path):
    code = f"""{LOOK}
import pickle
from sklearn_bert import BertLayerFeaturizer, Pooling

featurizer = BertLayerFeaturizer("some/model", layers=[1, 2], pooling=Pooling("sum", sum))
_look_at(featurizer)
_look_at(clone(featurizer).set_params(layers=1))
_look_at(pickle.loads(pickle.dumps(featurizer)))
try:
    featurizer.transform(["a"])
except ValueError as error:
    print(type(error).__name__, heavy())
"""
    assert run_python(code, subprocess_env, tmp_path) == "NotFittedError []"


# --- pickling


def _joblib_bytes(estimator):
    file = io.BytesIO()
    joblib.dump(estimator, file)
    return file.getvalue()


def _skops_bytes(estimator):
    return skops.io.dumps(estimator, compression=zipfile.ZIP_DEFLATED)


def _skops_types(stream):
    return skops.io.get_untrusted_types(data=stream)


DUMPS = {
    **{f"pickle {n}": lambda e, n=n: pickle.dumps(e, n) for n in range(2, 6)},
    "cloudpickle": cloudpickle.dumps,
    "joblib": _joblib_bytes,
}
ROUND_TRIPS = {
    **{name: lambda e, dumps=dumps: pickle.loads(dumps(e)) for name, dumps in DUMPS.items()},
    "joblib": lambda e: joblib.load(io.BytesIO(_joblib_bytes(e))),
    "skops": lambda e: skops.io.loads(_skops_bytes(e), trusted=_skops_types(_skops_bytes(e))),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}
PARAMS = [
    {},
    {"layers": [1, -1], "pooling": ["mean", POOLINGS["max"]], "norm": "l2"},
    {"layers": range(1, 3), "layer_combination": "mean", "special_tokens": "exclude"},
    {"cache": FeatureCache("memory", layers="requested")},
]


def global_names(stream):
    """Modules and names that unpickling a stream would import."""
    names, strings = [], []
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name == "GLOBAL":
            names.append(argument.replace(" ", "."))
        elif opcode.name == "STACK_GLOBAL":
            # its module and name may have been fetched from the memo: all strings so far count
            names.extend(strings)
        elif isinstance(argument, str):
            strings.append(argument)
    return names


def test_globals_of_torch_would_be_found_in_a_stream():
    for protocol in range(2, 6):
        stream = pickle.dumps([torch.device("cpu"), torch.nn.Linear(1, 1)], protocol)
        assert any(name.split(".")[0] == "torch" for name in global_names(stream))


@pytest.mark.parametrize("when", ["before fit", "after fit", "after use"])
@pytest.mark.parametrize("round_trip", ROUND_TRIPS)
@pytest.mark.parametrize("params", [*PARAMS, {"layers": np.array([1, -1])}], ids=repr)
def test_copies_give_the_same_bits(tiny, params, round_trip, when):
    featurizer = BertLayerFeaturizer(tiny, **params)
    if when != "before fit":
        featurizer.fit(TEXTS)
    if when == "after use":
        featurizer.transform(TEXTS)
    other = ROUND_TRIPS[round_trip](featurizer)
    assert repr(other) == repr(featurizer)
    if when == "before fit":
        assert vars(other).keys() == vars(featurizer).keys()
        featurizer.fit(TEXTS)
        other.fit(TEXTS)
    np.testing.assert_array_equal(other.transform(TEXTS), featurizer.transform(TEXTS))
    np.testing.assert_array_equal(other.get_feature_names_out(), featurizer.get_feature_names_out())


@pytest.mark.parametrize("when", ["before fit", "after fit", "after use"])
@pytest.mark.parametrize("dumps", DUMPS)
@pytest.mark.parametrize("params", PARAMS, ids=repr)
def test_a_pickle_is_small_and_holds_nothing_of_torch(tiny, params, dumps, when):
    featurizer = BertLayerFeaturizer(tiny, **params)
    if when != "before fit":
        featurizer.fit(TEXTS)
    if when == "after use":
        featurizer.transform(TEXTS)
    stream = DUMPS[dumps](featurizer)
    assert len(stream) < 10_000
    names = global_names(stream)
    assert any("BertLayerFeaturizer" in name for name in names)
    assert [name for name in names if name.split(".")[0] in HEAVY] == []


@pytest.mark.parametrize("when", ["before fit", "after fit", "after use"])
@pytest.mark.parametrize("params", [*PARAMS, {"device": torch.device("cpu")}], ids=repr)
def test_a_skops_file_is_small_and_names_no_private_function(tiny, params, when):
    featurizer = BertLayerFeaturizer(str(tiny), **params)
    if when != "before fit":
        featurizer.fit(TEXTS)
    if when == "after use":
        featurizer.transform(TEXTS)
    stream = _skops_bytes(featurizer)
    assert len(stream) < 10_000
    names = [name.rpartition(".")[2] for name in _skops_types(stream)]
    assert set(names) <= {"BertLayerFeaturizer", "FeatureCache", "Pooling", "range"}


def test_a_pickle_of_a_device_holds_its_name_only(tiny):
    """An estimator from a GPU box was unreadable where torch, or its device, is not."""
    featurizer = BertLayerFeaturizer(tiny, device=torch.device("cpu")).fit(TEXTS)
    expected = featurizer.transform(TEXTS)
    featurizer.set_params(device=torch.device("cuda:1"))
    for name, dumps in DUMPS.items():
        stream = dumps(featurizer)
        assert b"torch" not in stream
        loaded = ROUND_TRIPS[name](featurizer)
        assert loaded.device == "cuda:1"
        with pytest.raises(RuntimeError, match=r"'cuda:1' is not .*set_params\(device='cpu'\)"):
            loaded.transform(TEXTS)
        np.testing.assert_array_equal(loaded.set_params(device="cpu").transform(TEXTS), expected)
    assert featurizer.device == torch.device("cuda:1")  # as it was given


def test_nothing_wakes_cuda_but_its_use(tiny, monkeypatch):
    """A child that is forked after CUDA was woken cannot use it."""
    saved = pickle.dumps(BertLayerFeaturizer(tiny).fit(TEXTS).set_params(device="cuda"))
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was woken"))
    monkeypatch.setattr(torch._C, "_cuda_init", lambda: pytest.fail("CUDA was woken"), False)
    loaded = clone(pickle.loads(saved)), copy.deepcopy(pickle.loads(saved))
    for featurizer in (BertLayerFeaturizer(tiny, device="cuda"), *loaded):
        assert repr(featurizer)
        assert estimator_html_repr(featurizer)
    assert len(loaded[1].get_feature_names_out()) == 32
    BertLayerFeaturizer(tiny, device="cpu").fit(TEXTS).transform(TEXTS)


def test_a_pickle_does_not_grow_with_the_model(tiny, tmp_path):
    wide = make_bert(tmp_path / "wide", n_layers=2, hidden_size=256)
    assert os.path.getsize(wide / "model.safetensors") > 10 * os.path.getsize(
        tiny / "model.safetensors"
    )
    sizes = []
    for folder in (tiny, wide):
        pipe = make_pipeline(BertLayerFeaturizer(folder), StandardScaler(with_std=False))
        pipe.fit(TEXTS).transform(TEXTS)
        sizes.append(len(pickle.dumps(pipe[0])))
    assert abs(sizes[0] - sizes[1]) < 500  # the lengths of the paths differ


@pytest.mark.parametrize("dump", ["pickle", "joblib", "cloudpickle"])
def test_a_fitted_pipeline_is_loaded_without_torch(tiny, subprocess_env, tmp_path, dump):
    pipe = make_pipeline(BertLayerFeaturizer(tiny, **FITTED), LogisticRegression())
    pipe.fit(TEXTS, [1, 0, 0, 1, 0, 1]).predict(TEXTS)
    dumping = {"pickle": pickle, "joblib": joblib, "cloudpickle": cloudpickle}[dump]
    with (tmp_path / "pipe").open("wb") as file:
        dumping.dump(pipe, file)
    code = f"""{LOOK}
import joblib, pickle
pipe = {dump.removeprefix("cloud")}.load(open("pipe", "rb"))
_look_at(pipe)
_look_at(pipe[0])
pipe[0].get_feature_names_out()
clone(pipe)
print(heavy())
"""
    assert run_python(code, subprocess_env, tmp_path) == "[]"


def test_an_unpickled_estimator_gives_the_same_bits_in_another_process(
    tiny, subprocess_env, tmp_path
):
    featurizer = BertLayerFeaturizer(tiny, device="cpu", **FITTED).fit(TEXTS)
    (tmp_path / "featurizer").write_bytes(pickle.dumps(featurizer))
    code = f"""
import pickle
features = pickle.load(open("featurizer", "rb")).transform({TEXTS!r})
print(features.shape, features.tobytes().hex())
"""
    expected = featurizer.transform(TEXTS)
    printed = run_python(code, subprocess_env, tmp_path)
    assert printed == f"{expected.shape} {expected.tobytes().hex()}"


def spread(states):
    return states.amax(dim=1) - states.amin(dim=1)


def test_a_pooling_of_the_user_is_pickled_by_name_or_by_value(tiny):
    by_name = BertLayerFeaturizer(tiny, pooling=Pooling("spread", spread)).fit(TEXTS)
    by_value = BertLayerFeaturizer(
        tiny, pooling=["mean", Pooling("spread", lambda s: s.amax(dim=1) - s.amin(dim=1))]
    ).fit(TEXTS)
    for featurizer, dumps in ((by_name, pickle.dumps), (by_value, cloudpickle.dumps)):
        other = pickle.loads(dumps(featurizer))
        np.testing.assert_array_equal(other.transform(TEXTS), featurizer.transform(TEXTS))
    np.testing.assert_array_equal(by_value.transform(TEXTS)[:, 32:], by_name.transform(TEXTS))


# --- output containers and feature names


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"layers": [2, 0], "pooling": ["mean", "max"]},
        {"layers": "all", "layer_combination": "mean", "pooling": ("min", "last", "mean_sqrt_len")},
    ],
    ids=repr,
)
def test_feature_names_are_unique_and_one_for_each_column(tiny, params):
    featurizer = BertLayerFeaturizer(tiny, **params)
    features = featurizer.fit_transform(TEXTS)
    names = featurizer.get_feature_names_out()
    assert names.dtype == object
    assert {type(name) for name in names} == {str}
    assert len(set(names)) == len(names) == features.shape[1]
    np.testing.assert_array_equal(featurizer.get_feature_names_out(["text"]), names)


def test_feature_names_say_layer_pooling_and_dimension_in_the_order_of_the_columns(tiny):
    featurizer = BertLayerFeaturizer(tiny, layers=[2, -1], pooling=["max", "cls"])
    frame = featurizer.set_output(transform="pandas").fit_transform(TEXTS)
    for layer in (2, 3):
        for pooling in ("max", "cls"):
            alone = BertLayerFeaturizer(tiny, layers=layer, pooling=pooling).fit_transform(TEXTS)
            columns = [f"layer{layer}_{pooling}_{dimension:02d}" for dimension in range(32)]
            np.testing.assert_array_equal(frame[columns].to_numpy(), alone)


def test_feature_names_sort_in_the_order_of_the_columns(tmp_path):
    deep = make_bert(tmp_path / "deep", n_layers=12, hidden_size=8)
    featurizer = BertLayerFeaturizer(deep, layers="all").fit(TEXTS)
    names = featurizer.get_feature_names_out().tolist()
    assert names == sorted(names)
    assert (names[0], names[-1]) == ("layer00_mean_0", "layer12_mean_7")


@pytest.mark.parametrize("kind", ["Series", "frame"])
def test_the_index_of_a_column_is_kept_in_pandas_output(tiny, kind):
    featurizer = BertLayerFeaturizer(tiny).fit(TEXTS)
    expected = featurizer.transform(TEXTS)
    featurizer.set_output(transform="pandas")
    series = pd.Series(TEXTS, index=[7, 3, 99, 0, 4, 12], name="text")
    order = [4, 2, 0, 5, 1, 3]
    X = (series if kind == "Series" else series.to_frame()).iloc[order]
    for output in (featurizer.transform(X), clone(featurizer).fit_transform(X)):
        assert isinstance(output, pd.DataFrame)
        assert output.index.tolist() == [4, 99, 7, 12, 3, 0]
        assert output.columns.tolist() == featurizer.get_feature_names_out().tolist()
        np.testing.assert_array_equal(output.to_numpy(), expected[order])


@pytest.mark.parametrize(
    "container",
    [list, tuple, iter, np.array, pl.Series, pd.Index, lambda t: pl.DataFrame({"text": t})],
    ids=["list", "tuple", "iterator", "array", "polars Series", "Index", "polars frame"],
)
@pytest.mark.parametrize("output", ["pandas", "polars"])
def test_set_output_makes_frames_of_every_container(tiny, container, output):
    featurizer = BertLayerFeaturizer(tiny, **FITTED).fit(TEXTS)
    expected = featurizer.transform(TEXTS)
    frame = featurizer.set_output(transform=output).transform(container(TEXTS))
    assert isinstance(frame, pd.DataFrame if output == "pandas" else pl.DataFrame)
    assert list(frame.columns) == featurizer.get_feature_names_out().tolist()
    np.testing.assert_array_equal(frame.to_numpy(), expected)
    empty = featurizer.transform(container([]) if container is not np.array else np.array([], str))
    assert empty.shape == (0, expected.shape[1])
    back = featurizer.set_output(transform="default").transform(TEXTS)
    assert type(back) is np.ndarray


# --- in other estimators


@pytest.fixture(scope="module")
def reviews():
    return pd.DataFrame(
        {"title": TEXTS[::-1], "stars": [5, 1, 1, 3, 2, 4], "text": TEXTS},
        index=[7, 3, 99, 0, 4, 12],
    )


@pytest.mark.parametrize("column", ["text", ["text"], 2, [2], slice("text", "text")], ids=repr)
@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_column_transformer_passes_a_column_in_any_form(tiny, reviews, column, kind):
    X = reviews if kind == "pandas" else pl.from_pandas(reviews)
    featurizer = BertLayerFeaturizer(tiny)
    columns = ColumnTransformer([("bert", featurizer, column)])
    expected = featurizer.fit_transform(TEXTS)
    np.testing.assert_array_equal(columns.fit_transform(X), expected)
    np.testing.assert_array_equal(columns.transform(X), expected)


@pytest.mark.parametrize("column", [0, [0]], ids=repr)
@pytest.mark.parametrize("kind", ["array", "frame without column names"])
def test_column_transformer_passes_a_column_that_has_no_name(tiny, column, kind):
    X = np.array([[text, 1] for text in TEXTS], dtype=object)
    X = X if kind == "array" else pd.DataFrame(X)
    columns = ColumnTransformer([("bert", BertLayerFeaturizer(tiny), column)])
    expected = BertLayerFeaturizer(tiny).fit_transform(TEXTS)
    np.testing.assert_array_equal(columns.fit_transform(X), expected)


def test_column_transformer_with_two_columns_of_texts(tiny, reviews):
    columns = ColumnTransformer(
        [
            ("title", BertLayerFeaturizer(tiny, pooling="cls"), "title"),
            ("text", BertLayerFeaturizer(tiny, layers=1), ["text"]),
            ("stars", "passthrough", ["stars"]),
        ]
    ).set_output(transform="pandas")
    frame = columns.fit_transform(reviews)
    pd.testing.assert_index_equal(frame.index, reviews.index)
    assert frame.columns.tolist() == columns.get_feature_names_out().tolist()
    assert frame.columns[[0, 32, 64]].tolist() == [
        "title__layer3_cls_00",
        "text__layer1_mean_00",
        "stars__stars",
    ]
    titles = BertLayerFeaturizer(tiny, pooling="cls").fit_transform(TEXTS[::-1])
    texts = BertLayerFeaturizer(tiny, layers=1).fit_transform(TEXTS)
    np.testing.assert_array_equal(
        frame.to_numpy(), np.column_stack([titles, texts, reviews["stars"]])
    )


def test_two_columns_for_one_featurizer_are_refused(tiny, reviews):
    columns = ColumnTransformer([("bert", BertLayerFeaturizer(tiny), ["title", "text"])])
    with pytest.raises(ValueError, match=r"2 columns .*ColumnTransformer"):
        columns.fit_transform(reviews)


def test_feature_union_stands_features_side_by_side(tiny):
    union = FeatureUnion(
        [
            ("low", BertLayerFeaturizer(tiny, layers=1)),
            ("high", BertLayerFeaturizer(tiny, pooling="cls")),
        ]
    )
    both = union.fit_transform(TEXTS)
    low = BertLayerFeaturizer(tiny, layers=1).fit_transform(TEXTS)
    high = BertLayerFeaturizer(tiny, pooling="cls").fit_transform(TEXTS)
    np.testing.assert_array_equal(both, np.hstack([low, high]))
    names = union.get_feature_names_out()
    assert len(names) == both.shape[1]
    assert names[[0, 32]].tolist() == ["low__layer1_mean_00", "high__layer3_cls_00"]


def test_feature_names_pass_through_a_pipeline(tiny):
    pipe = make_pipeline(BertLayerFeaturizer(tiny), StandardScaler()).set_output(transform="pandas")
    frame = pipe.fit_transform(pd.DataFrame({"text": TEXTS}, index=list("fedcba")))
    assert frame.index.tolist() == list("fedcba")
    assert frame.columns.tolist() == pipe[0].get_feature_names_out().tolist()
    assert pipe.get_feature_names_out().tolist() == frame.columns.tolist()


# --- grid search and cross-validation

GOOD = ["good", "a good film", "excellent plot", "loved it", "great", "i loved the film",
        "very good", "the plot was great", "excellent", "great movie"]  # fmt: skip
BAD = ["bad", "a bad film", "awful plot", "hated it", "not good", "i hated the film",
       "very bad", "the plot was awful", "awful", "bad movie"]  # fmt: skip
X_GRID = [text for pair in zip(GOOD, BAD, strict=True) for text in pair]
Y_GRID = [1, 0] * len(GOOD)
GRID = {
    "bertlayerfeaturizer__layers": [-1, 2, [1, 2]],
    "bertlayerfeaturizer__pooling": ["mean", "cls"],
}


def _pipeline(folder):
    return make_pipeline(
        BertLayerFeaturizer(folder, device="cpu"), LogisticRegression(max_iter=5000)
    )


@pytest.fixture(scope="module")
def searched(tiny):
    """Grid search in this process."""
    return GridSearchCV(_pipeline(tiny), GRID, cv=2).fit(X_GRID, Y_GRID)


def test_the_candidates_of_the_grid_search_of_these_tests_differ(searched):
    assert len(set(searched.cv_results_["mean_test_score"])) >= 3


@pytest.mark.parametrize(("backend", "n_jobs"), [("loky", 2), ("threading", 2)])
@pytest.mark.parametrize("used", [False, True], ids=["unfitted", "fitted and used"])
def test_grid_search_gives_the_same_scores_in_parallel(tiny, searched, backend, n_jobs, used):
    pipe = _pipeline(tiny)
    if used:
        pipe.fit(X_GRID, Y_GRID).predict(X_GRID)
    with joblib.parallel_config(backend):
        search = GridSearchCV(pipe, GRID, cv=2, n_jobs=n_jobs).fit(X_GRID, Y_GRID)
    for split in ("split0_test_score", "split1_test_score", "mean_test_score"):
        np.testing.assert_array_equal(search.cv_results_[split], searched.cv_results_[split])
    assert search.best_params_ == searched.best_params_
    np.testing.assert_array_equal(search.predict(X_GRID), searched.predict(X_GRID))


def test_a_layer_that_does_not_exist_fails_only_its_candidate(tiny):
    search = GridSearchCV(
        _pipeline(tiny),
        {"bertlayerfeaturizer__layers": [-1, 99, [1, 7], 1]},
        cv=2,
        error_score=np.nan,
    )
    with (
        pytest.warns(FitFailedWarning, match=r"layers=99[\s\S]*-4\.\.3"),
        pytest.warns(UserWarning, match="non-finite"),
    ):
        search.fit(X_GRID, Y_GRID)
    assert np.isnan(search.cv_results_["mean_test_score"]).tolist() == [False, True, True, False]
    assert search.best_params_["bertlayerfeaturizer__layers"] in (-1, 1)


def test_cross_validation_of_a_fitted_pipeline_in_two_processes(tiny):
    pipe = _pipeline(tiny).fit(X_GRID, Y_GRID)
    pipe.predict(X_GRID)
    alone = cross_val_score(pipe, X_GRID, Y_GRID, cv=3)
    np.testing.assert_array_equal(cross_val_score(pipe, X_GRID, Y_GRID, cv=3, n_jobs=2), alone)
    frame = pd.Series(X_GRID, index=range(100, 120)).sample(frac=1, random_state=0)
    y = pd.Series(Y_GRID, index=range(100, 120)).loc[frame.index]
    np.testing.assert_array_equal(
        cross_val_score(pipe, frame, y, cv=3, n_jobs=2),
        cross_val_score(pipe, frame.tolist(), y.tolist(), cv=3),
    )


# --- docstrings


def documented(docstring, section):
    """Names in a section of a numpydoc docstring, with their descriptions of type."""
    found = re.search(
        rf"^{section}\n-+\n(.*?)(?=^\S[^\n]*\n-{{3,}}$|\Z)",
        inspect.cleandoc(docstring),
        re.DOTALL | re.MULTILINE,
    )
    if found is None:
        return {}
    entries = re.findall(r"^(\w[\w, ]*) : (.+)$", found.group(1), re.MULTILINE)
    return {name.strip(): kind for names, kind in entries for name in names.split(",")}


def test_every_parameter_is_documented_with_the_default_of_the_signature():
    signature = inspect.signature(BertLayerFeaturizer).parameters
    entries = documented(BertLayerFeaturizer.__doc__, "Parameters")
    assert list(entries) == list(signature)
    defaults = {
        name: ast.literal_eval(re.search(r"default=(.+)$", kind).group(1))
        for name, kind in entries.items()
    }
    assert defaults == {name: parameter.default for name, parameter in signature.items()}


def test_every_choice_is_documented():
    entries = documented(BertLayerFeaturizer.__doc__, "Parameters")
    for name, constraints in BertLayerFeaturizer._parameter_constraints.items():
        for constraint in constraints if isinstance(constraints, list) else []:
            for option in getattr(constraint, "options", ()):
                assert f'"{option}"' in entries[name], name
    for pooling in POOLINGS:
        assert f'``"{pooling}"``' in BertLayerFeaturizer.__doc__


def test_every_fitted_attribute_is_documented(tiny):
    fitted = BertLayerFeaturizer(tiny)
    fitted.fit_transform(TEXTS)
    public = {n for n in vars(fitted) if n.endswith("_") and not n.startswith("_")}
    pairs = pd.DataFrame([("good", "bad")], columns=["a", "b"])
    public |= {
        n for n in vars(BertLayerFeaturizer(tiny, text_pair=True).fit(pairs)) if n[-1] == "_"
    }
    assert set(documented(BertLayerFeaturizer.__doc__, "Attributes")) == public


@pytest.mark.parametrize(
    "method",
    [
        name
        for name, member in vars(BertLayerFeaturizer).items()
        if inspect.isfunction(member) and not name.startswith("_")
    ],
)
def test_every_method_documents_its_parameters_and_result(method):
    function = getattr(BertLayerFeaturizer, method)
    parameters = [name for name in inspect.signature(function).parameters if name != "self"]
    assert list(documented(function.__doc__, "Parameters")) == parameters
    assert "Returns\n-------\n" in inspect.cleandoc(function.__doc__)


class TestPicklesOfOtherVersions:
    """A pickle outlives the version that wrote it."""

    @staticmethod
    def rewrite(estimator, change):
        """Pickle with a state as another version would have written it."""
        state = estimator.__getstate__()
        change(state)
        empty = type(estimator).__new__(type(estimator))
        empty.__setstate__(pickle.loads(pickle.dumps(state)))
        return empty

    @pytest.mark.parametrize("newer", ["cache", "long_documents", "norm"])
    def test_a_parameter_that_did_not_exist_yet_has_its_default(self, tiny, newer):
        featurizer = BertLayerFeaturizer(tiny, layers=1).fit(TEXTS)

        def change(state):
            del state[newer]
            fitted = state["_fitted_params"]
            state["_fitted_params"] = {name: fitted[name] for name in fitted if name != newer}
            del state["_state_format"]

        loaded = self.rewrite(featurizer, change)
        assert loaded.get_params()[newer] == BertLayerFeaturizer().get_params()[newer]
        assert repr(loaded) == repr(featurizer)
        np.testing.assert_array_equal(loaded.transform(TEXTS), featurizer.transform(TEXTS))

    @pytest.mark.parametrize("number", [0, 1])
    def test_an_older_pickle_is_read(self, tiny, number):
        """The files were written by the library as it was when that was its format."""
        loaded = pickle.loads((PICKLES / f"format_{number}.pickle").read_bytes())
        params = {"layers": [1, -1], "pooling": ["mean", "cls"], "norm": "l2"}
        assert repr(loaded) == repr(BertLayerFeaturizer("tiny", **params))
        fitted = BertLayerFeaturizer(tiny, **params).fit(TEXTS)
        assert vars(loaded).keys() == vars(fitted).keys()
        assert loaded.get_feature_names_out().tolist() == fitted.get_feature_names_out().tolist()
        # the random weights differ between versions of torch
        loaded.model_fingerprint_ = fitted.model_fingerprint_
        features = loaded.set_params(model=tiny).transform(TEXTS)
        np.testing.assert_array_equal(features, fitted.transform(TEXTS))

    def test_the_format_of_this_version_is_among_them(self):
        last = max(PICKLES.glob("format_*.pickle"))
        assert last.name == f"format_{_featurizer._STATE_FORMAT}.pickle"

    def test_a_newer_format_says_so(self, tiny):
        featurizer = BertLayerFeaturizer(tiny).fit(TEXTS)
        with pytest.raises(ValueError, match="format 99 by a newer version"):
            self.rewrite(featurizer, lambda state: state.update(_state_format=99))

    def test_poolings_are_pickled_by_name(self, tiny):
        """A renamed private function must not break a pickle."""
        featurizer = BertLayerFeaturizer(tiny, pooling=["mean", "cls"]).fit(TEXTS)
        stream = pickle.dumps(featurizer)
        assert b"_mean" not in stream
        assert b"_first" not in stream
        assert pickle.loads(stream)._fitted_poolings == featurizer._fitted_poolings
