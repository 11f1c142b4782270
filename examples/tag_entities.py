"""Find names in posts and comments: a vector for every word, and entities scored as a whole.

    python examples/tag_entities.py

Trained and tested on WNUT 2017 (see examples/data/README.md): people, places, groups, companies,
products and works. Of 1079 in the test sentences, 24 are also in the training sentences. It takes a
minute of one core and prints:

    3394 sentences to learn from, 1009 (dev) and 1287 to test on
                           F1 (dev)  precision  recall    F1
    usual tag of the word     0.096      0.212   0.035 0.060
    layer 0                   0.354      0.428   0.174 0.248
    layer 2                   0.455      0.538   0.230 0.322
    layer 3                   0.484      0.581   0.244 0.343
    layer 4                   0.475      0.588   0.248 0.349
    layer 6                   0.400      0.448   0.191 0.268
    layer 3, spelling         0.507      0.568   0.281 0.376

Layer 0 knows a word and its place, not its neighbours; what the middle layers add is context. The
last layer of this model, which was trained to compare sentences, says less of its words. The model
reads all in lower case, so five columns on how a word is spelled help. Still seven of ten
entities are missed: a small frozen model with a linear head is a start, not a good tagger.
"""

import gzip
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklearn_bert import BertLayerFeaturizer
from sklearn_bert.datasets import minilm_path

DATA = Path(__file__).parent / "data" / "wnut17"
FILES = ["wnut17train.conll.gz", "emerging.dev.conll.gz", "emerging.test.annotated.gz"]
LAYERS = [0, 2, 3, 4, 6]
BEST = 3  # on the development sentences, on which C and subwords were chosen, too


def read_sentences(name, n=None):
    """Return the words and the tags of (the first n) sentences: a word and its tag per line."""
    sentences = [[]]
    with gzip.open(DATA / name, "rt", encoding="utf-8") as lines:
        for line in lines:
            word, _, tag = line.rstrip("\n").partition("\t")
            if word:
                sentences[-1].append((word, tag))
            elif sentences[-1]:  # a line without a word ends a sentence
                sentences.append([])
    pairs = [list(zip(*sentence, strict=True)) for sentence in sentences if sentence][:n]
    return [list(words) for words, _ in pairs], [list(tags) for _, tags in pairs]


def entities(tags):
    """Return the entities of a sentence as a set of (first word, word after the last, kind).

    ``B-`` begins an entity and ``I-`` continues one of the same kind. A classifier that decides
    word by word also says ``I-`` where there is nothing to continue; that begins an entity, too.
    """
    found, kind, first = set(), None, 0
    for position, tag in enumerate([*tags, "O"]):
        prefix, _, kind_here = tag.partition("-")
        if kind is not None and (prefix != "I" or kind_here != kind):
            found.add((first, position, kind))
            kind = None
        if kind is None and prefix != "O":
            kind, first = kind_here, position
    return found


def entity_scores(true, predicted):
    """Return precision, recall and F1 of the entities in lists of tags, one list per sentence."""
    pairs = [(entities(a), entities(b)) for a, b in zip(true, predicted, strict=True)]
    n_true = sum(len(a) for a, _ in pairs)
    n_predicted = sum(len(b) for _, b in pairs)
    n_right = sum(len(a & b) for a, b in pairs)  # first word, last word and kind are right
    return {
        "precision": n_right / max(n_predicted, 1),
        "recall": n_right / max(n_true, 1),
        "F1": 2 * n_right / max(n_true + n_predicted, 1),
    }


def spelling(words):
    """Return what an uncased model is not shown of a word: capitals. Digits and @, # besides."""
    looks = [
        (w[0].isupper(), w.isupper(), w[1:] != w[1:].lower(), w[0].isdigit(), w[0] in "@#")
        for w in words
    ]
    return np.array(looks, np.float32)


def tagger():
    return make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=300))


def main(n=None):
    """Print and return the scores; `n` is the number of sentences to read of each file."""
    (train, tags), (dev, dev_tags), (test, test_tags) = (read_sentences(name, n) for name in FILES)
    y = [tag for sentence in tags for tag in sentence]
    ends = np.cumsum([len(sentence) for sentence in dev + test])[:-1]

    # fit trains nothing, it wants some text; transform_tokens also takes lists of words. It returns
    # a row for every word, with the columns of the layers side by side.
    featurizer = BertLayerFeaturizer(minilm_path(), layers=LAYERS).fit(["any text"])
    known = featurizer.transform_tokens(train, level="word", subwords="mean")
    new = featurizer.transform_tokens(dev + test, level="word", subwords="mean")
    X = dict(zip(LAYERS, np.split(known.vectors, len(LAYERS), axis=1), strict=True))
    X_new = dict(zip(LAYERS, np.split(new.vectors, len(LAYERS), axis=1), strict=True))

    # the tag a word has most often in the training sentences; what is common is entered last
    pairs = Counter(zip(known.tokens, y, strict=True)).most_common()
    usual = dict(pair for pair, _ in reversed(pairs))

    predicted = {"usual tag of the word": [usual.get(word, "O") for word in new.tokens]}
    for layer in LAYERS:
        predicted[f"layer {layer}"] = tagger().fit(X[layer], y).predict(X_new[layer])
    X_spelled = np.hstack([X[BEST], spelling(known.tokens)])
    new_spelled = np.hstack([X_new[BEST], spelling(new.tokens)])
    predicted[f"layer {BEST}, spelling"] = tagger().fit(X_spelled, y).predict(new_spelled)

    table = {}
    for name, flat in predicted.items():
        by_sentence = np.split(np.asarray(flat), ends)
        scores = entity_scores(test_tags, by_sentence[len(dev) :])
        table[name] = {"F1 (dev)": entity_scores(dev_tags, by_sentence[: len(dev)])["F1"], **scores}
    table = pd.DataFrame(table).T
    print(f"{len(train)} sentences to learn from, {len(dev)} (dev) and {len(test)} to test on")
    print(table.to_string(float_format="{:.3f}".format))
    return table


if __name__ == "__main__":
    main()
