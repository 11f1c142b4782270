"""Rows for tokens and words, against transformers' tokenizer and model text by text."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from families import FAMILIES, TEXTS, random_texts

from sklearn_bert import BertLayerFeaturizer
from sklearn_bert._fast_bert import Block
from sklearn_bert.exceptions import LongDocumentError, ParameterChangedError, TruncationWarning

WORDS = [
    ["a", "good", "film"],
    ["unbelievable", "plot"],  # words of several tokens
    ["", "good", "", "\u200b", "bad", ""],  # words without a token
    [],
    ["don't", "100%", "(x)"],
    ["good"],
]


class Reference:
    def __init__(self, folder):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def __call__(self, text, layers, **how):
        """States, tokens, offsets and word numbers of a text, special tokens with word None."""
        encoded = self.tokenizer(text, **how)
        ids = encoded["input_ids"]
        with torch.no_grad():
            output = self.model(torch.tensor([ids]), output_hidden_states=True)
        states = np.concatenate([output.hidden_states[k][0].numpy() for k in layers], axis=1)
        tokens = self.tokenizer.convert_ids_to_tokens(ids)
        return states, tokens, encoded.encodings[0].offsets, encoded.word_ids()


def fitted(folder, **settings):
    return BertLayerFeaturizer(folder, layers=[1, 3], **settings).fit(TEXTS)


FAST_AND_NOT = ["bert", "roberta", "distilbert", "mpnet", "albert", "xlm-roberta", "modernbert"]


@pytest.mark.parametrize("family", FAST_AND_NOT)
def test_rows_of_tokens_are_the_models_states(tmp_path, family):
    folder = FAMILIES[family](tmp_path / family)
    got = fitted(folder).transform_tokens(TEXTS)
    reference = Reference(folder)
    rows = [reference(text, [1, 3]) for text in TEXTS]
    np.testing.assert_allclose(
        got.vectors, np.concatenate([row[0] for row in rows]), atol=1e-5, rtol=1e-5
    )
    assert got.tokens.tolist() == [token for row in rows for token in row[1]]
    assert got.document.tolist() == [i for i, row in enumerate(rows) for _ in row[1]]
    is_special = np.array([word is None for row in rows for word in row[3]])
    np.testing.assert_array_equal(got.word == -1, is_special)
    assert (got.offsets[is_special] == 0).all()
    for text, token, (start, stop), special in zip(
        [TEXTS[i] for i in got.document], got.tokens, got.offsets, is_special, strict=True
    ):
        piece = text[start:stop]
        assert piece == piece.lstrip()  # offsets begin at the word, not at the space before it
        if not special and family == "bert" and token != "[UNK]":
            assert piece.lower() == token.removeprefix("##").lower() or not piece.isascii()


def test_without_special_tokens_their_rows_are_left_out(tiny):
    everything = fitted(tiny).transform_tokens(TEXTS)
    some = fitted(tiny, special_tokens="exclude").transform_tokens(TEXTS)
    keep = everything.word >= 0
    for name in ("vectors", "tokens", "offsets", "document", "word"):
        np.testing.assert_array_equal(getattr(some, name), getattr(everything, name)[keep])


def test_the_vector_of_one_word(tiny):
    """Tutorials look for the position of "film" in the ids; here it is a mask."""
    got = fitted(tiny).transform_tokens(["a good film", "film"])
    states, tokens, *_ = Reference(tiny)("a good film", [1, 3])
    (row,) = got.vectors[(got.tokens == "film") & (got.document == 0)]
    np.testing.assert_allclose(row, states[tokens.index("film")], atol=1e-5)


@pytest.mark.parametrize("subwords", ["first", "mean", "last"])
@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_rows_of_given_words(tmp_path, family, subwords):
    """Against the tokenizer's own reading of lists of words."""
    folder = FAMILIES[family](tmp_path / family)
    got = fitted(folder).transform_tokens(WORDS, level="word", subwords=subwords)
    reference = Reference(folder)
    reduce = {
        "first": lambda rows: rows[0],
        "mean": lambda rows: rows.mean(0),
        "last": lambda rows: rows[-1],
    }[subwords]
    expected, numbers = [], []
    for words in WORDS:
        states, _, _, word_ids = reference(words, [1, 3], is_split_into_words=True)
        for number in range(len(words)):
            rows = states[[i for i, word in enumerate(word_ids) if word == number]]
            expected.append(reduce(rows) if len(rows) else np.zeros(64))
            numbers.append(number)
    np.testing.assert_allclose(got.vectors, np.array(expected), atol=1e-5, rtol=1e-5)
    assert got.word.tolist() == numbers
    assert got.tokens.tolist() == [word for words in WORDS for word in words]
    assert got.document.tolist() == [i for i, words in enumerate(WORDS) for _ in words]
    assert got.offsets.tolist() == [[0, len(word)] for words in WORDS for word in words]


@pytest.mark.parametrize("family", FAST_AND_NOT)
def test_a_row_for_every_word_in_every_family(tmp_path, family):
    """Also where a word after a space is written otherwise than at the beginning."""
    folder = FAMILIES[family](tmp_path / family)
    est = fitted(folder, special_tokens="exclude")
    words = [["a", "good", "film"], ["good", "", "plot", "film"]]
    got = est.transform_tokens(words, level="word", subwords="last")
    assert got.tokens.tolist() == ["a", "good", "film", "good", "", "plot", "film"]
    words = [[word for word in text if word] for text in words]
    tokens = est.transform_tokens([" ".join(text) for text in words])
    for position in (0, 1, 2, 3, 5, 6):
        same = (tokens.document == got.document[position]) & (
            tokens.offsets[:, 1]
            == len(" ".join(words[got.document[position]]).split(got.tokens[position])[0])
            + len(got.tokens[position])
        )
        np.testing.assert_array_equal(got.vectors[position], tokens.vectors[same][-1])
    assert (got.vectors[4] == 0).all()


def test_words_of_a_text_are_those_the_tokenizer_splits_it_into(tiny):
    got = fitted(tiny).transform_tokens(["a good film!", "  unbelievable"], level="word")
    assert got.tokens.tolist() == ["a", "good", "film", "!", "unbelievable"]
    assert got.offsets.tolist() == [[0, 1], [2, 6], [7, 11], [11, 12], [2, 14]]
    assert got.word.tolist() == [0, 1, 2, 3, 0]


class TestLongTexts:
    def test_a_cut_text_keeps_its_first_tokens_and_all_its_words(self, tiny):
        words = random_texts([30])[0].split()
        est = fitted(tiny, max_length=12)
        with pytest.warns(TruncationWarning, match="1 of 1 texts") as caught:
            tokens = est.transform_tokens([" ".join(words)])
        assert len(caught) == 1
        assert len(tokens) == 12
        assert tokens.tokens.tolist() == ["[CLS]", *words[:10], "[SEP]"]
        with pytest.warns(TruncationWarning):
            rows = est.transform_tokens([words], level="word")
        assert len(rows) == 30
        assert rows.vectors[:10].any(axis=1).all()
        assert not rows.vectors[10:].any()

    @pytest.mark.parametrize("overlap", [0, 4])
    def test_windows_give_every_token_its_vector(self, tiny, overlap):
        text = random_texts([37])[0]
        est = fitted(
            tiny,
            max_length=12,
            long_documents="window",
            window_overlap=overlap,
            special_tokens="exclude",
        )
        got = est.transform_tokens([text, "good"])
        assert got.tokens.tolist() == [*text.split(), "good"]
        reference = Reference(tiny)
        words, step = text.split(), 10 - overlap
        for token in range(37):
            candidates = []
            for start in range(0, 37 - overlap, step):
                stop = min(start + 10, 37)
                if start <= token < stop:
                    left = token - start if start else 99
                    right = stop - 1 - token if stop < 37 else 99
                    candidates.append((min(left, right), -start, stop))
            _, start, stop = max(candidates)
            states, *_ = reference(" ".join(words[-start:stop]), [1, 3])
            np.testing.assert_allclose(got.vectors[token], states[1 + token + start], atol=1e-5)

    def test_too_long_can_be_an_error(self, tiny):
        est = fitted(tiny, max_length=12, long_documents="error")
        with pytest.raises(LongDocumentError, match="rows 1 "):
            est.transform_tokens(["good", "good " * 30])


@pytest.mark.parametrize("level", ["token", "word"])
def test_bits_do_not_depend_on_the_call(tiny, threads, level):
    texts = [*TEXTS, *random_texts([30, 5, 5, 17])]
    est = fitted(tiny)
    expected = est.transform_tokens(texts, level=level)
    for n_threads, batch_tokens in ((1, 1), (2, 40), (2, 10**6)):
        threads(n_threads)
        est.set_params(batch_tokens=batch_tokens)
        for i, text in enumerate(texts):
            got = est.transform_tokens([text], level=level)
            np.testing.assert_array_equal(got.vectors, expected.vectors[expected.document == i])
        got = est.transform_tokens(texts[::-1], level=level)
        for i in range(len(texts)):
            np.testing.assert_array_equal(
                got.vectors[got.document == len(texts) - 1 - i],
                expected.vectors[expected.document == i],
            )


def test_the_mean_of_the_rows_is_the_mean_pooling(tiny):
    est = fitted(tiny)
    rows = est.transform_tokens(TEXTS)
    means = np.array([rows.vectors[rows.document == i].mean(0) for i in range(len(TEXTS))])
    np.testing.assert_allclose(est.transform(TEXTS), means, atol=1e-5)


@pytest.mark.parametrize("combination", ["mean", "max", "sum"])
def test_layers_combine_and_rows_are_normed(tiny, combination):
    plain = fitted(tiny).transform_tokens(TEXTS).vectors.reshape(-1, 2, 32)
    reduce = {"mean": np.mean, "max": np.max, "sum": np.sum}[combination]
    expected = reduce(plain, axis=1)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    got = fitted(tiny, layer_combination=combination, norm="l2").transform_tokens(TEXTS)
    np.testing.assert_allclose(got.vectors, expected, atol=1e-5)
    words = fitted(tiny, norm="l2").transform_tokens([["", "good"]], level="word")
    np.testing.assert_allclose(np.linalg.norm(words.vectors, axis=1), [0, 1], atol=1e-6)


@pytest.mark.parametrize("level", ["token", "word"])
def test_a_text_that_comes_again_is_computed_once(tiny, monkeypatch, level):
    from sklearn_bert._forward import Encoder

    seen = []
    original = Encoder._token_states
    monkeypatch.setattr(
        Encoder,
        "_token_states",
        lambda self, groups, *a: seen.append(len(groups[0].ids)) or original(self, groups, *a),
    )
    est = fitted(tiny)
    once = est.transform_tokens(["a good film", "bad"], level=level)
    seen.clear()
    again = est.transform_tokens(["bad", *["a good film"] * 3, "bad"], level=level)
    assert sum(seen) <= 2
    for document, of in enumerate([1, 0, 0, 0, 1]):
        for name in ("vectors", "tokens", "offsets", "word"):
            np.testing.assert_array_equal(
                getattr(again, name)[again.document == document],
                getattr(once, name)[once.document == of],
            )


@pytest.mark.parametrize("layers", [0, 2, [1, 0], -1])
def test_only_the_blocks_that_are_needed_run(tiny, monkeypatch, layers):
    est = BertLayerFeaturizer(tiny, layers=layers).fit(TEXTS)
    est.transform_tokens(["good"])
    ran = []
    original = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, *a: ran.append(1) or original(self, *a))
    est.transform_tokens(["a good film"])
    assert len(ran) == max(est.layers_)


def test_a_missing_text_among_lists_of_words(tiny):
    with pytest.raises(ValueError, match="1 missing value, in row 1"):
        fitted(tiny).transform_tokens([["good"], None], level="word")
    est = fitted(tiny, missing="empty")
    assert est.transform_tokens([["good"], None, ["bad"]], level="word").document.tolist() == [0, 2]


def test_parameters_set_after_fit_are_checked(tiny):
    with pytest.raises(ValueError, match="'batch_tokens' parameter"):
        fitted(tiny).set_params(batch_tokens="many").transform_tokens(["good"])


def test_nothing_to_do(tiny):
    for level in ("token", "word"):
        got = fitted(tiny).transform_tokens([], level=level)
        assert got.vectors.shape == (0, 64)
        assert len(got) == len(got.tokens) == len(got.document) == len(got.word) == 0
        assert got.offsets.shape == (0, 2)
    assert fitted(tiny).transform_tokens([[], []], level="word").vectors.shape == (0, 64)


def test_containers(tiny):
    est = fitted(tiny)
    expected = est.transform_tokens(WORDS, level="word").vectors
    for X in (iter(WORDS), pd.Series(WORDS, index=range(9, 3, -1)), [tuple(w) for w in WORDS]):
        got = est.transform_tokens(X, level="word").vectors
        np.testing.assert_array_equal(got, expected)
    texts = est.transform_tokens(TEXTS).vectors
    np.testing.assert_array_equal(est.transform_tokens(pd.Series(TEXTS)).vectors, texts)


@pytest.mark.parametrize(
    ("X", "options", "message"),
    [
        ("good film", {}, "single str"),
        ([["good"], "bad"], {}, "row 1 of X is of type str among lists of words"),
        ([["good", None]], {}, "word 1 of row 0 of X is of type NoneType, not str"),
        (["good", None], {}, "missing value, in row 1"),
        (["good"], {"level": "sentence"}, "'level' parameter of transform_tokens"),
        (["good"], {"subwords": "max"}, "'subwords' parameter of transform_tokens"),
    ],
)
def test_anything_else_is_refused(tiny, X, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        fitted(tiny).transform_tokens(X, **options)


def test_it_wants_a_fit_that_is_up_to_date(tiny):
    with pytest.raises(ParameterChangedError):
        fitted(tiny).set_params(layers=2).transform_tokens(["good"])
    with pytest.raises(ValueError, match="not pairs"):
        BertLayerFeaturizer(tiny, text_pair=True).fit([("a", "b")]).transform_tokens(["good"])


def test_nothing_is_warned_of_in_passing(tiny):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted(tiny).transform_tokens([*TEXTS[:9], ""])
