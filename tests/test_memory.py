"""Memory: constant while computing, given back afterwards, and never more with more calls."""

import gc
import random
import sys
import threading
import tracemalloc
import weakref

import numpy as np
import pytest
import torch
from families import FAMILIES

import sklearn_bert
from sklearn_bert import (
    BertLayerFeaturizer,
    FeatureCache,
    Pooling,
    _forward,
    _model_loading,
    _text_states,
)
from sklearn_bert._memory_store import MemoryStore
from sklearn_bert._models import get_tokenizer
from sklearn_bert._packed_linear import PackedLinear, padded_height
from sklearn_bert._tokenization import (
    PairTokens,
    SpecialTokens,
    TextLayout,
    TextTokenizer,
    tokenize,
)
from sklearn_bert.exceptions import SlowPathWarning
from sklearn_bert.testing import make_bert

WORDS = "a good film the plot was awful and i hated it very much bad great movie".split()
MEGABYTE = 2**20


def tensors(condition=lambda tensor: True):
    """Tensors that are alive; garbage that waits for its collection counts."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    return [t for t in gc.get_objects() if type(t) in kinds and condition(t)]


def resident():
    """Memory of this process, in bytes."""
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def random_texts(n, rng, longest=60):
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, longest))) for _ in range(n)]


def watched_mean(watch):
    """Return a pooling that shows the states of every batch to `watch`."""

    def reduce(states):
        watch(states)
        return states.mean(dim=1)

    return Pooling("watched", reduce)


class TestWhileComputing:
    def test_what_is_alive_does_not_grow_with_the_batches(self, tiny):
        alive, inside = [], []

        def watch(states):
            inside.append((torch.is_grad_enabled(), states.requires_grad, states.grad_fn))
            if len(inside) % 20 == 5:
                alive.append(sum(t.nbytes for t in tensors()))

        texts = sorted(set(random_texts(1500, random.Random(0), longest=20)))
        featurizer = BertLayerFeaturizer(tiny, pooling=watched_mean(watch), batch_tokens=64)
        with torch.enable_grad():
            features = featurizer.fit_transform(texts)
            assert torch.is_grad_enabled()
        assert isinstance(features, np.ndarray)
        assert len(inside) > 200
        one_batch = 64 * 32 * 4
        assert max(alive) <= alive[0] + 2 * one_batch  # views count too, and not all are full
        assert set(inside) == {(False, False, None)}

    def test_no_token_is_padding(self, tiny):
        """One long text once made its whole batch as long as itself."""
        rng = random.Random(1)
        shapes = []
        featurizer = BertLayerFeaturizer(
            tiny, pooling=watched_mean(lambda states: shapes.append(states.shape[:2]))
        ).fit(["a"])
        for texts in (
            random_texts(200, rng),
            [f"{a} {b}" for a in WORDS for b in WORDS] + [" ".join(WORDS * 3)],
        ):
            shapes.clear()
            featurizer.transform(rng.sample(texts, len(texts)))
            lengths = [len(text.split()) + 2 for text in dict.fromkeys(texts)]
            assert sum(n * length for n, length in shapes) == sum(lengths)
        assert (1, 50) in shapes  # the long one, by itself

    def test_a_batch_that_did_not_fit_is_freed_before_its_halves_run(self, tiny):
        """What it had computed was in the way of the next attempt."""
        leftovers, sizes = [], []

        def watch(states):
            n_texts, n_tokens, _ = states.shape
            if n_texts > 4:
                raise torch.OutOfMemoryError("out of memory (simulated)")
            sizes.append(n_texts)
            leftovers.extend(tensors(lambda t: t.ndim == 3 and t.shape[:2] == (16, n_tokens)))

        texts = [f"{word} good film" for word in WORDS]
        featurizer = BertLayerFeaturizer(tiny, pooling=watched_mean(watch)).fit(texts)
        sklearn_bert.unload_models()
        gc.disable()
        try:
            with pytest.warns(SlowPathWarning, match="out of memory"):
                got = featurizer.transform(texts)
        finally:
            gc.enable()
            sklearn_bert.unload_models()  # it remembers what fits
        assert sizes == [4, 4, 4, 4]
        assert leftovers == []
        assert np.array_equal(got, BertLayerFeaturizer(tiny).fit_transform(texts))

    @pytest.mark.parametrize("pooling", ["mean", "pooler"])
    @pytest.mark.parametrize("fast", [True, False])
    def test_few_numbers_of_rows_are_multiplied(self, tiny, fast, pooling, monkeypatch):
        """oneDNN keeps a kernel of over half a megabyte for each that it has met."""
        sklearn_bert.unload_models()
        if not fast:
            monkeypatch.setattr(_model_loading, "fast_bert", lambda model, dtype: None)
        heights = set()
        original = PackedLinear._rows

        def note(self, x, add):
            heights.add(x.numel() // self.in_features)
            return original(self, x, add)

        monkeypatch.setattr(PackedLinear, "_rows", note)
        rng = random.Random(5)
        featurizer = BertLayerFeaturizer(tiny, pooling=pooling, device="cpu").fit(["a"])
        featurizer.transform(random_texts(2_000, rng, longest=30))
        for _ in range(100):
            featurizer.transform(random_texts(1, rng) + random_texts(rng.randint(0, 8), rng))
        sklearn_bert.unload_models()
        assert heights
        assert all(padded_height(n) == n for n in heights)
        assert len(heights) <= sum(padded_height(n) == n for n in range(2, 1025)) < 128

    def test_holes_in_the_heap_are_given_back(self, tiny, monkeypatch):
        """Of a model in transformers' code, whose batches leave them; a C library keeps them."""
        monkeypatch.setattr(_model_loading, "fast_bert", lambda model, dtype: None)
        trims = []
        monkeypatch.setattr(_forward, "free_memory", trims.append)
        sklearn_bert.unload_models()
        texts = random_texts(3_000, random.Random(6), longest=30)
        features = BertLayerFeaturizer(tiny, device="cpu").fit(["a"])
        features.transform(texts)
        sklearn_bert.unload_models()
        n_tokens = sum(len(text.split()) + 2 for text in dict.fromkeys(texts))
        assert len(trims) == pytest.approx(n_tokens / 2**14, abs=1)

    def test_what_is_kept_for_the_cache_at_a_time_is_bounded(self, tiny, tmp_path, monkeypatch):
        """Thousands of short texts with all their layers were once put at a time."""
        limit = 2**20
        sizes = []
        original = MemoryStore.put

        def note(self, shelf, texts, n_tokens, states, max_bytes):
            sizes.append(states.nbytes)
            return original(self, shelf, texts, n_tokens, states, max_bytes)

        monkeypatch.setattr(MemoryStore, "put", note)
        monkeypatch.setattr(_text_states, "_CLAIMED_BYTES", limit)
        texts = [f"{a} {b} {c}" for a in WORDS for b in WORDS for c in WORDS]
        poolings = ["mean", "max", "min"]
        cache = FeatureCache(tmp_path, poolings=poolings)
        BertLayerFeaturizer(tiny, layers="all", cache=cache).fit_transform(texts)
        assert len(sizes) > 3 * len(poolings)
        assert max(sizes) <= limit / len(poolings)


class TestTokenizing:
    """A call holds the ids of thousands of texts, and was held up by what came with them."""

    class Kept:
        """What the tokenizers library keeps of a text: kilobytes, outside of Python's memory."""

        def __init__(self, text):
            self.ids = list(range(1000, 1000 + len(text)))

    @pytest.mark.parametrize("text_pair", [False, True])
    def test_what_the_library_keeps_of_a_text_is_let_go(self, text_pair):
        alive, most = weakref.WeakSet(), []

        class Backend:
            def encode_batch_fast(self, texts, add_special_tokens):
                assert not add_special_tokens
                encodings = [TestTokenizing.Kept(text) for text in texts]
                alive.update(encodings)
                most.append(len(alive))
                return encodings

        pair = PairTokens((1,), (2,), (2,), (0, 0, 0, 1, 1))
        tokenizer = TextTokenizer(Backend(), SpecialTokens((1,), (2,)), pair, None)
        texts = ["a" * (1 + number % 50) for number in range(5000)]
        layout = TextLayout(max_length=100, text_pair=text_pair)
        given = list(zip(texts, texts[1:] + texts[:1], strict=True)) if text_pair else texts
        encodings = tokenize(tokenizer, given, layout)
        assert max(most) <= 1100
        assert len(encodings.ids) == 5000
        if not text_pair:
            for text, ids in zip(texts, encodings.ids, strict=True):
                assert ids.tolist() == [1, *range(1000, 1000 + len(text)), 2]

    def test_ids_take_a_few_bytes_each(self, tiny):
        """Python's integers took forty."""
        tokenizer = get_tokenizer(BertLayerFeaturizer(tiny).fit(["a"])._reference())
        texts = [" ".join(WORDS * 20)] * 500
        layout = TextLayout(max_length=10**6)
        tokenize(tokenizer, texts[:2], layout)
        tracemalloc.start()
        try:
            encodings = tokenize(tokenizer, texts, layout)
            n_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert n_bytes < 6 * sum(encodings.n_tokens)


class TestOverManyCalls:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_new_lengths_and_batch_sizes_take_no_more(self, tiny, dtype):
        rng = random.Random(2)
        featurizer = BertLayerFeaturizer(tiny, dtype=dtype).fit(["a"])
        after = {}
        for call in range(1, 801):
            featurizer.set_params(batch_tokens=rng.randint(1, 4000))
            featurizer.transform(random_texts(rng.randint(1, 8), rng))
            after[call] = resident() if call in (400, 800) else 0
        assert after[800] - after[400] < 30 * MEGABYTE

    @pytest.mark.filterwarnings("ignore::sklearn_bert.exceptions.TruncationWarning")
    @pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
    def test_giant_words_are_not_kept(self, tmp_path, family):
        """A tokenizer that remembers words must not remember these."""
        rng = random.Random(3)
        featurizer = BertLayerFeaturizer(FAMILIES[family](tmp_path / family)).fit(["a"])

        def use(n_calls):
            for _ in range(n_calls):
                featurizer.transform(["".join(rng.choices("abcdefghij", k=50_000))])
            _forward.free_memory(torch.device("cpu"))  # what the C library may keep is not ours
            return resident()

        before = use(20)
        assert use(100) - before < 30 * MEGABYTE

    def test_short_lived_threads_take_no_more(self, tiny):
        featurizer = BertLayerFeaturizer(tiny).fit(["a"])
        texts = random_texts(3, random.Random(4), longest=20)

        def use(n_threads):
            for _ in range(n_threads):
                thread = threading.Thread(target=featurizer.transform, args=(texts,))
                thread.start()
                thread.join()
            return resident()

        before = use(30)
        assert use(300) - before < 30 * MEGABYTE


class TestModels:
    """The weights of these models have 25 MB."""

    @staticmethod
    def model(tmp_path, seed):
        return make_bert(tmp_path / str(seed), n_layers=3, hidden_size=512, n_heads=8, seed=seed)

    def test_unloading_gives_the_memory_back(self, tmp_path):
        featurizers = [BertLayerFeaturizer(self.model(tmp_path, n)).fit(["a"]) for n in range(3)]
        sklearn_bert.unload_models()
        before = resident()
        expected = [featurizer.transform(["good film"]) for featurizer in featurizers]
        loaded = resident()
        sklearn_bert.unload_models()
        assert loaded - before > 70 * MEGABYTE
        assert resident() - before < 25 * MEGABYTE
        again = [featurizer.transform(["good film"]) for featurizer in featurizers]
        assert np.array_equal(again, expected)
        sklearn_bert.unload_models()

    def test_a_loop_over_models_does_not_add_up(self, tmp_path):
        sizes = []
        for seed in range(10):
            featurizer = BertLayerFeaturizer(self.model(tmp_path, seed))
            featurizer.fit_transform(["good film"])
            del featurizer
            sizes.append(resident())
        assert sizes[-1] - sizes[4] < 30 * MEGABYTE
        sklearn_bert.unload_models()

    def test_a_model_is_held_once(self, tmp_path):
        """Its weights as they were read, and once more as they are computed with, are too many."""
        featurizer = BertLayerFeaturizer(self.model(tmp_path, 0), device="cpu").fit(["a"])
        sklearn_bert.unload_models()
        before = resident()
        featurizer.transform(["good film"])
        assert resident() - before < 45 * MEGABYTE
        sklearn_bert.unload_models()
