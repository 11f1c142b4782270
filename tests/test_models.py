"""Which models are taken, which are refused and in what words, and what stays in memory."""

import errno
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from families import FAMILIES, OTHER_FAMILIES
from safetensors.torch import load_file, save_file

import sklearn_bert
from sklearn_bert import BertLayerFeaturizer, _model_loading, _models, _text_states
from sklearn_bert._forward import Encoder, HookedModel
from sklearn_bert._packed_linear import packing_works
from sklearn_bert.exceptions import (
    ConstantFeaturesWarning,
    FingerprintMismatchError,
    LongDocumentError,
    ModelFilesError,
    SlowPathWarning,
    TruncationWarning,
    UnsupportedModelError,
)
from sklearn_bert.testing import make_bert

TEXTS = ["good film", "the plot was awful and i hated it very much", "", "bad"]


@pytest.fixture
def copy(tiny, tmp_path):
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


@pytest.fixture
def loads(monkeypatch):
    """Names of the folders whose weights were read, in order."""
    seen = []
    original = _model_loading._load_weights

    def counted(folder):
        seen.append(folder.path)
        return original(folder)

    monkeypatch.setattr(_model_loading, "_load_weights", counted)
    return seen


def rewrite_weights(folder, change):
    weights = change(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def rewrite_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _encoder_of(folder):
    reference = BertLayerFeaturizer(folder).fit(["a"])._reference()
    return _models.get_encoder(reference, torch.device("cpu"), "float32")


@pytest.mark.parametrize("family", ["bert", "albert", "deberta-v3", "convbert"])
def test_what_a_config_says_of_the_output_is_not_obeyed(tmp_path, family, empty_registry):
    """Some fine-tuning scripts leave such settings; a tuple then came where names were expected."""
    folder = {**FAMILIES, **OTHER_FAMILIES}[family](tmp_path / "m")
    settings = {"layers": "all", "pooling": ["mean", "last"]}
    expected = BertLayerFeaturizer(folder, **settings).fit_transform(TEXTS)
    rewrite_json(
        folder / "config.json", return_dict=False, output_hidden_states=True, output_attentions=True
    )
    sklearn_bert.unload_models()
    got = BertLayerFeaturizer(folder, **settings).fit_transform(TEXTS)
    assert np.array_equal(got, expected)
    if hasattr(_encoder_of(folder).runner, "model"):
        config = _encoder_of(folder).runner.model.config
        assert (config.output_hidden_states, config.output_attentions) == (False, False)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_disk_that_cannot_be_written_is_not_taken_for_the_network(monkeypatch, number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelFilesError, match=f"stored on this machine: .*{os.strerror(number)}"):
        BertLayerFeaturizer("owner/model").fit(["a"])


def test_a_tokenizer_that_gives_a_text_another_type_is_refused(tiny, empty_registry, monkeypatch):
    """Funnel's [CLS] has type 2, which would be computed as type 0."""
    from tokenizers.processors import TemplateProcessing

    original = _model_loading.stateless_tokenizer

    def like_funnel(tokenizer):
        tokenizer = original(tokenizer)
        special = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = TemplateProcessing(
            single="[CLS]:2 $A:0 [SEP]:0", special_tokens=special
        )
        return tokenizer

    monkeypatch.setattr(_model_loading, "stateless_tokenizer", like_funnel)
    with pytest.raises(UnsupportedModelError, match="another type than 0"):
        BertLayerFeaturizer(tiny).fit(TEXTS)


@pytest.mark.parametrize(("family", "spread"), [("bert", 0.1), ("convbert", 0.0)])
def test_only_families_known_to_heed_the_mask_are_padded(tmp_path, family, spread, monkeypatch):
    """MobileBERT looks at a token's right neighbour, padding or not; nobody compares the others."""
    import transformers

    folder = {**FAMILIES, **OTHER_FAMILIES}[family](tmp_path / "m")
    monkeypatch.setattr(HookedModel, "_compare_with_transformers", lambda self: None)
    for device, expected in (("meta", spread), ("cpu", 0.0)):
        model = transformers.AutoModel.from_pretrained(folder).eval().to(device)
        assert HookedModel(model, 2).spread == expected


def framed(header):
    """Put the length before the header of a safetensors file."""
    return len(header).to_bytes(8, "little") + header


class TestModelArgument:
    @pytest.mark.parametrize(
        ("model", "error", "words"),
        [
            (None, TypeError, "folder or a hub id"),
            (123, TypeError, "123"),
            (b"folder", TypeError, "folder or a hub id"),
            ("", ValueError, "empty"),
            ("  ", ValueError, "empty"),
            ("/no/such/folder", ModelFilesError, "no such folder"),
            ("./missing", ModelFilesError, "no such folder"),
            (Path("missing"), ModelFilesError, "no such folder"),
        ],
    )
    def test_nonsense_fails_at_fit_in_words(self, model, error, words):
        featurizer = BertLayerFeaturizer(model)  # nothing happens here
        with pytest.raises(error, match=words):
            featurizer.fit(TEXTS)

    def test_a_file_is_not_a_folder(self, tiny):
        with pytest.raises(ModelFilesError, match="is a file; pass the folder"):
            BertLayerFeaturizer(tiny / "config.json").fit(TEXTS)

    def test_an_unknown_hub_id_says_what_was_tried(self):
        with pytest.raises(ModelFilesError, match=r"nobody/nothing.*local_files_only=True"):
            BertLayerFeaturizer("nobody/nothing", local_files_only=True).fit(TEXTS)

    def test_a_folder_goes_before_the_hub(self, tiny, tmp_path, monkeypatch):
        """An empty folder that is called like a hub id is found, and has no model."""
        monkeypatch.chdir(tmp_path)
        (tmp_path / "owner" / "name").mkdir(parents=True)
        with pytest.raises(ModelFilesError, match=r"owner/name was found, but it has no config"):
            BertLayerFeaturizer("owner/name").fit(TEXTS)

    def test_a_revision_of_a_folder_is_refused(self, tiny):
        with pytest.raises(ValueError, match="revision='main' is for models on the hub"):
            BertLayerFeaturizer(tiny, revision="main").fit(TEXTS)

    @pytest.mark.parametrize(
        ("files", "words"),
        [
            (["config.json"], "has no config.json"),
            (["model.safetensors"], "has no model.safetensors"),
            (["tokenizer.json"], "has no tokenizer"),
        ],
    )
    def test_a_missing_file_is_named(self, copy, files, words):
        for file in files:
            (copy / file).unlink()
        with pytest.raises(ModelFilesError, match=words):
            BertLayerFeaturizer(copy).fit(TEXTS)

    def test_pickled_weights_are_refused_with_the_way_out(self, copy):
        (copy / "model.safetensors").unlink()
        torch.save({}, copy / "pytorch_model.bin")
        with pytest.raises(UnsupportedModelError, match="save_pretrained"):
            BertLayerFeaturizer(copy).fit(TEXTS)

    def test_relative_paths_survive_a_change_of_directory(self, tiny, tmp_path, monkeypatch):
        monkeypatch.chdir(tiny.parent)
        featurizer = BertLayerFeaturizer(tiny.name).fit(TEXTS)
        expected = featurizer.transform(TEXTS)
        monkeypatch.chdir(tmp_path)
        _models._encoders.clear()
        assert np.array_equal(featurizer.transform(TEXTS), expected)
        assert featurizer.get_params()["model"] == tiny.name

    def test_shards_are_read_like_one_file(self, tiny, copy):
        weights = load_file(copy / "model.safetensors")
        names = sorted(weights)
        shards = {"model-00001-of-00002.safetensors": names[::2]}
        shards["model-00002-of-00002.safetensors"] = names[1::2]
        for file, members in shards.items():
            save_file({n: weights[n] for n in members}, copy / file, metadata={"format": "pt"})
        (copy / "model.safetensors").unlink()
        index = {"metadata": {}, "weight_map": {n: f for f, ns in shards.items() for n in ns}}
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))
        got = BertLayerFeaturizer(copy).fit_transform(TEXTS)
        assert np.array_equal(got, BertLayerFeaturizer(tiny).fit_transform(TEXTS))
        (copy / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(ModelFilesError, match="which is not there"):
            BertLayerFeaturizer(copy).fit(TEXTS)


class TestWeights:
    def test_a_missing_block_is_an_error(self, copy):
        """transformers would fill it with random numbers."""
        rewrite_weights(
            copy, lambda w: {k: v for k, v in w.items() if not k.startswith("encoder.layer.1.")}
        )
        with pytest.raises(UnsupportedModelError, match=r"lack 16 .*encoder\.layer\.1"):
            BertLayerFeaturizer(copy).fit(TEXTS)

    def test_names_of_another_model_are_an_error(self, copy):
        rewrite_weights(copy, lambda w: {f"xyz.{k}": v for k, v in w.items()})
        with pytest.raises(UnsupportedModelError, match="would be random"):
            BertLayerFeaturizer(copy).fit(TEXTS)

    def test_usual_spellings_of_names_are_read(self, tiny, copy):
        """Checkpoints with a head put "bert." before the names; old ones say gamma and beta."""

        def respell(weights):
            return {
                "bert."
                + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                    "LayerNorm.bias", "LayerNorm.beta"
                ): value
                for name, value in weights.items()
            } | {"cls.predictions.bias": torch.zeros(3)}

        rewrite_weights(copy, respell)
        got = BertLayerFeaturizer(copy, layers="all", pooling="max").fit_transform(TEXTS)
        expected = BertLayerFeaturizer(tiny, layers="all", pooling="max").fit_transform(TEXTS)
        assert np.array_equal(got, expected)
        assert BertLayerFeaturizer(copy, pooling="pooler").fit_transform(TEXTS).shape == (4, 32)

    def test_a_missing_pooler_matters_only_to_who_asks_for_it(self, tmp_path):
        folder = make_bert(tmp_path / "no_pooler", pooler=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            first = BertLayerFeaturizer(folder, pooling="cls").fit_transform(TEXTS)
            _models._encoders.clear()
            again = BertLayerFeaturizer(folder, pooling="cls").fit_transform(TEXTS)
        assert np.array_equal(first, again)
        with pytest.raises(ValueError, match="needs trained pooler weights"):
            BertLayerFeaturizer(folder, pooling="pooler").fit(TEXTS)

    def test_the_pooler_is_made_from_the_last_layer_only(self, tiny):
        with pytest.raises(ValueError, match=r"made from the last layer, 3; got layers \[1\]"):
            BertLayerFeaturizer(tiny, pooling="pooler", layers=1).fit(TEXTS)

    @pytest.mark.parametrize("n_bytes", [4, 1000, -1])
    def test_a_file_that_was_cut_off_is_an_error_at_fit(self, copy, n_bytes):
        weights = copy / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:n_bytes])
        with pytest.raises(ModelFilesError, match="cannot be read as safetensors"):
            BertLayerFeaturizer(copy).fit(TEXTS)

    @pytest.mark.parametrize(
        "damage",
        [
            lambda header, data: (10**18).to_bytes(8, "little") + header + data,
            lambda header, data: b"\x80\x04" + header + data,
            lambda header, data: framed(header.replace(b"[0,", b"[4,", 1)) + data,
            lambda header, data: framed(header.replace(b"[32]", b"[33]", 1)) + data,
            lambda header, data: framed(header.replace(b"F32", b"XYZ", 1)) + data,
            lambda header, data: framed(header) + data + data,
            lambda header, data: framed(b"[" * len(header)) + data,
        ],
        ids=["length", "pickle", "offset", "shape", "type", "more", "brackets"],
    )
    def test_tampered_weights_are_an_error_at_fit(self, copy, damage):
        weights = copy / "model.safetensors"
        content = weights.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        weights.write_bytes(damage(content[8:end], content[end:]))
        with pytest.raises(ModelFilesError, match="cannot be read as safetensors"):
            BertLayerFeaturizer(copy).fit(TEXTS)

    def test_shards_cannot_be_outside_of_the_folder(self, copy):
        (copy / "model.safetensors").rename(copy.parent / "model.safetensors")
        index = {"metadata": {}, "weight_map": {"x": "../model.safetensors"}}
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelFilesError, match=r"names '\.\./model\.safetensors'"):
            BertLayerFeaturizer(copy).fit(TEXTS)

    @pytest.mark.parametrize(
        "change",
        [
            {"hidden_size": 64},
            {"hidden_size": 10**9, "num_attention_heads": 1},
            {"vocab_size": 10**12},
            {"intermediate_size": 10**12},
            {"max_position_embeddings": 10**10},
            {"num_hidden_layers": 10**9},
            {"num_hidden_layers": 0},
            {"num_hidden_layers": -1},
            {"hidden_size": -32},
            {"num_attention_heads": 7},
        ],
        ids=str,
    )
    def test_a_config_that_does_not_fit_is_an_error_before_memory_is_taken(self, copy, change):
        rewrite_json(copy / "config.json", **change)
        with pytest.raises(UnsupportedModelError, match=r"config\.json"):
            BertLayerFeaturizer(copy).fit(TEXTS)

    @pytest.mark.parametrize(
        ("family", "change"),
        [
            ("bert", {"num_labels": 10**12}),
            ("albert", {"num_hidden_groups": 10**9}),
            ("mobilebert", {"num_feedforward_networks": 10**9}),
        ],
        ids=str,
    )
    def test_a_config_cannot_ask_for_endless_parts(self, tmp_path, family, change):
        """Each of them took memory without end before anything was compared with the weights."""
        from families import FAMILIES, OTHER_FAMILIES

        folder = {**FAMILIES, **OTHER_FAMILIES}[family](tmp_path / family)
        rewrite_json(folder / "config.json", **change)
        with pytest.raises(UnsupportedModelError, match=r"config\.json .* more than \d+"):
            BertLayerFeaturizer(folder).fit(TEXTS)

    def test_a_large_config_takes_no_memory_when_the_names_are_strange(self, copy, loads):
        """Then transformers is asked to read the weights, and it makes the missing ones."""
        rewrite_weights(copy, lambda w: {f"xyz.{k}": v for k, v in w.items()})
        rewrite_json(copy / "config.json", vocab_size=10**8)
        with pytest.raises(UnsupportedModelError, match=r"asks for 32\d{8} numbers"):
            BertLayerFeaturizer(copy).fit(TEXTS)
        assert loads == []

    @pytest.mark.parametrize(
        "change",
        [{"vocab_size": "many"}, {"hidden_size": 32.5}, {"layer_norm_eps": "x"}, {"dtype": 3}],
        ids=str,
    )
    def test_a_config_of_wrong_types_is_an_error_of_this_library(self, copy, change):
        rewrite_json(copy / "config.json", **change)
        with pytest.raises(UnsupportedModelError, match=r"config\.json"):
            BertLayerFeaturizer(copy).fit(TEXTS)

    @pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, "\x00"])
    def test_a_config_that_is_none_is_an_error_of_this_library(self, copy, content):
        (copy / "config.json").write_text(content)
        with pytest.raises((UnsupportedModelError, ModelFilesError), match=r"config\.json"):
            BertLayerFeaturizer(copy).fit(TEXTS)

    def test_an_unknown_architecture_and_its_code_are_refused(self, copy):
        rewrite_json(copy / "config.json", model_type="mine", auto_map={"AutoModel": "code.Model"})
        (copy / "code.py").write_text("raise SystemExit('code from the model folder was run')")
        with pytest.raises(UnsupportedModelError, match="never run"):
            BertLayerFeaturizer(copy).fit(TEXTS)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"attn_implementation": "somebody/kernel"}, "attention"),
            ({"_attn_implementation": "somebody/kernel"}, "attention"),
            ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized"),
        ],
        ids=str,
    )
    def test_code_from_elsewhere_is_refused(self, copy, change, words):
        """A configuration can name kernels on the hub, which transformers would fetch and run."""
        rewrite_json(copy / "config.json", **change)
        with pytest.raises(UnsupportedModelError, match=words):
            BertLayerFeaturizer(copy).fit(TEXTS)

    @pytest.mark.parametrize(
        ("file", "change"),
        [
            ("config.json", {"auto_map": {"AutoModel": "code.Mine", "AutoConfig": "code.Mine"}}),
            ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["code.Mine", "code.Mine"]}}),
        ],
        ids=["model", "tokenizer"],
    )
    def test_code_beside_a_model_that_is_known_is_not_run(self, tiny, copy, file, change):
        rewrite_json(copy / file, **change)
        (copy / "code.py").write_text("raise SystemExit('code from the model folder was run')")
        got = BertLayerFeaturizer(copy).fit_transform(TEXTS)
        assert np.array_equal(got, BertLayerFeaturizer(tiny).fit_transform(TEXTS))
        assert "transformers_modules" not in sys.modules

    def test_an_adapter_beside_the_weights_is_refused(self, copy):
        (copy / "adapter_config.json").write_text("{}")
        with pytest.raises(UnsupportedModelError, match="Merge the adapter"):
            BertLayerFeaturizer(copy).fit(TEXTS)

    def test_a_tokenizer_of_another_model_is_an_error(self, copy):
        """Ids past the embedding table would be an index error in the middle of transform."""
        rewrite_weights(
            copy,
            lambda w: {k: v[:50].clone() if "word_embeddings" in k else v for k, v in w.items()},
        )
        rewrite_json(copy / "config.json", vocab_size=50)
        with pytest.raises(UnsupportedModelError, match="only 50 embeddings"):
            BertLayerFeaturizer(copy).fit(TEXTS)


class TestIdentity:
    def test_weights_that_changed_after_fit_are_refused(self, copy, empty_registry):
        featurizer = BertLayerFeaturizer(copy).fit(TEXTS)
        rewrite_weights(copy, lambda w: {k: v + 1 for k, v in w.items()})
        with pytest.raises(FingerprintMismatchError, match="Fit again"):
            featurizer.transform(TEXTS)
        assert featurizer.fit(TEXTS).transform(TEXTS).shape == (4, 32)

    def test_a_refusal_names_both_fingerprints(self, copy, tiny, empty_registry):
        featurizer = BertLayerFeaturizer(copy).fit(TEXTS)
        rewrite_weights(copy, lambda w: {k: v + 1 for k, v in w.items()})
        fitted = featurizer.model_fingerprint_[:12]
        found = BertLayerFeaturizer(copy).fit(TEXTS).model_fingerprint_[:12]
        both = f"fingerprint is {found}, not {fitted}"
        with pytest.raises(FingerprintMismatchError, match=rf"{both}\. Fit again, or set model="):
            featurizer.transform(TEXTS)
        featurizer.set_params(model=str(copy) + os.sep)
        with pytest.raises(FingerprintMismatchError, match=rf"{both}\. Set model .*call fit again"):
            featurizer.transform(TEXTS)

    def test_the_first_use_after_unpickling_compares(self, copy, empty_registry):
        saved = pickle.dumps(BertLayerFeaturizer(copy).fit(TEXTS))
        rewrite_weights(copy, lambda w: {k: v + 1 for k, v in w.items()})
        loaded = pickle.loads(saved)  # looks at no file
        with pytest.raises(FingerprintMismatchError):
            loaded.transform(TEXTS)
        make_bert(copy)
        assert loaded.transform(TEXTS).shape == (4, 32)

    def test_files_are_read_once_for_their_fingerprint(self, copy, monkeypatch):
        digested = []
        original = hashlib.file_digest
        monkeypatch.setattr(
            hashlib, "file_digest", lambda f, name: digested.append(f.name) or original(f, name)
        )
        for _ in range(3):
            BertLayerFeaturizer(copy).fit(TEXTS).transform(TEXTS)
        assert sorted(digested) == sorted(map(str, copy.iterdir()))
        (copy / "config.json").touch()
        BertLayerFeaturizer(copy).fit(TEXTS)
        assert digested[4:] == [str(copy / "config.json")]

    def test_a_file_that_is_written_over_does_not_change_a_loaded_model(self, copy, empty_registry):
        """Weights were a view of the file: the loaded model changed with it."""
        featurizer = BertLayerFeaturizer(copy, layers="all").fit(TEXTS)
        expected = featurizer.transform(TEXTS)
        with open(copy / "model.safetensors", "r+b") as file:
            file.seek(-4000, os.SEEK_END)
            file.write(bytes(4000))
            file.seek(3000)
            file.write(bytes(3000))
        assert np.array_equal(featurizer.transform(TEXTS), expected)

    def test_a_file_with_the_old_size_and_time_is_another_file(self, copy):
        before = BertLayerFeaturizer(copy).fit(TEXTS).model_fingerprint_
        weights = copy / "model.safetensors"
        times = weights.stat()
        content = bytearray(weights.read_bytes())
        content[-5] ^= 1
        with open(weights, "r+b") as file:
            file.write(content)
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert BertLayerFeaturizer(copy).fit(TEXTS).model_fingerprint_ != before

    @pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
    def test_every_file_that_matters_is_in_the_fingerprint(self, copy, file):
        before = BertLayerFeaturizer(copy).fit(TEXTS).model_fingerprint_
        (copy / file).write_text((copy / file).read_text() + "\n")
        assert BertLayerFeaturizer(copy).fit(TEXTS).model_fingerprint_ != before

    def test_other_files_are_not(self, copy):
        before = BertLayerFeaturizer(copy).fit(TEXTS).model_fingerprint_
        (copy / "README.md").write_text("about this model")
        assert BertLayerFeaturizer(copy).fit(TEXTS).model_fingerprint_ == before

    def test_a_moved_folder_is_found_by_set_params(self, copy, empty_registry):
        featurizer = BertLayerFeaturizer(copy).fit(TEXTS)
        expected = featurizer.transform(TEXTS)
        moved = copy.rename(copy.with_name("moved"))
        _models._encoders.clear()
        _models._tokenizers.clear()
        with pytest.raises(ModelFilesError, match="no such folder"):
            featurizer.transform(TEXTS)
        assert np.array_equal(featurizer.set_params(model=moved).transform(TEXTS), expected)

    def test_another_model_needs_a_new_fit(self, tiny, tmp_path):
        featurizer = BertLayerFeaturizer(tiny).fit(TEXTS)
        other = make_bert(tmp_path / "other", seed=1)
        with pytest.raises(FingerprintMismatchError, match="call fit again"):
            featurizer.set_params(model=other).transform(TEXTS)


class TestParameters:
    @pytest.mark.parametrize(
        "layers", [4, -5, 99, [], [1, 99], 1.0, True, "last", None, [[1]], {1, 2}, [3, -1], [1, 1]]
    )
    def test_a_layer_that_does_not_exist_fails_at_fit(self, tiny, layers):
        featurizer = BertLayerFeaturizer(tiny, layers=layers)
        with pytest.raises((ValueError, TypeError), match="layers"):
            featurizer.fit(TEXTS)

    @pytest.mark.parametrize("layers", [4, -5, [1, 99], []])
    def test_the_message_shows_the_valid_range(self, tiny, layers):
        with pytest.raises(ValueError, match=r"-4\.\.3"):
            BertLayerFeaturizer(tiny, layers=layers).fit(TEXTS)

    @pytest.mark.parametrize(
        "pooling", ["median", ["mean", "mean"], [], None, 3, ["cls", None], {"mean"}]
    )
    def test_a_pooling_that_does_not_exist_fails_at_fit(self, tiny, pooling):
        with pytest.raises((ValueError, TypeError), match="pooling"):
            BertLayerFeaturizer(tiny, pooling=pooling).fit(TEXTS)

    @pytest.mark.parametrize(
        "params",
        [
            {"layer_combination": "median"},
            {"special_tokens": True},
            {"norm": "l1"},
            {"long_documents": "skip"},
            {"dtype": "int8"},
            {"dtype": torch.float32},
            {"batch_tokens": 0},
            {"batch_tokens": "many"},
            {"local_files_only": "yes"},
            {"verbose": "loud"},
            {"revision": 3},
            {"max_length": 0},
            {"max_length": "long"},
        ],
        ids=str,
    )
    def test_an_option_that_does_not_exist_fails_at_fit(self, tiny, params):
        (name,) = params
        with pytest.raises((ValueError, TypeError), match=name):
            BertLayerFeaturizer(tiny, **params).fit(TEXTS)

    def test_how_parameters_set_after_fit_are_checked_too(self, tiny):
        featurizer = BertLayerFeaturizer(tiny).fit(TEXTS)
        with pytest.raises(ValueError, match="batch_tokens"):
            featurizer.set_params(batch_tokens=-1).transform(TEXTS)

    @pytest.mark.parametrize("device", ["gpu", "cuda:x", "", 3, None])
    def test_a_device_that_is_none_fails_at_fit(self, tiny, device):
        with pytest.raises((ValueError, TypeError), match="device"):
            BertLayerFeaturizer(tiny, device=device).fit(TEXTS)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
    @pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")])
    def test_a_device_that_is_not_there_says_what_to_do(self, tiny, device):
        with pytest.raises(RuntimeError, match=r"set_params\(device='cpu'\)"):
            BertLayerFeaturizer(tiny, device=device).fit(TEXTS)
        fitted_elsewhere = BertLayerFeaturizer(tiny).fit(TEXTS).set_params(device=device)
        with pytest.raises(RuntimeError, match="not available"):
            fitted_elsewhere.transform(TEXTS)
        assert fitted_elsewhere.set_params(device="cpu").transform(TEXTS).shape == (4, 32)

    def test_the_cpu_does_not_wake_an_accelerator(self, tiny):
        BertLayerFeaturizer(tiny, device="cpu").fit_transform(TEXTS)
        assert not torch.cuda.is_initialized()

    def test_a_constant_vector_is_announced(self, tiny):
        with pytest.warns(ConstantFeaturesWarning, match="constant vector"):
            features = BertLayerFeaturizer(tiny, layers=0, pooling="cls").fit_transform(TEXTS)
        assert (features == features[0]).all()


class TestLength:
    def test_more_than_the_table_is_refused_at_fit(self, tiny):
        with pytest.raises(ValueError, match=r"max_length=512 is more than the 64 tokens"):
            BertLayerFeaturizer(tiny, max_length=512).fit(["good"])

    @pytest.mark.parametrize("max_length", [1, 2])
    def test_less_than_one_token_of_text_is_refused(self, tiny, max_length):
        with pytest.raises(ValueError, match="leaves no room for text"):
            BertLayerFeaturizer(tiny, max_length=max_length).fit(["good"])

    def test_the_limit_is_the_table_when_the_tokenizer_records_none(self, tiny):
        """The placeholder of about 1e30 overflowed, or let too long texts through."""
        featurizer = BertLayerFeaturizer(tiny).fit(TEXTS)
        assert featurizer.max_length_ == 64
        with pytest.warns(TruncationWarning):
            got = featurizer.transform(["good film " * 300])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert np.array_equal(got, featurizer.transform(["good film " * 31]))

    def test_texts_around_the_limit(self, tiny):
        """62 words and two special tokens fill 64 positions; more words change nothing."""
        words = "good film plot bad movie very".split() * 20
        texts = [" ".join(words[:n]) for n in (61, 62, 63, 64, 65)] + ["bad"]
        featurizer = BertLayerFeaturizer(tiny).fit(texts)
        with pytest.warns(TruncationWarning, match="3 of 6 texts were cut to max_length=64"):
            rows = featurizer.transform(texts)
        assert not np.allclose(rows[0], rows[1])
        assert all(np.array_equal(row, rows[1]) for row in rows[1:5])
        assert np.array_equal(rows[5:], featurizer.transform(["bad"]))

    def test_one_warning_per_call_counts_rows(self, tiny):
        long = "good film " * 100
        featurizer = BertLayerFeaturizer(tiny).fit(TEXTS)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rows = featurizer.transform([long, "bad", long + "awful", long])
        assert [w.category for w in caught] == [TruncationWarning]
        assert "3 of 4 texts" in str(caught[0].message)
        assert "the longest text has 203" in str(caught[0].message)
        assert caught[0].filename == __file__
        assert np.array_equal(rows[0], rows[2])

    def test_nothing_cut_nothing_said(self, tiny):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            BertLayerFeaturizer(tiny, max_length=12).fit_transform(TEXTS)

    def test_error_names_the_rows_before_the_model_runs(self, tiny, monkeypatch):
        monkeypatch.setattr(
            "sklearn_bert._forward.Encoder.pooled_states",
            lambda *args: pytest.fail("the model ran"),
        )
        texts = ["bad", *["good " * 20, "bad"] * 6]
        featurizer = BertLayerFeaturizer(tiny, max_length=10, long_documents="error").fit(texts)
        with pytest.raises(LongDocumentError, match=r"6 of 13 .*rows 1 \(22 tokens\), 3 .*\.\.\."):
            featurizer.transform(texts)


class TestMemory:
    def test_a_model_is_loaded_once(self, tiny, empty_registry, loads):
        featurizer = BertLayerFeaturizer(tiny)
        featurizer.fit(TEXTS)
        assert loads == []
        for layers in (1, 2, "all"):
            BertLayerFeaturizer(tiny, layers=layers).fit(TEXTS).transform(TEXTS)
        assert len(loads) == 1

    def test_first_use_by_many_threads_loads_once(self, tiny, empty_registry, loads):
        featurizer = BertLayerFeaturizer(tiny).fit(TEXTS)
        expected = BertLayerFeaturizer(tiny, batch_tokens=2).fit_transform(TEXTS)
        _models._encoders.clear()
        _models._tokenizers.clear()
        loads.clear()
        results, gate = [], threading.Barrier(8)

        def work():
            gate.wait()
            results.append(featurizer.transform(TEXTS))

        workers = [threading.Thread(target=work) for _ in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert len(loads) == 1
        assert len(results) == 8
        assert all(np.array_equal(result, expected) for result in results)

    def test_threads_with_different_limits_do_not_mix(self, tiny):
        """A shared tokenizer once gave a thread the other thread's maximum length."""
        texts = [" ".join(["good film plot"] * n) for n in range(1, 12)]
        featurizers = [BertLayerFeaturizer(tiny, max_length=n).fit(texts) for n in (8, 16)]
        failures = []

        def work(featurizer, expected):
            for _ in range(50):
                if not np.array_equal(featurizer.transform(texts), expected):
                    failures.append(featurizer.max_length)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TruncationWarning)
            expected = [featurizer.transform(texts) for featurizer in featurizers]
            workers = [
                threading.Thread(target=work, args=pair)
                for pair in list(zip(featurizers, expected, strict=True)) * 3
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        assert failures == []

    def test_the_number_of_loaded_models_is_bounded(self, tmp_path, empty_registry):
        for seed in range(_models.MAX_LOADED_MODELS + 2):
            folder = make_bert(tmp_path / str(seed), seed=seed)
            BertLayerFeaturizer(folder).fit_transform(TEXTS)
        assert len(_models._encoders) == _models.MAX_LOADED_MODELS

    def test_the_result_owns_its_memory(self, tiny):
        for params in ({}, {"layer_combination": "mean"}, {"norm": "l2"}, {"layers": "all"}):
            for texts in (TEXTS, TEXTS + TEXTS, []):
                features = BertLayerFeaturizer(tiny, **params).fit(TEXTS).transform(texts)
                assert features.flags.owndata
                assert features.flags.c_contiguous
                assert features.flags.writeable
                assert features.dtype == np.float32

    def test_memory_beyond_the_result_is_small(self, tmp_path):
        """The result of layers side by side was once copied as a whole."""
        import tracemalloc

        folder = make_bert(tmp_path / "wide", hidden_size=256, n_layers=2)
        texts = [f"good film {n}" for n in range(3000)]
        featurizer = BertLayerFeaturizer(folder, layers=[0, 1, 2]).fit(texts)
        featurizer.transform(texts[:10])
        tracemalloc.start()
        features = featurizer.transform(texts)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert features.flags.owndata
        assert peak < 1.4 * features.nbytes

    def test_buffers_keep_their_precision(self, tmp_path):
        """Rotary frequencies rounded to bfloat16 put distant tokens at wrong positions."""
        from families import FAMILIES

        folder = FAMILIES["modernbert"](tmp_path / "modernbert")
        BertLayerFeaturizer(folder, dtype="bfloat16").fit_transform(["good"])
        model = next(reversed(_models._encoders.values())).runner.model
        buffers = dict(model.named_buffers())
        assert any("inv_freq" in name for name in buffers)
        assert all(b.dtype != torch.bfloat16 for b in buffers.values())

    def test_no_more_states_are_alive_than_needed(self, tmp_path):
        """States are pooled when they are seen, so a deep model holds no more of them."""
        import gc

        folder = make_bert(tmp_path / "deep", n_layers=12)
        alive = []

        def count(module, args, output):
            alive.append(
                sum(
                    1
                    for thing in gc.get_objects()
                    if type(thing) is torch.Tensor and thing.shape == (12, 32)
                )
            )

        featurizer = BertLayerFeaturizer(folder, layers="all", batch_tokens=1).fit(TEXTS)
        featurizer.transform(TEXTS)
        encoder = next(reversed(_models._encoders.values()))
        handles = [layer.register_forward_hook(count) for layer in encoder.runner.blocks]
        featurizer.transform([" ".join(["good"] * 10)])
        for handle in handles:
            handle.remove()
        assert len(alive) == 12
        assert max(alive[6:]) <= max(alive[:3])

    def test_texts_are_tokenized_in_pieces(self, tiny, monkeypatch):
        texts = [f"good film {n}" for n in range(50)]
        expected = BertLayerFeaturizer(tiny).fit_transform(texts)
        sizes = []
        original = _text_states.tokenize
        monkeypatch.setattr(_text_states, "_CHUNK_TEXTS", 8)
        monkeypatch.setattr(
            _text_states,
            "tokenize",
            lambda tokenizer, texts, n: sizes.append(len(texts)) or original(tokenizer, texts, n),
        )
        assert np.array_equal(BertLayerFeaturizer(tiny).fit_transform(texts), expected)
        assert sizes == [8] * 6 + [2]


class TestOutOfMemory:
    @pytest.fixture
    def small_device(self, empty_registry, monkeypatch):
        """A device on which more than 40 tokens at a time are too many; returns what it ran."""
        original = Encoder._pooled_states
        sizes = []

        def limited(self, groups, *args):
            n_tokens = sum(group.ids.size for group in groups)
            if n_tokens > 40:
                raise torch.OutOfMemoryError("out of memory (simulated)")
            sizes.append(n_tokens)
            return original(self, groups, *args)

        monkeypatch.setattr(Encoder, "_pooled_states", limited)
        return sizes

    def test_batches_are_halved_with_one_warning(self, tiny, small_device):
        texts = [f"good {word}" for word in "abcdefghijklmnopqrstuvwxyz"] + ["bad film"] * 3
        featurizer = BertLayerFeaturizer(tiny, layers=[1, 3], pooling=["max", "mean"]).fit(texts)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = featurizer.transform(texts)
            again = featurizer.transform(texts)
        assert len(caught) == 1
        assert "out of memory" in str(caught[0].message)
        assert "batch_tokens" in str(caught[0].message)
        assert max(small_device) <= 40
        one_by_one = np.concatenate([featurizer.transform([text]) for text in texts])
        assert np.array_equal(got, one_by_one)
        assert np.array_equal(again, one_by_one)

    def test_a_device_may_say_so_in_an_ordinary_error(self, tiny, empty_registry, monkeypatch):
        """As MPS does."""
        texts = [f"good {word}" for word in "abcdefghijklmnopqrstuvwxyz"]
        expected = BertLayerFeaturizer(tiny).fit_transform(texts)
        original, sizes = Encoder._pooled_states, []

        def limited(self, groups, *args):
            sizes.append(sum(group.ids.size for group in groups))
            if sizes[-1] > 40:
                raise RuntimeError("MPS backend out of memory (MPS allocated: 9.05 GB)")
            return original(self, groups, *args)

        monkeypatch.setattr(Encoder, "_pooled_states", limited)
        with pytest.warns(SlowPathWarning, match="out of memory"):
            got = BertLayerFeaturizer(tiny).fit_transform(texts)
        assert sizes[0] > 40 >= sizes[-1]
        assert np.array_equal(got, expected)

    def test_another_error_is_not_taken_for_it(self, tiny, empty_registry, monkeypatch):
        def fail(*_):
            raise RuntimeError("a bug")

        monkeypatch.setattr(Encoder, "_pooled_states", fail)
        with pytest.raises(RuntimeError, match="a bug"):
            BertLayerFeaturizer(tiny).fit_transform(TEXTS)

    def test_a_text_that_does_not_fit_alone_is_an_error(self, tiny, small_device):
        featurizer = BertLayerFeaturizer(tiny).fit(TEXTS)
        with pytest.raises(torch.OutOfMemoryError):
            featurizer.transform(["good " * 50])
        assert featurizer.transform(TEXTS).shape == (4, 32)


def global_state():
    import logging
    import random

    import huggingface_hub
    import transformers

    return {
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "torch seed": torch.random.get_rng_state().tolist(),
        "numpy seed": np.random.get_state()[1].tolist(),
        "python seed": random.getstate(),
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "levels": {n: logging.getLogger(n).level for n in (None, "transformers", "torch")},
        "verbosity": transformers.utils.logging.get_verbosity(),
        "bars": transformers.utils.logging.is_progress_bar_enabled(),
        "hub bars": huggingface_hub.utils.are_progress_bars_disabled(),
        "directory": os.getcwd(),
    }


class TestManners:
    def test_nothing_global_changes(self, tiny, empty_registry):
        before = global_state()
        featurizer = BertLayerFeaturizer(tiny, layers="all", dtype="bfloat16")
        featurizer.fit_transform(TEXTS)
        featurizer.transform_tokens(TEXTS)
        assert global_state() == before

    @pytest.mark.parametrize("where", ["load", "forward"])
    def test_nothing_global_changes_after_an_exception(
        self, tiny, empty_registry, monkeypatch, where
    ):
        class Interruption(Exception):  # noqa: N818
            pass

        def fail(*args, **kwargs):
            raise Interruption

        featurizer = BertLayerFeaturizer(tiny).fit(TEXTS)
        if where == "forward":
            monkeypatch.setattr(torch.nn.LayerNorm, "forward", fail)
        else:
            monkeypatch.setattr("transformers.BertModel.__init__", fail)
        before = global_state()
        with pytest.raises((Interruption, ModelFilesError)):
            featurizer.transform(TEXTS)
        assert global_state() == before
        monkeypatch.undo()
        assert featurizer.transform(TEXTS).shape == (4, 32)

    def test_the_callers_grad_mode_stays_on_and_no_graph_is_kept(self, tiny):
        with torch.enable_grad():
            BertLayerFeaturizer(tiny).fit_transform(TEXTS)
            assert torch.is_grad_enabled()
            assert (torch.ones(1, requires_grad=True) * 2).requires_grad

    @pytest.mark.parametrize("family", ["bert", "mpnet", "albert", "convbert"])
    def test_the_callers_torch_contexts_do_not_reach_in(self, tmp_path, empty_registry, family):
        """Under autocast or another default device the features were errors, or other numbers."""
        folder = {**FAMILIES, **OTHER_FAMILIES}[family](tmp_path / family)
        expected = BertLayerFeaturizer(folder).fit_transform(TEXTS)
        kind = type(_encoder_of(folder).runner)
        for name in ("_encoders", "_tokenizers", "_facts"):
            getattr(_models, name).clear()
        packing_works.cache_clear()  # asked once per process, perhaps in such a context
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            assert np.array_equal(BertLayerFeaturizer(folder).fit_transform(TEXTS), expected)
        assert type(_encoder_of(folder).runner) is kind

    def test_dropout_is_off_and_no_randomness_is_used(self, tiny):
        featurizer = BertLayerFeaturizer(tiny).fit(TEXTS)
        torch.manual_seed(1)
        first = featurizer.transform(TEXTS)
        torch.manual_seed(2)
        assert np.array_equal(featurizer.transform(TEXTS), first)

    def test_nothing_is_printed(self, tmp_path, subprocess_env):
        """Loading prints bars and reports of unused weights unless it is kept from it."""
        folder = make_bert(tmp_path / "with_head")
        rewrite_weights(folder, lambda w: {**w, "cls.predictions.bias": torch.zeros(3)})
        code = (
            "import logging, sys; logging.basicConfig(level=logging.INFO)\n"
            "from sklearn_bert import BertLayerFeaturizer\n"
            "texts = [f'good film {n}' for n in range(200)]\n"
            "BertLayerFeaturizer(sys.argv[1]).fit(texts).transform(texts)\n"
        )
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code, str(folder)],
            capture_output=True,
            text=True,
            env=subprocess_env,
            check=True,
        )
        assert (done.stdout, done.stderr) == ("", "")

    def test_verbose_shows_a_bar(self, tiny, capsys):
        BertLayerFeaturizer(tiny, verbose=True).fit_transform(TEXTS)
        assert "4/4" in capsys.readouterr().err
