"""A search over layers, poolings and C, with the feature cache, against one bare forward pass.

    python benchmarks/bench_search.py            # a few minutes
    python benchmarks/bench_search.py --full     # also the whole search without a cache: long

Everything is measured in one run, so the ratios can be compared where the times cannot. "Head" is
the same search on ready-made columns: scikit-learn and the classifier, without any text.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler

from sklearn_bert import BertLayerFeaturizer, FeatureCache, _cache
from sklearn_bert._store import Shelf
from sklearn_bert._tiered_store import TieredStore
from sklearn_bert.datasets import load_sentence_polarity, minilm_path

LAYERS = list(range(7))
POOLINGS = ["mean", "max", "min"]  # no cls: it is constant at layer 0
CS = [0.001, 0.01, 0.1]


class ReadyColumns(TransformerMixin, BaseEstimator):
    """Take the columns of one layer and pooling from features made before."""

    def __init__(self, features=None, layers=1, pooling="mean"):
        self.features = features
        self.layers = layers
        self.pooling = pooling

    def fit(self, X, y=None):
        return self

    def transform(self, X):
        return self.features[self.layers, self.pooling][np.asarray(X)]


class SharedFeatures(dict):
    """A table that clone does not copy."""

    def __deepcopy__(self, memo):
        return self


def search(first_step, n_jobs=1):
    pipe = Pipeline(
        [
            ("text", first_step),
            ("scale", StandardScaler()),
            ("head", LogisticRegression(max_iter=200)),
        ]
    )
    grid = {"text__layers": LAYERS, "text__pooling": POOLINGS, "head__C": CS}
    return GridSearchCV(pipe, grid, cv=5, n_jobs=n_jobs, refit=False)


def timed(action):
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def bare_pass(texts, model):
    """One forward pass over the corpus: the last layer, mean."""
    featurizer = BertLayerFeaturizer(model).fit(texts)
    featurizer.transform(texts[:10])
    return statistics.median(timed(lambda: featurizer.transform(texts))[0] for _ in range(3))


def ready_features(texts, model):
    featurizer = BertLayerFeaturizer(model, layers=LAYERS, pooling=POOLINGS)
    features = featurizer.fit_transform(texts)
    blocks = np.split(features, len(LAYERS) * len(POOLINGS), axis=1)
    keys = [(layer, pooling) for layer in LAYERS for pooling in POOLINGS]
    return SharedFeatures(zip(keys, map(np.ascontiguousarray, blocks), strict=True))


def close_stores():
    for store in _cache._stores.values():
        if isinstance(store, TieredStore):
            store.close()
    _cache._stores.clear()


def report(name, seconds, head, one_pass):
    beyond = seconds - head
    print(
        f"{name:38s} {seconds:8.1f} s   beyond the head {beyond:7.2f} s "
        f"= {beyond / one_pass:6.2f} x one pass",
        flush=True,
    )


def bench_search(texts, y, model, full):
    one_pass = bare_pass(texts, model)
    print(f"{'one forward pass over the corpus':38s} {one_pass:8.2f} s", flush=True)
    ready = ReadyColumns(ready_features(texts, model))
    head, expected = timed(lambda: search(ready).fit(np.arange(len(texts)), y))
    print(f"{'head only, on ready columns':38s} {head:8.1f} s", flush=True)
    folder = Path(tempfile.mkdtemp())
    places = {"memory": "memory", "disk": folder / "cold", "disk, n_jobs=2": folder / "two"}
    for name, place in places.items():
        n_jobs = 2 if name.endswith("2") else 1
        cache = FeatureCache(place, poolings=POOLINGS)
        run = search(BertLayerFeaturizer(model, cache=cache), n_jobs)
        seconds, fitted = timed(lambda run=run: run.fit(texts, y))
        report(f"search, {name}, cold", seconds, head, one_pass)
        same = np.array_equal(
            fitted.cv_results_["mean_test_score"], expected.cv_results_["mean_test_score"]
        )
        print(f"{'':38s} scores equal those of ready columns: {same}")
        close_stores()
    again = search(BertLayerFeaturizer(model, cache=FeatureCache(folder / "cold")))
    report("search, disk, warm", timed(lambda: again.fit(texts, y))[0], head, one_pass)
    close_stores()
    shutil.rmtree(folder)
    n_passes = len(LAYERS) * len(POOLINGS) * len(CS) * 5
    if full:
        seconds = timed(lambda: search(BertLayerFeaturizer(model)).fit(texts, y))[0]
        report("search without a cache", seconds, head, one_pass)
    else:
        print(f"search without a cache: {n_passes} passes over the corpus (measured with --full)")
    return one_pass


def bench_rows(texts, one_pass):
    """Put and get all that a text's row can have, against computing it."""
    folder = tempfile.mkdtemp()
    store = TieredStore(folder)
    states = np.random.default_rng(0).standard_normal((len(texts), 7, 384), np.float32)
    n_tokens = np.full(len(texts), 20)
    out = np.empty_like(states)
    shelves = [Shelf("n", pooling, tuple(LAYERS), 384) for pooling in POOLINGS]
    put = timed(lambda: [store.put(s, texts, n_tokens, states, 2**40) for s in shelves])[0]
    store.memory.clear()
    disk = timed(lambda: [store.get(s, texts, out) for s in shelves])[0]
    memory = timed(lambda: [store.get(s, texts, out) for s in shelves])[0]
    print(f"\nall layers and {len(shelves)} poolings of {len(texts)} texts, microseconds per text")
    computing = one_pass / len(texts) * 1e6
    print(f"  computing {computing:.0f}")
    for name, seconds in (("put", put), ("get, disk", disk), ("get, memory", memory)):
        each = seconds / len(texts) * 1e6
        print(f"  {name} {each:.1f}: {computing / each:.0f} times faster")
    store.close()
    shutil.rmtree(folder)


def bench_scale(n_rows):
    """Put and get rows of one 384-dimensional state, on disk, in steps of a tenth."""
    print(f"\n{n_rows} rows of 384 numbers on disk: microseconds per row, by tenth")
    folder = tempfile.mkdtemp()
    store = TieredStore(folder)
    shelf = Shelf("n", "mean", (0,), 384)
    rng = np.random.default_rng(0)
    states = rng.standard_normal((1000, 1, 384), np.float32)
    n_tokens = np.full(1000, 20)
    out = np.empty_like(states)
    tenth = n_rows // 10
    put, get = [], []
    for start in range(0, n_rows, tenth):
        seconds = 0.0
        for first in range(start, start + tenth, 1000):
            names = [f"text {n}" for n in range(first, first + 1000)]
            seconds += timed(lambda n=names: store.put(shelf, n, n_tokens, states, 2**40))[0]
        put.append(seconds)
    for _ in range(10):
        store.memory.clear()
        seconds = 0.0
        for first in rng.integers(0, n_rows - 1000, tenth // 1000):
            names = [f"text {n}" for n in range(first, first + 1000)]
            seconds += timed(lambda n=names: store.get(shelf, n, out))[0]
        get.append(seconds)
    for name, times in (("put", put), ("get", get)):
        print(f"  {name}: " + " ".join(f"{1e6 * t / tenth:6.1f}" for t in times))
    print(
        f"  size on disk {store.info(2**40).n_bytes / n_rows:.0f} bytes a row, of which 1536 states"
    )
    store.close()
    shutil.rmtree(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="also run the search without a cache")
    parser.add_argument("--sentences", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=100_000)
    options = parser.parse_args()
    corpus, labels = load_sentence_polarity(return_X_y=True)
    corpus, labels = corpus[: options.sentences], labels[: options.sentences]
    bench_rows(corpus, bench_search(corpus, labels, minilm_path(), options.full))
    bench_scale(options.rows)
