"""BERT and its closest relatives on a CPU, computed on rows of tokens.

All that a block does except attention treats each token by itself. So the tokens of texts of any
lengths are the rows of one matrix, without padding; only attention goes through the texts, length
by length. A block is four matrix products on packed weights (queries, keys and values are one;
GELU and the residual sums come with them), an attention and two norms. Each keeps "same text, same
bits": what computes a row depends on its text's length and on the precision, never on the other
rows. That is why a few rows of zeros at the end, which belong to no text, can make the number of
rows one that ``PackedLinear`` takes as it is.

What a model's parts are called is all that differs between these families: see ``_LAYOUTS``.
A model of another make runs in transformers' own code (``_forward``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation

from ._batching import TextGroup, known_types
from ._packed_linear import PackedLinear, packing_works, pad_rows, padded_height

__all__ = ["Block", "DistanceBias", "Embeddings", "FastBert", "fast_bert"]

# Lengths from which attention is computed in tiles, by torch's scaled_dot_product_attention, and
# not in three products of whole matrices: where it is faster, or those would take much memory.
# In float32 and without the registers of AVX-512 all lengths are: only full batches of a few tokens
# a text would gain by whole matrices.
_LONG = {torch.float32: 80, torch.bfloat16: 1024}
# Texts whose attention is computed together in half precision, and the most tokens they have.
_TOGETHER, _MOST_TOGETHER = (16, 4, 1), 1024


class FastBert(nn.Module):
    """A BERT-like encoder for inference on a CPU.

    Parameters
    ----------
    embeddings : Embeddings
        Token ids to the first layer.
    blocks : sequence of Block
        The transformer.
    pooler : nn.Linear or None
        Dense layer of the pooler.
    distances : DistanceBias or None
        What attention adds for the distance of two tokens.
    """

    batch_tokens = 2048  # larger batches gain next to nothing and take memory
    spread = math.inf  # texts of any lengths may share a batch
    one_at_a_time = False

    def __init__(
        self,
        embeddings: Embeddings,
        blocks: Sequence[Block],
        pooler: nn.Linear | None,
        distances: DistanceBias | None,
    ) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.blocks = nn.ModuleList(blocks)
        self.pooler = None if pooler is None else PackedLinear(pooler)
        self.distances = distances

    def run(self, groups: Sequence[TextGroup], highest: int, on_layer: Callable[..., None]) -> None:
        """Compute the layers up to `highest`, and hand each to `on_layer` (see ``Runner``)."""
        shapes = [group.ids.shape for group in groups]
        biases = [
            None if self.distances is None else self.distances(n_tokens) for _, n_tokens in shapes
        ]
        rows = self.embeddings(groups)
        on_layer(0, _by_group(rows, shapes), None)
        for layer, block in enumerate(self.blocks[:highest], start=1):
            rows = block(rows, shapes, biases)
            states = _by_group(rows, shapes)
            output = None
            if layer == len(self.blocks) and self.pooler is not None:
                output = partial(_pool, states, self.pooler)
            on_layer(layer, states, output)


class Embeddings(nn.Module):
    """Sum of word, token type and position embeddings, normed (and projected, in ELECTRA).

    Parameters
    ----------
    original : nn.Module
        Embeddings of transformers.
    projection : nn.Linear or None
        From the size of an embedding to that of a state.
    """

    def __init__(self, original: Any, projection: nn.Linear | None) -> None:
        super().__init__()
        self.words = original.word_embeddings
        self.types = getattr(original, "token_type_embeddings", None)
        self.positions = original.position_embeddings
        self.norm = original.LayerNorm
        self.projection = None if projection is None else PackedLinear(projection)

    def forward(self, groups: Sequence[TextGroup]) -> Tensor:
        """Return the rows of all tokens and of padding, of shape ``(height, hidden_size)``."""
        rows = torch.cat([self._embed(group) for group in groups])
        rows = pad_rows(rows, padded_height(len(rows)))
        return rows if self.projection is None else self.projection(rows)

    def _embed(self, group: TextGroup) -> Tensor:
        ids = torch.from_numpy(group.ids)
        rows = self.words(ids)
        if self.types is not None:
            types = known_types([group], self.types.num_embeddings)
            rows = rows + (
                self.types.weight[0] if types is None else self.types(torch.from_numpy(types[0]))
            )
        return self.norm((rows + self._positions(ids)).flatten(0, 1))

    def _positions(self, ids: Tensor) -> Tensor:
        """Return position embeddings, of ``(n_tokens, size)`` or ``(n_texts, n_tokens, size)``."""
        padding = self.positions.padding_idx
        if padding is None:
            return self.positions.weight[: ids.shape[1]]
        # RoBERTa and its relatives number positions from padding_idx + 1 on
        if not (ids == padding).any():
            return self.positions.weight[padding + 1 : padding + 1 + ids.shape[1]]
        # and do not count a token of that id, which an unknown piece of a text can be
        is_token = ids != padding
        return self.positions(is_token.cumsum(dim=1) * is_token + padding)


class DistanceBias(nn.Module):
    """What is added to the scores of attention for how far apart two tokens are, as in MPNet.

    Parameters
    ----------
    encoder : nn.Module
        Encoder of transformers' MPNet.
    longest : int
        Most tokens in a text.
    """

    def __init__(self, encoder: Any, longest: int) -> None:
        super().__init__()
        buckets = encoder.relative_position_bucket(torch.arange(1 - longest, longest))
        by_distance = encoder.relative_attention_bias.weight.detach()[buckets].T.contiguous()
        self.by_distance: Tensor
        self.register_buffer("by_distance", by_distance)
        self.longest = longest

    def forward(self, n_tokens: int) -> Tensor:
        """Return the bias of shape ``(n_heads, n_tokens, n_tokens)``, queries before keys."""
        first = self.longest - n_tokens
        distances = self.by_distance[:, first : first + 2 * n_tokens - 1]
        # the last query's keys have the smallest distances, and each one before it one more
        return distances.unfold(1, n_tokens, 1).flip(1)


class Block(nn.Module):
    """One transformer block with norms after its residual sums.

    Parameters
    ----------
    query, key, value, attention_output, intermediate, output : nn.Linear
        Its linear layers.
    attention_norm, output_norm : nn.LayerNorm
        Its norms.
    n_heads : int
        Number of attention heads.
    """

    def __init__(
        self,
        *,
        query: nn.Linear,
        key: nn.Linear,
        value: nn.Linear,
        attention_output: nn.Linear,
        attention_norm: nn.LayerNorm,
        intermediate: nn.Linear,
        output: nn.Linear,
        output_norm: nn.LayerNorm,
        n_heads: int,
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.query_key_value = PackedLinear(_side_by_side(query, key, value))
        self.attention_output = PackedLinear(attention_output)
        self.attention_norm = attention_norm
        self.intermediate = PackedLinear(intermediate, activation="gelu")
        self.output = PackedLinear(output)
        self.output_norm = output_norm

    def forward(
        self, rows: Tensor, shapes: Sequence[tuple[int, ...]], biases: Sequence[Tensor | None]
    ) -> Tensor:
        """Compute the next layer of `rows`, groups of ``(n_texts, n_tokens)`` and padding."""
        attended = _attend(self.query_key_value(rows), shapes, biases, self.n_heads)
        rows = self.attention_norm(self.attention_output(attended, add=rows))
        return self.output_norm(self.output(self.intermediate(rows), add=rows))


def _side_by_side(*linears: nn.Linear) -> nn.Linear:
    """Return one layer whose output is that of several, concatenated."""
    n_out = sum(linear.out_features for linear in linears)
    joined = nn.Linear(linears[0].in_features, n_out, device="meta")
    joined.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), False)
    joined.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]), False)
    return joined


def _pool(states: Sequence[Tensor], dense: nn.Module) -> Tensor:
    """Return the pooler output of all texts: of their first tokens, dense and tanh."""
    return torch.tanh(dense(torch.cat([group[:, 0] for group in states])))


def _by_group(rows: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """View rows of tokens as one tensor of shape ``(n_texts, n_tokens, size)`` per group."""
    by_group, first = [], 0
    for n_texts, n_tokens in shapes:
        stop = first + n_texts * n_tokens
        by_group.append(rows[first:stop].view(n_texts, n_tokens, -1))
        first = stop
    return by_group


def _attend(
    rows: Tensor,
    shapes: Sequence[tuple[int, ...]],
    biases: Sequence[Tensor | None],
    n_heads: int,
) -> Tensor:
    """Let the tokens of each text attend to each other.

    Parameters
    ----------
    rows : Tensor of shape (height, 3 * hidden_size)
        Queries, keys and values of each token, and padding.
    shapes : sequence of (n_texts, n_tokens)
        Of the groups that the rows are made of.
    biases : sequence of Tensor of shape (n_heads, n_tokens, n_tokens) or None
        What is added to the scores of each group.
    n_heads : int
        Number of heads.

    Returns
    -------
    Tensor of shape (height, hidden_size)
        Weighted sums of values, and padding.
    """
    attended = []
    for group, bias in zip(_by_group(rows, shapes), biases, strict=True):
        n_texts, n_tokens, size = group.shape
        heads = group.view(n_texts, n_tokens, 3, n_heads, size // (3 * n_heads))
        attention = _attention_for(n_tokens, rows.dtype)
        attended.append(attention(heads, bias).view(n_texts * n_tokens, -1))
    n_padding = len(rows) - sum(map(len, attended))
    if n_padding:
        attended.append(rows.new_zeros(n_padding, attended[0].shape[1]))
    return attended[0] if len(attended) == 1 else torch.cat(attended)


def _attention_for(n_tokens: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return the fastest way for texts of `n_tokens`: "same bits" allows no other reason."""
    in_tiles = dtype == torch.float32 and _register_bytes() < 64
    if in_tiles or n_tokens >= _LONG[dtype]:
        return _flash
    # matrices so small that a product in half precision takes longer to prepare than to compute
    is_small = n_tokens * dtype.itemsize < _register_bytes()
    return _matrix_products if dtype == torch.float32 or is_small else _half_products


def _flash(heads: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention in tiles, for long texts."""
    query, key, value = heads.permute(2, 0, 3, 1, 4)
    bias = None if bias is None else bias.expand(len(heads), *bias.shape)
    attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    return attended.transpose(1, 2).flatten(2)


def _matrix_products(heads: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention as softmax(Q K^T / sqrt(d)) V of whole matrices in float32, for short texts.

    The operands are contiguous: products of strided ones give other bits to a text alone.
    """
    n_texts, n_tokens, _, n_heads, size = heads.shape
    heads_first = heads.permute(2, 0, 3, 1, 4).to(
        torch.float32, memory_format=torch.contiguous_format
    )
    query, key, value = heads_first.reshape(3, -1, n_tokens, size)
    unused = query.new_empty(())
    scale = 1 / math.sqrt(size)
    if n_tokens * query.element_size() < _register_bytes():
        # softmax along rows that do not fill a register is slow, so it is taken along columns
        scores = torch.baddbmm(unused, key, query.transpose(1, 2), beta=0, alpha=scale)
        _add(bias, scores.transpose(1, 2))
        weights = scores.softmax(dim=1).transpose(1, 2)
    else:
        scores = torch.baddbmm(unused, query, key.transpose(1, 2), beta=0, alpha=scale)
        _add(bias, scores)
        weights = scores.softmax(dim=2)
    attended = torch.bmm(weights, value).view(n_texts, n_heads, n_tokens, size)
    return attended.transpose(1, 2).to(heads.dtype).flatten(2)


def _half_products(heads: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention in products of whole matrices in half precision, a few texts at a time.

    The scores of a few texts stay in the processor's cache. And oneDNN makes a kernel for every
    shape it meets and keeps it, which takes more than a megabyte; so matrices have one of a few
    shapes. What fills them up is masked.
    """
    n_texts, n_tokens, _, n_heads, size = heads.shape
    step = 8 if n_tokens < 128 else 16
    width = -(-n_tokens // step) * step
    heads_first = heads.new_empty(3, n_texts, n_heads, width, size)
    heads_first[..., :n_tokens, :] = heads.permute(2, 0, 3, 1, 4)
    heads_first[..., n_tokens:, :] = 0
    query, key, value = heads_first.flatten(1, 2)
    pieces = list(_few_at_a_time(n_texts, n_tokens))
    room = heads.new_empty(pieces[0] * n_heads, width, width)
    attended, unused = torch.empty_like(query), query.new_empty(())
    first = 0
    for piece in pieces:
        some = slice(first, first + piece * n_heads)
        scores, keys = room[: piece * n_heads], key[some].transpose(1, 2)
        torch.baddbmm(unused, query[some], keys, beta=0, alpha=1 / math.sqrt(size), out=scores)
        _add(bias, scores[:, :n_tokens, :n_tokens])
        scores[:, :, n_tokens:] = -math.inf
        torch.softmax(scores, 2, out=scores)
        torch.bmm(scores, value[some], out=attended[some])
        first = some.stop
    attended = attended.view(n_texts, n_heads, width, size)[:, :, :n_tokens]
    return attended.transpose(1, 2).flatten(2)


def _add(bias: Tensor | None, scores: Tensor) -> None:
    """Add a bias of each head to the scores of all texts, of ``(n_texts * n_heads, ...)``."""
    if bias is not None:
        scores.unflatten(0, (-1, len(bias))).add_(bias)


def _few_at_a_time(n_texts: int, n_tokens: int) -> Iterator[int]:
    """Yield how many texts go together, until all have gone."""
    for together in _TOGETHER:
        while together <= n_texts and together * n_tokens <= _MOST_TOGETHER:
            yield together
            n_texts -= together


@cache
def _register_bytes() -> int:
    """Size of the registers that torch's elementwise code uses here."""
    return 64 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 32


# Where the parts of a block are, by the type of the model.
_BERT = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}
_DISTILBERT = {
    "query": "attention.q_lin",
    "key": "attention.k_lin",
    "value": "attention.v_lin",
    "attention_output": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "intermediate": "ffn.lin1",
    "output": "ffn.lin2",
    "output_norm": "output_layer_norm",
}
_MPNET = {
    **_BERT,
    "query": "attention.attn.q",
    "key": "attention.attn.k",
    "value": "attention.attn.v",
    "attention_output": "attention.attn.o",
    "attention_norm": "attention.LayerNorm",
}
_LAYOUTS = {
    **dict.fromkeys(
        ("bert", "camembert", "electra", "roberta", "xlm-roberta"),
        ("encoder.layer", _BERT, "intermediate.intermediate_act_fn"),
    ),
    "distilbert": ("transformer.layer", _DISTILBERT, "ffn.activation"),
    "mpnet": ("encoder.layer", _MPNET, "intermediate.intermediate_act_fn"),
}


def fast_bert(model: Any, dtype: torch.dtype) -> FastBert | None:
    """Build a fast copy of a model of transformers.

    Parameters
    ----------
    model : PreTrainedModel
        On the CPU, in `dtype`.
    dtype : torch.dtype
        Type of its weights.

    Returns
    -------
    FastBert or None
        None if the model is of another make, or this machine lacks the kernels.
    """
    config = model.config
    if config.model_type not in _LAYOUTS or not packing_works(dtype):
        return None
    where, names, activation = _LAYOUTS[config.model_type]
    blocks = list(attrgetter(where)(model))
    n_heads, hidden_size = config.num_attention_heads, config.hidden_size
    # other shapes of heads were seen to give other bits to a text alone
    keeps_bits = n_heads > 1 and hidden_size % (16 * n_heads) == 0
    if not keeps_bits or type(attrgetter(activation)(blocks[0])) is not GELUActivation:
        return None
    pooler = getattr(model, "pooler", None)
    is_mpnet = config.model_type == "mpnet"
    return FastBert(
        Embeddings(model.embeddings, getattr(model, "embeddings_project", None)),
        [
            Block(**{part: attrgetter(name)(b) for part, name in names.items()}, n_heads=n_heads)
            for b in blocks
        ],
        None if pooler is None else pooler.dense,
        DistanceBias(model.encoder, config.max_position_embeddings) if is_mpnet else None,
    )
