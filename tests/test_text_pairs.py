"""Sentence pairs, against the tokenizer's own pair encoding and transformers' model."""

import warnings

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
import transformers
from families import FAMILIES, random_texts

from sklearn_bert import BertLayerFeaturizer, _model_loading, _models
from sklearn_bert.exceptions import LongDocumentError, ParameterChangedError, TruncationWarning

PAIRS = [
    ("a good film", "the plot was bad"),
    ("good", ""),
    ("", "bad"),
    ("", ""),
    ("the plot was awful", "i hated it very much and not for the plot"),
    ("film", "film"),
]
LONG = list(
    zip(random_texts([3, 30, 12, 40, 8, 9]), random_texts([30, 3, 12, 40, 9, 8], 1), strict=True)
)
POOLINGS = ["mean", "max", "cls", "last"]


class Reference:
    def __init__(self, folder):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        embeddings = getattr(self.model, "embeddings", None)
        types = getattr(embeddings, "token_type_embeddings", None)
        self.has_types = types is not None and types.num_embeddings > 1

    def row(self, pair, special_tokens, max_length):
        encoded = self.tokenizer(
            [pair[0]],  # as a batch: alone, an empty second text is taken for none
            [pair[1]],
            truncation="longest_first",
            max_length=max_length,
            return_tensors="pt",
            return_token_type_ids=True,
            return_special_tokens_mask=True,
        )
        mask = encoded.pop("special_tokens_mask")[0].numpy() == 1
        if not self.has_types:
            encoded.pop("token_type_ids")
        with torch.no_grad():
            states = self.model(**encoded, output_hidden_states=True).hidden_states[2][0].numpy()
        counted = states if special_tokens == "include" else states[~mask]
        if not len(counted):
            counted = np.zeros_like(states[:1])
        return np.concatenate([counted.mean(0), counted.max(0), states[0], states[-1]])


@pytest.mark.parametrize("special_tokens", ["include", "exclude"])
@pytest.mark.parametrize(
    "family",
    ["bert", "roberta", "distilbert", "electra", "mpnet", "albert", "deberta-v3", "xlm-roberta"],
)
def test_pairs_are_those_of_the_tokenizer(tmp_path, family, special_tokens):
    folder = FAMILIES[family](tmp_path / family)
    est = BertLayerFeaturizer(
        folder,
        layers=2,
        pooling=POOLINGS,
        text_pair=True,
        max_length=20,
        special_tokens=special_tokens,
    )
    pairs = [*PAIRS, *LONG]
    with pytest.warns(TruncationWarning, match="of 12 texts"):
        got = est.fit_transform(pairs)
    reference = Reference(folder)
    expected = np.array([reference.row(pair, special_tokens, 20) for pair in pairs])
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)


def fitted(folder, **settings):
    return BertLayerFeaturizer(folder, text_pair=True, pooling=POOLINGS, **settings).fit(PAIRS)


@pytest.mark.parametrize("special_tokens", ["include", "exclude"])
def test_bits_do_not_depend_on_the_call(tiny, special_tokens):
    est = fitted(tiny, special_tokens=special_tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruncationWarning)
        pairs = [*PAIRS, *LONG, *PAIRS]
        expected = est.transform(pairs)
        for batch_tokens in (1, 17, 10**6):
            est.set_params(batch_tokens=batch_tokens)
            order = np.random.default_rng(batch_tokens).permutation(len(pairs))
            got = est.transform([pairs[i] for i in order])
            np.testing.assert_array_equal(got, expected[order])
            for i in (0, 1, 3):
                np.testing.assert_array_equal(est.transform([pairs[i]])[0], expected[i])


CONTAINERS = {
    "tuples in a Series": lambda rows: pd.Series(rows, index=range(9, 3, -1)),
    "lists": lambda rows: [list(row) for row in rows],
    "generator": lambda rows: (row for row in rows),
    "array": np.array,
    "objects": lambda rows: np.array(rows, dtype=object),
    "pandas": lambda rows: pd.DataFrame(rows, columns=["b", "a"], index=range(9, 3, -1)),
    "polars": lambda rows: pl.DataFrame(rows, schema=["b", "a"], orient="row"),
    "pyarrow": lambda rows: pa.table({"b": [r[0] for r in rows], "a": [r[1] for r in rows]}),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_containers(tiny, container):
    est = BertLayerFeaturizer(tiny, text_pair=True, pooling=POOLINGS)
    est.fit(CONTAINERS[container](PAIRS))
    expected = fitted(tiny).transform(PAIRS)
    np.testing.assert_array_equal(est.transform(CONTAINERS[container](PAIRS)), expected)


def test_columns_of_a_frame_must_come_in_the_order_of_fit(tiny):
    """Read by position, the second text would silently be taken for the first."""
    frame = pd.DataFrame(PAIRS, columns=["premise", "hypothesis"])
    est = BertLayerFeaturizer(tiny, text_pair=True, pooling=POOLINGS).fit(frame)
    assert est.feature_names_in_.tolist() == ["premise", "hypothesis"]
    np.testing.assert_array_equal(est.transform(frame), fitted(tiny).transform(PAIRS))
    with pytest.raises(ValueError, match="feature names should match"):
        est.transform(frame[["hypothesis", "premise"]])


def test_a_refit_on_single_texts_forgets_the_columns(tiny):
    frame = pd.DataFrame(PAIRS, columns=["premise", "hypothesis"])
    est = BertLayerFeaturizer(tiny, text_pair=True).fit(frame)
    est.set_params(text_pair=False).fit(["a", "b"])
    assert not hasattr(est, "feature_names_in_")


@pytest.mark.parametrize("fast", [True, False])
def test_a_model_with_one_token_type_takes_pairs_of_a_tokenizer_with_two(
    tmp_path, monkeypatch, fast
):
    """RoBERTa models trained with a BERT tokenizer are like that; type 1 has no embedding."""
    from families import _ROBERTA_LIKE, _bert_tokenizer, write_model

    config = transformers.RobertaConfig(**_ROBERTA_LIKE, type_vocab_size=1)
    folder = write_model(tmp_path / "mixed", config, _bert_tokenizer(), "RobertaModel")
    if not fast:
        monkeypatch.setattr(_model_loading, "fast_bert", lambda model, dtype: None)
        monkeypatch.setattr(_models, "_encoders", type(_models._encoders)())
    got = BertLayerFeaturizer(
        folder, layers=2, pooling=POOLINGS, text_pair=True, max_length=20
    ).fit_transform(PAIRS)
    reference = Reference(folder)
    expected = np.array([reference.row(pair, "include", 20) for pair in PAIRS])
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)


def test_a_frame_of_two_columns_in_a_column_transformer(tiny):
    from sklearn.compose import ColumnTransformer

    frame = pd.DataFrame(PAIRS, columns=["a", "b"]).assign(n=1.0)
    est = BertLayerFeaturizer(tiny, text_pair=True, pooling=POOLINGS)
    made = ColumnTransformer([("pair", est, ["a", "b"])]).fit_transform(frame)
    np.testing.assert_array_equal(made, fitted(tiny).transform(PAIRS))


@pytest.mark.parametrize(
    ("X", "message"),
    [
        ("good film", "str; text_pair=True needs two texts per row"),
        (["good", "bad"], "row 0 of X is a str; text_pair=True needs two texts per row"),
        ([("good", "bad"), ("good",)], "row 1 of X is a tuple of 1"),
        ([("a", "b", "c")], "row 0 of X is a tuple of 3"),
        ([("good", 3)], "row 0 of X is of type int"),
        (np.array(["a", "b"]), r"shape \(2,\)"),
        (np.ones((2, 2)), "dtype float64"),
        (pl.DataFrame({"a": ["x"]}), "X has 1 columns; text_pair=True needs two"),
        (pd.Series(["x"]), "row 0 of X is a str; text_pair=True needs two texts per row"),
        (pd.DataFrame([["x", "y"]], columns=["t", "t"]), "columns of the same name"),
        ([("good", None), ("a", "b"), (float("nan"), "x")], "2 missing values, in rows 0, 2"),
        ({"a": "b"}, "dict; text_pair=True"),
        (3, "int; text_pair=True"),
    ],
)
def test_anything_else_is_refused(tiny, X, message):
    with pytest.raises((TypeError, ValueError), match=message):
        fitted(tiny).transform(X)


def test_a_missing_half_can_be_the_empty_text(tiny):
    est = fitted(tiny, missing="empty")
    np.testing.assert_array_equal(
        est.transform([("good", None), (np.nan, pd.NA)]), est.transform([("good", ""), ("", "")])
    )


def test_pairs_of_the_same_letters_are_kept_apart(tiny, tmp_path):
    """Cached under the two texts run together, ("ab", "c") would be found for ("a", "bc")."""
    pairs = [("1 ab", "c"), ("1", " abc"), ("1 a", "bc"), ("1 abc", "")]
    plain = fitted(tiny).transform(pairs)
    cached = fitted(tiny, cache=str(tmp_path))
    for _ in range(2):
        np.testing.assert_array_equal(cached.transform(pairs), plain)
    cached.fit(PAIRS)
    texts = BertLayerFeaturizer(tiny, pooling=POOLINGS, cache=str(tmp_path))
    keys = [f"{len(a)} {a}{b}" for a, b in pairs]
    np.testing.assert_array_equal(
        texts.fit_transform(keys),
        BertLayerFeaturizer(tiny, pooling=POOLINGS).fit_transform(keys),
    )


def test_too_long_a_pair_can_be_an_error(tiny):
    with pytest.raises(LongDocumentError, match="rows 1 "):
        fitted(tiny, max_length=10, long_documents="error").transform([PAIRS[0][:2], LONG[0]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"long_documents": "window"}, "pairs of texts are not read in windows"),
        ({"max_length": 3}, "leaves no room for text beside the 3 special tokens; use 4"),
    ],
)
def test_what_cannot_be_met_is_refused_by_fit(tiny, settings, message):
    with pytest.raises(ValueError, match=message):
        fitted(tiny, **settings)


def test_changing_it_after_fit_asks_for_another_fit(tiny):
    with pytest.raises(ParameterChangedError, match="text_pair"):
        fitted(tiny).set_params(text_pair=False).transform(["good"])
