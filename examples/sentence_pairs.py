"""Do two questions ask the same thing? Pairs read as one text, or two texts read apart.

    python examples/sentence_pairs.py

From the bank customers' questions of Banking77 (tests/data/banking77): half of the pairs are two
questions of one intent, the others two questions of two intents, drawn at random. No intent is in
both the training and the test pairs, so what is learned is to compare, not to know the intents.
It takes a minute and a half of one core and prints accuracies:

    4000 pairs to learn from, 2000 to test on
           together  apart  cosine
    layer
    0         0.514  0.787   0.751
    2         0.755  0.790   0.739
    4         0.834  0.825   0.779
    6         0.739  0.885   0.875

Half of the pairs are right by chance. Before the first block (layer 0) nothing was compared, and a
mean over both texts does not say how they differ; the blocks make a pair of it, up to a point. But
this model was fine-tuned to give every text a vector of its own, not two texts in one input. So
reading them apart is the better way, and the cosine of the last layer alone is nearly as good; on
layer 4 there is no difference worth the name. Apart, a text also has to be read once only, however
many pairs it is in. ``text_pair=True`` is for models that were trained with pairs.
"""

import csv
import gzip
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, normalize

from sklearn_bert import BertLayerFeaturizer
from sklearn_bert.datasets import minilm_path

QUESTIONS = Path(__file__).parents[1] / "tests" / "data" / "banking77" / "train.csv.gz"
LAYERS = [0, 2, 4, 6]
N_TRAINING_INTENTS = 52  # of 77


def questions_by_intent():
    with gzip.open(QUESTIONS, "rt", encoding="utf-8", newline="") as file:
        rows = pd.DataFrame(csv.DictReader(file))
    return [group["text"].tolist() for _, group in rows.groupby("category")]


def draw_pairs(intents, n, rng):
    """Return n pairs and whether their two questions, which differ, have the same intent."""
    pairs, same = [], np.arange(n) % 2
    for is_same in same:
        one, other = rng.choice(len(intents), 2, replace=False)
        if is_same:
            pairs.append(tuple(rng.choice(intents[one], 2, replace=False).tolist()))
        else:
            pairs.append((str(rng.choice(intents[one])), str(rng.choice(intents[other]))))
    return pairs, same


def features_of_pairs(pairs):
    """Return three ways to describe a pair to a classifier, and those for every layer.

    Read together, BERT sees ``[CLS] first [SEP] second [SEP]``, and a row is the mean over all
    tokens. Read apart, each text has its vector u or v, of length 1, and a row is |u - v| and
    u * v side by side, or only the sum of u * v, which is their cosine.
    """
    together = BertLayerFeaturizer(minilm_path(), layers=LAYERS, text_pair=True)
    apart = BertLayerFeaturizer(minilm_path(), layers=LAYERS)
    firsts, seconds = (by_layer(apart.fit_transform(texts)) for texts in zip(*pairs, strict=True))
    features = {}
    for layer, pair, u, v in zip(
        LAYERS, by_layer(together.fit_transform(pairs)), firsts, seconds, strict=True
    ):
        u, v = normalize(u), normalize(v)
        features[layer] = {
            "together": pair,
            "apart": np.hstack([np.abs(u - v), u * v]),
            "cosine": (u * v).sum(axis=1, keepdims=True),
        }
    return features


def by_layer(features):
    return np.split(features, len(LAYERS), axis=1)


def main(n=4000):
    """Print and return accuracies; `n` is the number of training pairs, half as many are tested."""
    rng = np.random.default_rng(0)
    intents = questions_by_intent()
    rng.shuffle(intents)
    pairs, y = draw_pairs(intents[:N_TRAINING_INTENTS], n, rng)
    test_pairs, y_test = draw_pairs(intents[N_TRAINING_INTENTS:], n // 2, rng)
    train, test = features_of_pairs(pairs), features_of_pairs(test_pairs)

    head = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
    table = pd.DataFrame(
        {
            way: {
                layer: head.fit(train[layer][way], y).score(test[layer][way], y_test)
                for layer in LAYERS
            }
            for way in ("together", "apart", "cosine")
        }
    ).rename_axis("layer")
    print(f"{len(pairs)} pairs to learn from, {len(test_pairs)} to test on")
    print(table.to_string(float_format="{:.3f}".format))
    return table


if __name__ == "__main__":
    main()
