"""Any string is a text: nothing crashes, rows are finite, same text gives same bits."""

import random
import sys
import warnings

import numpy as np
import pytest
from families import FAMILIES
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sklearn_bert import BertLayerFeaturizer
from sklearn_bert._documents import check_documents
from sklearn_bert._tokenization import TextLayout, tokenize
from sklearn_bert.exceptions import TruncationWarning

pytestmark = pytest.mark.filterwarnings("ignore::sklearn_bert.exceptions.TruncationWarning")


@pytest.fixture(scope="module")
def featurizer(tiny):
    return BertLayerFeaturizer(tiny, layers="all", pooling=["mean", "max", "last"]).fit(["good"])


def random_text(rng):
    """Characters of every kind: scripts, controls, joiners, surrogates, private and unassigned."""
    kinds = [
        lambda: chr(rng.randrange(0x20, 0x7F)),
        lambda: chr(rng.randrange(0x0, 0x20)),
        lambda: chr(rng.randrange(0x80, 0x800)),
        lambda: chr(rng.randrange(0x800, 0xD800)),
        lambda: chr(rng.randrange(0xD800, 0xE000)),
        lambda: chr(rng.randrange(0xE000, 0x10000)),
        lambda: chr(rng.randrange(0x10000, sys.maxunicode + 1)),
        lambda: rng.choice("\u200b\u200d\u200e\u200f\u202e\u2066\ufeff\u0301\u00ad\u2028\x85\x00"),
        lambda: rng.choice([" ", " ", "good", "film", "[SEP]", "##", "[MASK]", "\U0001f600"]),
    ]
    return "".join(rng.choice(kinds)() for _ in range(rng.randrange(0, 12)))


def test_a_hundred_thousand_random_strings(featurizer):
    rng = random.Random(0)
    texts = [random_text(rng) for _ in range(100_000)]
    features = featurizer.transform(texts)
    assert features.shape == (100_000, len(featurizer.get_feature_names_out()))
    assert np.isfinite(features).all()
    for row in rng.sample(range(len(texts)), 150):
        assert np.array_equal(featurizer.transform([texts[row]])[0], features[row])


@given(st.lists(st.text(st.characters(), max_size=30), min_size=1, max_size=8))
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_neighbours_do_not_matter(featurizer, texts):
    together = featurizer.transform(texts)
    assert np.isfinite(together).all()
    alone = np.concatenate([featurizer.transform([text]) for text in texts])
    assert np.array_equal(together, alone)


ANY_TEXT = st.text(st.characters(), max_size=12)
TYPED = st.sampled_from("[CLS] [SEP] [PAD] [MASK] <s> </s> <pad> <mask> good ##film".split())


@given(
    texts=st.lists(ANY_TEXT, min_size=1, max_size=10),
    repeated=st.integers(1, 2),
    seed=st.randoms(use_true_random=False),
    batch_tokens=st.integers(1, 200),
    max_length=st.integers(3, 20),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_order_duplicates_and_batches_do_not_matter(
    tiny, texts, repeated, seed, batch_tokens, max_length
):
    params = {"special_tokens": "exclude", "max_length": max_length, "layers": [0, 2]}
    expected = BertLayerFeaturizer(tiny, **params).fit_transform(texts)
    assert np.isfinite(expected).all()
    order = list(range(len(texts))) * repeated
    seed.shuffle(order)
    got = BertLayerFeaturizer(tiny, batch_tokens=batch_tokens, **params).fit_transform(
        [texts[row] for row in order]
    )
    assert np.array_equal(got, expected[order])


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Of each kind that there is: WordPiece, byte-level BPE and Unigram."""
    from sklearn_bert._models import get_tokenizer

    folders = {name: tmp_path_factory.mktemp(name) for name in ("bert", "roberta", "xlm-roberta")}
    fitted = [BertLayerFeaturizer(FAMILIES[name](folders[name])).fit(["a"]) for name in folders]
    return [get_tokenizer(featurizer._reference()) for featurizer in fitted]


@given(st.lists(st.one_of(TYPED, ANY_TEXT), max_size=8).map("".join))
@example("\ud800")
@example("".join(["[CLS]", "<s>", "[SEP]", "</s>", "[PAD]", "<pad>", "[MASK]", "<mask>"]))
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_nothing_that_is_typed_becomes_a_control_token(tokenizers, text):
    documents = check_documents([text])  # it replaces lone surrogates, which no tokenizer takes
    for tokenizer in tokenizers:
        around = tokenizer.special_tokens
        (ids,) = tokenize(tokenizer, documents, TextLayout(max_length=1000)).ids
        typed = ids[len(around.prefix) : len(ids) - len(around.suffix)].tolist()
        assert not {*around.prefix, *around.suffix} & set(typed)
        names = {tokenizer.backend.id_to_token(number) for number in typed}
        assert not {"[PAD]", "<pad>", "[MASK]", "<mask>"} & names


@pytest.mark.parametrize(
    "text",
    [
        "x" * 10_000_000,
        "\n" * 1_000_000,
        "good\n" * 200_000,
        "\U0001f600" * 100_000,
        "a\x00b" * 1000,
    ],
    ids=["ten million letters", "a million newlines", "lines", "emoji", "zero bytes"],
)
def test_very_long_texts(featurizer, text):
    rows = featurizer.transform([text, "good film", text + " "])
    assert np.isfinite(rows).all()
    assert np.array_equal(rows[1], featurizer.transform(["good film"])[0])


@pytest.mark.parametrize("token", ["[SEP]", "[CLS]", "[PAD]", "[MASK]", "[UNK]"])
def test_a_special_token_that_a_user_types_is_text(featurizer, token):
    """Taken for a control token, it would end the sentence or vanish in padding."""
    rows = featurizer.transform([f"good {token} film", "good film", f"good {token.lower()} film"])
    assert not np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])  # this model lower-cases: the token is only letters


def test_the_big_list_of_naughty_strings(featurizer, shared_data):
    import json

    texts = json.loads((shared_data / "may_ship" / "blns" / "blns.json").read_text("utf-8"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruncationWarning)
        rows = featurizer.transform(texts)
        alone = np.concatenate([featurizer.transform([text]) for text in texts])
    assert np.isfinite(rows).all()
    assert np.array_equal(rows, alone)
