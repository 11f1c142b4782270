"""What makes it fast, in numbers of passes, blocks and tokens; and that it stays right."""

import math
import platform

import numpy as np
import pytest
import torch
from families import FAMILIES, TEXTS, random_texts
from hypothesis import given
from hypothesis import strategies as st

from sklearn_bert import (
    BertLayerFeaturizer,
    _fast_bert,
    _forward,
    _model_loading,
    _models,
    _text_states,
)
from sklearn_bert._batching import plan_batches
from sklearn_bert._fast_bert import FastBert
from sklearn_bert._forward import HookedModel
from sklearn_bert._packed_linear import PackedLinear, packing_works
from sklearn_bert._pooling import POOLINGS

FAST = ["bert", "camembert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta"]
MIXED = random_texts(range(1, 41))  # every number of words from 1 to 40 once
CPU = torch.device("cpu")


def encoder_of(est):
    return _models.get_encoder(est._reference(), CPU, est.dtype)


def fitted(folder, **settings):
    return BertLayerFeaturizer(folder, device="cpu", layers="all", **settings).fit(TEXTS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAST)
def test_these_families_run_in_our_own_code(tmp_path, family, dtype):
    """A change of names in transformers would silently cost them their speed."""
    if not packing_works(getattr(torch, dtype)):
        pytest.skip("no packed weights of this type on this machine")
    est = fitted(FAMILIES[family](tmp_path / family), dtype=dtype)
    assert isinstance(encoder_of(est).runner, FastBert)


def test_a_model_of_the_same_make_but_another_shape_does_not(tmp_path):
    """Heads of 8 and other activations were seen to give other bits; they run elsewhere."""
    from families import VARIANTS

    for name in ("heads-of-8", "gelu_new", "one-head", "mpnet-four-heads"):
        est = fitted(VARIANTS[name](tmp_path / name))
        assert isinstance(encoder_of(est).runner, HookedModel)


@pytest.mark.parametrize("family", FAST)
def test_our_own_code_agrees_with_that_of_transformers(
    tmp_path, family, empty_registry, monkeypatch
):
    """Both ways through the same weights, for every length and layer."""
    folder = FAMILIES[family](tmp_path / family)
    fast = fitted(folder, pooling=["mean", "max", "last"]).transform(MIXED)
    monkeypatch.setattr(_model_loading, "fast_bert", lambda model, dtype: None)
    _models.unload_models()
    slow = fitted(folder, pooling=["mean", "max", "last"])
    # each is within 1e-5 of what transformers has for a text alone (test_reference)
    np.testing.assert_allclose(slow.transform(MIXED), fast, atol=2e-5, rtol=0)
    assert isinstance(encoder_of(slow).runner, HookedModel)


@pytest.mark.parametrize("fast", [True, False])
def test_a_token_with_the_number_of_the_padding_is_not_given_a_position(
    tmp_path, empty_registry, monkeypatch, fast
):
    """RoBERTa does not count it; an unknown piece of a text can have that number."""
    import transformers
    from families import _ROBERTA_LIKE, _bert_tokenizer, write_model

    tokenizer = _bert_tokenizer()
    settings = {**_ROBERTA_LIKE, "pad_token_id": tokenizer.convert_tokens_to_ids("good")}
    config = transformers.RobertaConfig(**settings, type_vocab_size=1)
    config.max_position_embeddings = 200
    folder = write_model(tmp_path / "m", config, tokenizer, "RobertaModel")
    if not fast:
        monkeypatch.setattr(_model_loading, "fast_bert", lambda model, dtype: None)
    got = fitted(folder, pooling="mean").transform(["a good film", "bad"])
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    for text, row in zip(["a good film", "bad"], got, strict=True):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            states = model(ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
        expected = torch.cat([h[0].mean(0) for h in states.hidden_states]).numpy()
        np.testing.assert_allclose(row, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="not tried elsewhere")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_packed_products_are_had_whatever_the_caller_has_switched_on():
    """Tests of packed products are skipped where there are none, and the library is just slow."""
    packing_works.cache_clear()  # asked once per process, so the answer would last
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert packing_works(torch.float32)
        assert packing_works(torch.bfloat16) == torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_the_fused_products_are_tried_before_they_are_used(monkeypatch):
    """Where one of them fails, the plain layers are used and not an error of the first call."""

    class WithoutSum:
        def __call__(self, *args):
            return torch.ops.mkldnn._linear_pointwise.default(*args)

        def binary(self, *args):
            raise RuntimeError("not here")

    from sklearn_bert import _packed_linear

    if not packing_works(torch.float32):
        pytest.skip("no packed weights on this machine")
    packing_works.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(_packed_linear, "_product", WithoutSum)
        patch.setattr(_packed_linear, "_one_pass_pays", lambda: True)
        assert not packing_works(torch.float32)
    packing_works.cache_clear()
    assert packing_works(torch.float32)


@pytest.mark.parametrize("one_pass", [True, False])
def test_activation_and_sum_in_one_pass_or_after_it(monkeypatch, one_pass):
    """Which one is used is a matter of speed; both are GELU and a sum, for any number of rows."""
    from sklearn_bert import _packed_linear

    if not packing_works(torch.float32):
        pytest.skip("no packed weights on this machine")
    monkeypatch.setattr(_packed_linear, "_one_pass_pays", lambda: one_pass)
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 80).requires_grad_(False)
    weight, bias = linear.weight.double(), linear.bias.double()
    for n_rows in (1, 2, 5, 33, 200):
        x, other = torch.randn(n_rows, 48), torch.randn(n_rows, 80)
        expected = torch.nn.functional.linear(x.double(), weight, bias)
        total = expected + other
        got = PackedLinear(linear)(x, add=other).double()
        torch.testing.assert_close(got, total, atol=1e-5, rtol=0)
        assert torch.equal(total, expected + other)  # what was added is as it was
        got = PackedLinear(linear, "gelu")(x).double()
        torch.testing.assert_close(got, torch.nn.functional.gelu(expected), atol=1e-5, rtol=0)


def test_texts_of_forty_lengths_are_one_pass(tiny, passes):
    """Equal-length batches would be forty passes of one text each."""
    est = fitted(tiny, batch_tokens=10**6)
    est.transform(MIXED)
    assert len(passes) == 1
    assert sorted(passes[0]) == [(1, n) for n in range(3, 43)]


def test_no_token_is_computed_that_is_not_in_a_text(tiny, passes):
    est = fitted(tiny)
    est.transform(MIXED)
    n_tokens = sum(n_texts * length for groups in passes for n_texts, length in groups)
    assert n_tokens == sum(range(3, 43))


def test_a_claim_for_the_cache_does_not_cut_the_batch_that_was_asked_for(
    tiny, tmp_path, passes, monkeypatch
):
    monkeypatch.setattr(_text_states, "_CLAIMED_TOKENS", 50)
    small = fitted(tiny, cache=tmp_path / "small").transform(MIXED)
    assert len(passes) > 10
    passes.clear()
    large = fitted(tiny, cache=tmp_path / "large", batch_tokens=10_000).transform(MIXED)
    assert len(passes) == 1
    np.testing.assert_array_equal(large, small)


def test_all_layers_and_poolings_are_read_in_the_same_passes(tiny, passes):
    BertLayerFeaturizer(tiny, layers=-1).fit_transform(MIXED)
    one = list(passes)
    passes.clear()
    BertLayerFeaturizer(tiny, layers="all", pooling=["mean", "max", "last"]).fit_transform(MIXED)
    assert passes == one


class TestPadding:
    """Batches as an accelerator gets them, run on the CPU."""

    @pytest.fixture
    def padded(self, empty_registry, monkeypatch):
        monkeypatch.setattr(_model_loading, "fast_bert", lambda model, dtype: None)
        original = HookedModel.__init__

        def with_padding(self, *args):
            original(self, *args)
            self.spread = 0.1
            self.one_at_a_time = False  # what only the bits of a CPU can ask for

        monkeypatch.setattr(HookedModel, "__init__", with_padding)

    @pytest.fixture
    def inputs(self, monkeypatch):
        seen = []
        original = HookedModel._inputs

        def note(self, groups):
            seen.append(original(self, groups))
            return seen[-1]

        monkeypatch.setattr(HookedModel, "_inputs", note)
        return seen

    @pytest.mark.parametrize(
        "family", ["bert", "roberta", "distilbert", "mpnet", "albert", "deberta-v3", "modernbert"]
    )
    @pytest.mark.parametrize("special_tokens", ["include", "exclude"])
    def test_padded_batches_are_right(
        self, tmp_path, family, special_tokens, padded, inputs, monkeypatch
    ):
        poolings = ["mean", "max", "min", "mean_sqrt_len", "last"]
        est = fitted(
            FAMILIES[family](tmp_path / family),
            pooling=poolings,
            special_tokens=special_tokens,
            batch_tokens=300,
        )
        got = est.transform(MIXED)
        assert any("attention_mask" in names for names in inputs)
        one_by_one = np.concatenate([est.transform([text]) for text in MIXED])
        np.testing.assert_allclose(got, one_by_one, atol=1e-5, rtol=1e-5)

    def test_at_most_a_tenth_is_padding(self, tiny, padded, inputs):
        fitted(tiny).transform(MIXED)
        assert len(inputs) < 15  # forty lengths
        for names in inputs:
            n_padded = names["input_ids"].numel()
            mask = names.get("attention_mask", torch.ones(names["input_ids"].shape))
            assert n_padded <= 1.1 * int(mask.sum())


@given(
    st.lists(st.integers(1, 30), max_size=60),
    st.integers(1, 100),
    st.sampled_from([0.0, 0.1, 0.5, math.inf]),
)
def test_batches_hold_every_text_once_within_their_limits(lengths, budget, spread):
    batches = list(plan_batches(lengths, budget, spread))
    assert sorted(np.concatenate(batches)) == list(range(len(lengths))) if lengths else not batches
    order = [lengths[i] for batch in batches for i in batch]
    assert order == sorted(order, reverse=True)
    for batch in batches:
        true, longest = sum(lengths[i] for i in batch), lengths[batch[0]]
        padded = longest * len(batch)
        if math.isinf(spread):
            assert true <= budget or len(batch) == 1
        else:
            assert padded <= budget or len(batch) == 1
            assert padded <= (1 + spread) * true + 1e-9


@given(st.lists(st.integers(1, 30), min_size=2, max_size=60), st.integers(30, 100))
def test_no_two_batches_of_mixed_lengths_would_fit_into_one(lengths, budget):
    batches = list(plan_batches(lengths, budget, math.inf))
    sizes = [sum(lengths[i] for i in batch) for batch in batches]
    assert all(a + lengths[b[0]] > budget for a, b in zip(sizes, batches[1:], strict=False))


ATTENTION = [_fast_bert._flash, _fast_bert._matrix_products, _fast_bert._half_products]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("n_tokens", [1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 79, 80, 130, 257])
def test_attention_is_what_its_formula_says(attention, n_tokens, dtype, biased):
    generator = torch.Generator().manual_seed(n_tokens)
    heads = torch.randn(23, n_tokens, 3, 2, 16, generator=generator).to(dtype)
    bias = 2 * torch.randn(2, n_tokens, n_tokens, generator=generator).to(dtype)
    query, key, value = heads.double().permute(2, 0, 3, 1, 4)
    scores = query @ key.transpose(-1, -2) / 4 + (bias.double() if biased else 0)
    expected = (torch.softmax(scores, dim=-1) @ value).transpose(1, 2).flatten(2)
    tolerance = 2e-6 if dtype == torch.float32 else 5e-2
    got = attention(heads, bias if biased else None)
    assert (got.double() - expected).abs().max() < tolerance


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("register", [32, 64])
@pytest.mark.parametrize("n_tokens", [5, 40, 79, 80, 131, 300])
def test_attention_gives_a_text_the_same_bits_in_any_company(
    n_tokens, register, dtype, biased, monkeypatch
):
    """Also long ones with a bias, which no tiny model has; as chosen with and without AVX-512."""
    monkeypatch.setattr(_fast_bert, "_register_bytes", lambda: register)
    generator = torch.Generator().manual_seed(n_tokens)
    heads = torch.randn(21, n_tokens, 3, 3, 16, generator=generator).to(dtype)
    bias = torch.randn(3, n_tokens, n_tokens, generator=generator).to(dtype) if biased else None
    attention = _fast_bert._attention_for(n_tokens, dtype)
    together = attention(heads, bias)
    for first, n_texts in ((0, 1), (20, 1), (3, 2), (1, 5), (2, 17)):
        few = attention(heads[first : first + n_texts], bias)
        assert torch.equal(few, together[first : first + n_texts])


@pytest.mark.parametrize(
    ("register", "dtype", "n_tokens", "name"),
    [
        (64, torch.float32, 26, "_matrix_products"),
        (64, torch.float32, 80, "_flash"),
        (32, torch.float32, 4, "_flash"),  # without AVX-512 at every length
        (64, torch.bfloat16, 26, "_matrix_products"),
        (64, torch.bfloat16, 512, "_half_products"),
        (64, torch.bfloat16, 1024, "_flash"),
    ],
)
def test_attention_is_chosen_by_length_precision_and_processor(
    register, dtype, n_tokens, name, monkeypatch
):
    monkeypatch.setattr(_fast_bert, "_register_bytes", lambda: register)
    assert _fast_bert._attention_for(n_tokens, dtype).__name__ == name


def test_mpnet_is_told_how_far_apart_tokens_are():
    import transformers

    config = transformers.MPNetConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=9
    )
    encoder = transformers.MPNetModel(config).encoder
    distances = _fast_bert.DistanceBias(encoder, longest=514)
    for n_tokens in (1, 2, 3, 9, 100, 300, 514):
        expected = encoder.compute_position_bias(torch.empty(1, n_tokens))
        assert torch.equal(distances(n_tokens), expected[0])


@pytest.mark.parametrize("score", [90.0, 300.0])
def test_attention_to_very_large_scores_is_finite(score):
    """exp(90) is infinite in float32; softmax must subtract the largest score first."""
    heads = torch.ones(1, 5, 3, 2, 16)
    heads[:, 2:, 1] = score
    for attention in ATTENTION:
        assert torch.isfinite(attention(heads)).all()


@pytest.mark.parametrize("n_tokens", [33, 63, 129])
def test_what_fills_matrices_up_is_never_seen(n_tokens, monkeypatch):
    """Memory as it comes may hold anything, and nothing times NaN is NaN."""
    heads = torch.randn(5, n_tokens, 3, 2, 16).bfloat16()
    expected = _fast_bert._half_products(heads)

    def dirty(self, *shape):
        return self.new_zeros(*shape).fill_(math.nan)

    monkeypatch.setattr(torch.Tensor, "new_empty", dirty)
    assert torch.equal(_fast_bert._half_products(heads), expected)


def test_attention_in_half_precision_multiplies_matrices_of_few_shapes(monkeypatch):
    """oneDNN keeps a kernel of more than half a megabyte for each that it has met."""
    shapes = set()
    monkeypatch.setattr(torch, "baddbmm", lambda *_, **__: None)
    monkeypatch.setattr(torch, "softmax", lambda *_, **__: None)
    monkeypatch.setattr(torch, "bmm", lambda a, b, out: shapes.add((*a.shape, *b.shape)))
    for n_tokens in range(32, 513):
        for n_texts in range(1, max(2, 2048 // n_tokens)):
            heads = torch.empty(n_texts, n_tokens, 3, 2, 16, dtype=torch.bfloat16)
            _fast_bert._half_products(heads)
    assert len(shapes) < 70


@pytest.mark.parametrize("pooling", ["cls", "last", "mean", "max"])
def test_a_pooled_vector_does_not_keep_the_states_alive(pooling):
    """[CLS] as a part of a layer's states held all tokens of all layers until the last was read."""
    states = torch.randn(3, 50, 16)
    vectors = _forward._pool(states, slice(0, 50), POOLINGS[pooling])
    assert vectors.untyped_storage().nbytes() == 3 * 16 * 4
