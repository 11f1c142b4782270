"""Sentiment of film reviews with a frozen BERT and a logistic regression, from start to finish.

Run it with ``make demo``, or ``python examples/sentiment.py [folder for the results]``.
"""

import sys
import time
import warnings
from pathlib import Path

import joblib
import pandas as pd
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sklearn_bert import BertLayerFeaturizer, FeatureCache
from sklearn_bert.datasets import load_sentence_polarity, minilm_path
from sklearn_bert.exceptions import ConstantFeaturesWarning

N_SENTENCES = 3000
POOLINGS = ["mean", "cls", "max"]
FOLDS = StratifiedKFold(5)


def head():
    """Linear model on top of the features; scaling lets it see layers that hardly vary."""
    return make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))


def accuracy_table(model, texts, y):
    """Cross-validated accuracy of every layer and pooling, from one pass over the texts."""
    with warnings.catch_warnings():
        # layer 0 with cls is the same vector for every text; the table shows what that costs
        warnings.simplefilter("ignore", ConstantFeaturesWarning)
        featurizer = BertLayerFeaturizer(model, layers="all", pooling=POOLINGS)
        featurizer.set_output(transform="pandas")
        features = featurizer.fit_transform(texts)
    table = pd.DataFrame(index=pd.Index(featurizer.layers_, name="layer"), columns=POOLINGS)
    for layer in table.index:
        for pooling in POOLINGS:
            columns = features.filter(like=f"layer{layer}_{pooling}_")
            table.loc[layer, pooling] = cross_val_score(head(), columns, y, cv=FOLDS).mean()
    return table.astype(float)


def plot(table, baseline, path):
    """Draw accuracy against layer, one line per pooling, and the baseline."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for pooling, marker in zip(table.columns, "osD", strict=True):
        ax.plot(table.index, table[pooling], marker=marker, label=f"BERT, {pooling}")
    ax.axhline(baseline, color="0.45", linestyle="--", label="TF-IDF")
    ax.set(
        title=f"Sentiment of {N_SENTENCES} film-review sentences, all-MiniLM-L6-v2",
        xlabel="hidden layer (0 is the embedding output)",
        ylabel="accuracy, 5-fold cross-validation",
        xticks=list(table.index),
    )
    ax.grid(alpha=0.3)
    ax.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(output):
    output.mkdir(parents=True, exist_ok=True)
    model = minilm_path()
    texts, y = load_sentence_polarity(return_X_y=True)
    texts, y = texts[:N_SENTENCES], y[:N_SENTENCES]
    X_train, X_test, y_train, y_test = train_test_split(texts, y, random_state=0, stratify=y)

    print(f"1. A pipeline on {len(X_train)} sentences, tested on {len(X_test)} others")
    start = time.perf_counter()
    pipe = make_pipeline(BertLayerFeaturizer(model, layers=-2, pooling="mean"), head())
    pipe.fit(X_train, y_train)
    accuracy = pipe.score(X_test, y_test)
    seconds = time.perf_counter() - start
    print(f"   accuracy {accuracy:.3f} in {seconds:.1f} s, model loading included\n")

    print("2. Accuracy by layer and pooling (5-fold cross-validation)")
    table = accuracy_table(model, texts, y)
    tfidf = make_pipeline(
        TfidfVectorizer(ngram_range=(1, 2)), LogisticRegression(C=10, max_iter=1000)
    )
    baseline = cross_val_score(tfidf, texts, y, cv=FOLDS).mean()
    print(table.to_string(float_format="{:.3f}".format))
    print(f"   TF-IDF baseline: {baseline:.3f}")
    plot(table, baseline, output / "layers.png")
    print(f"   picture: {output / 'layers.png'}\n")

    print("3. The same choice by grid search, with a cache")
    start = time.perf_counter()
    cache = FeatureCache("memory")
    grid = {
        "bertlayerfeaturizer__layers": [1, 2, 3, 4, 5, 6, [3, 4], [4, 5]],
        "bertlayerfeaturizer__pooling": POOLINGS,
    }
    pipe.set_params(bertlayerfeaturizer__cache=cache)
    search = GridSearchCV(pipe, grid, cv=3).fit(X_train, y_train)
    asked = (3 * len(search.cv_results_["params"]) + 1) * len(X_train)
    computed = cache.info().n_texts
    print(f"   best: {search.best_params_}")
    print(
        f"   {asked} texts were asked for and {computed} went through the model, "
        f"{asked / computed:.0f} times fewer; {time.perf_counter() - start:.0f} s"
    )
    print(f"   accuracy on the test sentences {search.score(X_test, y_test):.3f}\n")

    print("4. Saved and loaded again")
    path = output / "sentiment.joblib"
    best = search.best_estimator_.set_params(bertlayerfeaturizer__cache=None)
    joblib.dump(best, path)
    loaded = joblib.load(path)
    print(f"   {path}: {path.stat().st_size / 1024:.0f} kB (the model's weights are not in it)")
    for text in [
        "a gripping , warm and funny film .",
        "two hours of my life i will never get back .",
    ]:
        positive = loaded.predict_proba([text])[0, 1]
        print(f"   {positive:.2f} positive: {text}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo_output"))
