"""What the contenders are given: texts, folders of models, and how much arithmetic that is."""

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from sklearn_bert.datasets import load_sentence_polarity, minilm_path

MAX_LENGTH = 512


def short_sentences(n):
    """The first sentences of film reviews; 26 tokens on average."""
    return load_sentence_polarity().data[:n]


def distinct_sentences(n):
    """As many sentences as one likes: beyond the 10662 there are, the words in another order."""
    sentences = [text for text in load_sentence_polarity().data if len(text.split()) > 9]
    rng = np.random.default_rng(0)
    texts = dict.fromkeys(sentences[:n])
    while len(texts) < n:
        words = sentences[len(texts) % len(sentences)].split()
        texts[" ".join(rng.permutation(words))] = None
    return list(texts)


def long_reviews(n, n_tokens, folder, reviews=None):
    """Texts of exactly `n_tokens` tokens, so that no contender cuts, pads, or gains by sorting.

    Parameters
    ----------
    n, n_tokens : int
        Number of texts, and tokens of each with ``[CLS]`` and ``[SEP]``.
    folder : str
        Model whose tokens are counted.
    reviews : path, default=None
        File of JSON lines with a "text"; None strings sentences from film reviews together.
    """
    tokenizer = _tokenizer(folder)
    if reviews is None:
        sources = [" ".join(load_sentence_polarity().data)]
    else:
        lines = Path(reviews).read_text("utf-8").splitlines()
        sources = [json.loads(line)["text"] for line in lines]
    texts, words, room = [], [], n_tokens - 2
    for source in sources:
        for word in source.split():
            size = len(tokenizer.encode(word, add_special_tokens=False))
            if size <= room:
                words.append(word)
                room -= size
            if room == 0:
                texts.append(" ".join(words))
                words, room = [], n_tokens - 2
                if reviews is not None:
                    break
        words, room = [], n_tokens - 2  # the review was too short
    if len(texts) < n:
        raise SystemExit(f"only {len(texts)} texts have {n_tokens} tokens; {n} are needed")
    return texts[:n]


def count_tokens(texts, folder):
    """Tokens of each text, special tokens included."""
    encodings = _tokenizer(folder).encode_batch(texts)
    return np.minimum([len(encoding) for encoding in encodings], MAX_LENGTH)


def _tokenizer(folder):
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_config(folder):
    return json.loads((Path(folder) / "config.json").read_text("utf-8"))


def model_flops(n_tokens, config):
    """Floating-point operations that a BERT needs for texts of these lengths, without padding.

    Per block and token, four products with a matrix of H x H and two of H x I; per block and text
    of T tokens, the scores of attention and their use, T x T x H each. A multiplication and its
    addition are two operations. Everything else is small beside it and not counted.
    """
    n_tokens = np.asarray(n_tokens, dtype=float)
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    products = 2 * n_tokens * (4 * hidden**2 + 2 * hidden * intermediate)
    attention = 4 * n_tokens**2 * hidden
    return config["num_hidden_layers"] * float((products + attention).sum())


def model_folder(source=None):
    """Return a new folder with a model that every contender reads in the same way.

    It has the files of `source` (default: the packaged all-MiniLM-L6-v2), and tells
    sentence-transformers to take the mean over the tokens and to leave its length as it is.
    """
    source, folder = Path(source or minilm_path()), new_folder()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    hidden_size = read_config(folder)["hidden_size"]
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_LENGTH})
    pooling = {"word_embedding_dimension": hidden_size, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling").mkdir()
    _write_json(folder / "1_Pooling" / "config.json", pooling)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules = [
        {
            "idx": position,
            "name": str(position),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for position, (path, kind) in enumerate(modules)
    ]
    _write_json(folder / "modules.json", modules)
    return str(folder)


def random_bert_base():
    """Return a folder with a BERT of 12 x 768, random weights, and MiniLM's tokenizer."""
    import torch
    from transformers import BertConfig, BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = Path(model_folder())
    torch.manual_seed(0)
    BertModel(BertConfig(), add_pooling_layer=False).save_pretrained(folder)
    return str(folder)


def new_folder():
    """Return an empty folder that is removed when the process ends."""
    return Path(tempfile.mkdtemp(dir=_home().name))


@cache
def _home():
    return tempfile.TemporaryDirectory(prefix="bench-")


def _write_json(path, content):
    path.write_text(json.dumps(content), "utf-8")
