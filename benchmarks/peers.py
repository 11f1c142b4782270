"""The libraries that are compared: how each is loaded and asked for features.

Every contender does the same job: the mean over a text's tokens of the last hidden state, cut at
the same number of tokens, on the same folder with the same weights, with the same number of
threads. Beyond that, each is used as its own documentation says. Loading is never timed.

Each contender lives in a process of its own, which sleeps while the others run: thread pools and
patches of one library (nncf patches torch, for one) cannot slow down another.
"""

import multiprocessing
import os
import time
import traceback
from functools import partial

BATCH_SIZE = 32  # default of sentence-transformers and of most tutorials


def load_sklearn_bert(folder, max_length, dtype):
    from sklearn_bert import BertLayerFeaturizer

    featurizer = BertLayerFeaturizer(
        folder, layers=-1, pooling="mean", max_length=max_length, dtype=dtype, device="cpu"
    )
    return featurizer.fit(["a text"]).transform


def load_naive_loop(folder, max_length, dtype):
    """The loop of the tutorials: batches in input order, padded to their longest text."""
    import numpy as np
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def encode(texts):
        features = []
        for start in range(0, len(texts), BATCH_SIZE):
            batch = tokenizer(
                texts[start : start + BATCH_SIZE],
                padding=True,
                truncation=True,
                max_length=max_length,
                return_tensors="pt",
            )
            states = model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            features.append(((states * mask).sum(1) / mask.sum(1)).float().numpy())
        return np.concatenate(features)

    return encode


def load_pipeline(folder, max_length, dtype):
    """One text at a time, as transformers' documentation advises for a CPU; so no padding."""
    import torch
    from transformers import pipeline

    extractor = pipeline(
        "feature-extraction", model=folder, device="cpu", dtype=getattr(torch, dtype)
    )
    cut = {"truncation": True, "max_length": max_length}

    def encode(texts):
        states = extractor(texts, return_tensors=True, tokenize_kwargs=cut)
        return torch.stack([text[0].mean(0) for text in states]).float().numpy()

    return encode


def load_sentence_transformers(folder, max_length, dtype):
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(
        folder, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)}
    ).eval()
    model.max_seq_length = max_length
    return partial(model.encode, batch_size=BATCH_SIZE, show_progress_bar=False)


def load_openvino(folder, max_length, dtype):
    """sentence-transformers' OpenVINO backend; the model is converted here, outside the timing."""
    import torch
    from sentence_transformers import SentenceTransformer

    hint = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    settings = {
        "INFERENCE_PRECISION_HINT": hint,
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    model = SentenceTransformer(
        folder,
        device="cpu",
        backend="openvino",
        model_kwargs={"export": True, "ov_config": settings},
    )
    model.max_seq_length = max_length
    return partial(model.encode, batch_size=BATCH_SIZE, show_progress_bar=False)


def load_skrub(folder, max_length, dtype):
    """skrub's encoder without the PCA that it does by default; of texts it keeps only the frame."""
    import pandas as pd
    from skrub import LLMEncoder

    encoder = LLMEncoder(folder, n_components=None, device="cpu", batch_size=BATCH_SIZE)
    encoder.fit(pd.Series(["a text", "another text"]))
    encoder._estimator.max_seq_length = max_length
    encoder.scaling_factor_ = 1.0  # it divides all the same, but numbers can be compared
    return lambda texts: encoder.transform(pd.Series(texts))


def load_embetter(folder, max_length, dtype):
    from embetter.text import SentenceEncoder

    encoder = SentenceEncoder(folder)
    encoder.tfm.max_seq_length = max_length
    return encoder.transform


class PackedProduct:
    """The fastest matrix product of this machine that torch has: oneDNN, weights packed before.

    Its speed is the roof that a model cannot break through, for most of what a model computes is
    such products. The size is that of the widest layer, with 1024 tokens.
    """

    def __init__(self, hidden_size, intermediate_size, dtype):
        import torch

        type_ = getattr(torch, dtype)
        self.x = torch.randn(1024, hidden_size).to(type_)
        weight = torch.randn(intermediate_size, hidden_size).to(type_)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1024)
        self.product = torch.ops.mkldnn._linear_pointwise
        self.flops = 2 * 1024 * hidden_size * intermediate_size

    def rate(self, n_tries=5, seconds=0.1):
        """FLOP/s of the best of some tries, each long enough to be more than a lucky moment."""
        return max(self._rate(seconds) for _ in range(n_tries))

    def _rate(self, seconds):
        start, n_done = time.perf_counter(), 0
        while (passed := time.perf_counter() - start) < seconds:
            self.product(self.x, self.weight, None, "none", [], "")
            n_done += 1
        return n_done * self.flops / passed


def load_packed_product(hidden_size, intermediate_size, dtype):
    return PackedProduct(hidden_size, intermediate_size, dtype).rate


# name -> how it is loaded, and its precision. The first name of a precision is the library itself.
OURS = {"float32": "sklearn_bert f32", "bfloat16": "sklearn_bert bf16"}
REFERENCE = "naive loop f32"
CONTENDERS = {
    OURS["float32"]: (load_sklearn_bert, "float32"),
    "sentence-transformers f32": (load_sentence_transformers, "float32"),
    "  its OpenVINO backend f32": (load_openvino, "float32"),
    REFERENCE: (load_naive_loop, "float32"),
    "transformers pipeline f32": (load_pipeline, "float32"),
    "skrub LLMEncoder f32": (load_skrub, "float32"),
    "embetter SentenceEncoder f32": (load_embetter, "float32"),
    OURS["bfloat16"]: (load_sklearn_bert, "bfloat16"),
    "sentence-transformers bf16": (load_sentence_transformers, "bfloat16"),
    "  its OpenVINO backend bf16": (load_openvino, "bfloat16"),
}
# those that the targets name, and the reference; the others take minutes to load
FEW = [
    name
    for name in CONTENDERS
    if name in (*OURS.values(), REFERENCE) or "OpenVINO" in name or name.startswith("sentence-")
]


class ContenderError(Exception):
    """What went wrong in the process of a contender."""


class Remote:
    """A contender, or anything else that `make` returns, in a process of its own.

    Parameters
    ----------
    make, *args : callable and its arguments
        Called in the process once; what it returns is then called by ``call`` and ``time``.
    """

    def __init__(self, make, *args):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make, args), daemon=True)
        self.process.start()
        theirs.close()

    def wait_until_loaded(self):
        self._receive()

    def call(self, *args):
        """Return what a call returns."""
        return self._ask("call", args)

    def time(self, calls):
        """Return the seconds of one call after the other, each with its arguments."""
        return self._ask("time", calls)

    def stop(self):
        self.connection.close()
        self.process.join()

    def _ask(self, action, args):
        self.connection.send((action, args))
        return self._receive()

    def _receive(self):
        try:
            is_error, answer = self.connection.recv()
        except EOFError:
            raise ContenderError("its process died") from None
        if is_error:
            raise ContenderError(answer)
        return answer


def _serve(connection, make, args):
    _be_quiet()
    try:
        function = make(*args)
        connection.send((False, None))
        while True:
            action, arguments = connection.recv()
            if action == "call":
                connection.send((False, function(*arguments)))
            else:
                connection.send((False, [_seconds(function, call) for call in arguments]))
    except EOFError:
        pass  # the other side is done
    except Exception as error:
        traceback.print_exc()
        connection.send((True, f"{type(error).__name__}: {error}".splitlines()[0]))


def _seconds(function, arguments):
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def _be_quiet():
    """Discard what libraries print while they load; errors go to the other side by name."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not os.environ.get("BENCH_VERBOSE"):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
