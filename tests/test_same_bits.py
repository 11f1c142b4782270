"""Same text, same bits: nothing else in a call changes the features of a text on a CPU."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from families import FAMILIES, OTHER_FAMILIES, TEXTS, VARIANTS, WITH_POOLER, random_texts

from sklearn_bert import (
    BertLayerFeaturizer,
    _devices,
    _fast_bert,
    _model_loading,
    _models,
    _packed_linear,
)
from sklearn_bert.exceptions import SlowPathWarning

# Texts of few lengths, so that batches have from one to many rows, and as many of one length as it
# takes for torch to share the work of an operation among several threads.
MANY = [*TEXTS, *random_texts([30] * 61 + [13] * 19 + [5] * 11)]
ALONE = [*range(len(TEXTS)), 20, 27, 33, 80, 100]
FEW = MANY[::3]
POOLINGS = ["mean", "max", "last"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory, minilm):
    """Function that returns the folder of a model."""
    root = tmp_path_factory.mktemp("families")

    def build(name):
        builders = {**FAMILIES, **VARIANTS, **OTHER_FAMILIES}
        return minilm if name == "minilm" else builders[name](root / name)

    return cache(build)


def fitted(folder, **settings):
    settings = {"layers": "all", "pooling": POOLINGS, **settings}
    return BertLayerFeaturizer(folder, device="cpu", **settings).fit(MANY)


def assert_same_bits(est, texts, threads, n_threads=(1, 2, 3, 5, 7)):
    """Compute texts in many ways and compare the bits with those of each text alone."""
    threads(1)
    alone = {i: est.transform([texts[i]])[0] for i in ALONE if i < len(texts)}
    expected = est.transform(texts)
    for i, row in alone.items():
        np.testing.assert_array_equal(expected[i], row, f"alone: {texts[i]!r}")
    order = np.random.default_rng(0).permutation(len(texts))
    for n in n_threads:
        threads(n)
        # with 2 tokens in a batch every text is alone; work is shared only in large batches
        for batch_tokens in {1: (8192, 1024, 64, 2), 2: (8192, 1024, 2)}.get(n, (8192,)):
            rows = order[:30] if batch_tokens == 2 else order
            actual = est.set_params(batch_tokens=batch_tokens).transform([texts[i] for i in rows])
            how = f"{n} threads, {batch_tokens} tokens in a batch"
            np.testing.assert_array_equal(actual, expected[rows], how)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["minilm", *FAMILIES])
def test_batches_order_subsets_and_threads(folder_of, threads, model, dtype):
    """Batch size, order, neighbours and number of threads do not change a bit of any layer."""
    texts = FEW if model == "minilm" else MANY
    assert_same_bits(fitted(folder_of(model), dtype=dtype), texts, threads)


@pytest.mark.parametrize("model", VARIANTS)
def test_shapes_of_heads_and_activations(folder_of, threads, model):
    """No size or number of attention heads and no activation makes bits depend on the call."""
    assert_same_bits(fitted(folder_of(model)), MANY, threads)


@pytest.mark.filterwarnings(f"ignore::{SlowPathWarning.__module__}.{SlowPathWarning.__name__}")
@pytest.mark.parametrize("model", OTHER_FAMILIES)
def test_other_families(folder_of, threads, model):
    """An encoder whose layout the library does not know keeps the promise too."""
    assert_same_bits(fitted(folder_of(model)), MANY, threads, n_threads=(1, 2, 3))


def test_half_precision_without_arithmetic(folder_of, threads):
    """Weights in float16, which a CPU computes with in float32, keep the bits too."""
    assert_same_bits(fitted(folder_of("bert"), dtype="float16"), FEW, threads)


@pytest.mark.parametrize("special_tokens", ["include", "exclude"])
@pytest.mark.parametrize("model", ["minilm", "bert", "roberta", "modernbert"])
def test_every_pooling(folder_of, threads, model, special_tokens):
    """The bits are the same under every pooling, with and without special tokens."""
    poolings = ["cls", "mean", "max", "min", "mean_sqrt_len", "last"]
    est = fitted(folder_of(model), layers=[-1, 1], pooling=poolings, special_tokens=special_tokens)
    assert_same_bits(est, FEW, threads, n_threads=(1, 2))


@pytest.mark.parametrize("model", ["minilm", *WITH_POOLER])
def test_pooler(folder_of, threads, model):
    """The pooler reads one row per text, and a text alone has the same bits there too."""
    est = fitted(folder_of(model), layers=-1, pooling=["pooler", "mean"])
    assert_same_bits(est, FEW, threads, n_threads=(1, 2, 3))


@pytest.mark.parametrize("model", ["minilm", "bert"])
def test_duplicates(folder_of, model):
    """A text that is there twice has the same bits in both rows, as if it were there once."""
    est = fitted(folder_of(model))
    once = est.transform(MANY[:30])
    twice = est.transform([*MANY[:30], *MANY[:30][::-1], *MANY[:30]])
    np.testing.assert_array_equal(twice, np.concatenate([once, once[::-1], once]))


@pytest.mark.parametrize("model", ["minilm", *FAMILIES])
def test_early_stop(folder_of, model):
    """A layer has the same bits whether the blocks above it run or not."""
    est = fitted(folder_of(model))
    deep = est.transform(FEW)
    width = est.hidden_size_ * len(POOLINGS)
    for layer in range(est.n_layers_ + 1):
        alone = fitted(folder_of(model), layers=[layer]).transform(FEW)
        np.testing.assert_array_equal(alone, deep[:, layer * width : (layer + 1) * width])


def test_calls_of_any_composition(folder_of):
    """Random selections of texts, with repetition and in any order, give the rows of the whole."""
    est = fitted(folder_of("bert"))
    expected = est.transform(MANY)
    generator = np.random.default_rng(1)
    for size in (1, 2, 3, 7, 20, 90):
        rows = generator.integers(len(MANY), size=size)
        np.testing.assert_array_equal(est.transform([MANY[i] for i in rows]), expected[rows])


@pytest.mark.parametrize("kind", [_packed_linear.PackedLinear, _packed_linear.PaddedLinear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_features", [32, 384, 1536, 4096])
def test_rows_of_a_linear_layer(threads, kind, dtype, in_features):
    """A row has the same bits alone and among others, also where a row is long."""
    if kind is _packed_linear.PackedLinear and not _packed_linear.packing_works(dtype):
        pytest.skip("no packed weights of this type on this machine")
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(in_features, 64, bias=False).requires_grad_(False)
    torch.nn.init.normal_(linear.weight, generator=generator)
    rows = torch.randn(64, in_features, generator=generator).to(dtype)
    layer = kind(linear.to(dtype))
    threads(1)
    expected = layer(rows)
    for n_threads in (1, 2, 3):
        threads(n_threads)
        for n_rows in (1, 2, 3, 5, 8, 17, 33):
            assert torch.equal(layer(rows[-n_rows:]), expected[-n_rows:])


class TestWithoutPackedLinears:
    """Where oneDNN has no packed weights, torch's own linear layers keep the promise as well."""

    @pytest.fixture(autouse=True)
    def no_packing(self, empty_registry, monkeypatch):
        for module in (_devices, _fast_bert, _model_loading, _packed_linear):
            monkeypatch.setattr(module, "packing_works", lambda dtype: False)

    @pytest.mark.parametrize(
        ("model", "dtype"),
        [
            ("minilm", "float32"),
            ("bert", "float32"),
            ("bert", "bfloat16"),
            ("mpnet", "float32"),
            ("albert", "float32"),
            ("modernbert", "float32"),
        ],
    )
    def test_padded_linears(self, folder_of, threads, model, dtype):
        est = fitted(folder_of(model), dtype=dtype)
        texts = FEW if model == "minilm" else MANY
        assert_same_bits(est, texts, threads, n_threads=(1, 2, 3))
        encoder = _models.get_encoder(est._reference(), torch.device("cpu"), dtype)
        kinds = {type(module) for module in encoder.runner.model.modules()}
        assert _packed_linear.PaddedLinear in kinds
        assert _packed_linear.PackedLinear not in kinds


class TestPlainLinears:
    """The tests above can fail: with torch's linear layers as they are, they do."""

    @pytest.mark.usefixtures("empty_registry")
    def test_control(self, folder_of, threads, monkeypatch):
        """Without stabilized linear layers, bits depend on the batch, and the comparison sees it.

        That is so on machines where torch takes other kernels for few rows than for many.
        """
        threads(1)
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(64, 384, generator=generator)
        linear = torch.nn.Linear(384, 384, bias=False).requires_grad_(False)
        torch.nn.init.normal_(linear.weight, generator=generator)
        whole = linear(rows)
        if all(torch.equal(linear(rows[:n]), whole[:n]) for n in (2, 3, 5, 7)):
            pytest.skip("on this machine torch's own linear layers keep the bits of a row")
        monkeypatch.setattr(_model_loading, "fast_bert", lambda model, dtype: None)
        monkeypatch.setattr(_model_loading, "stabilize_linears", lambda model, dtype: None)
        with pytest.raises(AssertionError, match="Arrays are not equal"):
            assert_same_bits(fitted(folder_of("minilm")), MANY, threads, n_threads=(1,))


SCRIPT = """
import sys
import torch
from families import FAMILIES
from test_same_bits import FEW, assert_same_bits, fitted

folders = dict(zip(["minilm", *FAMILIES], sys.argv[1:], strict=True))
for name in ("minilm", "mpnet", "deberta-v2-convolution", "modernbert"):
    for dtype in ("float32", "bfloat16"):
        est = fitted(folders[name], dtype=dtype)
        assert_same_bits(est, FEW, torch.set_num_threads, n_threads=(1, 2))
print("same bits")
"""


@pytest.mark.parametrize(
    ("isa", "limits"),
    [("AVX2", {"ATEN_CPU_CAPABILITY": "avx2"}), ("SSE41", {})],
    ids=["AVX2", "SSE41"],
)
def test_older_instruction_sets(folder_of, subprocess_env, isa, limits):
    """The promise holds with the kernels that oneDNN has for processors with less to offer."""
    folders = [str(folder_of(name)) for name in ("minilm", *FAMILIES)]
    here = str(Path(__file__).parent)
    path = f"{here}:{subprocess_env['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *folders],
        env={**subprocess_env, "PYTHONPATH": path, "ONEDNN_MAX_CPU_ISA": isa, **limits},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "same bits\n"), done.stderr
