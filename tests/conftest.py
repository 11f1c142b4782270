"""Fixtures that several test files use, and the guard that keeps the tests off the network."""

import os
import socket
from pathlib import Path

import pytest

from sklearn_bert.testing import make_bert

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"

# A model from the hub is only ever fetched from a loopback server that a test started.
_LOOPBACK = {"127.0.0.1", "::1", "localhost"}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """Fail the test if anything opens a connection beyond this machine."""
    connect, getaddrinfo = socket.socket.connect, socket.getaddrinfo

    def guarded_connect(self, address):
        if self.family != getattr(socket, "AF_UNIX", None) and address[0] not in _LOOPBACK:
            raise AssertionError(f"a test opened a connection to {address!r}")
        return connect(self, address)

    def guarded_getaddrinfo(host, *args, **kwargs):
        if host not in _LOOPBACK:
            raise AssertionError(f"a test looked up the address of {host!r}")
        return getaddrinfo(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", guarded_connect)
    monkeypatch.setattr(socket.socket, "connect_ex", guarded_connect)
    monkeypatch.setattr(socket, "getaddrinfo", guarded_getaddrinfo)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folder of a random 3-layer BERT of hidden size 32 that takes 64 tokens."""
    return make_bert(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def minilm():
    """Folder of the packaged all-MiniLM-L6-v2 (6 layers, hidden size 384)."""
    from sklearn_bert.datasets import minilm_path

    return minilm_path()


@pytest.fixture(scope="session")
def shared_data():
    """Folder of data that is not part of the project."""
    if not SHARED_DATA.is_dir():
        pytest.skip("needs data that may not be redistributed, in ../shared/data")
    return SHARED_DATA


@pytest.fixture
def threads():
    """Set torch's number of threads for a test and put it back."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def empty_registry(monkeypatch):
    """Nothing loaded, as in a new process; what a test loads is forgotten after it."""
    from sklearn_bert import _models

    for name in ("_encoders", "_tokenizers", "_facts"):
        monkeypatch.setattr(_models, name, type(getattr(_models, name))())


@pytest.fixture
def passes(monkeypatch):
    """Shapes of the token ids in every pass through a model, one shape for each group."""
    from sklearn_bert._forward import Encoder

    seen = []
    original = Encoder._pooled_states

    def note(self, groups, *args):
        seen.append([group.ids.shape for group in groups])
        return original(self, groups, *args)

    monkeypatch.setattr(Encoder, "_pooled_states", note)
    return seen


@pytest.fixture(scope="session")
def subprocess_env():
    """Environment in which a Python subprocess finds this package and no network."""
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
