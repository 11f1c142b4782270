"""Texts longer than the model takes: cut, refused, or read in windows."""

import warnings

import numpy as np
import pytest
import torch
import transformers
from families import FAMILIES, random_texts
from hypothesis import given
from hypothesis import strategies as st

from sklearn_bert import BertLayerFeaturizer, Pooling
from sklearn_bert._windows import windows
from sklearn_bert.exceptions import ParameterChangedError, TruncationWarning

POOLINGS = ["mean", "mean_sqrt_len", "max", "min", "cls", "last"]
LENGTHS = [1, 3, 9, 10, 11, 19, 25, 40]  # words; 10 is what fits beside two special tokens
MAX_LENGTH = 12


@given(st.integers(0, 320), st.integers(1, 62), st.data())
def test_every_token_counts_once_where_it_has_most_context(n_tokens, size, data):
    overlap = data.draw(st.integers(0, size - 1))
    pieces = windows(n_tokens, size, overlap)
    counted = [token for piece in pieces for token in range(piece.first, piece.end)]
    assert counted == list(range(n_tokens))
    assert all(0 <= p.start <= p.first <= p.end <= p.stop <= n_tokens for p in pieces)
    assert all(piece.stop - piece.start <= size for piece in pieces)
    for token in range(n_tokens):
        # context on the poorer side, where the ends of the text are no lack of context
        def context(piece, token=token):
            left = token - piece.start if piece.start else n_tokens
            right = piece.stop - 1 - token if piece.stop < n_tokens else n_tokens
            return min(left, right)

        holding = [piece for piece in pieces if piece.start <= token < piece.stop]
        (own,) = [piece for piece in holding if piece.first <= token < piece.end]
        if 2 * overlap <= size:  # beyond that, a token can be in three windows or more
            assert context(own) == max(map(context, holding))


@pytest.mark.parametrize(("n_tokens", "size", "overlap"), [(25, 10, 3), (10, 10, 4), (11, 10, 9)])
def test_windows_are_those_of_the_tokenizers_library(tiny, n_tokens, size, overlap):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    text = " ".join(random_texts([n_tokens]))
    theirs = tokenizer(
        text,
        max_length=size + 2,
        truncation=True,
        stride=overlap,
        return_overflowing_tokens=True,
    )["input_ids"]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ours = [ids[piece.start : piece.stop] for piece in windows(len(ids), size, overlap)]
    assert [row[1:-1] for row in theirs] == ours


class Reference:
    """Windows by hand: transformers' model on each, states of the counted tokens collected."""

    def __init__(self, folder, overlap, special_tokens):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        self.overlap = overlap
        self.counts_special = special_tokens == "include"

    def states(self, text, layer):
        """States of the tokens that count, and those of the first and last token of a window."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        around = self.tokenizer("")["input_ids"]
        size, step = MAX_LENGTH - 2, MAX_LENGTH - 2 - self.overlap
        starts = [0]
        while starts[-1] + size < len(ids):
            starts.append(starts[-1] + step)
        token_states, first, last = {}, [], []
        for start in starts:
            window = [around[0], *ids[start : start + size], around[-1]]
            with torch.no_grad():
                output = self.model(torch.tensor([window]), output_hidden_states=True)
            states = output.hidden_states[layer][0].numpy()
            first.append(states[0])
            last.append(states[-1])
            for position, state in enumerate(states[1:-1]):
                token = start + position
                # the window where the token is farther from a cut
                left = position if start else 10**6
                right = len(states) - 3 - position if start + size < len(ids) else 10**6
                rank = min(left, right)
                if token not in token_states or rank > token_states[token][0]:
                    token_states[token] = rank, state
        counted = [token_states[token][1] for token in sorted(token_states)]
        if self.counts_special:
            counted = [first[0], *counted, last[-1]]
        size = len(states[0])
        return np.array(counted).reshape(-1, size), np.array(first), np.array(last)

    def features(self, text, layer):
        counted, first, last = self.states(text, layer)
        n = len(counted)
        return np.concatenate(
            [
                counted.mean(0),
                counted.sum(0) / np.sqrt(n),
                counted.max(0),
                counted.min(0),
                first.mean(0),
                last.mean(0),
            ]
        )


@pytest.mark.parametrize("special_tokens", ["include", "exclude"])
@pytest.mark.parametrize("overlap", [0, 1, 2, 5])
@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
def test_features_are_those_of_windows_by_hand(tmp_path, family, overlap, special_tokens):
    folder = FAMILIES[family](tmp_path / family)
    texts = random_texts(LENGTHS)
    est = BertLayerFeaturizer(
        folder,
        layers=2,
        pooling=POOLINGS,
        max_length=MAX_LENGTH,
        long_documents="window",
        window_overlap=overlap,
        special_tokens=special_tokens,
    )
    reference = Reference(folder, overlap, special_tokens)
    expected = np.array([reference.features(text, 2) for text in texts])
    np.testing.assert_allclose(est.fit_transform(texts), expected, atol=1e-5, rtol=1e-5)


def spread(states):
    return states.amax(1) - states.amin(1)


def in_windows(folder, **settings):
    settings = {"max_length": MAX_LENGTH, "window_overlap": 3, "pooling": POOLINGS, **settings}
    return BertLayerFeaturizer(folder, long_documents="window", layers="all", **settings)


@pytest.mark.filterwarnings("ignore::sklearn_bert.exceptions.ConstantFeaturesWarning")
class TestWindows:
    def test_a_text_that_fits_has_the_bits_it_has_without_windows(self, tiny):
        texts = ["", "good", "a good film", "good " * 10]
        plain = BertLayerFeaturizer(
            tiny, layers="all", pooling=POOLINGS, max_length=MAX_LENGTH, long_documents="error"
        )
        with_long = [*texts, "bad " * 50]
        np.testing.assert_array_equal(
            in_windows(tiny).fit_transform(with_long)[:4], plain.fit_transform(texts)
        )

    @pytest.mark.parametrize("batch_tokens", [1, 12, 50, 10**6])
    def test_bits_do_not_depend_on_the_call(self, tiny, threads, batch_tokens):
        texts = random_texts([*range(1, 60, 3), 5, 5])
        expected = in_windows(tiny, batch_tokens=24).fit_transform(texts)
        order = np.random.default_rng(0).permutation(len(texts))
        threads(2)
        est = in_windows(tiny, batch_tokens=batch_tokens).fit(texts)
        np.testing.assert_array_equal(est.transform([texts[i] for i in order]), expected[order])
        for i in (0, 7, 19):
            np.testing.assert_array_equal(est.transform([texts[i]])[0], expected[i])

    @pytest.mark.parametrize("cache", ["memory", "disk"])
    def test_the_cache_keeps_merged_rows_apart_from_cut_ones(self, tiny, tmp_path, cache):
        texts = random_texts([3, 30, 50])
        cache = "memory" if cache == "memory" else str(tmp_path)
        expected = in_windows(tiny).fit_transform(texts)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TruncationWarning)
            cut = in_windows(tiny, cache=cache).set_params(
                long_documents="truncate", window_overlap=0
            )
            cut.fit_transform(texts)
        for _ in range(2):
            got = in_windows(tiny, cache=cache).fit_transform(texts)
            np.testing.assert_array_equal(got, expected)
        other = in_windows(tiny, cache=cache, window_overlap=4).fit_transform(texts)
        assert not np.array_equal(other, expected)

    def test_a_pooling_of_ones_own_says_how_windows_merge(self, tiny):
        (text,) = random_texts([30])
        words = text.split()
        est = BertLayerFeaturizer(tiny, pooling=Pooling("spread", spread), special_tokens="exclude")
        own = est.fit_transform([" ".join(words[i : i + 10]) for i in (0, 10, 20)])
        for merge, expected in (
            ("max", own.max(0)),
            ("min", own.min(0)),
            ("mean", own.mean(0)),
            ("token_mean", own.mean(0)),
            ("token_sum_sqrt", own.sum(0) / np.sqrt(3)),
        ):
            est = in_windows(
                tiny,
                pooling=Pooling("spread", spread, merge=merge),
                window_overlap=0,
                special_tokens="exclude",
            ).set_params(layers=-1)
            np.testing.assert_allclose(est.fit_transform([text])[0], expected, atol=1e-5)
        with pytest.raises(ValueError, match="merge must be one of mean, token_mean"):
            Pooling("spread", lambda h: h.amax(1), merge="median")
        with pytest.raises(ValueError, match="reads must be 'counted', 'all' or 'pooler'; got 'a"):
            Pooling("spread", lambda h: h.amax(1), reads="al")
        with pytest.raises(TypeError, match=r"a name and a function, Pooling\(name, reduce\)"):
            Pooling(lambda h: h.amax(1), "spread")

    @pytest.mark.parametrize("cached", [False, True])
    def test_numbers_of_numpy_are_numbers(self, tiny, tmp_path, cached):
        """A search over np.arange met json, which knows Python's integers only."""
        cache = tmp_path / "cache" if cached else None
        texts = random_texts([90, 300])
        expected = in_windows(tiny, max_length=40, window_overlap=8).set_params(layers=-1)
        expected = expected.fit_transform(texts)
        est = in_windows(
            tiny,
            cache=cache,
            max_length=np.int64(40),
            window_overlap=np.int64(8),
        ).set_params(layers=np.int64(-1), batch_tokens=np.int64(300))
        np.testing.assert_array_equal(est.fit_transform(texts), expected)
        est.set_params(window_overlap=8, max_length=np.int32(40))  # the same, so no new fit
        np.testing.assert_array_equal(est.transform(texts), expected)

    def test_no_text_is_cut_so_nothing_is_warned_of(self, tiny):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            est = BertLayerFeaturizer(tiny, long_documents="window")
            est.fit_transform(random_texts([300]))
        assert est.n_truncated_ == 0

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"long_documents": "window", "window_overlap": 10}, "leaves no room for new tokens"),
            ({"window_overlap": 3}, "long_documents='window' only"),
            ({"window_overlap": -1}, "window_overlap"),
            ({"long_documents": "windows"}, "long_documents"),
        ],
    )
    def test_what_cannot_be_met_is_refused_by_fit(self, tiny, settings, message):
        with pytest.raises(ValueError, match=message):
            BertLayerFeaturizer(tiny, max_length=MAX_LENGTH, **settings).fit(["good"])


def test_changing_the_overlap_after_fit_asks_for_another_fit(tiny):
    est = in_windows(tiny, pooling="mean").fit(["good"])
    with pytest.raises(ParameterChangedError, match="window_overlap=3 to 2"):
        est.set_params(window_overlap=2).transform(["good"])


class TestTruncate:
    def test_one_warning_counts_texts_and_tokens(self, tiny):
        texts = ["good", "good " * 15, "bad " * 12, "good"]
        est = BertLayerFeaturizer(tiny, max_length=MAX_LENGTH)
        with pytest.warns(TruncationWarning) as caught:
            est.fit_transform(texts)
        assert len(caught) == 1
        message = str(caught[0].message)
        # with special tokens 3 + 17 + 14 + 3 tokens, of which 5 + 2 are too many
        assert "2 of 4 texts were cut to max_length=12" in message
        assert "7 of 37 tokens did not reach the model" in message
        assert "the longest text has 17" in message
        assert est.n_truncated_ == 2

    def test_the_count_belongs_to_fit_transform(self, tiny):
        est = BertLayerFeaturizer(tiny, max_length=MAX_LENGTH).fit(["good"])
        assert not hasattr(est, "n_truncated_")
        est.fit_transform(["good"])
        assert est.n_truncated_ == 0
        assert not hasattr(est.fit(["good"]), "n_truncated_")
