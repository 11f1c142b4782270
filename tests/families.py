"""Tiny random models on disk, one per family of encoders, with tokenizers built from scratch.

Every model has 3 blocks, all its weights (biases and norms too) are drawn at random and wide, so
that different texts get clearly different states and no weight is without effect. Checkpoints are
written the way they are found in practice: some with a language-model head and no pooler, some as
bare encoders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

N_LAYERS = 3
MAX_TOKENS = 64  # most tokens a text may have in every family here

_WORDS = """
    a an and as at awful bad but by excellent film for good great hated i in is it loved movie
    much my not of on plot the this to very was with
""".split()
_CHARACTERS = [chr(code) for code in range(33, 127)]


TEXTS = [
    "",
    "   ",
    "good",
    "bad",
    "good film",
    "Good film!",
    "the plot was awful and i hated it very much",
    "is it? (x, y) z; 100%",
    "naïve 電影 🎬",
    "i loved this film but not the plot",
    "a great film " * 5,
    "an excellent movie with much plot and not much for me " * 4,
]


def random_texts(n_words: Iterable[int], seed: int = 0) -> list[str]:
    """Draw texts with the numbers of words given."""
    generator = torch.Generator().manual_seed(seed)
    return [
        " ".join(_WORDS[int(i)] for i in torch.randint(len(_WORDS), (n,), generator=generator))
        for n in n_words
    ]


# --- Tokenizers -------------------------------------------------------------------------------


_BERT_SPECIAL = ("pad", "unk", "cls", "sep", "mask")


def _wordpiece(special: Iterable[str]) -> dict[str, int]:
    characters = [c for c in _CHARACTERS if not c.isupper()]
    pieces = [*special, *_WORDS, *characters, *(f"##{c}" for c in characters)]
    return {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}


def _unigram(special: Iterable[str], last: str) -> list[tuple[str, float]]:
    pieces = [(f"▁{word}", -4.0) for word in _WORDS] + [("▁", -6.0)]
    pieces += [(c, -9.0 - 0.01 * i) for i, c in enumerate(_CHARACTERS)]
    return [*((token, 0.0) for token in special), *pieces, (last, 0.0)]


def _byte_pairs(
    first: Iterable[str], last: Iterable[str]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    merges: dict[tuple[str, str], None] = {}
    for word in _WORDS:
        spelled = f"Ġ{word}"
        for end in range(1, len(spelled)):
            merges[spelled[:end], spelled[end]] = None
    pieces = [*first, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges), *last]
    return {piece: i for i, piece in enumerate(pieces)}, list(merges)


def _bert_tokenizer() -> Any:
    vocabulary = _wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    return transformers.BertTokenizer(vocab=vocabulary)


def _bert_like_fast_tokenizer(add_special_tokens: bool = True) -> Any:
    """Make the tokenizer of BERT without the class that transformers has for it."""
    own = _bert_tokenizer()
    special = {f"{name}_token": getattr(own, f"{name}_token") for name in _BERT_SPECIAL}
    backend = Tokenizer.from_str(own.backend_tokenizer.to_str())
    if not add_special_tokens:
        backend.post_processor = processors.Sequence([])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def _mpnet_tokenizer() -> Any:
    vocabulary = _wordpiece(["<s>", "<pad>", "</s>", "[UNK]", "<mask>"])
    return transformers.MPNetTokenizer(vocab=vocabulary, model_max_length=MAX_TOKENS)


def _roberta_tokenizer() -> Any:
    vocabulary, merges = _byte_pairs(["<s>", "<pad>", "</s>", "<unk>"], ["<mask>"])
    return transformers.RobertaTokenizer(vocab=vocabulary, merges=merges)


def _modernbert_tokenizer() -> Any:
    special = {
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "mask_token": "[MASK]",
    }
    vocabulary, merges = _byte_pairs([], special.values())  # its special tokens come last
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=MAX_TOKENS, **special
    )


def _albert_tokenizer() -> Any:
    return transformers.AlbertTokenizer(
        vocab=_unigram(["<pad>", "<unk>", "[CLS]", "[SEP]"], "[MASK]"), model_max_length=MAX_TOKENS
    )


def _deberta_tokenizer() -> Any:
    return transformers.DebertaV2Tokenizer(
        vocab=_unigram(["[PAD]", "[CLS]", "[SEP]", "[UNK]"], "[MASK]")
    )


def _xlm_roberta_tokenizer() -> Any:
    return transformers.XLMRobertaTokenizer(
        vocab=_unigram(["<s>", "<pad>", "</s>", "<unk>"], "<mask>")
    )


# --- Models -----------------------------------------------------------------------------------

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": MAX_TOKENS,
}
# Position ids of these families begin after the padding id, 1: two rows are never used.
_ROBERTA_LIKE: dict[str, Any] = {
    **_SIZES,
    "max_position_embeddings": MAX_TOKENS + 2,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
# Its configuration has ids of special tokens of its own, which this vocabulary does not have.
_NO_SPECIAL_IDS: dict[str, Any] = dict.fromkeys(
    ["pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"], 0
)


def write_model(
    folder: Path, config: Any, tokenizer: Any, model_class: str, width: float = 0.3
) -> Path:
    """Write a model with random weights and its tokenizer to a folder.

    `model_class` is the name of a transformers class, with or without a head; `width` is the
    standard deviation of the weights.
    """
    config.vocab_size = len(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, model_class)(config)
        with torch.no_grad():
            for name, weights in model.named_parameters():
                is_norm = "norm" in name.lower() and name.endswith("weight")
                weights.normal_(1.0 if is_norm else 0.0, width)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _bert(folder: Path, **settings: Any) -> Path:
    """Write a BERT with a pooler and no recorded length limit, as BERT was published."""
    config = transformers.BertConfig(**{**_SIZES, **settings})
    return write_model(folder, config, _bert_tokenizer(), "BertForPreTraining")


def _distilbert(folder: Path) -> Path:
    config = transformers.DistilBertConfig(
        dim=32, n_layers=N_LAYERS, n_heads=2, hidden_dim=64, max_position_embeddings=MAX_TOKENS
    )
    return write_model(folder, config, _bert_tokenizer(), "DistilBertForMaskedLM")


def _roberta(folder: Path) -> Path:
    config = transformers.RobertaConfig(**_ROBERTA_LIKE, type_vocab_size=1)
    return write_model(folder, config, _roberta_tokenizer(), "RobertaForMaskedLM")


def _xlm_roberta(folder: Path) -> Path:
    config = transformers.XLMRobertaConfig(**_ROBERTA_LIKE, type_vocab_size=1)
    return write_model(folder, config, _xlm_roberta_tokenizer(), "XLMRobertaModel")


def _camembert(folder: Path) -> Path:
    config = transformers.CamembertConfig(**_ROBERTA_LIKE, type_vocab_size=1)
    return write_model(folder, config, _xlm_roberta_tokenizer(), "CamembertModel")


def _electra(folder: Path) -> Path:
    config = transformers.ElectraConfig(**_SIZES, embedding_size=24)
    return write_model(folder, config, _bert_tokenizer(), "ElectraForPreTraining")


def _mpnet(folder: Path, n_heads: int = 3) -> Path:
    settings = {**_ROBERTA_LIKE, "hidden_size": 48, "num_attention_heads": n_heads}
    return write_model(
        folder, transformers.MPNetConfig(**settings), _mpnet_tokenizer(), "MPNetModel"
    )


def _albert(folder: Path, **settings: Any) -> Path:
    config = transformers.AlbertConfig(**_SIZES, embedding_size=24, **settings)
    return write_model(folder, config, _albert_tokenizer(), "AlbertModel")


def _deberta(folder: Path, **settings: Any) -> Path:
    """Write a DeBERTa with relative positions only, in buckets, as its second version has them."""
    config = transformers.DebertaV2Config(
        **{**_SIZES, "hidden_size": 48},
        relative_attention=True,
        position_biased_input=False,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        type_vocab_size=0,
        **settings,
    )
    return write_model(folder, config, _deberta_tokenizer(), "DebertaV2ForMaskedLM")


def _modernbert(folder: Path) -> Path:
    """Write a ModernBERT whose second block sees only 4 tokens to each side."""
    config = transformers.ModernBertConfig(
        **{**_SIZES, "hidden_size": 48},
        global_attn_every_n_layers=2,
        local_attention=8,
        **_NO_SPECIAL_IDS,
    )
    return write_model(folder, config, _modernbert_tokenizer(), "ModernBertForMaskedLM", 0.12)


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "bert": _bert,
    "distilbert": _distilbert,
    "roberta": _roberta,
    "xlm-roberta": _xlm_roberta,
    "electra": _electra,
    "mpnet": _mpnet,
    "camembert": _camembert,
    "albert": partial(_albert, num_hidden_groups=1),
    "albert-two-groups": partial(_albert, num_hidden_groups=2),
    "albert-two-layers-a-group": partial(_albert, inner_group_num=2),
    "deberta-v3": partial(_deberta, share_att_key=True),
    "deberta-v2-convolution": partial(_deberta, conv_kernel_size=3, conv_act="gelu"),
    "modernbert": _modernbert,
}
# Families whose checkpoint above has weights for the pooler.
WITH_POOLER = ["bert", "xlm-roberta", "mpnet", *(n for n in FAMILIES if n.startswith("albert"))]
# Shapes of attention and activations that other checkpoints of these families have.
VARIANTS: dict[str, Callable[[Path], Path]] = {
    "heads-of-8": partial(_bert, num_attention_heads=4),
    "heads-of-12": partial(_bert, hidden_size=48, num_attention_heads=4),
    "heads-of-26": partial(_bert, hidden_size=52),
    "one-head": partial(_bert, num_attention_heads=1),
    "three-heads": partial(_bert, hidden_size=48, num_attention_heads=3),
    "mpnet-two-heads": partial(_mpnet, n_heads=2),
    "mpnet-four-heads": partial(_mpnet, n_heads=4),
    **{
        activation: partial(_bert, hidden_act=activation, intermediate_size=160)
        for activation in ("gelu_new", "gelu_pytorch_tanh", "silu", "relu")
    },
}


def _convbert(folder: Path) -> Path:
    config = transformers.ConvBertConfig(**_SIZES, embedding_size=24)
    return write_model(folder, config, _bert_tokenizer(), "ConvBertModel")


def _roformer(folder: Path) -> Path:
    config = transformers.RoFormerConfig(**_SIZES, embedding_size=24)
    return write_model(folder, config, _bert_like_fast_tokenizer(), "RoFormerModel")


def _mobilebert(folder: Path) -> Path:
    config = transformers.MobileBertConfig(
        **{**_SIZES, "hidden_size": 48},
        embedding_size=24,
        intra_bottleneck_size=32,
        true_hidden_size=32,
    )
    # nothing is normalized in it, so wide weights would make states without bound
    return write_model(folder, config, _bert_tokenizer(), "MobileBertModel", width=0.1)


def _nomic_bert(folder: Path) -> Path:
    config = transformers.NomicBertConfig(**_SIZES, head_dim=16)
    return write_model(folder, config, _bert_tokenizer(), "NomicBertModel")


def _nystromformer(folder: Path) -> Path:
    config = transformers.NystromformerConfig(**_SIZES, segment_means_seq_len=MAX_TOKENS)
    return write_model(folder, config, _bert_tokenizer(), "NystromformerModel")


def _deberta_v1(folder: Path) -> Path:
    config = transformers.DebertaConfig(
        **_SIZES, relative_attention=True, pos_att_type=["c2p", "p2c"]
    )
    return write_model(folder, config, _bert_tokenizer(), "DebertaModel")


def _camembert(folder: Path) -> Path:
    config = transformers.CamembertConfig(**_ROBERTA_LIKE, type_vocab_size=1)
    return write_model(folder, config, _xlm_roberta_tokenizer(), "CamembertForMaskedLM")


def _xlm(folder: Path) -> Path:
    config = transformers.XLMConfig(
        emb_dim=32, n_layers=N_LAYERS, n_heads=2, max_position_embeddings=MAX_TOKENS, pad_index=0
    )
    return write_model(folder, config, _bert_like_fast_tokenizer(), "XLMModel")


def _funnel(folder: Path) -> Path:
    """Write a Funnel Transformer, whose middle blocks have fewer states than there are tokens."""
    config = transformers.FunnelConfig(
        d_model=32, n_head=2, d_head=16, d_inner=64, block_sizes=[1, 1, 1], num_decoder_layers=2
    )
    return write_model(folder, config, _bert_tokenizer(), "FunnelModel")


# Encoders of other families; the library knows nothing of their layout.
OTHER_FAMILIES: dict[str, Callable[[Path], Path]] = {
    "camembert": _camembert,
    "convbert": _convbert,
    "deberta": _deberta_v1,
    "mobilebert": _mobilebert,
    "nomic_bert": _nomic_bert,
    "nystromformer": _nystromformer,
    "roformer": _roformer,
    "xlm": _xlm,  # has no module that is a block
}


# --- Models that must be refused ----------------------------------------------------------------


def _gpt2(folder: Path) -> Path:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=N_LAYERS, n_head=2, n_positions=MAX_TOKENS, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    vocabulary, merges = _byte_pairs(["<|endoftext|>"], [])
    tokenizer = transformers.GPT2Tokenizer(vocab=vocabulary, merges=merges)
    return write_model(folder, config, tokenizer, "GPT2LMHeadModel")


def _bart(folder: Path) -> Path:
    config = transformers.BartConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_position_embeddings=MAX_TOKENS,
    )  # fmt: skip
    return write_model(folder, config, _roberta_tokenizer(), "BartForConditionalGeneration")


def _t5(folder: Path) -> Path:
    config = transformers.T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
    return write_model(folder, config, _bert_tokenizer(), "T5ForConditionalGeneration")


def _without_special_tokens(folder: Path) -> Path:
    tokenizer = _bert_like_fast_tokenizer(add_special_tokens=False)
    return write_model(folder, transformers.BertConfig(**_SIZES), tokenizer, "BertModel")


# For each, words of the reason that the user must be given.
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "gpt2": (_gpt2, "'gpt2'.*not a bidirectional encoder"),
    "bert-decoder": (partial(_bert, is_decoder=True), "not a bidirectional encoder"),
    "bart": (_bart, "'bart'.*not a bidirectional encoder"),
    "t5": (_t5, "'t5'.*not a bidirectional encoder"),
    "no-special-tokens": (_without_special_tokens, "puts no special tokens"),
    "funnel": (_funnel, "(?i)funnel"),
}
