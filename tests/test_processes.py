"""Forks, spawned workers, threads, and memory that is given back."""

import gc
import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

import sklearn_bert
from sklearn_bert import BertLayerFeaturizer, _models
from sklearn_bert.testing import make_bert

TEXTS = ["good film", "the plot was awful and i hated it very much", "", "bad"]

FORK = """
import os, signal, sys, threading, time
import numpy as np, torch
from sklearn_bert import BertLayerFeaturizer
torch.set_num_threads(2)
small = ["good film", "the plot was awful and i hated it very much", ""]
large = [f"good film number {n} " + "very " * (n % 30) for n in range(600)]
featurizer = BertLayerFeaturizer(sys.argv[1], layers=[1, 3], cache=sys.argv[2] or None).fit(small)
expected = [featurizer.transform(texts) for texts in (small, large)]
if sys.argv[2]:
    small, large = [t + " bad" for t in small], [t + " bad" for t in large]
    expected = [BertLayerFeaturizer(sys.argv[1], layers=[1, 3]).fit_transform(t)
                for t in (small, large)]
for _ in range(2):
    child = os.fork()
    if child == 0:
        got = [featurizer.transform(texts) for texts in (small, large)]
        os._exit(0 if all(map(np.array_equal, got, expected)) else 3)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            sys.exit("the forked child hangs")
        time.sleep(0.01)
    if ended[1] != 0:
        sys.exit(f"the forked child ended with status {ended[1]}")
assert torch.get_num_threads() == 2  # the parent's number is as it was
assert all(map(np.array_equal, (featurizer.transform(t) for t in (small, large)), expected))
"""


def run_script(code, *arguments, env, **changes):
    env = {k: v for k, v in {**env, **changes}.items() if v is not None}
    if "OMP_NUM_THREADS" not in changes:
        env.pop("OMP_NUM_THREADS", None)
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=env,
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
class TestFork:
    @pytest.mark.parametrize("parallelism", [None, "true", "false"])
    def test_a_child_finishes_after_the_parent_has_run(self, tiny, subprocess_env, parallelism):
        """It used to wait for ever for threads that do not survive the fork."""
        done = run_script(FORK, tiny, "", env=subprocess_env, TOKENIZERS_PARALLELISM=parallelism)
        assert (done.returncode, done.stderr) == (0, "")

    def test_with_a_cache_on_disk(self, tiny, tmp_path, subprocess_env):
        done = run_script(FORK, tiny, tmp_path / "cache", env=subprocess_env)
        assert (done.returncode, done.stderr) == (0, "")


def test_spawned_workers_need_no_main_guard_and_no_help(tiny, subprocess_env):
    """A worker that starts anew gets an estimator of some kilobytes and loads the model itself."""
    code = """
        import multiprocessing, sys
        import numpy as np
        from concurrent.futures import ProcessPoolExecutor
        from sklearn_bert import BertLayerFeaturizer
        texts = ["good film", "the plot was awful", ""]
        featurizer = BertLayerFeaturizer(sys.argv[1]).fit(texts)
        expected = featurizer.transform(texts)
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
            for got in pool.map(featurizer.transform, [texts] * 4):
                assert np.array_equal(got, expected)
    """
    done = run_script(code, tiny, env=subprocess_env, OMP_NUM_THREADS="1")
    assert (done.returncode, done.stderr) == (0, "")


WORKERS = """
import logging, os, sys
import cloudpickle, joblib, numpy as np, torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn_bert import BertLayerFeaturizer
logging.basicConfig(level=logging.INFO)
torch.set_num_threads(2)
texts, labels = ["good film", "the plot was awful", "", "bad"] * 3, [1, 0, 1, 0] * 3
os.chdir(sys.argv[1])
pipe = make_pipeline(BertLayerFeaturizer("model"), LogisticRegression())
grid = {"bertlayerfeaturizer__layers": [-1, -2], "bertlayerfeaturizer__pooling": ["mean", "cls"]}
searches = [GridSearchCV(pipe, grid, cv=3, n_jobs=n).fit(texts, labels) for n in (1, 2)]
scores = [search.cv_results_["mean_test_score"].tolist() for search in searches]
assert scores[0] == scores[1]
featurizer = searches[1].best_estimator_[0]
os.chdir("/")
expected = featurizer.transform(texts)

def work(blob):
    # loads what the driver has pickled twenty times, in another folder
    from sklearn_bert import _model_loading, _models
    os.chdir("/")
    _models._encoders.clear()
    original, loads = _model_loading._load_weights, []
    _model_loading._load_weights = lambda folder: loads.append(1) or original(folder)
    got = [cloudpickle.loads(blob).transform(texts) for _ in range(20)]
    _model_loading._load_weights = original
    return len(loads), torch.get_num_threads(), got

with joblib.parallel_config("loky", n_jobs=2, inner_max_num_threads=1):
    blob = cloudpickle.dumps(featurizer)
    results = joblib.Parallel()(joblib.delayed(work)(blob) for _ in range(2))
for n_loads, n_threads, got in results:
    assert n_loads == 1, n_loads
    assert n_threads == 1, n_threads
    assert all(np.array_equal(features, expected) for features in got)
assert len(blob) < 10_000
assert torch.get_num_threads() == 2
"""


def test_loky_workers(tmp_path, subprocess_env):
    """Without a main guard: one load each, no more threads than allowed, relative paths, no noise.

    The checkpoint has heads that nobody needs; each worker could say so at each load.
    """
    folder = make_bert(tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        weights = transformers.BertForPreTraining(config).state_dict()
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    done = run_script(WORKERS, tmp_path, env=subprocess_env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class TestThreads:
    def test_many_threads_get_what_one_gets(self, tiny):
        """Eight threads, a hundred calls each, texts of all lengths, two maximum lengths."""
        words = "good film plot bad movie very".split()
        calls = [
            [" ".join(words[i % 6 :] * (1 + i % 9)) for i in range(n, n + 3)] for n in range(100)
        ]
        featurizers = [
            BertLayerFeaturizer(tiny, max_length=n, layers=n % 4).fit(TEXTS) for n in (61, 62)
        ]
        expected = [[f.transform(texts) for texts in calls] for f in featurizers]
        wrong = []

        def work(number):
            which = number % 2
            for position in np.random.default_rng(number).permutation(len(calls)):
                got = featurizers[which].transform(calls[position])
                if not np.array_equal(got, expected[which][position]):
                    wrong.append((number, position))

        workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert wrong == []

    def test_short_lived_threads_leave_nothing_behind(self, tiny):
        featurizer = BertLayerFeaturizer(tiny).fit(TEXTS)

        def live_tensors():
            gc.collect()
            return sum(type(thing) is torch.Tensor for thing in gc.get_objects())

        def burst(n):
            for _ in range(n):
                worker = threading.Thread(target=featurizer.transform, args=(TEXTS,))
                worker.start()
                worker.join()

        burst(10)
        before, n_threads = live_tensors(), threading.active_count()
        burst(290)
        assert live_tensors() <= before + 2
        assert threading.active_count() == n_threads


def loaded_models():
    gc.collect()
    return sum(type(thing).__name__ == "Encoder" for thing in gc.get_objects())


class TestUnload:
    def test_memory_is_given_back_and_the_next_call_loads_again(self, tiny):
        featurizer = BertLayerFeaturizer(tiny).fit(TEXTS)
        expected = featurizer.transform(TEXTS)
        assert _models._encoders
        assert loaded_models() >= 1
        sklearn_bert.unload_models()
        assert loaded_models() == 0
        assert not _models._encoders
        assert np.array_equal(featurizer.transform(TEXTS), expected)

    def test_it_may_be_called_while_others_compute(self, tiny):
        featurizer = BertLayerFeaturizer(tiny).fit(TEXTS)
        expected = featurizer.transform(TEXTS)
        wrong = []

        def work():
            for _ in range(30):
                if not np.array_equal(featurizer.transform(TEXTS), expected):
                    wrong.append(1)

        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        for _ in range(10):
            sklearn_bert.unload_models()
        for worker in workers:
            worker.join()
        assert wrong == []


def test_models_in_a_loop_do_not_add_up(tmp_path):
    sklearn_bert.unload_models()
    for seed in range(_models.MAX_LOADED_MODELS + 3):
        BertLayerFeaturizer(make_bert(tmp_path / str(seed), seed=seed)).fit_transform(TEXTS)
    assert loaded_models() <= _models.MAX_LOADED_MODELS
