"""Models from the hub: the real client against a server on loopback."""

import json
import os
import socket
import subprocess
import sys
import textwrap

import joblib
import numpy as np
import pytest
from hub_server import Hub

from sklearn_bert import BertLayerFeaturizer
from sklearn_bert.testing import make_bert

OLD, NEW = "a" * 40, "b" * 40
TEXTS = ["good film", "the plot was awful", ""]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("origin")
    return {OLD: make_bert(root / "old", seed=1), NEW: make_bert(root / "new", seed=2)}


@pytest.fixture
def hub(folders):
    commits = {
        commit: {file.name: file.read_bytes() for file in folder.iterdir()}
        for commit, folder in folders.items()
    }
    for files in commits.values():
        files["README.md"] = b"not needed"
        files["pytorch_model.bin"] = b"a pickle, not wanted"
        files["onnx/model.safetensors"] = b"of a sub-folder, not wanted"
        files["code.py"] = b"raise SystemExit"
    pickled = {"config.json": b"{}", "vocab.txt": b"", "pytorch_model.bin": b"a pickle"}
    server = Hub(
        {"owner/tiny": commits, "owner/pickled": {OLD: pickled}},
        {
            ("owner/tiny", "main"): NEW,
            ("owner/tiny", "v1"): OLD,
            ("owner/pickled", "main"): OLD,
        },
    )
    yield server
    server.close()


@pytest.fixture
def run(hub, tmp_path, subprocess_env):
    """Run code in a new process whose client knows only the server; returns what it prints."""

    def run(code, **env):
        script = f"""
            import json, sys, warnings
            from sklearn_bert._model_files import find_model, fingerprint

            def show(**answer):
                print(json.dumps(answer))

            def attempt(*args, **kwargs):
                try:
                    folder = find_model(*args, **kwargs)
                    show(path=folder.path, revision=folder.revision)
                except Exception as error:
                    show(error=type(error).__name__, message=str(error))

            {textwrap.indent(textwrap.dedent(code), " " * 12).strip()}
        """
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={
                **subprocess_env,
                "HF_ENDPOINT": hub.url,
                "HF_HOME": str(tmp_path / "home"),
                "HF_HUB_OFFLINE": "0",
                "HF_HUB_DISABLE_XET": "1",
                "HF_HUB_DISABLE_TELEMETRY": "1",
                "NO_PROXY": "127.0.0.1",
                **env,
            },
        )
        assert done.stderr == ""
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def test_a_branch_is_resolved_to_its_commit(run, hub, folders):
    main, tag, commit = run(
        """
        attempt("owner/tiny")
        attempt("owner/tiny", "v1")
        attempt("owner/tiny", "b" * 40)
        """
    )
    assert (main["revision"], tag["revision"], commit["revision"]) == (NEW, OLD, NEW)
    for answer in (main, tag):
        names = set(os.listdir(answer["path"]))
        assert names == {file.name for file in folders[answer["revision"]].iterdir()}
    fetched = {request.rsplit("/", 1)[1] for request in hub.requests if "resolve" in request}
    assert fetched == {file.name for file in folders[NEW].iterdir()}  # nothing else


def test_a_commit_that_is_here_is_used_when_the_hub_is_out_of_reach(run, hub):
    run('attempt("owner/tiny")')
    hub.down = True
    (answer,) = run(f'attempt("owner/tiny", "{NEW}")')
    assert answer["revision"] == NEW


def test_a_copy_that_is_not_complete_is_completed(run, hub, folders):
    """A download that was interrupted must not pass for the model, or stay broken for ever."""
    (answer,) = run('attempt("owner/tiny")')
    for name in ("tokenizer_config.json", "model.safetensors"):
        os.unlink(os.path.join(answer["path"], name))
    (again,) = run(f'attempt("owner/tiny", "{NEW}")')
    assert set(os.listdir(again["path"])) == {file.name for file in folders[NEW].iterdir()}


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_offline_uses_what_is_here(run, hub, how):
    run('attempt("owner/tiny")')
    hub.requests.clear()
    argument = ", local_files_only=True" if how == "argument" else ""
    env = {} if how == "argument" else {"HF_HUB_OFFLINE": "1"}
    here, missing, other = run(
        f"""
        attempt("owner/tiny", None{argument})
        attempt("owner/other", None{argument})
        attempt("owner/tiny", "v1"{argument})
        """,
        **env,
    )
    assert here["revision"] == NEW
    for answer, name in ((missing, "owner/other"), (other, "owner/tiny")):
        assert answer["error"] == "ModelFilesError"
        assert name in answer["message"]
    assert hub.requests == []


def test_what_is_missing_is_said(run):
    repository, revision, commit, pickled = run(
        """
        attempt("owner/nothing")
        attempt("owner/tiny", "no-such-branch")
        attempt("owner/tiny", "c" * 40)
        attempt("owner/pickled")
        """
    )
    assert "owner/nothing" in repository["message"]
    assert "neither a local folder nor a repository" in repository["message"]
    for answer, name in ((revision, "no-such-branch"), (commit, "c" * 40)):
        assert answer["error"] == "ModelFilesError"
        assert name in answer["message"]
        assert "no such branch, tag or commit" in answer["message"]
    assert pickled["error"] == "ModelFilesError"
    assert "convert them once" in pickled["message"]


def test_a_network_that_is_down_is_said(run, hub):
    hub.down = True
    (answer,) = run('attempt("owner/tiny")')
    assert answer["error"] == "ModelFilesError"
    assert "owner/tiny" in answer["message"]
    assert len(hub.requests) < 20  # no endless retries


NOTE_CONNECTIONS = """
connections = []

def note(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        connections.append(event)

sys.addaudithook(note)
"""


@pytest.mark.parametrize("revision", [None, "main", NEW])
def test_a_network_that_is_not_there_is_tried_once(run, revision):
    """For a commit, as a fitted pipeline has one, the client tried for half a minute."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        answer, tried = run(
            f"""
            {textwrap.indent(NOTE_CONNECTIONS, " " * 12).strip()}
            attempt("owner/tiny", {revision!r})
            show(connections=connections)
            """,
            HF_ENDPOINT=url,
        )
    assert answer["error"] == "ModelFilesError"  # an OSError
    assert "owner/tiny" in answer["message"]
    assert tried["connections"].count("socket.connect") == 1


def test_a_pipeline_whose_commit_is_gone_fails_at_once(run, hub, folders, tmp_path):
    featurizer = BertLayerFeaturizer(folders[NEW]).fit(["good"])
    featurizer.model = featurizer._fitted_params["model"] = "owner/tiny"
    featurizer.model_path_, featurizer.revision_ = None, NEW
    joblib.dump(featurizer, tmp_path / "featurizer")
    hub.down = True
    (answer,) = run(
        f"""
        import joblib
        featurizer = joblib.load(r"{tmp_path}/featurizer")
        try:
            featurizer.transform(["good"])
        except OSError as error:
            show(message=str(error))
        """
    )
    assert "owner/tiny" in answer["message"]
    assert NEW in answer["message"]
    assert len(hub.requests) == 1


def test_a_local_folder_opens_no_connection(run, hub, folders, tmp_path):
    (answer,) = run(
        f"""
        {textwrap.indent(NOTE_CONNECTIONS, " " * 8).strip()}
        import joblib, pickle
        from sklearn_bert import BertLayerFeaturizer, with_weights
        featurizer = BertLayerFeaturizer(r"{folders[NEW]}").fit(["good"])
        featurizer.transform(["good"])
        pickle.loads(pickle.dumps(with_weights(featurizer))).transform(["bad"])
        attempt = featurizer.set_params(model=r"{tmp_path}/gone").transform
        try:
            attempt(["good"])
        except OSError as error:
            show(message=str(error), connections=connections)
        """
    )
    assert "gone" in answer["message"]
    assert answer["connections"] == []
    assert hub.requests == []


def test_a_fitted_pipeline_keeps_its_commit(run, hub, folders, tmp_path):
    """The branch moves on; what was fitted stays what it was, here and in another process."""
    code = """
        import joblib
        import numpy as np
        from sklearn_bert import BertLayerFeaturizer
        texts = ["good film", "the plot was awful", ""]
    """
    fit = run(
        code
        + f"""
        featurizer = BertLayerFeaturizer("owner/tiny", layers=2).fit(texts)
        np.save(r"{tmp_path}/features.npy", featurizer.transform(texts))
        joblib.dump(featurizer, r"{tmp_path}/featurizer.joblib")
        show(revision=featurizer.revision_, path=featurizer.model_path_)
        """
    )
    assert fit == [{"revision": NEW, "path": None}]
    expected = BertLayerFeaturizer(folders[NEW], layers=2).fit_transform(TEXTS)
    assert np.array_equal(np.load(tmp_path / "features.npy"), expected)

    hub.branches["owner/tiny", "main"] = OLD
    hub.requests.clear()
    run(
        code
        + f"""
        featurizer = joblib.load(r"{tmp_path}/featurizer.joblib")
        np.save(r"{tmp_path}/again.npy", featurizer.transform(texts))
        """
    )
    assert np.array_equal(np.load(tmp_path / "again.npy"), expected)
    assert hub.requests == []
