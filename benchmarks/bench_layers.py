"""Seconds by layer: a lower layer costs less, and more layers and poolings cost hardly more.

    python benchmarks/bench_layers.py
    python benchmarks/bench_layers.py --quick

Layer k of L runs k blocks. Half a block stands for all that is not in blocks: tokenization,
embeddings, pooling. So the time should be proportional to (k + 0.5) / L, and is expected to be so
within 15 %; a layer that costs less than that is no miss.
"""

import numpy as np
from peers import Remote
from side_by_side import parse_options, print_machine
from workloads import model_folder, read_config, short_sentences

POOLINGS = ["mean", "max", "cls"]
TOLERANCE = 0.15


def load_featurizers(folder, n_layers):
    """Return one function of (layers, texts); all featurizers share the process's one model."""
    from sklearn_bert import BertLayerFeaturizer

    featurizers = {
        layer: BertLayerFeaturizer(folder, layers=layer, device="cpu")
        for layer in range(n_layers + 1)
    }
    featurizers["all"] = BertLayerFeaturizer(folder, layers="all", pooling=POOLINGS, device="cpu")
    for featurizer in featurizers.values():
        featurizer.fit(["a text"])
    return lambda layers, texts: featurizers[layers].transform(texts)


def load_transformers(folder):
    """Return transformers' own states: the mean over the tokens at every layer, text by text."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def states(text):
        output = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True)
        return np.stack([layer[0].mean(0).numpy() for layer in output.hidden_states])

    return lambda texts: np.stack([states(text) for text in texts], axis=1)


def largest_difference(remote, folder, texts):
    """Compare every layer's features, alone and from all layers, with transformers' states."""
    reference = Remote(load_transformers, folder)
    reference.wait_until_loaded()
    expected = reference.call(texts)
    reference.stop()
    n_layers, n_texts, hidden_size = expected.shape
    together = remote.call("all", texts).reshape(n_texts, n_layers, len(POOLINGS), hidden_size)
    worst = np.abs(together[:, :, 0].swapaxes(0, 1) - expected).max()  # the first pooling is mean
    for layer in range(n_layers):
        worst = max(worst, np.abs(remote.call(layer, texts) - expected[layer]).max())
    return worst


def take_turns(remote, names, texts, n_rounds):
    seconds = {name: [] for name in names}
    for number in range(n_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds[name] += remote.time([(name, texts)])
    return seconds


def print_layers(seconds, n_layers):
    full = np.median(seconds[n_layers])
    print(
        f"{'':8s}{'median s':>10s}{'min':>10s}{'max':>10s}"
        f"{'of last':>10s}{'expected':>10s}{'off':>8s}"
    )
    for layer in range(n_layers + 1):
        share = np.median(seconds[layer]) / full
        expected = (layer + 0.5) / (n_layers + 0.5)
        off = share / expected - 1
        verdict = "" if off <= TOLERANCE else "  MISSED"
        print(
            f"layer {layer:<2d}{np.median(seconds[layer]):10.4f}{min(seconds[layer]):10.4f}"
            f"{max(seconds[layer]):10.4f}{share:10.3f}{expected:10.3f}{off:8.0%}{verdict}"
        )
    everything = np.median(seconds["all"])
    print(
        f"all     {everything:10.4f}{min(seconds['all']):10.4f}{max(seconds['all']):10.4f}"
        f"{everything / full:10.3f}   {n_layers + 1} layers x {', '.join(POOLINGS)}"
    )


def main():
    options = parse_options(__doc__, rounds=7)
    texts = short_sentences(200 if options.quick else 1000)
    print_machine()
    folder = model_folder(options.model)
    n_layers = read_config(folder)["num_hidden_layers"]
    remote = Remote(load_featurizers, folder, n_layers)
    remote.wait_until_loaded()
    names = [*range(n_layers + 1), "all"]
    difference = largest_difference(remote, folder, texts[:5])
    print(f"\nlargest difference to transformers, all layers, 5 texts: {difference:.1e}")
    if difference > 1e-5:
        raise SystemExit("these are other features; their time would mean nothing")
    remote.call("all", texts)
    print(f"{len(texts)} sentences, one process, float32, mean pooling")
    print_layers(take_turns(remote, names, texts, options.rounds), n_layers)
    remote.stop()


if __name__ == "__main__":
    main()
