"""A pickled pipeline behind gunicorn, as examples/serve.py has it."""

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

import joblib
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from sklearn_bert import BertLayerFeaturizer

EXAMPLES = Path(__file__).parents[1] / "examples"
WORDS = "a good film the plot was awful and i hated it very much bad great movie".split()

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="gunicorn needs Unix")


@pytest.fixture(scope="module")
def pipeline(tiny):
    texts = ["good film", "great movie", "bad plot", "awful film"]
    head = LogisticRegression()
    return make_pipeline(BertLayerFeaturizer(tiny), head).fit(texts, [1, 1, 0, 0])


@pytest.fixture
def server(pipeline, tmp_path, subprocess_env):
    """Start gunicorn with two workers and wait until it answers; returns process and port."""
    joblib.dump(pipeline, tmp_path / "pipeline.joblib")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "gunicorn", "--preload", "--workers", "2"),
            *("--bind", f"127.0.0.1:{port}", "--chdir", str(EXAMPLES), "--log-level", "warning"),
            f"serve:make_app('{tmp_path}/pipeline.joblib')",
        ],
        env=subprocess_env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while True:
        try:
            assert ask(port, ["good film"])[0] == 200
            break
        except (ConnectionError, OSError):
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.1)
    yield process, port
    if process.poll() is None:
        process.terminate()
    process.communicate(timeout=60)


def ask(port, content):
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/", json.dumps(content))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def some_texts(seed):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(0, 20))) for _ in range(rng.randint(1, 4))]


def test_two_thousand_requests_from_eight_clients(server, pipeline):
    """None is lost, and every answer is the one this process gives, bit for bit."""
    _, port = server
    requests = [some_texts(seed) for seed in range(2000)]
    expected = [pipeline.predict_proba(texts)[:, 1].tolist() for texts in requests]
    answers = [None] * len(requests)

    def client(first):
        for number in range(first, len(requests), 8):
            answers[number] = ask(port, requests[number])

    clients = [threading.Thread(target=client, args=(first,)) for first in range(8)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    assert answers == [(200, wanted) for wanted in expected]
    # In one batch the features are the same bits; the head's float32 product with its weights may
    # round its last bit otherwise.
    everything = [text for texts in requests for text in texts]
    in_one_batch = pipeline.predict_proba(everything)[:, 1]
    np.testing.assert_allclose(np.concatenate(expected), in_one_batch, rtol=1e-6)


def test_a_wrong_request_is_told_what_is_wrong(server):
    _, port = server
    assert ask(port, ["good", None]) == (
        400,
        "X has 1 missing value, in row 1. Drop the row or use missing='empty'.",
    )
    assert ask(port, "good")[0] == 400
    assert ask(port, []) == (200, [])
    assert ask(port, ["good film"])[0] == 200


def test_termination_under_load_is_clean(server):
    """Requests that were accepted are answered; then the server is gone, without an error."""
    process, port = server
    statuses, stop = [], threading.Event()

    def client():
        for seed in range(500):
            if stop.is_set():
                return
            try:
                statuses.append(ask(port, some_texts(seed))[0])
            except (ConnectionError, OSError):
                return  # refused, or closed before it was accepted

    clients = [threading.Thread(target=client) for _ in range(4)]
    for thread in clients:
        thread.start()
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    stop.set()
    for thread in clients:
        thread.join()
    assert process.returncode == 0
    assert "Traceback" not in output
    assert statuses
    assert set(statuses) == {200}
