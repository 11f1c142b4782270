"""Features against transformers itself: its model and tokenizer, one text at a time, and NumPy."""

import re
from functools import cache

import numpy as np
import pytest
import torch
import transformers
from families import (
    FAMILIES,
    MAX_TOKENS,
    OTHER_FAMILIES,
    REFUSED,
    TEXTS,
    VARIANTS,
    WITH_POOLER,
    random_texts,
)

from sklearn_bert import BertLayerFeaturizer, _models
from sklearn_bert._pooling import POOLINGS
from sklearn_bert.exceptions import (
    ConstantFeaturesWarning,
    SlowPathWarning,
    TruncationWarning,
    UnsupportedModelError,
)

REVIEWS = [
    "A gorgeous, witty, seductive movie.",
    "The plot is nothing but boilerplate clichés from start to finish.",
    "It's not that the film is bad; it is that nothing in it matters.",
    "Great!",
    "I saw it twice (once in Köln, once in 東京) and would pay the 12 € again.",
    "",
    "Two hours of my life I will never get back. " * 4,
]

# The definitions of the poolings, for states of shape (n_tokens, hidden_size) in which some
# positions count. `cls` and `last` are whatever stands first and last.
POOL = {
    "cls": lambda states, counts: states[0],
    "last": lambda states, counts: states[-1],
    "mean": lambda states, counts: states[counts].sum(0) / counts.sum(),
    "mean_sqrt_len": lambda states, counts: states[counts].sum(0) / np.sqrt(counts.sum()),
    "max": lambda states, counts: states[counts].max(0),
    "min": lambda states, counts: states[counts].min(0),
}


class Reference:
    """The model and tokenizer of a folder, loaded and run by transformers alone."""

    def __init__(self, folder, dtype=torch.float32):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
        self.model = self.model.eval().to(dtype)
        self.known = {}

    def encode(self, text, **settings):
        encoded = self.tokenizer(text, return_special_tokens_mask=True, **settings)
        return encoded["input_ids"], np.array(encoded["special_tokens_mask"], bool)

    def run(self, ids):
        with torch.inference_mode():
            return self.model(torch.tensor([ids]), output_hidden_states=True)

    def states(self, text, **settings):
        """States of shape (n_layers + 1, n_tokens, hidden_size) and which tokens are special."""
        ids, special = self.encode(text, **settings)
        if tuple(ids) not in self.known:
            layers = [layer[0].double().numpy() for layer in self.run(ids).hidden_states]
            self.known[tuple(ids)] = np.stack(layers)
        return self.known[tuple(ids)], special

    def features(self, text, layers, poolings, special_tokens="include", **settings):
        """Vectors of shape (n_layers, n_poolings, hidden_size)."""
        states, special = self.states(text, **settings)
        counts = ~special if special_tokens == "exclude" else np.ones_like(special)
        layers = range(len(states)) if layers == "all" else layers
        blocks = [[_pool(name, states[k], counts) for name in poolings] for k in layers]
        return np.array(blocks)

    def text_of(self, n_tokens):
        """Make a text that the tokenizer turns into `n_tokens` tokens, special ones included."""
        for n_words in range(1, n_tokens):
            text = " ".join(["good"] * n_words)
            if len(self.encode(text)[0]) == n_tokens:
                return text
        raise AssertionError(f"no text of {n_tokens} tokens")


def _pool(name, states, counts):
    if name not in ("cls", "last") and not counts.any():
        return np.zeros(states.shape[1])
    return POOL[name](states, counts)


def stack(reference, texts, *args, **settings):
    return np.array([reference.features(text, *args, **settings).ravel() for text in texts])


def assert_equal_to_1e_5(actual, expected):
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Function that returns the folder of a tiny model of a family."""
    root = tmp_path_factory.mktemp("families")
    builders = {**FAMILIES, **VARIANTS, **OTHER_FAMILIES}
    return cache(lambda name: builders[name](root / name))


@pytest.fixture(scope="module")
def reference_of(folder_of):
    """Function that returns what transformers makes of the tiny model of a family."""
    return cache(lambda name: Reference(folder_of(name)))


@pytest.fixture(scope="module")
def exact_reference_of(folder_of):
    """Function that returns the same in float64."""
    return cache(lambda name: Reference(folder_of(name), torch.float64))


@pytest.fixture(scope="module")
def minilm_reference(minilm):
    return Reference(minilm)


@pytest.fixture(autouse=True)
def one_thread(threads):
    """One thread: these models are too small for two, and no number of threads matters here."""
    threads(1)


def featurizer(folder, **settings):
    return BertLayerFeaturizer(folder, device="cpu", **settings)


everywhere = pytest.mark.parametrize("family", FAMILIES)
# Layer 0 under "cls" is the same for every text, and the library says so.
constant = pytest.mark.filterwarnings(
    f"ignore::{ConstantFeaturesWarning.__module__}.{ConstantFeaturesWarning.__name__}"
)


class TestFeatures:
    def test_every_pooling_has_a_reference(self):
        """No pooling is left out of the comparisons below."""
        assert set(POOLINGS) == {*POOL, "pooler"}

    @constant
    @everywhere
    @pytest.mark.parametrize("special_tokens", ["include", "exclude"])
    def test_all_layers_and_poolings(
        self, folder_of, reference_of, exact_reference_of, family, special_tokens
    ):
        """Every layer under every pooling equals transformers' hidden states of the text alone."""
        expected = stack(reference_of(family), TEXTS, "all", list(POOL), special_tokens)
        actual = featurizer(
            folder_of(family), layers="all", pooling=list(POOL), special_tokens=special_tokens
        ).fit_transform(TEXTS)
        # some of these random models are so ill-conditioned that transformers itself is not that
        # close to what it has in float64
        exact = stack(exact_reference_of(family), TEXTS, "all", list(POOL), special_tokens)
        own_error = np.abs(expected - exact).max()
        assert actual.dtype == np.float32
        assert np.abs(actual - expected).max() <= max(1e-5, own_error)
        assert np.ptp(expected, axis=0).max() > 0.5  # or else nothing was compared

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_heads_and_activations(self, folder_of, reference_of, variant):
        """Other sizes of attention heads and other activations are as right."""
        expected = stack(reference_of(variant), TEXTS, "all", ["mean", "last"])
        est = featurizer(folder_of(variant), layers="all", pooling=["mean", "last"])
        assert_equal_to_1e_5(est.fit_transform(TEXTS), expected)

    @everywhere
    def test_each_layer_by_itself(self, folder_of, reference_of, family):
        """A layer is the same whether it is asked for alone or not, from either end."""
        reference = reference_of(family)
        n_layers = len(reference.states("good")[0]) - 1
        for layer in range(n_layers + 1):
            expected = stack(reference, TEXTS, [layer], ["mean"])
            for number in (layer, layer - n_layers - 1):
                est = featurizer(folder_of(family), layers=number).fit(TEXTS)
                assert (est.layers_, est.n_layers_) == ((layer,), n_layers)
                assert_equal_to_1e_5(est.transform(TEXTS), expected)

    @everywhere
    def test_last_layer_is_last_hidden_state(self, folder_of, reference_of, family):
        """Layer -1 is the model's own last_hidden_state, final norm included."""
        reference = reference_of(family)
        ids = [reference.encode(text)[0] for text in TEXTS]
        expected = [reference.run(i).last_hidden_state[0].mean(0).numpy() for i in ids]
        assert_equal_to_1e_5(featurizer(folder_of(family)).fit_transform(TEXTS), expected)

    @pytest.mark.parametrize("family", WITH_POOLER)
    def test_pooler(self, folder_of, reference_of, family):
        """The pooler is the model's own, alone and beside poolings of the last layer."""
        reference = reference_of(family)
        outputs = [reference.run(reference.encode(text)[0]).pooler_output[0] for text in TEXTS]
        pooler = np.array([output.numpy() for output in outputs])
        alone = featurizer(folder_of(family), pooling="pooler").fit_transform(TEXTS)
        assert_equal_to_1e_5(alone, pooler)
        both = featurizer(folder_of(family), pooling=["max", "pooler"]).fit_transform(TEXTS)
        n_layers = len(reference.states("good")[0]) - 1
        assert_equal_to_1e_5(
            both, np.hstack([stack(reference, TEXTS, [n_layers], ["max"]), pooler])
        )

    @pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(WITH_POOLER)))
    def test_no_pooler(self, folder_of, family):
        """A checkpoint without weights for the pooler has no pooler output, at fit already."""
        with pytest.raises(ValueError, match="pooler"):
            featurizer(folder_of(family), pooling="pooler").fit(TEXTS)

    def test_minilm(self, minilm, minilm_reference):
        """A trained model gives what transformers gives, in all layers and poolings."""
        names = list(POOL)
        for special_tokens in ("include", "exclude"):
            expected = stack(minilm_reference, REVIEWS, range(1, 7), names, special_tokens)
            actual = featurizer(
                minilm, layers=range(1, 7), pooling=names, special_tokens=special_tokens
            ).fit_transform(REVIEWS)
            assert_equal_to_1e_5(actual, expected)


class TestColumns:
    @pytest.fixture
    def blocks(self, reference_of):
        """Vectors of shape (n_texts, n_layers, n_poolings, hidden_size), poolings max and mean."""
        return np.array(
            [reference_of("bert").features(text, "all", ["max", "mean"]) for text in TEXTS]
        )

    @pytest.mark.parametrize("layers", [[3, 1], [-1, 1], (2,), range(1, 4), np.array([0, 2])])
    @pytest.mark.parametrize("pooling", [["max", "mean"], ["mean", "max"], ["mean"]])
    def test_order(self, folder_of, blocks, layers, pooling):
        """Blocks stand layer by layer in the order given, and in each pooling by pooling."""
        columns = [["max", "mean"].index(name) for name in pooling]
        expected = [[row[k, column] for k in layers for column in columns] for row in blocks]
        est = featurizer(folder_of("bert"), layers=layers, pooling=pooling).fit(TEXTS)
        assert_equal_to_1e_5(est.transform(TEXTS), np.reshape(expected, (len(TEXTS), -1)))
        names = [name.split("_")[:2] for name in est.get_feature_names_out()[::32]]
        assert names == [[f"layer{k % 4}", name] for k in layers for name in pooling]

    @pytest.mark.parametrize("norm", [None, "l2"])
    @pytest.mark.parametrize("combination", ["concat", "mean", "sum", "max"])
    @pytest.mark.parametrize("layers", [[3, 1, 2], "all", -2])
    def test_combination_and_norm(self, folder_of, blocks, layers, combination, norm):
        """Layers are combined element by element, pooling by pooling, and rows divided by length.

        The reference is computed here from transformers' states, in float64.
        """
        chosen = blocks if layers == "all" else blocks[:, np.atleast_1d(layers)]
        n_texts, n_layers = chosen.shape[:2]
        flat = chosen.reshape(n_texts, n_layers, -1)
        expected = {
            "concat": flat.reshape(n_texts, -1),
            "mean": sum(flat[:, k] for k in range(n_layers)) / n_layers,
            "sum": sum(flat[:, k] for k in range(n_layers)),
            "max": np.maximum.reduce([flat[:, k] for k in range(n_layers)]),
        }[combination]
        if norm == "l2":
            expected = expected / np.sqrt((expected**2).sum(axis=1, keepdims=True))
        actual = featurizer(
            folder_of("bert"),
            layers=layers,
            layer_combination=combination,
            pooling=["max", "mean"],
            norm=norm,
        ).fit_transform(TEXTS)
        assert_equal_to_1e_5(actual, expected)

    def test_norm_of_nothing(self, folder_of):
        """A row of zeros (an empty text without its special tokens) stays zeros, not nan."""
        est = featurizer(folder_of("bert"), special_tokens="exclude", norm="l2")
        rows = est.fit_transform(["", "good"])
        assert not rows[0].any()
        assert np.linalg.norm(rows[1]) == pytest.approx(1, abs=1e-6)


class TestLength:
    @pytest.mark.filterwarnings(
        f"ignore::{TruncationWarning.__module__}.{TruncationWarning.__name__}"
    )
    @everywhere
    @pytest.mark.parametrize("special_tokens", ["include", "exclude"])
    def test_max_length(self, folder_of, reference_of, family, special_tokens):
        """max_length cuts where the model's own tokenizer cuts with truncation=True."""
        names = ["mean", "last", "min"]
        texts = [*TEXTS, "good " * 100]
        for n in (3, 4, 9, 32):
            expected = stack(
                reference_of(family), texts, "all", names, special_tokens,
                truncation=True, max_length=n,
            )  # fmt: skip
            actual = featurizer(
                folder_of(family), layers="all", pooling=names, max_length=n,
                special_tokens=special_tokens,
            ).fit_transform(texts)  # fmt: skip
            assert_equal_to_1e_5(actual, expected)

    @everywhere
    def test_texts_around_the_limit(self, folder_of, reference_of, family):
        """Texts of one token fewer and more than the model takes are right, among short ones.

        The limit is that of the position table, less the rows that RoBERTa and its relatives do
        not use, also where the tokenizer records no limit.
        """
        reference = reference_of(family)
        lengths = (MAX_TOKENS - 1, MAX_TOKENS, MAX_TOKENS + 1, MAX_TOKENS + 40)
        below, full, above, far = (reference.text_of(n) for n in lengths)
        texts = ["bad", above, below, "", full, far, "good film"]
        est = featurizer(folder_of(family)).fit(texts)
        assert est.max_length_ == MAX_TOKENS
        with pytest.warns(TruncationWarning, match=r"2 of 7 texts .*max_length=64 .*has 104"):
            actual = est.transform(texts)
        expected = [
            reference.states(text, truncation=True, max_length=MAX_TOKENS)[0][-1].mean(0)
            for text in texts
        ]
        assert_equal_to_1e_5(actual, expected)
        np.testing.assert_array_equal(actual[[1, 5]], actual[[4, 4]])
        assert np.abs(actual[2] - actual[4]).max() > 1e-3

    @pytest.mark.parametrize("family", ["bert", "roberta", "mpnet"])
    def test_more_than_there_are_positions_for(self, folder_of, family):
        """A max_length beyond the position table is refused at fit, whatever the texts."""
        featurizer(folder_of(family), max_length=MAX_TOKENS).fit(["good"])
        with pytest.raises(ValueError, match=r"max_length=65 .*64 tokens"):
            featurizer(folder_of(family), max_length=MAX_TOKENS + 1).fit(["good"])

    def test_settings_in_the_tokenizer_file(self, minilm, minilm_reference):
        """Truncation and padding written in a tokenizer file (here to 128) do not take effect."""
        text = "It goes on and on. " * 60
        ids = minilm_reference.encode(text, truncation=True, max_length=250)[0]
        assert len(ids) == 250
        expected = minilm_reference.run(ids).last_hidden_state[0].mean(0).numpy()
        with pytest.warns(TruncationWarning, match="1 of 2"):
            actual = featurizer(minilm, max_length=250).fit_transform(["Great!", text])
        assert_equal_to_1e_5(actual[1], expected)


class TestTypedSpecialTokens:
    @everywhere
    @pytest.mark.parametrize(
        "token", ["[SEP]", "[CLS]", "[MASK]", "[PAD]", "[UNK]", "<s>", "</s>", "<pad>", "<mask>"]
    )
    def test_they_are_text(self, folder_of, reference_of, family, token):
        """A special token that a user typed is read letter by letter, like any other text."""
        reference = reference_of(family)
        tokenizer = reference.tokenizer
        text = f"good {token} bad"
        ids = reference.encode(text, split_special_tokens=True)[0]
        if "▁" in tokenizer.get_vocab():  # that setting does not reach the pieces of SentencePiece
            spelled = token.lower() if tokenizer.init_kwargs.get("do_lower_case") else token
            good, bad = reference.encode("good")[0], reference.encode("bad")[0]
            ids = [*good[:-1], *tokenizer.convert_tokens_to_ids(["▁", *spelled]), *bad[1:]]
        assert not set(ids[1:-1]) & set(tokenizer.all_special_ids)
        expected = reference.run(ids).last_hidden_state[0].mean(0).numpy()
        assert_equal_to_1e_5(featurizer(folder_of(family)).fit_transform([text]), [expected])

    def test_brackets_are_punctuation(self, folder_of, reference_of):
        """For BERT, "[SEP]" in a text is the same as "[ sep ]"."""
        spaced = reference_of("bert").states("good [ sep ] bad")[0][-1].mean(0)
        control = reference_of("bert").states("good [SEP] bad")[0][-1].mean(0)
        actual = featurizer(folder_of("bert")).fit_transform(["good [SEP] bad"])
        assert_equal_to_1e_5(actual, [spaced])
        assert np.abs(actual - control).max() > 1e-3


class TestPrecision:
    @everywhere
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision(self, folder_of, reference_of, family, dtype):
        """Half precision gives finite float32 features whose cosine to the right ones is > 0.999.

        Rows are compared layer by layer; in bfloat16 they must not be those of float32.
        """
        actual = featurizer(folder_of(family), layers="all", dtype=dtype).fit_transform(TEXTS)
        assert_close_in_direction(actual, stack(reference_of(family), TEXTS, "all", ["mean"]), 32)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision_of_minilm(self, minilm, minilm_reference, dtype):
        """A trained model in half precision stays as close."""
        actual = featurizer(minilm, layers="all", dtype=dtype).fit_transform(REVIEWS)
        assert_close_in_direction(actual, stack(minilm_reference, REVIEWS, "all", ["mean"]), 384)


def assert_close_in_direction(actual, expected, hidden_size):
    assert actual.dtype == np.float32
    assert np.isfinite(actual).all()
    assert np.abs(actual - expected).max() > 1e-5  # it is another precision
    a, b = (x.reshape(-1, hidden_size) for x in (actual, expected))
    cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert cosine.min() > 0.999


# Names of the modules that are blocks, in the families' own words.
BLOCK = re.compile(
    r"blocks\.\d+"
    r"|(encoder|transformer)\.layer\.\d+"
    r"|layers\.\d+"
    r"|encoder\.albert_layer_groups\.\d+\.albert_layers\.\d+"
)


def modules_of(encoder):
    return getattr(encoder.runner, "model", encoder.runner)


@pytest.fixture
def blocks_run(monkeypatch):
    """Function that counts how often a block of the model of a fitted featurizer runs."""

    def count(est, texts):
        encoder = _models.get_encoder(est._reference(), torch.device("cpu"), est.dtype)
        ran = []
        with monkeypatch.context() as patch:
            for name, module in modules_of(encoder).named_modules():
                if BLOCK.fullmatch(name):
                    patch.setattr(module, "forward", _counted(module.forward, ran))
            est.transform(texts)
        return len(ran)

    return count


def _counted(forward, ran):
    def wrapper(*args, **kwargs):
        ran.append(1)
        return forward(*args, **kwargs)

    return wrapper


class TestEarlyStop:
    @everywhere
    def test_only_the_blocks_needed_run(self, folder_of, blocks_run, family):
        """As many blocks run as the highest layer asked for, for any layers below it."""
        est = featurizer(folder_of(family), layers="all").fit(TEXTS)
        n_layers = est.n_layers_
        assert blocks_run(est, ["good film"]) == n_layers
        for layers in (0, 1, 2, [0, 2], [2, 1], n_layers - 1, -1, [0, -1]):
            est = featurizer(folder_of(family), layers=layers).fit(TEXTS)
            assert blocks_run(est, ["good film"]) == max(est.layers_)

    def test_every_batch_stops(self, folder_of, blocks_run):
        """Each batch stops early, not only the first, and later calls can go deeper again."""
        texts = random_texts([2, 2, 5, 5, 9])
        low = featurizer(folder_of("bert"), layers=1, batch_tokens=14).fit(texts)
        full = featurizer(folder_of("bert"), batch_tokens=14).fit(texts)
        assert [blocks_run(est, texts) for est in (low, full, low)] == [3, 9, 3]

    def test_minilm(self, minilm, blocks_run):
        """Of the six blocks of a trained model four run for layer 4."""
        assert blocks_run(featurizer(minilm, layers=4).fit(REVIEWS), ["Great!"]) == 4


class TestOtherFamilies:
    """Encoders whose layout the library does not know."""

    @pytest.mark.filterwarnings(
        f"ignore::{SlowPathWarning.__module__}.{SlowPathWarning.__name__}",
        f"ignore::{TruncationWarning.__module__}.{TruncationWarning.__name__}",
    )
    @pytest.mark.parametrize("family", OTHER_FAMILIES)
    def test_right(self, folder_of, reference_of, family):
        """All layers are transformers' hidden states, together and alone, up to the limit."""
        reference = reference_of(family)
        texts = [*TEXTS, reference.text_of(MAX_TOKENS), reference.text_of(MAX_TOKENS + 9)]
        names = ["mean", "max", "last"]
        est = featurizer(folder_of(family), layers="all", pooling=names).fit(texts)
        assert (est.n_layers_, est.max_length_) == (3, MAX_TOKENS)
        cut = {"truncation": True, "max_length": MAX_TOKENS}
        expected = stack(reference, texts, "all", names, **cut)
        assert_equal_to_1e_5(est.transform(texts), expected)
        for layer in range(4):
            actual = featurizer(folder_of(family), layers=layer).fit_transform(texts)
            assert_equal_to_1e_5(actual, stack(reference, texts, [layer], ["mean"], **cut))

    def test_blocks_that_cannot_be_told_apart(self, folder_of, monkeypatch):
        """A model without modules that are blocks runs as a whole, and says so once."""
        monkeypatch.setattr(_models, "_encoders", type(_models._encoders)())
        est = featurizer(folder_of("xlm"), layers=1).fit(TEXTS)
        with pytest.warns(SlowPathWarning, match="blocks of XLMModel"):
            est.transform(TEXTS)
        est.transform(TEXTS)  # another warning would be an error here


class TestRefused:
    @pytest.mark.parametrize("name", REFUSED)
    def test_at_fit_with_the_reason(self, tmp_path, name):
        """A model that gives no state per token of the whole text is refused at fit, with words."""
        build, reason = REFUSED[name]
        with pytest.raises(UnsupportedModelError, match=reason):
            featurizer(build(tmp_path)).fit(["good"])
