"""What may stand for X: every container of texts is read alike, everything else is refused."""

import copy
import re
from collections import deque
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from transformers import AutoModel, AutoTokenizer

from sklearn_bert import BertLayerFeaturizer
from sklearn_bert._documents import check_documents
from sklearn_bert._pooling import POOLINGS

TEXTS = [
    "a good film",
    "bad",
    "the plot was awful and i hated it very much",
    "",
    "bad",
    "Excellent!\tNot so bad, 10/10 \N{GRINNING FACE}",
    "None",
]
METHODS = ["fit", "transform", "fit_transform"]
GAPPY = [7, 3, 99, 0, 4, 12, 1]


def _enum(texts):
    return pl.Series(texts, dtype=pl.Enum(list(dict.fromkeys(t for t in texts if t is not None))))


def _masked(texts):
    return np.ma.array([t or "" for t in texts], dtype=object, mask=[t is None for t in texts])


def _read_only(texts):
    array = np.array(texts, dtype=object)
    array.flags.writeable = False
    return array


def _every_second(texts):
    array = np.array([text for text in texts for _ in range(2)], dtype=object)
    return array[::2]


def _backwards(texts):
    return np.array(list(texts)[::-1], dtype=object)[::-1]


def _chunked(texts, of=pa.string()):  # noqa: B008 - a value, never changed
    return pa.chunked_array([pa.array(texts[:3], of), pa.array(texts[3:], of)])


def _string_dtype(texts, **na):
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("NumPy has StringDType from 2.0 on")
    return np.array(texts, dtype=np.dtypes.StringDType(**na))


# Name -> function of a list of texts. None among the texts is a missing value.
CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "generator": lambda texts: (text for text in texts),
    "iterator": iter,
    "deque": deque,
    "dict values": lambda texts: dict(enumerate(texts)).values(),
    "object array": partial(np.array, dtype=object),
    "read-only array": _read_only,
    "strided array": _every_second,
    "reversed array": _backwards,
    "masked array": _masked,
    "object array (n, 1)": lambda texts: np.array(texts, dtype=object).reshape(-1, 1),
    "Fortran array (n, 1)": lambda texts: np.asfortranarray(
        np.array([[text] for text in texts], dtype=object).reshape(-1, 1)
    ),
    "StringDType array, missing is None": partial(_string_dtype, na_object=None),
    "StringDType array, missing is NaN": lambda texts: _string_dtype(
        [np.nan if text is None else text for text in texts], na_object=np.nan
    ),
    "Series object": partial(pd.Series, dtype=object),
    "Series str": partial(pd.Series, dtype="str"),
    "Series string[python]": partial(pd.Series, dtype="string[python]"),
    "Series string[pyarrow]": partial(pd.Series, dtype="string[pyarrow]"),
    "Series of Arrow strings": partial(pd.Series, dtype=pd.ArrowDtype(pa.string())),
    "Series categorical": partial(pd.Series, dtype="category"),
    "Series, gappy index": lambda texts: pd.Series(texts, GAPPY[: len(texts)], dtype="str"),
    "Series, repeated index": lambda texts: pd.Series(texts, [0] * len(texts), dtype="str"),
    "Series, text index": lambda texts: pd.Series(texts, list("gfedcba")[: len(texts)], dtype=str),
    "pandas string array": partial(pd.array, dtype="string"),
    "pandas Categorical": pd.Categorical,
    "Index": partial(pd.Index, dtype=object),
    "CategoricalIndex": pd.CategoricalIndex,
    "pandas frame": lambda texts: pd.DataFrame({"text": texts}, dtype=object),
    "pandas frame, gappy index": lambda texts: pd.DataFrame(
        {"text": texts}, GAPPY[: len(texts)], dtype="str"
    ),
    "pandas frame, column 0": lambda texts: pd.DataFrame({0: texts}, dtype="str"),
    "pandas frame, column 3": lambda texts: pd.DataFrame({3: texts}, dtype="str"),
    "pandas frame, two-level column": lambda texts: pd.DataFrame({("a", "b"): texts}, dtype=object),
    "pandas frame, column None": lambda texts: pd.DataFrame(
        np.array(texts, dtype=object).reshape(-1, 1), columns=[None]
    ),
    "polars Series": partial(pl.Series, dtype=pl.String),
    "polars Categorical": partial(pl.Series, dtype=pl.Categorical),
    "polars Enum": _enum,
    "polars frame": lambda texts: pl.DataFrame({"text": texts}, schema={"text": pl.String}),
    "pyarrow Array": lambda texts: pa.array(texts, pa.string()),
    "pyarrow LargeString": lambda texts: pa.array(texts, pa.large_string()),
    "pyarrow dictionary": lambda texts: pa.array(texts, pa.string()).dictionary_encode(),
    "pyarrow ChunkedArray": _chunked,
    "pyarrow LargeString ChunkedArray": partial(_chunked, of=pa.large_string()),
    "pyarrow dictionary ChunkedArray": lambda texts: _chunked(texts).dictionary_encode(),
    "pyarrow Table": lambda texts: pa.table({"text": pa.array(texts, pa.string())}),
}
# These cannot hold a missing value.
TEXT_ONLY_CONTAINERS = {
    "array <U": partial(np.array, dtype=str),
    "array <U (n, 1)": lambda texts: np.array(texts, dtype=str).reshape(-1, 1),
    "StringDType array": _string_dtype,
}
ALL_CONTAINERS = CONTAINERS | TEXT_ONLY_CONTAINERS
# Objects that stand for a missing value in a container of Python objects.
MISSING = {
    "None": None,
    "nan": float("nan"),
    "np.float64 nan": np.float64("nan"),
    "np.float32 nan": np.float32("nan"),
    "pd.NA": pd.NA,
    "NaT": pd.NaT,
    "np.datetime64 NaT": np.datetime64("NaT"),
    "np.timedelta64 NaT": np.timedelta64("NaT"),
}
OBJECT_CONTAINERS = [
    "list",
    "tuple",
    "generator",
    "object array",
    "object array (n, 1)",
    "Series object",
    "Index",
    "pandas frame",
]


@pytest.fixture(scope="module", autouse=True)
def _on_one_core():
    """The model of these tests is tiny: wait for no other core and no accelerator."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
        yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="module")
def featurizer(tiny):
    return BertLayerFeaturizer(tiny, layers=[1, -1], pooling=["mean", "cls"]).fit(TEXTS)


@pytest.fixture(scope="module")
def expected(featurizer):
    """Features of TEXTS, given as a list."""
    return featurizer.transform(TEXTS)


@pytest.fixture
def forwards():
    """List that grows by one whenever any torch module runs forward."""
    seen = []
    handle = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, _: seen.append(type(module).__name__)
    )
    yield seen
    handle.remove()


def same(a, b):
    """Whether two containers hold the same, labels and types included."""
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool(np.all(a == b))
    if isinstance(a, pd.Series | pd.DataFrame):
        return a.equals(b) and a.index.equals(b.index) and list(a.axes[-1]) == list(b.axes[-1])
    if hasattr(a, "equals"):
        return a.equals(b)
    return list(a) == list(b)


# --- containers


def test_rows_of_a_list_are_those_of_transformers_in_the_same_order(tiny, expected):
    model = AutoModel.from_pretrained(tiny).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    rows = []
    for text in TEXTS:
        with torch.no_grad():
            output = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True)
        states = [output.hidden_states[layer][0] for layer in (1, 3)]
        rows.append(torch.cat([part for h in states for part in (h.mean(0), h[0])]).numpy())
    np.testing.assert_allclose(expected, rows, atol=1e-5)


def test_the_texts_of_these_tests_have_different_features(expected):
    distinct = {row.tobytes() for row in expected}
    assert len(distinct) == len(set(TEXTS)) == len(TEXTS) - 1


@pytest.mark.parametrize("container", ALL_CONTAINERS)
def test_every_container_gives_the_features_of_the_list(featurizer, expected, container):
    X = ALL_CONTAINERS[container](TEXTS)
    np.testing.assert_array_equal(featurizer.transform(X), expected)


@pytest.mark.parametrize("container", ALL_CONTAINERS)
def test_fit_transform_reads_every_container_once(tiny, featurizer, expected, container):
    X = ALL_CONTAINERS[container](TEXTS)
    got = BertLayerFeaturizer(tiny, layers=[1, -1], pooling=["mean", "cls"]).fit_transform(X)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("container", ALL_CONTAINERS)
def test_no_rows_give_an_array_of_no_rows_without_running_the_model(
    featurizer, expected, forwards, container
):
    features = featurizer.transform(ALL_CONTAINERS[container]([]))
    assert features.shape == (0, expected.shape[1])
    assert features.dtype == np.float32
    assert forwards == []


@pytest.mark.parametrize("X", [np.array([]), np.empty((0, 1))], ids=["(0,)", "(0, 1)"])
def test_an_array_without_rows_has_no_rows_whatever_its_dtype(featurizer, expected, X):
    assert featurizer.transform(X).shape == (0, expected.shape[1])  # np.array([]) is float64


@pytest.mark.parametrize("container", ALL_CONTAINERS)
@pytest.mark.parametrize("method", ["fit", "fit_transform"])
def test_fit_on_no_rows_is_an_error_in_the_words_of_scikit_learn(tiny, container, method):
    X = ALL_CONTAINERS[container]([])
    with pytest.raises(ValueError, match=r"0 sample\(s\).*minimum of 1 is required"):
        getattr(BertLayerFeaturizer(tiny), method)(X)


@pytest.mark.parametrize(
    "container", sorted(ALL_CONTAINERS.keys() - {"generator", "iterator", "dict values"})
)
def test_x_is_never_changed(featurizer, container):
    X = ALL_CONTAINERS[container](TEXTS)
    before = copy.deepcopy(X)
    for method in METHODS:
        getattr(copy.deepcopy(featurizer), method)(X)
        assert same(X, before), method


def test_lone_surrogates_are_not_replaced_in_the_list_of_the_user(featurizer):
    X = ["bad \ud800", "good"]
    featurizer.transform(X)
    assert X == ["bad \ud800", "good"]


@pytest.mark.parametrize("method", METHODS)
def test_a_generator_is_consumed_once(featurizer, expected, method):
    taken = []

    def rows():
        for text in TEXTS:
            taken.append(text)
            yield text

    result = getattr(copy.deepcopy(featurizer), method)(rows())
    assert taken == TEXTS
    if method != "fit":
        np.testing.assert_array_equal(result, expected)


def test_an_error_inside_a_generator_reaches_the_caller(featurizer):
    def rows():
        yield "good"
        raise KeyError("the file ended early")

    with pytest.raises(KeyError, match="the file ended early"):
        featurizer.transform(rows())


# --- positions and elements


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "container", ["list", "object array", "Series str", "pandas frame", "polars Series"]
)
def test_row_i_belongs_to_position_i(featurizer, expected, container, seed):
    order = np.random.default_rng(seed).permutation(len(TEXTS))
    X = CONTAINERS[container]([TEXTS[i] for i in order])
    np.testing.assert_array_equal(featurizer.transform(X), expected[order])


@pytest.mark.parametrize("dtype", ["object", "str", "string[python]", "category"])
def test_the_labels_of_a_series_do_not_move_its_rows(featurizer, expected, dtype):
    series = pd.Series(TEXTS, index=GAPPY, dtype=dtype)
    shuffled = series.sample(frac=1, random_state=0)
    assert shuffled.index.tolist() != GAPPY
    for X in (shuffled, shuffled.to_frame("text")):
        np.testing.assert_array_equal(
            featurizer.transform(X), expected[[GAPPY.index(label) for label in shuffled.index]]
        )


def test_one_row_of_a_series_or_frame_is_that_row(featurizer, expected):
    series = pd.Series(TEXTS, index=GAPPY)
    for X in (series.iloc[[2]], series.to_frame("text").iloc[[2]], pl.Series(TEXTS)[2:3]):
        np.testing.assert_array_equal(featurizer.transform(X), expected[[2]])


class Shouted(str):
    """A str that prints as something else."""

    __slots__ = ()

    def __str__(self):
        return "good"

    def __repr__(self):
        return "good"

    def __iter__(self):
        return iter("good")

    def __len__(self):
        return 4


class Label(StrEnum):
    """Texts as members of an enumeration."""

    BAD = "bad"
    FILM = "a good film"


@pytest.mark.parametrize("wrap", [np.str_, Shouted], ids=["np.str_", "subclass of str"])
@pytest.mark.parametrize("container", ["list", "tuple", "generator", "object array"])
def test_elements_of_subclasses_of_str_are_read_as_their_text(
    featurizer, expected, wrap, container
):
    X = CONTAINERS[container]([wrap(text) for text in TEXTS])
    np.testing.assert_array_equal(featurizer.transform(X), expected)


def test_members_of_a_str_enumeration_are_read_as_their_value(featurizer, expected):
    np.testing.assert_array_equal(featurizer.transform([Label.FILM, Label.BAD]), expected[:2])


def test_words_that_look_like_missing_values_are_texts(featurizer):
    words = ["None", "nan", "NaN", "NA", "<NA>", "NaT", "null"]
    rows = featurizer.transform(words)
    alone = [featurizer.transform([word])[0] for word in words]
    np.testing.assert_array_equal(rows, alone)
    assert not np.array_equal(rows[1], featurizer.transform([""])[0])


# --- missing values


@pytest.mark.parametrize("position", [0, 3, 6], ids=["first", "middle", "last"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_missing_value_is_one_error_for_every_container(
    featurizer, forwards, container, position
):
    texts = [None if i == position else text for i, text in enumerate(TEXTS)]
    for method in METHODS:
        with pytest.raises(ValueError, match="missing") as error:
            getattr(copy.deepcopy(featurizer), method)(CONTAINERS[container](texts))
        assert type(error.value) is ValueError
        assert str(error.value) == (
            f"X has 1 missing value, in row {position}. Drop the row or use missing='empty'."
        )
    assert forwards == []


@pytest.mark.parametrize("position", [0, 3, 6], ids=["first", "middle", "last"])
@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("container", OBJECT_CONTAINERS)
def test_every_kind_of_missing_value_gives_the_error_of_none(
    featurizer, forwards, container, missing, position
):
    texts = [MISSING[missing] if i == position else text for i, text in enumerate(TEXTS)]
    with pytest.raises(ValueError, match=f"^X has 1 missing value, in row {position}[.] Drop"):
        featurizer.transform(CONTAINERS[container](texts))
    assert forwards == []


@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("container", OBJECT_CONTAINERS)
def test_a_missing_value_can_be_the_empty_text(featurizer, container, missing):
    other = copy.deepcopy(featurizer).set_params(missing="empty").fit(TEXTS)
    texts = [MISSING[missing], *TEXTS, MISSING[missing]]
    np.testing.assert_array_equal(
        other.transform(CONTAINERS[container](texts)), featurizer.transform(["", *TEXTS, ""])
    )


@pytest.mark.parametrize("batch_tokens", [1, 16, 100_000, "auto"])
@pytest.mark.parametrize("container", ["list", "object array", "Series str", "polars Series"])
def test_the_error_for_a_missing_value_does_not_depend_on_the_batch_size(
    featurizer, forwards, container, batch_tokens
):
    other = copy.deepcopy(featurizer).set_params(batch_tokens=batch_tokens)
    with pytest.raises(ValueError, match=r"^X has 1 missing value, in row 5[.]"):
        other.transform(CONTAINERS[container]([*TEXTS[:5], None]))
    assert forwards == []


@pytest.mark.parametrize("container", CONTAINERS)
def test_several_missing_values_are_counted_and_the_first_rows_named(featurizer, container):
    texts = ["good", None, "bad", None]
    with pytest.raises(ValueError, match=r"^X has 2 missing values, in rows 1, 3[.]"):
        featurizer.transform(CONTAINERS[container](texts))
    many = ["good", *[None] * 6]
    with pytest.raises(ValueError, match=r"^X has 6 missing values, in rows 1, 2, 3, 4, 5, [.]{3}"):
        featurizer.transform(CONTAINERS[container](many))


def test_rows_of_missing_values_are_positions_not_labels(featurizer):
    series = pd.Series(["good", None, "bad"], index=[10, 20, 0])
    with pytest.raises(ValueError, match=r"in row 1[.]"):
        featurizer.transform(series)


@pytest.mark.parametrize(
    "X",
    [pd.Series([np.nan, np.nan]), pl.Series([None, None]), pa.nulls(2), [None, None]],
    ids=["pandas", "polars", "pyarrow", "list"],
)
def test_a_column_of_missing_values_only_is_the_same_error(featurizer, X):
    with pytest.raises(ValueError, match=r"^X has 2 missing values, in rows 0, 1[.]"):
        featurizer.transform(X)


# --- refused


class LazyCollection:
    """Says that it is a Dask collection in the way that Dask documents."""

    def __dask_graph__(self):
        raise AssertionError("a lazy collection must not be computed")

    def __iter__(self):
        raise AssertionError("a lazy collection must not be computed")

    def __len__(self):
        return 2


def _two_columns(frame):
    return frame({"title": ["good", "bad"], "text": ["film", "plot"]})


# Name -> X, class of the error, words that its message must have.
REFUSED = {
    "str": ("good film", ValueError, ["str", "list", "[text]"]),
    "np.str_": (np.str_("good film"), ValueError, ["str_", "[text]"]),
    "subclass of str": (Shouted("bad"), ValueError, ["Shouted", "[text]"]),
    "bytes": (b"good film", ValueError, ["bytes", "list"]),
    "bytearray": (bytearray(b"good film"), ValueError, ["bytearray", "list"]),
    "int": (3, TypeError, ["int", "one text per row"]),
    "float": (1.5, TypeError, ["float", "one text per row"]),
    "bool": (True, TypeError, ["bool", "one text per row"]),
    "None": (None, TypeError, ["NoneType", "one text per row"]),
    "class": (list, TypeError, ["type", "one text per row"]),
    "path": (Path("texts.txt"), TypeError, ["Path", "one text per row"]),
    "int in a list": (["good", 3], TypeError, ["row 1", "int", "str"]),
    "float in a list": (["good", 1.5], TypeError, ["row 1", "float"]),
    "np.int64 in a list": ([np.int64(3), "good"], TypeError, ["row 0", "int64"]),
    "bool in a list": (["good", "bad", True], TypeError, ["row 2", "bool"]),
    "bytes in a list": (["good", b"bad"], TypeError, ["row 1", "bytes", "Decode"]),
    "dict in a list": ([{"text": "good"}], TypeError, ["row 0", "dict"]),
    "path in a tuple": (("good", Path("a.txt")), TypeError, ["row 1", "Path"]),
    "object in a list": (["good", object()], TypeError, ["row 1", "object"]),
    "int in an array": (np.array(["good", 3], dtype=object), TypeError, ["row 1", "int"]),
    "int in a Series": (pd.Series(["good", 3], [9, 7]), TypeError, ["row 1", "int"]),
    "int in a frame": (pd.DataFrame({"t": ["good", 3]}), TypeError, ["row 1", "int"]),
    "pairs as tuples": ([("good", "bad"), ("film", "plot")], TypeError, ["row 0", "tuple"]),
    "pairs as lists": (["good", ["film", "plot"]], TypeError, ["row 1", "list"]),
    "lists of one": ([["good"], ["bad"]], TypeError, ["row 0", "list"]),
    "arrays as rows": ([np.array(["good"])], TypeError, ["row 0", "ndarray"]),
    "pairs in a Series": (pd.Series([("good", "bad")]), TypeError, ["row 0", "tuple"]),
    "pairs in a MultiIndex": (
        pd.MultiIndex.from_tuples([("good", "bad")]),
        TypeError,
        ["row 0", "tuple"],
    ),
    "lists in polars": (pl.Series([["good", "bad"]]), TypeError, ["row 0"]),
    "lists in pyarrow": (pa.array([["good", "bad"]]), TypeError, ["row 0", "list"]),
    "array of float": (np.array([1.5, 2.0]), TypeError, ["float64", "str"]),
    "array of int": (np.array([1, 2]), TypeError, ["int64", "str"]),
    "array of bool": (np.array([True]), TypeError, ["bool", "str"]),
    "array of bytes": (np.array([b"good"]), TypeError, ["S4", "str"]),
    "array of dates": (np.array(["2020-01-01"], dtype="M8[D]"), TypeError, ["datetime64", "str"]),
    "structured array": (np.array([("a",)], dtype=[("t", "U1")]), TypeError, ["str"]),
    "Series of int": (pd.Series([1, 2]), TypeError, ["row 0", "int"]),
    "Series of dates": (pd.Series(pd.to_datetime(["2020-01-01"])), TypeError, ["row 0", "Timest"]),
    "Series of bytes": (pd.Series([b"good"]), TypeError, ["row 0", "bytes"]),
    "polars Series of int": (pl.Series([1, 2]), TypeError, ["row 0", "int"]),
    "polars Series of bytes": (pl.Series([b"good"]), TypeError, ["row 0", "bytes"]),
    "pyarrow Array of int": (pa.array([1, 2]), TypeError, ["row 0", "int"]),
    "pyarrow Array of bytes": (pa.array([b"good"]), TypeError, ["row 0", "bytes"]),
    "frame of int": (pd.DataFrame({"n": [1, 2]}), TypeError, ["row 0", "int"]),
    "two columns, pandas": (_two_columns(pd.DataFrame), ValueError, ["2 columns", "title", "one"]),
    "two columns of one name": (
        pd.DataFrame([["good", "bad"]], columns=["text", "text"]),
        ValueError,
        ["2 columns", "text", "one"],
    ),
    "two unnamed columns": (pd.DataFrame([["good", "bad"]]), ValueError, ["2 columns", "one"]),
    "two columns, polars": (_two_columns(pl.DataFrame), ValueError, ["2 columns", "title", "one"]),
    "two columns, pyarrow": (_two_columns(pa.table), ValueError, ["2 columns", "title", "one"]),
    "two columns, array": (np.array([["good", "bad"]]), ValueError, ["2 columns", "(1, 2)"]),
    "two columns, no rows": (np.empty((0, 2), dtype=str), ValueError, ["2 columns", "(0, 2)"]),
    "no columns, pandas": (pd.DataFrame(index=[0, 1]), ValueError, ["0 columns", "one"]),
    "no columns, polars": (pl.DataFrame(), ValueError, ["0 columns", "one"]),
    "no columns, array": (np.empty((2, 0), dtype=str), ValueError, ["0 columns", "(2, 0)"]),
    "3-D array": (np.array([[["good"]]]), ValueError, ["(1, 1, 1)", "(n_samples,)"]),
    "0-D array": (np.array("good"), ValueError, ["()", "(n_samples,)"]),
    "set": ({"good", "bad"}, TypeError, ["set", "list"]),
    "frozenset": (frozenset({"good"}), TypeError, ["frozenset", "list"]),
    "dict": ({"good": "bad"}, TypeError, ["dict", "list"]),
    "mapping": (MappingProxyType({"good": "bad"}), TypeError, ["mappingproxy", "list"]),
    "dict keys": ({"good": 1}.keys(), TypeError, ["dict_keys", "list"]),
    "sparse matrix": (sp.csr_matrix([[1.0, 0.0]]), TypeError, ["csr_matrix", "list"]),
    "sparse array": (sp.coo_array([[1.0, 0.0]]), TypeError, ["coo_array", "list"]),
    "polars LazyFrame": (
        pl.LazyFrame({"text": ["good"]}),
        TypeError,
        ["lazy", "LazyFrame", "collect"],
    ),
    "Dask collection": (LazyCollection(), TypeError, ["lazy", "LazyCollection", "compute"]),
    "polars expression": (pl.col("text"), TypeError, ["Expr"]),
    "pyarrow scalar": (pa.scalar("good"), TypeError, ["StringScalar"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_one_text_per_row_is_refused_before_the_model_runs(featurizer, forwards, case):
    X, error_class, words = REFUSED[case]
    for method in METHODS:
        with pytest.raises((TypeError, ValueError)) as error:
            getattr(copy.deepcopy(featurizer), method)(X)
        assert isinstance(error.value, error_class)
        assert [word for word in words if word not in str(error.value)] == []
    assert forwards == []


def test_a_number_that_a_generator_yields_is_refused_by_its_row(featurizer):
    with pytest.raises(TypeError, match=r"row 1 .*int"):
        featurizer.transform(row for row in ["good", 3])


@pytest.mark.parametrize("refused", ["good film", ["good", 3], [("good", "bad")], {"good"}])
def test_a_refused_x_leaves_an_estimator_unfitted(tiny, refused):
    featurizer = BertLayerFeaturizer(tiny)
    before = vars(featurizer).copy()
    with pytest.raises((TypeError, ValueError)):
        featurizer.fit(refused)
    assert vars(featurizer) == before


def test_running_the_model_is_noticed_by_these_tests(featurizer, forwards):
    featurizer.transform(["good"])
    assert forwards


# --- surrogates


def utf16_pairs_joined_others_replaced(text):
    """Text as Unicode defines it: pairs of surrogates are one character, others U+FFFD."""

    def join(pair):
        high, low = map(ord, pair.group())
        return chr(0x10000 + (high - 0xD800) * 0x400 + low - 0xDC00)

    joined = re.sub("[\ud800-\udbff][\udc00-\udfff]", join, text)
    return re.sub("[\ud800-\udfff]", "\ufffd", joined)


@given(
    st.lists(
        st.text(
            st.characters(categories=["Cs"])
            | st.sampled_from("ab \ufeff\ufffd\x00\U0001f600\ud83d\ude00"),
            max_size=8,
        ),
        max_size=3,
    )
)
def test_pairs_of_surrogates_are_joined_and_lone_ones_replaced(texts):
    assert check_documents(texts) == [utf16_pairs_joined_others_replaced(t) for t in texts]


@pytest.mark.parametrize(
    "text",
    ["\ud800", "good \udc00 film", "bad\ud83d", "\ude00\ud83d bad", "\ud83d\ud83d\ude00"],
    ids=ascii,
)
@pytest.mark.parametrize("container", ["list", "object array", "array <U", "Series object"])
def test_lone_surrogates_are_read_as_the_replacement_character(featurizer, text, container):
    row = featurizer.transform(ALL_CONTAINERS[container]([text]))
    assert np.isfinite(row).all()
    np.testing.assert_array_equal(
        row, featurizer.transform([utf16_pairs_joined_others_replaced(text)])
    )


def test_a_pair_of_surrogates_is_the_character_it_stands_for(featurizer):
    pair, character, replaced = featurizer.transform(
        ["bad \ud83d\ude00 film", "bad \N{GRINNING FACE} film", "bad \ufffd\ufffd film"]
    )
    np.testing.assert_array_equal(pair, character)
    assert not np.array_equal(pair, replaced)


# --- empty, blank and invisible texts

BLANK = ["", "   ", "\n\t", "\u200b", "\u00a0", "\u3000\r\n", "\ufeff", "\x00", "\ud800"]


def test_the_blank_texts_of_these_tests_tokenize_to_nothing(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    nothing = [tokenizer.cls_token_id, tokenizer.sep_token_id]
    for text in BLANK:
        read = utf16_pairs_joined_others_replaced(text)
        assert tokenizer(read)["input_ids"] == nothing, ascii(text)


@pytest.mark.parametrize("norm", [None, "l2"])
@pytest.mark.parametrize("special_tokens", ["include", "exclude"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_texts_that_tokenize_to_nothing_are_finite_and_alike(tiny, pooling, special_tokens, norm):
    featurizer = BertLayerFeaturizer(
        tiny, pooling=pooling, special_tokens=special_tokens, norm=norm
    )
    rows = featurizer.fit_transform([*BLANK[:3], "bad", *BLANK[3:], "a good film"])
    blank = np.delete(rows, [3, len(rows) - 1], axis=0)
    assert np.isfinite(rows).all()
    np.testing.assert_array_equal(blank, np.repeat(blank[:1], len(BLANK), axis=0))
    assert not np.array_equal(blank[0], rows[3])
    zeros = special_tokens == "exclude" and pooling in ("mean", "max", "min", "mean_sqrt_len")
    assert (not blank.any()) == zeros
    if norm == "l2":
        lengths = np.linalg.norm(rows, axis=1)
        np.testing.assert_allclose(lengths[[3, -1]], 1, atol=1e-6)
        expected = 0 if zeros else 1
        np.testing.assert_allclose(np.delete(lengths, [3, len(rows) - 1]), expected, atol=1e-6)


def test_the_empty_text_is_cls_and_sep(tiny):
    model = AutoModel.from_pretrained(tiny).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    with torch.no_grad():
        output = model(torch.tensor([[tokenizer.cls_token_id, tokenizer.sep_token_id]]))
    cls, sep = output.last_hidden_state[0].numpy()
    by_pooling = {
        "cls": cls,
        "last": sep,
        "mean": (cls + sep) / 2,
        "max": np.maximum(cls, sep),
        "min": np.minimum(cls, sep),
        "mean_sqrt_len": (cls + sep) / np.sqrt(2),
        "pooler": output.pooler_output[0].numpy(),
    }
    for pooling, expected in by_pooling.items():
        row = BertLayerFeaturizer(tiny, pooling=pooling).fit_transform([""])[0]
        np.testing.assert_allclose(row, expected, atol=1e-5, err_msg=pooling)


@pytest.mark.parametrize("pooling", ["mean", "max", "cls"])
@pytest.mark.parametrize("special_tokens", ["include", "exclude"])
def test_a_classifier_fits_on_blank_texts(tiny, pooling, special_tokens):
    featurizer = BertLayerFeaturizer(tiny, pooling=pooling, special_tokens=special_tokens)
    pipe = make_pipeline(featurizer, LogisticRegression(max_iter=1000))
    X = [*BLANK, "good", "bad film"]
    predicted = pipe.fit(X, [0] * len(BLANK) + [1, 1]).predict(X)
    assert len(set(predicted[: len(BLANK)])) == 1
