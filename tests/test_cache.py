"""The feature cache: one forward pass per distinct text, never a wrong row, never an error."""

import copy
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
import types
import warnings
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from counting import CountingFeaturizer, read_log
from safetensors.torch import load_file, save_file
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline
from transformers import AutoTokenizer

from sklearn_bert import (
    BertLayerFeaturizer,
    FeatureCache,
    Pooling,
    _cache,
    _devices,
    _models,
    _text_states,
)
from sklearn_bert._disk_store import DATABASE, DiskStore
from sklearn_bert._pooling import pooling_identity
from sklearn_bert._store import NOT_FOUND, Shelf
from sklearn_bert._tiered_store import TieredStore
from sklearn_bert.exceptions import CacheWarning, TruncationWarning
from sklearn_bert.testing import make_bert

WORDS = "a good film the plot was awful and i hated it very much bad great movie loved".split()
TEXTS = ["good film", "the plot was awful and i hated it very much", "", "bad"]
SHELF = Shelf("a namespace", "mean", (0, 1), 4)


def sentences(n, seed=0):
    """Distinct random sentences and labels, with some repeated rows."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 14))) for _ in range(n)]
    texts += texts[: n // 5]
    return texts, np.array([i % 2 for i in range(len(texts))])


@pytest.fixture(autouse=True)
def fresh_stores(monkeypatch):
    """No store is open when a test starts, as in a new process."""
    monkeypatch.setattr(_cache, "_stores", {})
    yield
    close_stores()


@pytest.fixture(params=["memory", "disk"])
def cache(request, tmp_path):
    return FeatureCache("memory" if request.param == "memory" else tmp_path / "cache")


@pytest.fixture
def disk(tmp_path):
    return FeatureCache(tmp_path / "cache")


def close_stores():
    for store in _cache._stores.values():
        if isinstance(store, TieredStore):
            store.close()
    _cache._stores.clear()


def store_of(cache):
    return _cache._store_of(cache)


def close_memory(store):
    """Forget what a disk store keeps in memory, so that the disk is asked."""
    if isinstance(store, TieredStore):
        store.memory.clear()


def connection_of(cache):
    return store_of(cache).disk._connection


def put(store, shelf, states_of, max_bytes=2**30):
    """Put rows that are given as a table from text to states."""
    texts = list(states_of)
    n_tokens = np.arange(len(texts))
    store.put(shelf, texts, n_tokens, np.stack(list(states_of.values())), max_bytes)


def get(store, shelf, texts):
    """Return a table from text to states of the rows that are found."""
    out = np.full((len(texts), len(shelf.layers), shelf.hidden_size), np.nan, np.float32)
    n_tokens = store.get(shelf, texts, out)
    return {t: row for t, row, n in zip(texts, out, n_tokens, strict=True) if n != NOT_FOUND}


def run_store_script(code, *args, **kwargs):
    """Start a process that works on a store; it imports no torch, so it starts at once."""
    root = str(Path(_cache.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


class TestOneForwardPass:
    """A search runs the model once per distinct text, whatever cv, n_jobs and backend."""

    def search(self, tiny, log, cache, n_jobs=1):
        pipe = Pipeline(
            [
                ("bert", CountingFeaturizer(tiny, log=str(log), cache=cache)),
                ("head", LogisticRegression(max_iter=2000)),
            ]
        )
        grid = {
            "bert__layers": [1, 2, 3],
            "bert__pooling": ["mean", "cls", "max"],
            "head__C": [0.01, 0.1, 1.0],
        }
        return GridSearchCV(pipe, grid, cv=3, n_jobs=n_jobs)

    @staticmethod
    def expected(tiny, texts):
        """Digest and length of the token ids of each distinct text, by transformers' tokenizer."""
        tokenizer = AutoTokenizer.from_pretrained(tiny)
        ids = {tuple(tokenizer(text)["input_ids"]) for text in texts}
        return {hashlib.sha256(np.array(i, np.int64).tobytes()).hexdigest(): len(i) for i in ids}

    @pytest.mark.parametrize(
        ("place", "n_jobs", "backend"),
        [
            ("memory", 1, "loky"),
            ("memory", 2, "threading"),
            ("disk", 1, "loky"),
            ("disk", 2, "threading"),
            ("disk", 2, "loky"),
        ],
    )
    def test_each_distinct_text_is_computed_once(self, tiny, tmp_path, place, n_jobs, backend):
        texts, y = sentences(120)
        cache = FeatureCache("memory" if place == "memory" else tmp_path / "cache")
        log = tmp_path / "log"
        with joblib.parallel_config(backend):
            search = self.search(tiny, log, cache, n_jobs).fit(texts, y)
        digests, lengths, _ = read_log(log)
        expected = self.expected(tiny, texts)
        assert len(set(texts)) == len(expected)
        assert sorted(digests) == sorted(expected)
        assert sum(lengths) == sum(expected.values())

        plain = self.search(tiny, tmp_path / "other", None).fit(texts, y)
        for key in ("mean_test_score", "split0_test_score", "rank_test_score"):
            assert np.array_equal(search.cv_results_[key], plain.cv_results_[key])
        assert search.best_params_ == plain.best_params_
        # what it would have been: 27 candidates, 3 folds of all texts, and the final fit
        assert len(read_log(tmp_path / "other")[0]) > 60 * len(expected)

    def test_a_warm_cache_needs_no_weights(self, tiny, tmp_path, monkeypatch):
        texts, y = sentences(60)
        cache = FeatureCache(tmp_path / "cache")
        first = self.search(tiny, tmp_path / "cold", cache).fit(texts, y)
        monkeypatch.setattr(_models, "_encoders", type(_models._encoders)())
        close_stores()
        again = self.search(tiny, tmp_path / "warm", cache).fit(texts, y)
        assert read_log(tmp_path / "warm") == ([], [], 0)
        assert _models._encoders == {}
        assert np.array_equal(
            first.cv_results_["mean_test_score"], again.cv_results_["mean_test_score"]
        )

    def test_the_pooler_is_kept_too(self, tiny, cache, tmp_path):
        featurizer = CountingFeaturizer(
            tiny, pooling=["pooler", "mean"], cache=cache, log=str(tmp_path / "log")
        )
        first = featurizer.fit_transform(TEXTS)
        assert np.array_equal(featurizer.fit_transform(TEXTS), first)
        plain = BertLayerFeaturizer(tiny, pooling=["pooler", "mean"]).fit_transform(TEXTS)
        assert np.array_equal(first, plain)
        assert len(read_log(tmp_path / "log")[0]) == len(TEXTS)


class TestSharing:
    @pytest.mark.parametrize("found", [[0], [1], [0, 2], [3, 1], [4]])
    def test_rows_that_others_put_between_look_and_claim(self, tiny, cache, monkeypatch, found):
        """Found rows once went to other places when texts were not in the order of their length."""
        texts = ["bad", "good film", "the plot was awful", "a", "i hated it very much"]
        expected = BertLayerFeaturizer(tiny).fit_transform(texts)
        other = BertLayerFeaturizer(tiny, cache=cache).fit(texts)
        kind = type(store_of(cache))
        claim = kind.claim

        def late(self, namespace, names):
            monkeypatch.setattr(kind, "claim", claim)
            other.transform([texts[position] for position in found])
            return claim(self, namespace, names)

        monkeypatch.setattr(kind, "claim", late)
        got = BertLayerFeaturizer(tiny, cache=cache).fit_transform(texts)
        assert np.array_equal(got, expected)

    def test_threads_on_overlapping_folds(self, tiny):
        texts, _ = sentences(60)
        expected = BertLayerFeaturizer(tiny).fit_transform(texts)
        folds = [list(range(0, 40)), list(range(20, 60)), [*range(0, 20), *range(40, 60)]]
        wrong = []

        def work(rows, gate, featurizer):
            gate.wait()
            if not np.array_equal(featurizer.transform([texts[r] for r in rows]), expected[rows]):
                wrong.append(rows)

        for _ in range(40):
            _cache._stores.clear()
            featurizer = BertLayerFeaturizer(tiny, cache="memory").fit(texts)
            gate = threading.Barrier(3)
            workers = [
                threading.Thread(target=work, args=(rows, gate, featurizer)) for rows in folds
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        assert wrong == []


class TestSameBits:
    @pytest.mark.parametrize("layers", ["all", "requested"])
    def test_cached_or_computed(self, tiny, cache, layers):
        cache = FeatureCache(cache.location, layers=layers)
        texts, _ = sentences(50)
        grid = [
            {"layers": 1},
            {"layers": [3, 0]},
            {"layers": "all", "layer_combination": "mean"},
            {"layers": 2, "pooling": ["min", "max"]},
            {"special_tokens": "exclude", "pooling": ["mean", "last"]},
            {"norm": "l2", "dtype": "bfloat16"},
        ]
        for half in (texts[:30], texts):
            for params in grid:
                expected = BertLayerFeaturizer(tiny, **params).fit_transform(half)
                for _ in range(2):
                    got = BertLayerFeaturizer(tiny, cache=cache, **params).fit_transform(half)
                    assert np.array_equal(got, expected)

    def test_requested_keeps_the_early_stop(self, tiny, cache):
        requested = FeatureCache(cache.location, layers="requested")
        BertLayerFeaturizer(tiny, layers=1, cache=requested).fit_transform(TEXTS)
        assert requested.info().n_vectors == len(TEXTS)
        BertLayerFeaturizer(tiny, layers=1, cache=cache).fit_transform(["another film"])
        assert cache.info().n_vectors == len(TEXTS) + 4 * 3

    def test_truncation_is_announced_from_a_warm_cache_too(self, tiny, cache):
        """A cut text whose row was found must not pass silently."""
        long = ["good film " * 100, "bad"]
        featurizer = BertLayerFeaturizer(tiny, cache=cache).fit(long)
        for _ in range(2):
            with pytest.warns(TruncationWarning, match=r"1 of 2 texts .*longest text has 202"):
                featurizer.transform(long)


def changed_weights(folder):
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: value + 0.01 for name, value in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def changed_tokenizer(folder):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["good"], vocabulary["bad"] = vocabulary["bad"], vocabulary["good"]
    path.write_text(json.dumps(tokenizer))


def spread(states):
    return states.amax(dim=1) - states.amin(dim=1)


def doubled_spread(states):
    return 2 * (states.amax(dim=1) - states.amin(dim=1))


class TestWhatIsTheSame:
    """Whatever changes the bits of a row is part of its key."""

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ({}, {"max_length": 5}),
            ({}, {"dtype": "bfloat16"}),
            ({}, {"special_tokens": "exclude"}),
            ({}, {"layers": 1}),
            ({}, {"pooling": "max"}),
            ({"pooling": Pooling("p", spread)}, {"pooling": Pooling("p", doubled_spread)}),
            ({"pooling": Pooling("p", spread)}, {"pooling": Pooling("p", spread, reads="all")}),
            ({}, {"pooling": Pooling("mean", spread)}),
        ],
        ids=str,
    )
    def test_a_parameter(self, tiny, cache, first, second):
        for params in (first, second, first, second):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TruncationWarning)
                got = BertLayerFeaturizer(tiny, cache=cache, **params).fit_transform(TEXTS)
                expected = BertLayerFeaturizer(tiny, **params).fit_transform(TEXTS)
            assert np.array_equal(got, expected)

    @pytest.mark.parametrize("change", [changed_weights, changed_tokenizer])
    def test_a_model_file(self, tiny, tmp_path, cache, change):
        folder = Path(shutil.copytree(tiny, tmp_path / "model"))
        before = BertLayerFeaturizer(folder, cache=cache).fit_transform(TEXTS)
        n_texts = cache.info().n_texts
        change(folder)
        after = BertLayerFeaturizer(folder, cache=cache).fit_transform(TEXTS)
        assert not np.array_equal(before, after)
        assert np.array_equal(after, BertLayerFeaturizer(folder).fit_transform(TEXTS))
        assert cache.info().n_texts == 2 * n_texts

    def test_two_models(self, tiny, tmp_path, cache):
        other = make_bert(tmp_path / "other", seed=1)
        for folder in (tiny, other, tiny, other):
            got = BertLayerFeaturizer(folder, cache=cache).fit_transform(TEXTS)
            assert np.array_equal(got, BertLayerFeaturizer(folder).fit_transform(TEXTS))

    def test_the_kernels(self, tiny, cache, monkeypatch):
        """The same row on another instruction set may differ in its last bits."""
        BertLayerFeaturizer(tiny, cache=cache).fit_transform(TEXTS)
        n_texts = cache.info().n_texts
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
        BertLayerFeaturizer(tiny, cache=cache).fit_transform(TEXTS)
        assert cache.info().n_texts == 2 * n_texts

    @pytest.mark.parametrize("name", ["__version__"])
    @pytest.mark.parametrize("library", ["torch", "transformers", "tokenizers"])
    def test_the_versions(self, tiny, cache, monkeypatch, library, name):
        BertLayerFeaturizer(tiny, cache=cache).fit_transform(TEXTS)
        monkeypatch.setattr(getattr(_devices, library), name, "another")
        BertLayerFeaturizer(tiny, cache=cache).fit_transform(TEXTS)
        assert cache.info().n_texts == 2 * len(TEXTS)

    def test_one_letter(self, tiny, cache):
        texts = ["good film", "good film ", "Good film", "good  film", "good film."]
        BertLayerFeaturizer(tiny, cache=cache).fit_transform(texts)
        assert cache.info().n_texts == len(texts)

    def test_a_pooling_with_hidden_dependencies_is_not_cached(self, tiny, cache):
        state = {"factor": 2}
        pooling = Pooling("scaled", lambda states: state["factor"] * states.mean(dim=1))
        featurizer = BertLayerFeaturizer(tiny, pooling=pooling, cache=cache).fit(TEXTS)
        with pytest.warns(CacheWarning, match="'scaled'"):
            before = featurizer.transform(TEXTS)
        state["factor"] = 3
        with pytest.warns(CacheWarning, match="not cached"):
            after = featurizer.transform(TEXTS)
        assert not np.array_equal(before, after)

    def test_modules_whose_content_may_change_are_not_trusted(self, tiny, cache, monkeypatch):
        """A number in a module of the user's decided the rows, and was not part of their key."""
        helpers = types.ModuleType("helpers")
        helpers.factor = 2
        monkeypatch.setitem(sys.modules, "helpers", helpers)
        by_global = eval("lambda states: helpers.factor * states.mean(dim=1)", {"helpers": helpers})

        def by_import(states):
            from helpers import factor

            return factor * states.mean(dim=1)

        for reduce in (by_global, by_import):
            featurizer = BertLayerFeaturizer(tiny, pooling=Pooling("p", reduce), cache=cache)
            with pytest.warns(CacheWarning, match="'p'"):
                featurizer.fit_transform(TEXTS)

    def test_an_attribute_of_a_function_is_part_of_it(self):
        def scaled(states):
            return scaled.factor * states.mean(dim=1)

        identities = set()
        for scaled.factor in (1, 2):
            identities.add(pooling_identity(Pooling("p", scaled)))
        assert len(identities) == 2
        assert None not in identities

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_the_precision_in_which_torch_multiplies_float32(self, device, monkeypatch):
        """Told to be fast, torch multiplies float32 in bfloat16 on processors that can."""
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
        backend = torch.backends.mkldnn if device == "cpu" else torch.backends.cuda
        before = backend.matmul.fp32_precision
        plain = _devices.computing_environment(torch.device(device))
        try:
            # also where torch.get_float32_matmul_precision refuses to answer
            backend.matmul.fp32_precision = "tf32"
            assert _devices.computing_environment(torch.device(device)) != plain
        finally:
            backend.matmul.fp32_precision = before
        assert _devices.computing_environment(torch.device(device)) == plain


class TestHandle:
    """A FeatureCache is a value: copies of it mean the same store."""

    def test_copies_are_equal_and_share_the_store(self, tiny, cache):
        copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), clone(cache, safe=False)]
        assert all(made == cache and hash(made) == hash(cache) for made in copies)
        BertLayerFeaturizer(tiny, cache=cache).fit_transform(TEXTS)
        assert all(made.info().n_texts == len(TEXTS) for made in copies)

    def test_it_cannot_be_changed(self, cache):
        with pytest.raises(AttributeError):
            cache.layers = "requested"

    def test_estimators_with_it_clone_and_pickle_small(self, tiny, cache):
        featurizer = BertLayerFeaturizer(tiny, cache=cache)
        featurizer.fit_transform(TEXTS)
        assert clone(featurizer).cache == cache
        assert len(pickle.dumps(featurizer)) < 10_000
        loaded = pickle.loads(pickle.dumps(featurizer))
        assert np.array_equal(loaded.transform(TEXTS), featurizer.transform(TEXTS))

    @pytest.mark.parametrize("path_type", [str, Path])
    def test_a_path_or_memory_is_enough(self, tiny, tmp_path, path_type):
        BertLayerFeaturizer(tiny, cache=path_type(tmp_path / "c")).fit_transform(TEXTS)
        assert FeatureCache(tmp_path / "c").info().n_texts == len(TEXTS)
        BertLayerFeaturizer(tiny, cache="memory").fit_transform(TEXTS)
        assert FeatureCache("memory").info().n_texts == len(TEXTS)

    def test_a_relative_path_means_the_folder_it_meant(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        cache = FeatureCache("here")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert cache.location == str(tmp_path / "here")

    @pytest.mark.parametrize("wrong", [3, "", True, ["memory"]])
    def test_anything_else_is_refused_at_fit(self, tiny, wrong):
        with pytest.raises(TypeError, match="cache must be None, 'memory'"):
            BertLayerFeaturizer(tiny, cache=wrong).fit(TEXTS)

    @pytest.mark.parametrize(
        ("params", "error"),
        [
            ({"location": None}, TypeError),
            ({"layers": 3}, ValueError),
            ({"poolings": ["median"]}, ValueError),
            ({"poolings": ["pooler"]}, ValueError),
            ({"poolings": None}, TypeError),
            ({"max_bytes": 0}, ValueError),
            ({"max_bytes": "1GB"}, TypeError),
        ],
        ids=str,
    )
    def test_a_handle_is_checked_when_it_is_made(self, params, error):
        (name,) = params
        with pytest.raises(error, match=f"{name.removesuffix('s')}|not iterable"):
            FeatureCache(**{"location": "memory", **params})

    def test_one_pooling_needs_no_list(self):
        assert FeatureCache("memory", poolings="mean") == FeatureCache("memory", poolings=["mean"])

    def test_every_name_of_a_folder_means_one_store(self, tmp_path, monkeypatch):
        """Two stores in one process would let go of each other's locks."""
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        monkeypatch.setenv("HOME", str(tmp_path))
        caches = [FeatureCache(tmp_path / "link"), FeatureCache("~/real"), FeatureCache("~/link")]
        assert all(cache == FeatureCache(tmp_path / "real") for cache in caches)

    def test_it_only_changes_speed(self, tiny, cache):
        """Set after fit, it takes effect at the next call."""
        featurizer = BertLayerFeaturizer(tiny).fit(TEXTS)
        expected = featurizer.transform(TEXTS)
        assert np.array_equal(featurizer.set_params(cache=cache).transform(TEXTS), expected)
        assert cache.info().n_texts == len(TEXTS)


class TestSize:
    def test_info_counts(self, tiny, cache):
        texts, _ = sentences(40)
        BertLayerFeaturizer(tiny, cache=cache).fit_transform(texts)
        info = cache.info()
        assert info.n_texts == len(set(texts))
        assert info.n_vectors == info.n_texts * 4 * 3
        assert info.n_bytes >= info.n_vectors * 32 * 4
        assert info.max_bytes == (2**30 if cache.location == "memory" else 2**34)

    def test_clear_forgets(self, tiny, cache):
        BertLayerFeaturizer(tiny, cache=cache).fit_transform(TEXTS)
        cache.clear()
        assert cache.info().n_texts == 0
        assert BertLayerFeaturizer(tiny, cache=cache).fit_transform(TEXTS).shape == (4, 32)

    def test_the_least_recently_used_go_first(self, cache, monkeypatch):
        store = store_of(cache)
        now = [10_000_000.0]
        monkeypatch.setattr("sklearn_bert._disk_store.time.time", lambda: now[0])
        shelf = Shelf("n", "mean", (0,), 10_000)
        texts = [f"text {n}" for n in range(200)]
        row = np.ones((1, 10_000), np.float32)
        for start in range(0, 200, 20):
            now[0] += 7200
            put(store, shelf, dict.fromkeys(texts[start : start + 20], row))
            close_memory(store)
            get(store, shelf, texts[:20])  # these are used all the time
        assert len(get(store, shelf, texts)) == 200
        close_memory(store)
        now[0] += 7200
        get(store, shelf, texts[:20])
        small = 100 * 50_000
        store.prune(small)
        assert cache.info().n_bytes <= small
        close_memory(store)
        kept = get(store, shelf, texts)
        assert 20 < len(kept) < 120
        assert set(texts[:20]) <= set(kept)
        assert set(texts[-15:]) <= set(kept)

    def test_the_limit_holds_while_rows_are_put(self, cache):
        store = store_of(cache)
        shelf = Shelf("n", "mean", (0, 1), 1000)
        rng = np.random.default_rng(0)
        for start in range(0, 3000, 100):
            rows = {
                f"text {n}": rng.standard_normal((2, 1000), np.float32)
                for n in range(start, start + 100)
            }
            put(store, shelf, rows, 4_000_000)
            assert store.info(4_000_000).n_bytes <= 4_000_000
            found = get(store, shelf, list(rows))
            assert len(found) == 100  # what was just put is there
            assert all(np.array_equal(found[text], rows[text]) for text in found)

    def test_a_small_cache_stays_small_and_right(self, tiny, cache):
        texts, _ = sentences(300)
        small = FeatureCache(cache.location, max_bytes=400_000)  # an empty database takes 300 kB
        for _ in range(2):
            got = BertLayerFeaturizer(tiny, cache=small).fit_transform(texts)
            assert np.array_equal(got, BertLayerFeaturizer(tiny).fit_transform(texts))
        assert small.info().n_bytes <= 400_000
        assert 0 < small.info().n_vectors < len(set(texts)) * 4 * 3

    def test_prune_gives_the_space_back(self, tiny, disk):
        texts, _ = sentences(300)
        BertLayerFeaturizer(tiny, cache=disk).fit_transform(texts)
        database = Path(disk.location) / DATABASE
        disk.prune(10**9)
        before = database.stat().st_size
        disk.prune(before // 2)
        assert database.stat().st_size < 0.7 * before


class TestDamage:
    """Whatever is wrong with the store: one warning, and the right features."""

    def check(self, tiny, cache, n_warnings=1):
        texts, _ = sentences(30)
        featurizer = BertLayerFeaturizer(tiny, cache=cache).fit(texts)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = featurizer.transform(texts)
        assert [w.category for w in caught] == [CacheWarning] * n_warnings
        assert all(w.filename == __file__ for w in caught)
        assert np.array_equal(got, BertLayerFeaturizer(tiny).fit_transform(texts))
        return [str(w.message) for w in caught]

    def test_the_folder_is_a_file(self, tiny, tmp_path):
        (tmp_path / "file").write_text("")
        (message,) = self.check(tiny, FeatureCache(tmp_path / "file"))
        assert str(tmp_path / "file") in message

    def test_the_folder_cannot_be_written(self, tiny, disk, monkeypatch):
        def refuse(*args, **kwargs):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("sklearn_bert._disk_store.os.open", refuse)
        assert "Permission denied" in self.check(tiny, disk)[0]

    @pytest.mark.parametrize("content", [b"x" * 100_000, b"SQLite format 3\0" + b"\xff" * 40_000])
    def test_the_database_is_something_else(self, tiny, disk, content):
        Path(disk.location).mkdir()
        (Path(disk.location) / DATABASE).write_bytes(content)
        self.check(tiny, disk)
        disk.clear()
        self.check(tiny, disk, n_warnings=0)

    def test_the_database_was_cut_off(self, tiny, disk):
        texts, _ = sentences(300)
        BertLayerFeaturizer(tiny, cache=disk).fit_transform(texts)
        connection_of(disk).execute("PRAGMA wal_checkpoint(TRUNCATE)")
        close_stores()
        database = Path(disk.location) / DATABASE
        database.write_bytes(database.read_bytes()[: database.stat().st_size // 2])
        featurizer = BertLayerFeaturizer(tiny, cache=disk).fit(texts)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = featurizer.transform(texts)
        assert {w.category for w in caught} <= {CacheWarning}
        assert len(caught) <= 1
        assert np.array_equal(got, BertLayerFeaturizer(tiny).fit_transform(texts))

    def test_a_newer_format_is_left_alone(self, tiny, disk):
        connection_of(disk).execute("PRAGMA user_version = 99")
        close_stores()
        (message,) = self.check(tiny, disk)
        assert "format" in message
        assert "99" in message

    def test_the_disk_is_full(self, tiny, disk):
        connection_of(disk).execute("PRAGMA max_page_count = 8")
        assert "full" in self.check(tiny, disk)[0]

    def test_claims_of_a_store_that_failed_are_void(self, tiny, disk, tmp_path):
        """Others must not wait for rows that a live process could not put."""
        connection_of(disk).execute("PRAGMA max_page_count = 8")
        self.check(tiny, disk)
        code = (
            "import sys; from sklearn_bert._disk_store import DiskStore\n"
            "store = DiskStore(sys.argv[1])\n"
            "owners = store._connection.execute('SELECT DISTINCT owner FROM claims').fetchall()\n"
            "assert owners and not any(store._is_alive(owner) for (owner,) in owners), owners\n"
            "store.close()\n"
        )
        process = run_store_script(code, disk.location)
        assert process.communicate(timeout=60)[1] == ""

    @pytest.mark.parametrize(
        "damage",
        [
            "UPDATE rows SET block = zeroblob(length(block))",
            "UPDATE rows SET block = substr(block, 1, length(block) - 4)",
            "UPDATE rows SET block = NULL",
            "UPDATE rows SET checksums = x''",
            "UPDATE rows SET block = 'text'",
        ],
    )
    def test_a_damaged_row_is_computed_again(self, tiny, disk, damage):
        self.check(tiny, disk, n_warnings=0)
        connection_of(disk).execute(damage)
        close_memory(store_of(disk))
        self.check(tiny, disk, n_warnings=0)
        damaged = "SELECT count(*) FROM rows WHERE length(checksums) != 16 OR length(block) != 512"
        assert connection_of(disk).execute(damaged).fetchone() == (0,)

    @pytest.mark.parametrize(
        "damage",
        [
            # every row gets the numbers and checksums of another text
            "UPDATE rows SET (checksums, block) = (SELECT checksums, block FROM rows r "
            "WHERE r.shelf = rows.shelf AND r.id != rows.id ORDER BY r.id LIMIT 1)",
            "UPDATE rows SET n_tokens = n_tokens + 1",
            "UPDATE rows SET n_tokens = 'many', used = 'never'",
        ],
    )
    def test_a_row_of_another_text_does_not_pass(self, tiny, disk, damage):
        self.check(tiny, disk, n_warnings=0)
        connection_of(disk).execute(damage)
        close_memory(store_of(disk))
        self.check(tiny, disk, n_warnings=0)

    def test_a_damaged_table_of_shelves_is_a_warning(self, tiny, disk):
        self.check(tiny, disk, n_warnings=0)
        connection_of(disk).execute("UPDATE shelves SET layers = '[0, 1'")
        close_memory(store_of(disk))
        self.check(tiny, disk)

    def test_clear_removes_nothing_that_is_not_the_caches(self, tmp_path):
        """A folder with a database and files of somebody else's is left as it is."""
        with sqlite3.connect(tmp_path / DATABASE) as other:
            other.execute("CREATE TABLE important (value)")
        other.close()
        (tmp_path / "workers").mkdir()
        (tmp_path / "workers" / "code.py").write_text("")
        with pytest.raises(FileExistsError, match="nothing was removed"):
            FeatureCache(tmp_path).clear()
        assert (tmp_path / DATABASE).stat().st_size > 0
        (tmp_path / DATABASE).write_bytes(b"damaged" * 1000)
        FeatureCache(tmp_path).clear()
        assert [path.name for path in (tmp_path / "workers").iterdir()] == ["code.py"]

    def test_one_flipped_bit_is_noticed(self, tiny, disk):
        texts, _ = sentences(30)
        BertLayerFeaturizer(tiny, cache=disk).fit_transform(texts)
        connection = connection_of(disk)
        rows = connection.execute("SELECT id, block FROM rows").fetchall()
        rng = random.Random(0)
        for identity, block in rows:
            position = rng.randrange(len(block))
            flipped = bytearray(block)
            flipped[position] ^= 1 << rng.randrange(8)
            connection.execute("UPDATE rows SET block = ? WHERE id = ?", (flipped, identity))
        close_memory(store_of(disk))
        self.check(tiny, disk, n_warnings=0)

    def test_the_folder_is_for_its_owner_only(self, tiny, tmp_path):
        cache = FeatureCache(tmp_path / "new" / "cache")
        BertLayerFeaturizer(tiny, cache=cache).fit_transform(TEXTS)
        assert stat.S_IMODE(os.stat(cache.location).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(Path(cache.location) / DATABASE).st_mode) == 0o600

    def test_no_row_is_unpickled(self, tiny, disk):
        BertLayerFeaturizer(tiny, cache=disk).fit_transform(TEXTS)
        code = Path(sys.modules[DiskStore.__module__].__file__).read_text()
        assert "pickle" not in code.replace("unpickled", "")


WRITER = """
import sys, random, numpy as np
from sklearn_bert._disk_store import DiskStore
from sklearn_bert._store import Shelf
store = DiskStore(sys.argv[1])
rng = random.Random(int(sys.argv[2]))
shelf = Shelf("a namespace", "mean", (0, 1), 500)
print("ready", flush=True)
for step in range(100000):
    numbers = [rng.randrange(5000) for _ in range(40)]
    mine = store.claim("a namespace", [str(n) for n in numbers])
    counts = np.array([int(text) for text in mine])
    states = np.broadcast_to(counts[:, None, None], (len(mine), 2, 500)).astype(np.float32)
    store.put(shelf, list(mine), counts, states, 2**30)
    store.release("a namespace", mine)
"""


class TestProcesses:
    def test_killed_in_the_middle_of_writing(self, tmp_path):
        """Thirty times, one of two writers is killed: nothing is corrupt, nothing is wrong."""
        rng = random.Random(1)
        shelf = Shelf("a namespace", "mean", (0, 1), 500)
        writers = [run_store_script(WRITER, tmp_path / "c", seed) for seed in range(2)]
        try:
            for number in range(30):
                victim = writers[number % 2]
                assert victim.stdout.readline() == "ready\n", victim.stderr.read()
                time.sleep(rng.uniform(0.02, 0.15))
                victim.send_signal(signal.SIGKILL)
                victim.wait()
                victim.stdout.close()
                victim.stderr.close()
                writers[number % 2] = run_store_script(WRITER, tmp_path / "c", 10 + number)
        finally:
            for writer in writers:
                writer.kill()
                writer.communicate()
        store = store_of(FeatureCache(tmp_path / "c"))
        assert store.disk._connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        texts = [str(n) for n in range(5000)]
        out = np.empty((5000, 2, 500), np.float32)
        n_tokens = store.get(shelf, texts, out)
        found = np.flatnonzero(n_tokens != NOT_FOUND)
        assert len(found) > 500
        assert (n_tokens[found] == found).all()
        assert (out[found] == found[:, None, None]).all()
        # and every claim of the dead is void
        assert store.claim("a namespace", texts) == set(texts)

    def test_many_open_a_new_cache_at_once(self, tmp_path):
        code = (
            "import sys, time, numpy as np\n"
            "from sklearn_bert._disk_store import DiskStore\n"
            "from sklearn_bert._store import Shelf\n"
            "print('ready', flush=True); sys.stdin.readline()\n"
            "for n in range(20):\n"
            "    store = DiskStore(f'{sys.argv[1]}/{n}')\n"
            "    shelf = Shelf('n', 'mean', (0,), 3)\n"
            "    one = np.ones((1, 1, 3), np.float32)\n"
            "    store.put(shelf, [sys.argv[2]], np.array([1]), one, 2**30)\n"
            "    assert len(store.read(shelf, (0,), [sys.argv[2]])[0]) == 1\n"
        )
        workers = [
            run_store_script(code, tmp_path, number, stdin=subprocess.PIPE) for number in range(6)
        ]
        for worker in workers:
            worker.stdout.readline()
        for worker in workers:
            worker.stdin.write("\n")
            worker.stdin.flush()
        for worker in workers:
            _, errors = worker.communicate(timeout=120)
            assert (worker.returncode, errors) == (0, "")
        for number in range(20):
            assert FeatureCache(tmp_path / str(number)).info().n_texts == 6

    def test_processes_that_ended_leave_no_file(self, tmp_path):
        code = self.HOLDER
        for end in ("clean", "killed"):
            holder = run_store_script(code, tmp_path, stdin=subprocess.PIPE)
            holder.stdout.readline()
            if end == "killed":
                holder.kill()
            holder.communicate("\n")
        assert len(list((tmp_path / "workers").iterdir())) == 1  # of the one that was killed
        store_of(FeatureCache(tmp_path))
        assert list((tmp_path / "workers").iterdir()) == []

    HOLDER = """
import sys
from sklearn_bert._disk_store import DiskStore
store = DiskStore(sys.argv[1])
print(len(store.claim("n", [str(n) for n in range(10)])), flush=True)
sys.stdin.readline()
"""

    def test_a_claim_lasts_as_long_as_its_process(self, tmp_path):
        holder = run_store_script(self.HOLDER, tmp_path, stdin=subprocess.PIPE)
        assert holder.stdout.readline() == "10\n"
        store = store_of(FeatureCache(tmp_path))
        keys = [str(n) for n in range(12)]
        assert store.claim("n", keys) == set(keys[10:])  # alive: not granted
        assert store.claim("other", keys) == set(keys)
        holder.kill()
        holder.communicate()
        assert store.claim("n", keys) == set(keys[:10])  # dead: void at once

    def test_a_claim_of_a_dead_process_does_not_block_a_transform(self, tiny, disk):
        featurizer = BertLayerFeaturizer(tiny, cache=disk).fit(TEXTS)
        code = self.HOLDER.replace(
            'store.claim("n", [str(n) for n in range(10)])',
            "store.claim(sys.argv[2], sys.argv[3:])",
        )
        namespace = _text_states._namespace(
            featurizer._fitted_spec().states,
            featurizer._reference(),
            _devices.resolve_device("cpu"),
        )
        holder = run_store_script(code, disk.location, namespace, *TEXTS, stdin=subprocess.PIPE)
        assert holder.stdout.readline() == "4\n"
        threading.Timer(0.5, holder.kill).start()
        got = featurizer.transform(TEXTS)  # waits for the living, takes over from the dead
        assert holder.wait() == -signal.SIGKILL
        assert np.array_equal(got, BertLayerFeaturizer(tiny).fit_transform(TEXTS))
        holder.communicate()

    @pytest.mark.parametrize(
        ("n_layers", "hidden_size", "tokens"),
        [(3, 32, 2**15), (6, 384, 2**15), (12, 512, 9216), (12, 768, 2**13), (24, 1024, 2**13)],
    )
    def test_a_claim_is_less_of_a_larger_model(self, n_layers, hidden_size, tokens):
        """With BERT-large a claim took longer than others are patient, so all computed it."""
        reference = _models.ModelReference("m", None, True, "f", n_layers, hidden_size)
        cpu, gpu = (types.SimpleNamespace(type=name) for name in ("cpu", "cuda"))
        assert _text_states._claimed_tokens(reference, cpu) == tokens
        assert _text_states._claimed_tokens(reference, gpu) == 2**18

    def test_nobody_waits_for_ever_for_a_process_that_stands_still(self, tiny, disk, monkeypatch):
        monkeypatch.setattr(_text_states, "_PATIENCE_SECONDS", 0.2)
        featurizer = BertLayerFeaturizer(tiny, cache=disk).fit(TEXTS)
        original = DiskStore.claim
        monkeypatch.setattr(DiskStore, "claim", lambda self, namespace, texts: set())
        got = featurizer.transform(TEXTS)
        monkeypatch.setattr(DiskStore, "claim", original)
        assert np.array_equal(got, BertLayerFeaturizer(tiny).fit_transform(TEXTS))

    def test_claims_are_given_up_when_computing_fails(self, tiny, cache, monkeypatch):
        featurizer = BertLayerFeaturizer(tiny, cache=cache).fit(TEXTS)
        with monkeypatch.context() as patch:
            patch.setattr(
                "sklearn_bert._forward.Encoder.pooled_states",
                lambda *args: (_ for _ in ()).throw(KeyboardInterrupt),
            )
            with pytest.raises(KeyboardInterrupt):
                featurizer.transform(TEXTS)
        store = store_of(cache)
        if isinstance(store, TieredStore):
            claims = connection_of(cache).execute("SELECT count(*) FROM claims").fetchone()[0]
        else:
            claims = len(store._claims)
        assert claims == 0

    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    @pytest.mark.parametrize("ever", [True, False])
    def test_files_that_cannot_be_removed_while_they_are_open(self, tiny, disk, monkeypatch, ever):
        """As on Windows; or not at all, because another process has them open."""
        original = Path.unlink

        def unlink(self, missing_ok=False):
            names = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
            is_open = str(self) in [os.readlink(name) for name in names if os.path.exists(name)]
            if is_open or not ever:
                raise PermissionError(32, "it is being used by another process")
            original(self, missing_ok=missing_ok)

        workers = Path(disk.location, "workers")
        workers.mkdir(parents=True)
        (workers / ("0" * 32)).touch()  # of a process that died
        monkeypatch.setattr(Path, "unlink", unlink)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = BertLayerFeaturizer(tiny, cache=disk).fit_transform(TEXTS)
            close_stores()
        assert list(workers.iterdir()) == [] or not ever
        assert np.array_equal(got, BertLayerFeaturizer(tiny).fit_transform(TEXTS))

    def test_a_forked_child_opens_its_own_store(self, disk):
        store = store_of(disk)
        put(store, SHELF, {"kept": np.ones((2, 4), np.float32)})
        store.claim("a namespace", ["claimed"])
        child = os.fork()
        if child == 0:
            status = 1
            try:
                own = store_of(disk)
                found = get(own, SHELF, ["kept"])
                # the parent lives, so its claim holds, although the child has copies of its files
                granted = own.claim("a namespace", ["claimed", "free"])
                if own is not store and len(found) == 1 and granted == {"free"}:
                    status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert store.claim("a namespace", ["claimed", "free"]) == {"free"}

    def test_threads_share_one_store(self, tiny, cache):
        texts, _ = sentences(80)
        expected = BertLayerFeaturizer(tiny, layers=[1, 2]).fit_transform(texts)
        featurizer = BertLayerFeaturizer(tiny, layers=[1, 2], cache=cache).fit(texts)
        results = []
        threads = [
            threading.Thread(target=lambda: results.append(featurizer.transform(texts)))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 8
        assert all(np.array_equal(result, expected) for result in results)
        assert len(_cache._stores) == 1


class TestStores:
    """What both kinds of store promise to those who use them."""

    def test_what_was_put_is_found(self, cache):
        store = store_of(cache)
        rng = np.random.default_rng(0)
        rows = {f"text {n}": rng.standard_normal((2, 4), np.float32) for n in range(1000)}
        put(store, SHELF, rows)
        for _ in range(2):
            found = get(store, SHELF, ["another", *rows])
            assert found.keys() == rows.keys()
            assert all(np.array_equal(found[text], rows[text]) for text in rows)
            close_memory(store)

    def test_a_row_that_is_put_again_is_replaced(self, cache):
        store = store_of(cache)
        for number in (1, 2):
            put(store, SHELF, {"text": np.full((2, 4), number, np.float32)})
        close_memory(store)
        assert (get(store, SHELF, ["text"])["text"] == 2).all()
        assert cache.info().n_texts == 1

    def test_some_of_the_layers_in_any_order(self, cache):
        store = store_of(cache)
        states = np.arange(12, dtype=np.float32).reshape(3, 4)
        put(store, Shelf("n", "mean", (0, 1, 2), 4), {"text": states})
        for _ in range(2):
            row = get(store, Shelf("n", "mean", (2, 0), 4), ["text"])["text"]
            assert np.array_equal(row, states[[2, 0]])
            close_memory(store)
        for other in [
            Shelf("n", "mean", (3,), 4),
            Shelf("n", "max", (0,), 4),
            Shelf("m", "mean", (0,), 4),
            Shelf("n", "mean", (0,), 3),
        ]:
            assert get(store, other, ["text"]) == {}

    def test_rows_of_several_shelves_are_put_together(self, cache):
        """Texts computed for one layer only, and others for all, are found by one question."""
        store = store_of(cache)
        one, both = Shelf("n", "mean", (1,), 4), Shelf("n", "mean", (0, 1), 4)
        put(store, one, {"a": np.full((1, 4), 1, np.float32)})
        put(store, both, {"b": np.full((2, 4), 2, np.float32)})
        for _ in range(2):
            found = get(store, one, ["b", "a", "c"])
            assert {text: float(row[0, 0]) for text, row in found.items()} == {"a": 1, "b": 2}
            close_memory(store)

    def test_a_claim_is_granted_once(self, cache):
        store = store_of(cache)
        assert store.claim("n", ["a", "b", "c"]) == {"a", "b", "c"}
        assert store.claim("n", ["a", "b", "c", "d"]) == {"d"}
        store.release("n", {"a", "b"})
        assert store.claim("n", ["a", "b", "c", "d"]) == {"a", "b"}

    def test_more_than_memory_is_for_is_read_from_disk_only(self, tmp_path, monkeypatch):
        cache = FeatureCache(tmp_path / "c")
        store = store_of(cache)
        rows = {f"text {n}": np.full((2, 4), n, np.float32) for n in range(100)}
        put(store, SHELF, rows)
        close_memory(store)
        monkeypatch.setattr("sklearn_bert._tiered_store.MEMORY_BYTES", 1000)
        found = get(store, Shelf("a namespace", "mean", (1,), 4), list(rows))
        assert all((found[text] == rows[text][1]).all() for text in rows)
        assert store.memory.info(1000).n_texts == 0
