"""Pipelines that carry their model's files: with_weights."""

import copy
import pickle
import pickletools
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import cloudpickle
import joblib
import numpy as np
import pytest
import skops.io
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import FeatureUnion, make_pipeline

from sklearn_bert import BertLayerFeaturizer, _models, with_weights
from sklearn_bert.exceptions import FingerprintMismatchError, ModelFilesError
from sklearn_bert.testing import make_bert

TEXTS = ["good film", "great movie", "bad plot", "awful film"]
LABELS = [1, 1, 0, 0]


@pytest.fixture
def folder(tmp_path):
    return make_bert(tmp_path / "model", seed=5)


@pytest.fixture
def forget(monkeypatch):
    """Function after which nothing is loaded, as in a new process."""

    def forget():
        for name in ("_encoders", "_tokenizers", "_facts"):
            monkeypatch.setattr(_models, name, type(getattr(_models, name))())

    forget()
    return forget


def size_of_weights(folder):
    return (Path(folder) / "model.safetensors").stat().st_size


@pytest.mark.parametrize("dump", [pickle.dumps, None], ids=["pickle", "joblib"])
def test_it_works_where_the_model_is_not(folder, tmp_path, forget, dump):
    pipe = make_pipeline(BertLayerFeaturizer(folder, layers=[1, 3]), LogisticRegression())
    pipe.fit(TEXTS, LABELS)
    features, labels = pipe[0].transform(TEXTS), pipe.predict(TEXTS)
    if dump is None:
        joblib.dump(with_weights(pipe), tmp_path / "file")
    else:
        (tmp_path / "file").write_bytes(dump(with_weights(pipe)))
    shutil.rmtree(folder)
    forget()
    with pytest.raises(ModelFilesError):
        pipe.predict(TEXTS)
    loaded = (joblib.load if dump is None else pickle.loads)(
        tmp_path / "file" if dump is None else (tmp_path / "file").read_bytes()
    )
    assert np.array_equal(loaded[0].transform(TEXTS), features)
    assert np.array_equal(loaded.predict(TEXTS), labels)
    forget()
    assert np.array_equal(pickle.loads(pickle.dumps(loaded))[0].transform(TEXTS), features)


def skops_bytes(estimator):
    return skops.io.dumps(estimator, compression=zipfile.ZIP_DEFLATED)


def skops_load(stream):
    return skops.io.loads(stream, trusted=skops.io.get_untrusted_types(data=stream))


@pytest.mark.parametrize(
    ("dumps", "loads"),
    [(cloudpickle.dumps, pickle.loads), (skops_bytes, skops_load), (copy.deepcopy, copy.deepcopy)],
    ids=["cloudpickle", "skops", "deepcopy"],
)
def test_other_ways_of_saving_carry_it_too(folder, forget, dumps, loads):
    featurizer = BertLayerFeaturizer(folder, layers=[1, 3]).fit(TEXTS)
    expected = featurizer.transform(TEXTS)
    saved = dumps(with_weights(featurizer))
    shutil.rmtree(folder)
    forget()
    assert np.array_equal(loads(saved).transform(TEXTS), expected)


def test_its_pickle_holds_bytes_and_nothing_of_torch(folder):
    stream = pickle.dumps(with_weights(BertLayerFeaturizer(folder).fit(TEXTS)))
    parts = [argument for _, argument, _ in pickletools.genops(stream)]
    for file in folder.iterdir():
        assert file.name in parts
        assert file.read_bytes() in parts
    modules = {part.split(".")[0] for part in parts if isinstance(part, str)}
    assert "sklearn_bert" in modules
    assert not modules & {"torch", "transformers", "tokenizers", "huggingface_hub", "safetensors"}


def test_another_process_leaves_nothing_behind(folder, tmp_path, subprocess_env):
    featurizer = BertLayerFeaturizer(folder).fit(TEXTS)
    np.save(tmp_path / "expected.npy", featurizer.transform(TEXTS))
    joblib.dump(with_weights(featurizer), tmp_path / "file.joblib")
    shutil.rmtree(folder)
    (tmp_path / "tmp").mkdir()
    code = (
        "import sys, joblib, numpy as np; folder = sys.argv[1]\n"
        "loaded = joblib.load(folder + '/file.joblib')\n"
        "assert 'torch' not in sys.modules\n"
        f"got = loaded.transform({TEXTS!r})\n"
        "assert np.array_equal(got, np.load(folder + '/expected.npy'))\n"
    )
    subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path)],
        env={**subprocess_env, "TMPDIR": str(tmp_path / "tmp")},
        check=True,
        timeout=120,
    )
    assert list((tmp_path / "tmp").iterdir()) == []


def test_shared_weights_are_stored_once(folder, tmp_path):
    union = FeatureUnion(
        [("a", BertLayerFeaturizer(folder)), ("b", BertLayerFeaturizer(folder, pooling="max"))]
    ).fit(TEXTS)
    joblib.dump(with_weights(union), tmp_path / "file")
    for size in (len(pickle.dumps(with_weights(union))), (tmp_path / "file").stat().st_size):
        assert size_of_weights(folder) < size < 1.5 * size_of_weights(folder)


def test_the_original_is_left_as_it_is(folder):
    featurizer = BertLayerFeaturizer(folder).fit(TEXTS)
    made = with_weights(featurizer)
    assert featurizer.model == folder
    assert len(pickle.dumps(featurizer)) < 10_000
    assert "MB)" in repr(made)
    assert len(repr(made)) < 200


def test_it_reaches_into_fitted_parts(folder, tmp_path, forget):
    import pandas as pd

    frame = pd.DataFrame({"text": TEXTS})
    columns = ColumnTransformer([("text", BertLayerFeaturizer(folder), "text")])
    search = GridSearchCV(
        make_pipeline(columns, LogisticRegression()), {"logisticregression__C": [1, 2]}, cv=2
    ).fit(frame, LABELS)
    expected = search.predict_proba(frame)
    made = with_weights(search)
    shutil.rmtree(folder)
    forget()
    assert np.array_equal(made.predict_proba(frame), expected)


def test_it_can_be_cloned_fitted_and_searched_like_any_other(folder, forget):
    made = with_weights(BertLayerFeaturizer(folder).fit(TEXTS))
    expected = made.transform(TEXTS)
    shutil.rmtree(folder)
    forget()
    again = clone(made).fit(TEXTS)
    assert again.model is made.model
    assert np.array_equal(again.transform(TEXTS), expected)
    forget()
    assert np.array_equal(pickle.loads(pickle.dumps(again)).transform(TEXTS), expected)


def test_serving_needs_no_files_once_it_is_loaded(folder, tmp_path, forget, monkeypatch):
    """Every call once looked at the temporary files, which something may have cleaned away."""
    made = with_weights(BertLayerFeaturizer(folder).fit(TEXTS))
    shutil.rmtree(folder)
    forget()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    expected = made.transform(TEXTS)
    assert list((tmp_path / "tmp").iterdir()) == []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    assert np.array_equal(made.transform(TEXTS), expected)


def test_what_is_not_fitted_is_refused(folder):
    with pytest.raises(NotFittedError, match="no fitted BertLayerFeaturizer"):
        with_weights(make_pipeline(BertLayerFeaturizer(folder), LogisticRegression()))


def test_files_that_changed_since_fit_are_refused(folder):
    featurizer = BertLayerFeaturizer(folder).fit(TEXTS)
    make_bert(folder, seed=6)
    with pytest.raises(FingerprintMismatchError):
        with_weights(featurizer)


def test_a_file_name_cannot_leave_the_folder(folder, forget):
    made = with_weights(BertLayerFeaturizer(folder).fit(TEXTS))
    made.model.files["../evil"] = b""
    forget()
    with pytest.raises(ModelFilesError, match="evil"):
        made.transform(TEXTS)
