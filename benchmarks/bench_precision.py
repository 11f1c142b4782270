"""What lower precision costs in accuracy, layer by layer: bfloat16, float16 and dynamic int8.

    python benchmarks/bench_precision.py
    python benchmarks/bench_precision.py --quick

int8 is torch's dynamic quantization of transformers' own model: the weights of every Linear are
rounded by one scale for each matrix, or for each of its rows ("by row"), and its input by the range
of the values in the batch. The library does not have it; this is what it would give.
"""

import csv
import gzip
import json
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
from peers import ContenderError, Remote
from side_by_side import parse_options, print_machine
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, normalize
from threadpoolctl import threadpool_limits
from workloads import MAX_LENGTH, model_folder, read_config

from sklearn_bert.datasets import load_sentence_polarity

BANKING77 = Path(__file__).parents[1] / "tests" / "data" / "banking77"


def load_ours(folder, dtype):
    """Return texts -> mean of every layer, of shape (n_texts, n_layers + 1, hidden_size)."""
    from sklearn_bert import BertLayerFeaturizer

    featurizer = BertLayerFeaturizer(
        folder, layers="all", dtype=dtype, max_length=MAX_LENGTH, device="cpu"
    ).fit(["a text"])

    def states(texts):
        return featurizer.transform(texts).reshape(len(texts), -1, featurizer.hidden_size_)

    return states


def load_int8(folder, qconfig, batch_size=32):
    """The same from a quantized model, in batches of texts of like length, padded."""
    import torch
    from torch.ao import quantization
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    scales = {torch.nn.Linear: getattr(quantization, qconfig)}
    model = quantization.quantize_dynamic(model, scales, dtype=torch.qint8)

    @torch.inference_mode()
    def batch_states(texts):
        batch = tokenizer(
            texts, padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt"
        )
        mask = batch["attention_mask"].unsqueeze(-1)
        layers = model(**batch, output_hidden_states=True).hidden_states
        return torch.stack([(h * mask).sum(1) / mask.sum(1) for h in layers], dim=1).numpy()

    def states(texts):
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        parts = [batch_states([texts[row] for row in rows]) for rows in batches]
        return np.concatenate(parts)[np.argsort(order)]

    return states


CONTENDERS = {
    "float32": (load_ours, "float32"),
    "bfloat16": (load_ours, "bfloat16"),
    "float16": (load_ours, "float16"),
    "int8": (load_int8, "default_dynamic_qconfig"),
    "int8 by row": (load_int8, "per_channel_dynamic_qconfig"),
}


def sentence_polarity_accuracy(n_train, n_test):
    """Return the texts, and a function of their features that gives the accuracy."""
    corpus = load_sentence_polarity()
    labels = corpus.target[: n_train + n_test]

    def accuracy(features):
        head = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
        head.fit(features[:n_train], labels[:n_train])
        return head.score(features[n_train:], labels[n_train:])

    return corpus.data[: n_train + n_test], accuracy


def read_banking77(split):
    with gzip.open(BANKING77 / f"{split}.csv.gz", "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))[1:]
    intents = json.loads((BANKING77 / "categories.json").read_text("utf-8"))
    return [text for text, _ in rows], [intents.index(intent) for _, intent in rows]


def draw_training_rows(labels, n_experiments, n_per_label=8):
    """The training rows of each experiment of MTEB's protocol, as in the tests."""
    order = np.arange(len(labels))
    for _ in range(n_experiments):
        np.random.RandomState(42).shuffle(order)
        n_drawn, drawn = Counter(), []
        for row in order:
            if n_drawn[labels[row]] < n_per_label:
                drawn.append(row)
                n_drawn[labels[row]] += 1
        yield drawn


def banking77_accuracy(n_experiments, n_test):
    """Return the texts, and a function of their features that gives MTEB's mean accuracy."""
    texts, labels = read_banking77("train")
    test_texts, test_labels = (part[:: 3080 // n_test] for part in read_banking77("test"))
    draws = list(draw_training_rows(labels, n_experiments))
    rows = sorted(set().union(*draws))
    place = {row: position for position, row in enumerate(rows)}

    def accuracy(features):
        features = normalize(features)
        scores = []
        for drawn in draws:
            head = LogisticRegression(random_state=42, max_iter=100)
            head.fit(features[[place[row] for row in drawn]], [labels[row] for row in drawn])
            scores.append(head.score(features[len(rows) :], test_labels))
        return float(np.mean(scores))

    return [texts[row] for row in rows] + test_texts, accuracy


def print_accuracy(title, texts, accuracy, remotes, layers):
    print(f"\naccuracy, {title}, by layer (mean pooling)")
    print(f"{'':16s}" + "".join(f"{layer:>8d}" for layer in layers))
    exact = None
    for name, remote in remotes.items():
        states = remote.call(texts)
        with threadpool_limits(1), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # 100 iterations are the protocol's
            scores = np.array([accuracy(states[:, layer]) for layer in layers])
        exact = scores if exact is None else exact
        print(f"{name:16s}" + "".join(f"{score:8.4f}" for score in scores))
        if scores is not exact:
            print(f"{'  difference':16s}" + "".join(f"{d:+8.4f}" for d in scores - exact))


def print_agreement(texts, remotes):
    """Compare with float32, and the features of a text alone with its features among others."""
    exact = remotes["float32"].call(texts)
    print(f"\nfeatures of {len(texts)} sentences, last layer")
    print(f"{'':16s}{'cosine with float32':>21s}{'max diff':>10s}{'alone against in a batch':>26s}")
    for name, remote in remotes.items():
        states = remote.call(texts)
        alone = np.concatenate([remote.call([text]) for text in texts[:20]])
        last, expected = normalize(states[:, -1]), normalize(exact[:, -1])
        difference = np.abs(alone - states[:20])[:, -1].max()
        verdict = (
            "same bits" if np.array_equal(alone, states[:20]) else f"differ by {difference:.1e}"
        )
        print(
            f"{name:16s}{(last * expected).sum(axis=1).min():21.5f}"
            f"{np.abs(states - exact)[:, -1].max():10.1e}{verdict:>26s}"
        )


def print_speed(texts, remotes, n_rounds):
    seconds = {name: [] for name in remotes}
    names = list(remotes)
    for number in range(n_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds[name] += remotes[name].time([(texts,)])
    print(f"\nseconds for {len(texts)} sentences, all layers, {n_rounds} rounds in turns")
    print(f"{'':16s}{'median':>10s}{'min':>10s}{'max':>10s}{'x float32':>11s}{'x bfloat16':>12s}")
    for name, rounds in seconds.items():
        ratios = [np.median(np.divide(rounds, seconds[o])) for o in ("float32", "bfloat16")]
        print(
            f"{name:16s}{np.median(rounds):10.3f}{min(rounds):10.3f}{max(rounds):10.3f}"
            f"{ratios[0]:11.2f}{ratios[1]:12.2f}"
        )


def main():
    options = parse_options(__doc__)
    quick = options.quick
    print_machine()
    folder = model_folder(options.model)
    n_layers = read_config(folder)["num_hidden_layers"]
    layers = [1, n_layers // 2, n_layers] if quick else list(range(n_layers + 1))
    remotes = {name: Remote(make, folder, *args) for name, (make, *args) in CONTENDERS.items()}
    for name, remote in list(remotes.items()):
        try:
            remote.wait_until_loaded()
        except ContenderError as error:  # torch has announced that it will remove quantization
            print(f"{name} skipped: {error}")
            remotes.pop(name).stop()
    n_train, n_test = (600, 300) if quick else (2000, 1000)
    texts, accuracy = sentence_polarity_accuracy(n_train, n_test)
    print_agreement(texts[:100], remotes)
    print_speed(texts[: 200 if quick else 1000], remotes, options.rounds)
    title = f"sentence polarity, {n_train} to train and {n_test} to test"
    print_accuracy(title, texts, accuracy, remotes, layers)
    texts, accuracy = banking77_accuracy(1 if quick else 10, 308 if quick else 3080)
    title = f"Banking77, MTEB's protocol{' in part' if quick else ''}"
    print_accuracy(title, texts, accuracy, remotes, layers)
    for remote in remotes.values():
        remote.stop()


if __name__ == "__main__":
    main()
