"""Token ids -> pooled states of the layers asked for, running only the blocks that are needed.

How a state is found, for every architecture alike: **layer k is what block k + 1 is given, and the
last layer is what the model returns.** So a hook before each block sees all layers, final norms
and convolutions between blocks are where the model's own code puts them, and as soon as the highest
layer wanted has been seen, the pass ends. Each state is pooled when it is seen and then let go.

The hooks are installed once per loaded model and do nothing unless this module is running a pass
in the same thread (a context variable says so), so threads share a model without a lock. BERT and
its closest relatives run on a CPU in code of our own (``_fast_bert``), which hands out the same
layers.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ._batching import TextGroup, known_types
from ._pooling import Pooling, Reading
from .exceptions import SlowPathWarning, UnsupportedModelError, warn_caller

__all__ = ["Encoder", "HookedModel", "Runner", "free_memory"]

# Most padding in a batch on an accelerator, as a share of its tokens.
_MOST_PADDING = 0.1
# Tokens in a batch: on a CPU few, because batches of ever new sizes leave holes in the heap.
_BATCH_TOKENS, _BATCH_TOKENS_ON_CPU = 16384, 512
# Tokens after which the holes are given back.
_TOKENS_BETWEEN_TRIMS = 2**14

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


_Result = TypeVar("_Result")


class Runner(Protocol):
    """What computes states: ``HookedModel`` here, or ``FastBert``.

    Attributes
    ----------
    batch_tokens : int
        Most tokens in a batch unless the user says otherwise.
    spread : float
        How different the lengths in a batch may be, as ``plan_batches`` has it.
    one_at_a_time : bool
        Whether a text must be alone in its batch to keep its bits.
    """

    batch_tokens: int
    spread: float
    one_at_a_time: bool

    def run(self, groups: Sequence[TextGroup], highest: int, on_layer: Callable[..., None]) -> None:
        """Compute the layers up to `highest`, and hand each to `on_layer`.

        `on_layer` is called with the number of a layer, a list of the states of each group, of
        shape ``(n_texts, n_tokens, hidden_size)``, and None, or for the last layer of a model that
        has a pooler a function that returns its output, of shape ``(n_texts, hidden_size)``.
        """


class Encoder:
    """A loaded model, ready to give pooled states.

    Parameters
    ----------
    runner : Runner
        Computes states.
    device : torch.device
        Where it is.
    """

    def __init__(self, runner: Runner, device: torch.device) -> None:
        self.runner = runner
        self.device = device
        self.most_tokens = math.inf  # in a batch; less once the device ran out of memory

    def pooled_states(
        self, groups: Sequence[TextGroup], readings: Sequence[Reading]
    ) -> list[NDArray[np.float32]]:
        """Run one batch.

        Parameters
        ----------
        groups : sequence of TextGroup
            Texts, with lengths no more different than the runner's `spread` allows.
        readings : sequence of Reading
            What to read. A pooling that reads the pooler is for the last layer only.

        Returns
        -------
        list of ndarray of shape (n_texts, n_layers, hidden_size)
            For each reading, float32, on the host; texts in the order of the groups.
        """
        pieces = self._in_pieces(groups, lambda some: self._pooled_states(some, readings))
        if len(pieces) == 1:
            return pieces[0]
        return [np.concatenate(blocks) for blocks in zip(*pieces, strict=True)]

    def token_states(
        self, groups: Sequence[TextGroup], layers: Sequence[int]
    ) -> list[NDArray[np.float32]]:
        """Run one batch, and return the states of the tokens that count.

        Parameters
        ----------
        groups : sequence of TextGroup
            Texts, with lengths no more different than the runner's `spread` allows.
        layers : sequence of int
            Layers to read.

        Returns
        -------
        list of ndarray of shape (n_counted, n_layers, hidden_size)
            For each text in the order of the groups; float32, on the host.
        """
        pieces = self._in_pieces(groups, lambda some: self._token_states(some, layers))
        return [text for piece in pieces for text in piece]

    def _in_pieces(
        self, groups: Sequence[TextGroup], compute: Callable[[Sequence[TextGroup]], _Result]
    ) -> list[_Result]:
        """Compute a batch at once, or in as many pieces as memory and "same bits" ask for."""
        n_tokens = sum(group.ids.size for group in groups)
        n_texts = sum(len(group.ids) for group in groups)
        if n_texts == 1:
            return [compute(groups)]
        if n_tokens <= self.most_tokens and not self.runner.one_at_a_time:
            try:
                return [compute(groups)]
            except RuntimeError as error:
                if not _is_out_of_memory(error):
                    raise
            # not in the handler, which would keep the tensors of the failed pass alive
            self._expect_less_memory(n_tokens // 2)
        if len(groups) > 1:
            halves = [groups[: len(groups) // 2], groups[len(groups) // 2 :]]
        else:
            middle = len(groups[0].ids) // 2
            halves = [[groups[0][:middle]], [groups[0][middle:]]]
        return [result for half in halves for result in self._in_pieces(half, compute)]

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
        self, groups: Sequence[TextGroup], readings: Sequence[Reading]
    ) -> list[NDArray[np.float32]]:
        pooled: list[dict[int, Tensor]] = [{} for _ in readings]

        def on_layer(
            layer: int, states: Sequence[Tensor], pooler: Callable[[], Tensor] | None
        ) -> None:
            here = [position for position, r in enumerate(readings) if layer in r.layers]
            full = [group.float() for group in states] if here else []
            for position in here:
                pooling = readings[position].pooling
                pooled[position][layer] = (
                    _pool_output(pooling, pooler)
                    if pooling.reads == "pooler"
                    else _pool_all(full, groups, pooling)
                )

        highest = max(layer for reading in readings for layer in reading.layers)
        # whatever the caller's own torch code has switched on
        with torch.inference_mode(), torch.autocast(self.device.type, enabled=False):
            self.runner.run(groups, highest, on_layer)
            blocks = [
                torch.stack([vectors[layer] for layer in reading.layers], dim=1)
                for reading, vectors in zip(readings, pooled, strict=True)
            ]
        return [block.cpu().numpy() for block in blocks]

    def _token_states(
        self, groups: Sequence[TextGroup], layers: Sequence[int]
    ) -> list[NDArray[np.float32]]:
        seen: dict[int, list[Tensor]] = {}

        def on_layer(layer: int, states: Sequence[Tensor], _: object) -> None:
            if layer in layers:
                pairs = zip(states, groups, strict=True)
                seen[layer] = [h[:, group.counted].float() for h, group in pairs]

        with torch.inference_mode(), torch.autocast(self.device.type, enabled=False):
            self.runner.run(groups, max(layers), on_layer)
            by_group = zip(*(seen[layer] for layer in layers), strict=True)
            stacked = [torch.stack(states, dim=2).cpu().numpy() for states in by_group]
        return [text for group in stacked for text in group]


class HookedModel:
    """A model in transformers' own code, watched by hooks.

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
        on_cpu = self.device.type == "cpu"
        # Padding costs bits; an accelerator has none to keep, and is slow with small batches. But a
        # model can look at padding in spite of the mask: MobileBERT at a token's right neighbour.
        may_pad = not on_cpu and model.config.model_type in TESTED_FAMILIES
        self.spread = _MOST_PADDING if may_pad else 0.0
        self.batch_tokens = _BATCH_TOKENS_ON_CPU if on_cpu else _BATCH_TOKENS
        self.tokens_since_trim = 0
        # "eager" attention multiplies strided heads; alone in its batch a text gets other bits
        self.pad_id = getattr(model.config, "pad_token_id", None) or 0
        self.n_types = max(
            (
                module.num_embeddings
                for name, module in model.named_modules()
                if name.endswith("token_type_embeddings") and isinstance(module, nn.Embedding)
            ),
            default=0,
        )
        self.needs_two_rows = model.config._attn_implementation == "eager"
        self.one_at_a_time = False
        blocks = find_blocks(model, n_layers)
        for block in blocks:
            block.register_forward_pre_hook(_before_block, with_kwargs=True)
        self.sees_blocks = bool(blocks)
        if model.config.model_type not in TESTED_FAMILIES:
            self._compare_with_transformers()
        if self.needs_two_rows and on_cpu:
            self.one_at_a_time = not self._rows_keep_their_bits()

    def run(self, groups: Sequence[TextGroup], highest: int, on_layer: Callable[..., None]) -> None:
        """Compute the layers up to `highest`, and hand each to `on_layer`, as ``FastBert`` does."""

        def split(layer: int, states: Tensor, pooler_output: Tensor | None = None) -> None:
            n_texts = [len(group.ids) for group in groups]
            by_group = [
                part[:, : group.ids.shape[1]]
                for part, group in zip(states[: sum(n_texts)].split(n_texts), groups, strict=True)
            ]
            output = None if pooler_output is None else pooler_output[: sum(n_texts)]
            on_layer(layer, by_group, None if output is None else lambda: output)

        self._watch(self._inputs(groups), highest, split)
        self.tokens_since_trim += sum(group.ids.size for group in groups)
        if self.tokens_since_trim >= _TOKENS_BETWEEN_TRIMS and self.device.type == "cpu":
            self.tokens_since_trim = 0
            free_memory(self.device)

    def _inputs(self, groups: Sequence[TextGroup]) -> dict[str, Tensor]:
        """Return the arguments of the model: the texts of all groups, padded if need be."""
        longest = max(group.ids.shape[1] for group in groups)
        inputs = {"input_ids": _padded([group.ids for group in groups], longest, self.pad_id)}
        types = known_types(groups, self.n_types)
        if types is not None:
            inputs["token_type_ids"] = _padded(types, longest, 0)
        if any(group.ids.shape[1] < longest for group in groups):
            mask = [np.ones_like(group.ids) for group in groups]
            inputs["attention_mask"] = _padded(mask, longest, 0)
        if self.needs_two_rows and len(inputs["input_ids"]) == 1:
            inputs = {name: array.repeat(2, axis=0) for name, array in inputs.items()}
        return {name: torch.from_numpy(array).to(self.device) for name, array in inputs.items()}

    @torch.inference_mode()
    def _watch(
        self, inputs: dict[str, Tensor], highest: int, on_layer: Callable[..., None]
    ) -> None:
        """Run the model up to a layer, and call `on_layer` with each layer's states."""
        if not self.sees_blocks:
            return self._run_whole(inputs, on_layer)
        # the last layer is what the model returns, so there is nothing to stop at before it
        current = _Pass(on_layer, highest if highest < self.n_layers else -1)
        token = _current_pass.set(current)
        try:
            output = self.model(**inputs)
        except _HighestLayerReached:
            return None
        finally:
            _current_pass.reset(token)
        on_layer(self.n_layers, output.last_hidden_state, output.get("pooler_output"))
        return None

    def _run_whole(self, inputs: dict[str, Tensor], on_layer: Callable[..., None]) -> None:
        output = self.model(**inputs, output_hidden_states=True)
        if len(output.hidden_states) != self.n_layers + 1:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has {self.n_layers} blocks but returns "
                f"{len(output.hidden_states)} hidden states; its layers cannot be numbered."
            )
        for layer, states in enumerate(output.hidden_states):
            on_layer(layer, states, output.get("pooler_output"))

    def _layers_of(self, ids: Tensor) -> list[Tensor]:
        layers: list[Tensor] = []
        self._watch({"input_ids": ids}, self.n_layers, lambda k, h, _=None: layers.append(h))
        return layers

    def _rows_keep_their_bits(self) -> bool:
        """Whether a text has the same bits in every row of a batch.

        Kernels for small matrices can depend on where in memory a matrix begins, which depends on
        the number of heads and tokens.
        """
        longest = getattr(self.model.config, "max_position_embeddings", 31) - 4
        for n_tokens in (n for n in (3, 5, 7, 9, 11, 13, 17, 31) if n <= longest):
            ids = torch.arange(n_tokens) % (self.model.config.vocab_size - 1) + 1
            two, many = self._layers_of(ids.repeat(2, 1)), self._layers_of(ids.repeat(23, 1))
            if not all(torch.equal(a[:1].expand_as(b), b) for a, b in zip(two, many, strict=True)):
                return False
        return True

    def _compare_with_transformers(self) -> None:
        ids = torch.arange(8, device=self.device).reshape(2, 4) % 4 + 1
        whole: list[Tensor] = []
        with torch.inference_mode():
            self._run_whole({"input_ids": ids}, lambda k, h, _=None: whole.append(h))
        seen = self._layers_of(ids)
        if len(whole) != len(seen) or not all(
            ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3)
            for ours, theirs in zip(seen, whole, strict=True)
        ):
            self.sees_blocks = False
        if not self.sees_blocks:
            warn_caller(
                f"The blocks of {type(self.model).__name__} could not be told apart; all of them "
                "run whatever layer is asked for. Results are right, but lower layers cost as "
                "much as the last.",
                SlowPathWarning,
            )


def _padded(arrays: Sequence[NDArray[np.int64]], width: int, value: int) -> NDArray[np.int64]:
    """Stack arrays of shape ``(n_texts, n_tokens)``, filled up on the right to `width`."""
    wide = [np.pad(a, ((0, 0), (0, width - a.shape[1])), constant_values=value) for a in arrays]
    return np.concatenate(wide)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device had no memory left, for which MPS has no exception of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "MPS backend out of memory" in str(error)


def free_memory(device: torch.device) -> None:
    """Give back the memory of a device that is held in reserve: by torch, or glibc on a CPU."""
    if device.type != "cpu":
        getattr(torch, device.type).empty_cache()
    elif sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


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


def _pool_output(pooling: Pooling, output: Callable[[], Tensor] | None) -> Tensor:
    if output is None:
        raise ValueError(f"pooling {pooling.name!r} needs the output of the model's pooler.")
    return pooling.reduce(output().float())


def _pool_all(states: Sequence[Tensor], groups: Sequence[TextGroup], pooling: Pooling) -> Tensor:
    """Reduce the states of all groups to ``(n_texts, hidden_size)``."""
    vectors = [_pool(h, group.counted, pooling) for h, group in zip(states, groups, strict=True)]
    return vectors[0] if len(vectors) == 1 else torch.cat(vectors)


def _pool(states: Tensor, counted: slice | list[int], pooling: Pooling) -> Tensor:
    """Reduce states of shape ``(n_texts, n_tokens, hidden_size)`` to ``(n_texts, hidden_size)``."""
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
    # a part of the states would keep all of them alive until the last layer is pooled
    is_part = vectors.untyped_storage().nbytes() > vectors.nbytes
    return vectors.clone() if is_part else vectors
