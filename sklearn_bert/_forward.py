"""Token ids -> pooled states of the layers asked for, running only the blocks that are needed.

How a state is found, for every architecture alike: **layer k is what block k + 1 is given, and the
last layer is what the model returns.** So a hook before each block sees all layers, final norms
and convolutions between blocks are where the model's own code puts them, and as soon as the highest
layer wanted has been seen, the pass ends. Each state is pooled when it is seen and then let go.

The hooks are installed once per loaded model and do nothing unless this module is running a pass
in the same thread (a context variable says so), so threads share a model without a lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ._pooling import Pooling, Reading
from .exceptions import SlowPathWarning, UnsupportedModelError, warn_caller

__all__ = ["Encoder", "free_memory"]

# Families whose layout the tests compare with transformers' own hidden states. Another one is
# compared once when it is loaded.
TESTED_FAMILIES = frozenset(
    {
        "albert",
        "bert",
        "deberta-v2",
        "distilbert",
        "electra",
        "modernbert",
        "mpnet",
        "roberta",
        "xlm-roberta",
    }
)


class _HighestLayerReached(Exception):  # noqa: N818 - a signal, not an error
    """Leaves the model's forward once the highest layer wanted has been seen."""


@dataclass
class _Pass:
    """One forward pass under way: which layers it wants and how many it has seen."""

    on_layer: Callable[[int, Tensor], None]
    highest: int
    n_seen: int = 0

    def see(self, states: Tensor) -> None:
        layer = self.n_seen
        self.n_seen += 1
        self.on_layer(layer, states)
        if layer == self.highest:
            raise _HighestLayerReached


_current_pass: ContextVar[_Pass | None] = ContextVar("sklearn_bert_pass", default=None)


def _before_block(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    current = _current_pass.get()
    if current is not None:
        current.see(args[0] if args else kwargs["hidden_states"])


class Encoder:
    """A loaded model, ready to give pooled states.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode, on its device. Its blocks get hooks.
    n_layers : int
        Number of its blocks.
    """

    def __init__(self, model: Any, n_layers: int) -> None:
        self.model = model
        self.n_layers = n_layers
        self.device: torch.device = model.device
        self.most_tokens = math.inf  # in a batch; less once the device ran out of memory
        # "eager" attention multiplies strided heads; alone in its batch a text gets other bits
        self.needs_two_rows = model.config._attn_implementation == "eager"
        self.one_at_a_time = False
        blocks = find_blocks(model, n_layers)
        for block in blocks:
            block.register_forward_pre_hook(_before_block, with_kwargs=True)
        self.sees_blocks = bool(blocks)
        if model.config.model_type not in TESTED_FAMILIES:
            self._compare_with_transformers()
        if self.needs_two_rows and self.device.type == "cpu":
            self.one_at_a_time = not self._rows_keep_their_bits()

    def _rows_keep_their_bits(self) -> bool:
        """Whether a text has the same bits in every row of a batch.

        Kernels for small matrices can depend on where in memory a matrix begins, which depends on
        the number of heads and tokens.
        """
        longest = getattr(self.model.config, "max_position_embeddings", 31) - 4
        for n_tokens in (n for n in (3, 5, 7, 9, 11, 13, 17, 31) if n <= longest):
            ids = torch.arange(n_tokens) % (self.model.config.vocab_size - 1) + 1
            two: list[Tensor] = []
            many: list[Tensor] = []
            self._run(ids.repeat(2, 1), self.n_layers, lambda k, h, _=None, two=two: two.append(h))
            self._run(
                ids.repeat(23, 1), self.n_layers, lambda k, h, _=None, many=many: many.append(h)
            )
            if not all(torch.equal(a[:1].expand_as(b), b) for a, b in zip(two, many, strict=True)):
                return False
        return True

    def pooled_states(
        self, ids: NDArray[np.int64], counted: slice, readings: Sequence[Reading]
    ) -> list[NDArray[np.float32]]:
        """Run one batch of texts of equal length.

        Parameters
        ----------
        ids : ndarray of shape (n_texts, n_tokens)
            Token ids.
        counted : slice
            Positions that poolings which read "counted" tokens are given.
        readings : sequence of Reading
            What to read. A pooling that reads the pooler is for the last layer only.

        Returns
        -------
        list of ndarray of shape (n_texts, n_layers, hidden_size)
            For each reading, float32, on the host.
        """
        if ids.size > self.most_tokens and len(ids) > 1:
            return self._in_halves(ids, counted, readings)
        try:
            return self._pooled_states(ids, counted, readings)
        except torch.OutOfMemoryError:
            if len(ids) == 1:
                raise
            self._expect_less_memory(ids.size // 2)
        return self._in_halves(ids, counted, readings)

    def _in_halves(
        self, ids: NDArray[np.int64], counted: slice, readings: Sequence[Reading]
    ) -> list[NDArray[np.float32]]:
        halves = [self.pooled_states(half, counted, readings) for half in np.array_split(ids, 2)]
        return [np.concatenate(blocks) for blocks in zip(*halves, strict=True)]

    def _expect_less_memory(self, most_tokens: int) -> None:
        """Remember what did not fit, warn the first time, and free what the failed pass left."""
        first = self.most_tokens == math.inf
        self.most_tokens = min(self.most_tokens, most_tokens)
        if first:
            warn_caller(
                f"{self.device} is out of memory; batches are made smaller. Set batch_tokens to "
                f"{most_tokens} or less to avoid the attempt.",
                SlowPathWarning,
            )
        free_memory(self.device)

    def _pooled_states(
        self, ids: NDArray[np.int64], counted: slice, readings: Sequence[Reading]
    ) -> list[NDArray[np.float32]]:
        n_texts = len(ids)
        if n_texts > 1 and self.one_at_a_time:
            rows = [self.pooled_states(ids[i : i + 1], counted, readings) for i in range(n_texts)]
            return [np.concatenate(blocks) for blocks in zip(*rows, strict=True)]
        if n_texts == 1 and self.needs_two_rows:
            ids = np.repeat(ids, 2, axis=0)
        pooled: list[dict[int, Tensor]] = [{} for _ in readings]

        def on_layer(layer: int, states: Tensor, pooler_output: Tensor | None = None) -> None:
            here = [position for position, r in enumerate(readings) if layer in r.layers]
            states = states.float() if here else states
            for position in here:
                pooling = readings[position].pooling
                pooled[position][layer] = _pool(states, counted, pooling, pooler_output)

        highest = max(layer for reading in readings for layer in reading.layers)
        # whatever the caller's own torch code has switched on
        with torch.autocast(self.device.type, enabled=False):
            self._run(torch.from_numpy(ids).to(self.device), highest, on_layer)
        blocks = [
            torch.stack([vectors[layer] for layer in reading.layers], dim=1)
            for reading, vectors in zip(readings, pooled, strict=True)
        ]
        return [block[:n_texts].cpu().numpy() for block in blocks]

    @torch.inference_mode()
    def _run(self, ids: Tensor, highest: int, on_layer: Callable[..., None]) -> None:
        if not self.sees_blocks:
            return self._run_whole(ids, on_layer)
        # the last layer is what the model returns, so there is nothing to stop at before it
        current = _Pass(on_layer, highest if highest < self.n_layers else -1)
        token = _current_pass.set(current)
        try:
            output = self.model(ids)
        except _HighestLayerReached:
            return None
        finally:
            _current_pass.reset(token)
        on_layer(self.n_layers, output.last_hidden_state, output.get("pooler_output"))
        return None

    def _run_whole(self, ids: Tensor, on_layer: Callable[..., None]) -> None:
        output = self.model(ids, output_hidden_states=True)
        if len(output.hidden_states) != self.n_layers + 1:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has {self.n_layers} blocks but returns "
                f"{len(output.hidden_states)} hidden states; its layers cannot be numbered."
            )
        for layer, states in enumerate(output.hidden_states):
            on_layer(layer, states, output.get("pooler_output"))

    def _compare_with_transformers(self) -> None:
        ids = torch.arange(8, device=self.device).reshape(2, 4) % 4 + 1
        whole: dict[int, Tensor] = {}
        seen: dict[int, Tensor] = {}
        with torch.inference_mode():
            self._run_whole(ids, lambda layer, states, _=None: whole.update({layer: states}))
        self._run(ids, self.n_layers, lambda layer, states, _=None: seen.update({layer: states}))
        if whole.keys() != seen.keys() or not all(
            whole[layer].shape == seen[layer].shape
            and torch.allclose(whole[layer], seen[layer], atol=1e-3, rtol=1e-3)
            for layer in whole
        ):
            self.sees_blocks = False
        if not self.sees_blocks:
            warn_caller(
                f"The blocks of {type(self.model).__name__} could not be told apart; all of them "
                "run whatever layer is asked for. Results are right, but lower layers cost as "
                "much as the last.",
                SlowPathWarning,
            )


def free_memory(device: torch.device) -> None:
    """Return the memory that torch holds in reserve for a device, if it does."""
    if device.type != "cpu":
        getattr(torch, device.type).empty_cache()


def find_blocks(model: Any, n_layers: int) -> list[nn.Module]:
    """Find the modules whose inputs are the layers of `model`; empty if they cannot be told."""
    recorded = (getattr(model, "_can_record_outputs", None) or {}).get("hidden_states")
    if isinstance(recorded, type) and issubclass(recorded, nn.Module):
        return [module for module in model.modules() if isinstance(module, recorded)]
    lists = [
        list(module.children())
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == n_layers
    ]
    return lists[0] if len(lists) == 1 else []


def _pool(states: Tensor, counted: slice, pooling: Pooling, pooler_output: Tensor | None) -> Tensor:
    """Reduce states of shape (n_texts, n_tokens, hidden_size) to (n_texts, hidden_size)."""
    if pooling.reads == "pooler":
        if pooler_output is None:
            raise ValueError(f"pooling {pooling.name!r} needs the output of the model's pooler.")
        return pooling.reduce(pooler_output.float())
    tokens = states[:, counted] if pooling.reads == "counted" else states
    if tokens.shape[1] == 0:
        # nothing to pool (an empty text without its special tokens): zeros, whatever the pooling
        return torch.zeros_like(states[:, 0])
    vectors = pooling.reduce(tokens)
    if vectors.shape != states[:, 0].shape:
        raise ValueError(
            f"pooling {pooling.name!r} returned shape {tuple(vectors.shape)} for "
            f"{tuple(tokens.shape)}; expected {tuple(states[:, 0].shape)}."
        )
    return vectors
