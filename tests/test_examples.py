"""The examples run, on a part of their data, and their scores are what they say."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from sklearn.model_selection import StratifiedKFold

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Import an example by its name."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


@pytest.fixture
def tagging(example):
    return example("tag_entities")


def test_the_tagger_runs(tagging, capsys):
    table = tagging.main(n=60)
    assert "60 sentences to learn from, 60 (dev) and 60 to test on" in capsys.readouterr().out
    assert table.index[0] == "usual tag of the word"
    assert f"layer {tagging.BEST}, spelling" in table.index
    assert ((table >= 0) & (table <= 1)).all(axis=None)
    assert table["F1"].max() > 0


def test_the_reviews_run(example, capsys):
    reviews = example("long_reviews")
    settings = [reviews.SETTINGS[0], reviews.SETTINGS[1], reviews.SETTINGS[4]]
    table = reviews.main(n=12, settings=settings, folds=StratifiedKFold(2))
    assert capsys.readouterr().out.count("tokens did not reach the model") == 1
    assert (table["cut"] > 0).tolist() == [True, False, False]
    assert table["tokens lost"].tolist()[1:] == ["0%", "0%"]
    assert table.index.tolist() == [(256, "truncate", 0), (256, "window", 0), (512, "window", 128)]
    accuracies = table[[f"layer {layer}" for layer in reviews.LAYERS]]
    assert ((accuracies >= 0) & (accuracies <= 1)).all(axis=None)


def test_the_pairs_run(example):
    table = example("sentence_pairs").main(n=600)
    assert list(table.columns) == ["together", "apart", "cosine"]
    assert table.loc[6, "cosine"] > 0.75  # half of the pairs are right by chance


def test_pairs_are_of_different_questions_and_no_intent_is_trained_and_tested(example):
    pairs_of = example("sentence_pairs")
    intents = pairs_of.questions_by_intent()
    assert len(intents) == 77
    assert sum(map(len, intents)) == 10003
    intent_of = {text: number for number, texts in enumerate(intents) for text in texts}
    pairs, same = pairs_of.draw_pairs(intents, 500, np.random.default_rng(0))
    assert same.sum() == 250
    for (one, other), is_same in zip(pairs, same, strict=True):
        assert one != other
        assert (intent_of[one] == intent_of[other]) == is_same


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("", []),
        ("O O", []),
        ("B-person", [(0, 1, "person")]),
        ("O B-person I-person O", [(1, 3, "person")]),
        ("B-person I-person", [(0, 2, "person")]),  # ends with the sentence
        ("B-person B-person", [(0, 1, "person"), (1, 2, "person")]),  # B- always begins one
        ("B-person I-group", [(0, 1, "person"), (1, 2, "group")]),  # another kind: another entity
        ("I-person I-person O", [(0, 2, "person")]),  # I- with nothing to continue begins one
        ("B-person O I-person", [(0, 1, "person"), (2, 3, "person")]),
        ("B-creative-work I-creative-work", [(0, 2, "creative-work")]),  # a - in the kind
        ("I-person B-person", [(0, 1, "person"), (1, 2, "person")]),
    ],
)
def test_entities_of_a_sentence(tagging, tags, expected):
    assert tagging.entities(tags.split()) == set(expected)


@pytest.mark.parametrize(
    ("true", "predicted", "expected"),
    [
        (["B-person I-person O"], ["B-person I-person O"], (1, 1, 1)),
        (["B-person I-person O"], ["B-person O O"], (0, 0, 0)),  # half an entity is none
        (["B-person I-person O"], ["B-group I-group O"], (0, 0, 0)),  # and so is another kind
        (["B-person O B-group"], ["B-person O O"], (1, 1 / 2, 2 / 3)),
        (["B-person O O"], ["B-person B-group B-group"], (1 / 3, 1, 1 / 2)),
        (["B-person", "O"], ["O", "B-person"], (0, 0, 0)),  # the same place in another sentence
        (["O"], ["O"], (0, 0, 0)),  # nothing to find and nothing found
    ],
)
def test_scores_of_entities(tagging, true, predicted, expected):
    scores = tagging.entity_scores([t.split() for t in true], [p.split() for p in predicted])
    got = [scores[name] for name in ("precision", "recall", "F1")]
    np.testing.assert_allclose(got, expected)


def test_the_data_have_the_sentences_that_their_description_counts(tagging):
    counts = {name: len(tagging.read_sentences(name)[0]) for name in tagging.FILES}
    assert list(counts.values()) == [3394, 1009, 1287]
    words, tags = tagging.read_sentences(tagging.FILES[0], 1)
    assert len(words) == len(tags) == 1
    assert words[0][:3] == ["@paulwalk", "It", "'s"]
    assert len(words[0]) == len(tags[0])
