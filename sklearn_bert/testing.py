"""A tiny random BERT on disk, for doctests, examples and the tests of your own code."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["make_bert"]

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_WORDS = """
    a an and as at awful bad but by excellent film for good great hated i in is it loved movie
    much my not of on plot the this to very was with
""".split()


def make_bert(
    folder: str | os.PathLike[str] | None = None,
    *,
    n_layers: int = 3,
    hidden_size: int = 32,
    n_heads: int = 2,
    max_length: int = 64,
    words: Sequence[str] | None = None,
    pooler: bool = True,
    seed: int = 0,
) -> Path:
    """Write a small BERT with random weights to a folder.

    The weights are drawn much wider than for training, so that different texts get clearly
    different states.

    Parameters
    ----------
    folder : str or path-like, default=None
        Where to write; it is created. None makes a new temporary folder.
    n_layers, hidden_size, n_heads : int
        Number of blocks, length of a state, number of attention heads.
    max_length : int, default=64
        Rows of the position table: the most tokens of a text.
    words : sequence of str, default=None
        Words that are one token each; any other word is spelled letter by letter. None is a
        small list of words of film reviews.
    pooler : bool, default=True
        Whether the checkpoint has weights for the pooler.
    seed : int, default=0
        The same seed gives the same weights. The global random state is not touched.

    Returns
    -------
    Path
        The folder.

    Examples
    --------
    >>> from sklearn_bert.testing import make_bert
    >>> sorted(file.name for file in make_bert().iterdir())
    ['config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json']
    """
    import torch
    from safetensors.torch import save_file
    from transformers import BertConfig, BertModel

    folder = Path(folder if folder is not None else tempfile.mkdtemp(prefix="make_bert-"))
    folder.mkdir(parents=True, exist_ok=True)
    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    pieces = [*letters, *(f"##{letter}" for letter in letters)]
    vocabulary = list(dict.fromkeys([*_SPECIAL, *(words or _WORDS), *pieces]))
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden_size,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        intermediate_size=2 * hidden_size,
        max_position_embeddings=max_length,
        initializer_range=0.3,
        architectures=["BertModel"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        weights = BertModel(config, add_pooling_layer=pooler).state_dict()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(config.to_json_string(), "utf-8")
    _write_tokenizer(folder, vocabulary)
    return folder


def _write_tokenizer(folder: Path, vocabulary: Sequence[str]) -> None:
    """Write a WordPiece tokenizer that records no length limit, as many checkpoints do."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizer

    ids = {token: position for position, token in enumerate(vocabulary)}
    BertTokenizer(tokenizer_object=BertWordPieceTokenizer(vocab=ids)._tokenizer).save_pretrained(
        str(folder)
    )
