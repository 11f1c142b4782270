"""What is shown and told while a call runs."""

import io
import re
import sys
import threading
import warnings

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline

from sklearn_bert import BertLayerFeaturizer, _progress

TEXTS = [f"a good film {'plot ' * (n % 7)}{n}" for n in range(40)] + ["a good film 0"] * 5
LABELS = [0, 1] * 22 + [0]


class TestBar:
    @pytest.mark.parametrize("use", ["transform", "fit_transform", "transform_tokens"])
    def test_it_shows_texts_tokens_per_second_and_time_left(self, tiny, capsys, use):
        getattr(BertLayerFeaturizer(tiny, verbose=True).fit(TEXTS), use)(TEXTS)
        out, err = capsys.readouterr()
        assert out == ""
        assert "40/40" in err  # distinct ones
        assert re.search(r"[\d,]+ tokens/s", err)
        assert re.search(r"\d\d:\d\d<\d\d:\d\d", err)  # gone < left

    def test_loading_the_model_does_not_count_as_speed(self, monkeypatch):
        shown = []

        class Bar:
            def set_postfix_str(self, text, refresh):
                shown.append(text)

            def update(self, n_texts):
                pass

        clock = iter([0, 1, 10, 11, 12, 13])
        monkeypatch.setattr(_progress.time, "perf_counter", lambda: next(clock))
        bar = _progress._Bar(Bar())
        bar.update(5, 0)  # found in the cache
        for n_tokens in (100, 100, 300, 0):
            bar.update(1, n_tokens)
        assert shown == ["10 tokens/s", "100 tokens/s", "200 tokens/s", "133 tokens/s"]

    def test_cached_texts_count_as_done(self, tiny, tmp_path, capsys):
        est = BertLayerFeaturizer(tiny, verbose=True, cache=str(tmp_path)).fit(TEXTS)
        est.transform(TEXTS[:20])
        capsys.readouterr()
        est.transform(TEXTS)
        assert "40/40" in capsys.readouterr().err
        est.transform(TEXTS)
        assert "40/40" in capsys.readouterr().err

    def test_windows_count_as_the_texts_they_are_of(self, tiny, capsys):
        est = BertLayerFeaturizer(
            tiny, verbose=True, max_length=12, long_documents="window", window_overlap=3
        ).fit(TEXTS)
        est.transform(["good " * 50, "bad", "film " * 30])
        assert "3/3" in capsys.readouterr().err
        est.transform_tokens(["good " * 50, "bad", "film " * 30])
        assert "3/3" in capsys.readouterr().err

    @pytest.mark.parametrize("use", ["transform", "fit_transform", "transform_tokens"])
    def test_nothing_is_shown_otherwise(self, tiny, capsys, use):
        getattr(BertLayerFeaturizer(tiny).fit(TEXTS), use)(TEXTS)
        assert capsys.readouterr() == ("", "")


class Recorder:
    """A callback that writes down what it is told, from any process through its file."""

    max_propagation_depth = None

    def __init__(self, path):
        self.path = str(path)

    def _write(self, what, context):
        line = f"{what} {context.estimator_name} {context.task_name} {context.max_subtasks}\n"
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line)

    def setup(self, estimator, context):
        self._write("setup", context)

    def teardown(self, estimator, context):
        self._write("teardown", context)

    def on_fit_task_begin(self, estimator, context):
        self._write("begin", context)

    def on_fit_task_end(self, estimator, context):
        self._write("end", context)

    def lines(self):
        with open(self.path, encoding="utf-8") as file:
            return [line.split() for line in file]


class TestCallbacks:
    @pytest.fixture(autouse=True)
    def needs_callbacks(self):
        pytest.importorskip("sklearn.callback", reason="scikit-learn has callbacks from 1.9 on")

    @pytest.fixture
    def recorder(self, tmp_path):
        return Recorder(tmp_path / "log")

    def test_fit_transform_tells_its_parts(self, tiny, recorder):
        est = BertLayerFeaturizer(tiny, batch_tokens=8).set_callbacks(recorder)
        features = est.fit_transform(TEXTS)
        np.testing.assert_array_equal(features, BertLayerFeaturizer(tiny).fit_transform(TEXTS))
        lines = recorder.lines()
        name = "BertLayerFeaturizer"
        assert lines[0] == ["setup", name, "fit_transform", "40"]
        assert lines[1] == ["begin", name, "fit_transform", "40"]
        assert lines[-2:] == [
            ["end", name, "fit_transform", "40"],
            ["teardown", name, "fit_transform", "40"],
        ]
        assert lines[2:-2] == [["begin", name, "texts", "0"], ["end", name, "texts", "0"]] * 40

    def test_many_texts_are_a_hundred_parts(self, tiny, recorder):
        BertLayerFeaturizer(tiny).set_callbacks(recorder).fit_transform(
            [f"good {n}" for n in range(1234)]
        )
        assert (
            sum(line[:3] == ["end", "BertLayerFeaturizer", "texts"] for line in recorder.lines())
            == 100
        )

    def test_fit_is_a_task_without_parts(self, tiny, recorder):
        BertLayerFeaturizer(tiny).set_callbacks(recorder).fit(TEXTS)
        assert [line[0] for line in recorder.lines()] == ["setup", "begin", "end", "teardown"]

    def test_teardown_comes_after_an_error_too(self, tiny, recorder):
        est = BertLayerFeaturizer(tiny, layers=9).set_callbacks(recorder)
        with pytest.raises(ValueError, match="layers"):
            est.fit_transform(TEXTS)
        assert recorder.lines()[-1][0] == "teardown"
        est.set_params(layers=1).fit_transform(TEXTS)

    @pytest.mark.parametrize("n_jobs", [1, 2])
    def test_a_search_tells_the_featurizers_parts(self, tiny, tmp_path, recorder, n_jobs):
        pipe = make_pipeline(BertLayerFeaturizer(tiny), LogisticRegression())
        grid = {"bertlayerfeaturizer__layers": [1, 2]}
        search = GridSearchCV(pipe, grid, cv=2, n_jobs=n_jobs).set_callbacks(recorder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            search.fit(TEXTS, LABELS)
        told = [line for line in recorder.lines() if line[1] == "BertLayerFeaturizer"]
        assert sum(line[2] == "texts" for line in told) > 4 * 15
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = GridSearchCV(pipe, grid, cv=2).fit(TEXTS, LABELS)
        np.testing.assert_array_equal(
            plain.cv_results_["mean_test_score"], search.cv_results_["mean_test_score"]
        )

    def test_scikit_learns_own_progress_bar_shows_them(self, tiny, monkeypatch):
        pytest.importorskip("rich")
        from sklearn.callback import ProgressBar

        out = io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
        pipe = make_pipeline(BertLayerFeaturizer(tiny), LogisticRegression())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe.set_callbacks(ProgressBar()).fit(TEXTS, LABELS)
        assert "BertLayerFeaturizer - fit_t" in out.getvalue()
        assert threading.active_count() < 20
