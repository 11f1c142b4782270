"""Files of a model -> what ``fit`` must know of it, its tokenizer, its weights ready to run.

Everything that a folder says is checked here before it is believed: that it describes a
bidirectional encoder that transformers has code for, that weights, tokenizer and description
belong together, and that no part of it asks for more memory than its weights could need. No code
from a folder is run.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from ._fast_bert import fast_bert
from ._forward import Encoder, HookedModel
from ._model_files import ModelFolder, weight_shapes
from ._packed_linear import packing_works, stabilize_activations, stabilize_linears
from ._tokenization import (
    TextTokenizer,
    find_pair_tokens,
    find_special_tokens,
    stateless_tokenizer,
)
from .exceptions import ModelFilesError, UnsupportedModelError

__all__ = ["ModelFacts", "inspect_folder", "load_encoder", "load_tokenizer"]

# Tokenizers without a limit record about 1e30 here.
_NO_LIMIT = 10**9
# A description may ask for a pooler that is not in the files, and for weights that are tied, but
# not for many times what is there.
_SPARE_TENSORS = 100
_SPARE_FACTOR = 2
# transformers writes a name for each of them.
_MOST_LABELS = 100_000


@dataclass(frozen=True)
class ModelFacts:
    """What ``fit`` must know of a model; found without loading its weights.

    Attributes
    ----------
    model_type : str
        Family, as in ``config.json``.
    n_layers, hidden_size : int
        Number of blocks; length of a state.
    max_length : int
        Tokens the model is meant for: the smaller of the tokenizer's and the position table's.
    position_limit : int
        Tokens the model can take at all.
    n_special_tokens : int
        Special tokens around a text.
    n_pair_tokens : int or None
        Special tokens around and between two texts; None if the tokenizer takes no pairs.
    has_pooler : bool
        Whether the checkpoint has weights for the pooler.
    """

    model_type: str
    n_layers: int
    hidden_size: int
    max_length: int
    position_limit: int
    n_special_tokens: int
    n_pair_tokens: int | None
    has_pooler: bool


def inspect_folder(folder: ModelFolder) -> tuple[ModelFacts, TextTokenizer]:
    """Check that features can be had from the model in a folder, without keeping its weights."""
    config = _load_config(folder)
    shapes = weight_shapes(folder.path)
    skeleton = _skeleton(config, folder, len(shapes))
    missing = _missing_weights(skeleton, shapes, folder)
    if any(not name.startswith("pooler.") for name in missing):
        # the names may only be spelled in a way that transformers knows how to read: ask it
        _refuse_larger(skeleton, shapes, folder)
        missing = _load_weights(folder)[1]
    tokenizer = load_tokenizer(folder)
    n_embeddings = getattr(skeleton.get_input_embeddings(), "num_embeddings", None)
    if n_embeddings is None:
        raise UnsupportedModelError(
            f"a model of type {config.model_type!r} has no table of token embeddings."
        )
    highest_id = max(tokenizer.backend.get_vocab(with_added_tokens=True).values())
    if highest_id >= n_embeddings:
        raise UnsupportedModelError(
            f"the tokenizer in {folder.path} has ids up to {highest_id}, but the model has only "
            f"{n_embeddings} embeddings; the two do not belong together."
        )
    position_limit = _position_limit(skeleton)
    facts = ModelFacts(
        model_type=config.model_type,
        n_layers=_count_layers(config),
        hidden_size=config.hidden_size,
        max_length=min(tokenizer.recorded_length or position_limit, position_limit),
        position_limit=position_limit,
        n_special_tokens=len(tokenizer.special_tokens),
        n_pair_tokens=None if tokenizer.pair_tokens is None else len(tokenizer.pair_tokens),
        has_pooler=getattr(skeleton, "pooler", None) is not None and not missing,
    )
    return facts, tokenizer


def _load_config(folder: ModelFolder) -> Any:
    try:
        _refuse_many_labels(folder)
        with _quiet_transformers():
            config = transformers.AutoConfig.from_pretrained(
                folder.path, local_files_only=True, trust_remote_code=False
            )
    except UnsupportedModelError:
        raise
    except OSError as error:
        raise ModelFilesError(f"the config.json in {folder.path} cannot be read.") from error
    except Exception as error:  # transformers raises whatever its parts raise
        raise UnsupportedModelError(
            f"the config.json in {folder.path} does not describe a model that transformers "
            f"{transformers.__version__} has code for ({error}); code from a model folder is never "
            "run."
        ) from error
    _refuse_foreign_code(config, folder)
    if config.model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES or (
        getattr(config, "is_encoder_decoder", False) or getattr(config, "is_decoder", False)
    ):
        raise UnsupportedModelError(
            f"the model in {folder.path} is of type {config.model_type!r}, which is not a "
            "bidirectional encoder: its tokens do not see the whole text. Use BERT or one of its "
            "relatives (DistilBERT, RoBERTa, ELECTRA, MPNet, ALBERT, DeBERTa-v2, ModernBERT, "
            "XLM-R, ...)."
        )
    return config


def _refuse_many_labels(folder: ModelFolder) -> None:
    with open(os.path.join(folder.path, "config.json"), encoding="utf-8") as file:
        n_labels = json.load(file).get("num_labels")
    if isinstance(n_labels, int) and n_labels > _MOST_LABELS:
        raise UnsupportedModelError(
            f"the config.json in {folder.path} says {n_labels} labels; more than {_MOST_LABELS} "
            "are not read. Remove that entry: features need none."
        )


def _refuse_foreign_code(config: Any, folder: ModelFolder) -> None:
    """Refuse a configuration that names kernels or quantizers to fetch or run."""
    attention = getattr(config, "_attn_implementation", None)
    if attention not in (None, "eager", "sdpa"):
        raise UnsupportedModelError(
            f"the config.json in {folder.path} asks for the attention {attention!r}; only torch's "
            "own ('sdpa' or 'eager') is used. Remove that entry."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            f"the config.json in {folder.path} asks for quantized weights, which are not read."
        )


def _count_layers(config: Any) -> int:
    # ALBERT can repeat several layers in each of its groups
    return int(config.num_hidden_layers) * int(getattr(config, "inner_group_num", 1))


def _skeleton(config: Any, folder: ModelFolder, n_tensors: int) -> Any:
    """Build the model that a configuration describes, without memory for its weights."""
    if not 0 < _count_layers(config) <= n_tensors:
        raise UnsupportedModelError(
            f"the config.json in {folder.path} says {_count_layers(config)} layers, but there are "
            f"{n_tensors} tensors in the weights."
        )
    try:
        with (
            torch.device("meta"),
            torch.random.fork_rng(devices=[]),
            _quiet_transformers(),
            _at_most_parameters(_SPARE_FACTOR * n_tensors + _SPARE_TENSORS),
        ):
            return transformers.AutoModel.from_config(config)
    except Exception as error:  # transformers raises whatever its parts raise
        raise UnsupportedModelError(
            f"the config.json in {folder.path} does not describe a possible model: {error}"
        ) from error


@contextmanager
def _at_most_parameters(most: int) -> Iterator[None]:
    """Stop this thread from building modules with more than `most` parameters.

    A configuration has many ways to ask for thousands of parts; this counts what comes of them.
    """
    thread, n_registered = threading.get_ident(), 0

    def count(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
        nonlocal n_registered
        if threading.get_ident() == thread:
            n_registered += 1
            if n_registered > most:
                raise ValueError(f"it has more than {most} parameters, far more than the weights.")

    handle = torch.nn.modules.module.register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _missing_weights(
    skeleton: Any, found: dict[str, tuple[int, ...]], folder: ModelFolder
) -> set[str]:
    """Names of the model's weights that are not in the files, under any usual spelling."""
    prefix = f"{skeleton.base_model_prefix}."
    spelled = {name.removeprefix(prefix): shape for name, shape in found.items()}
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        for name in [name for name in spelled if name.endswith(old)]:
            spelled[name.removesuffix(old) + new] = spelled[name]
    expected = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
    for name in expected.keys() & spelled.keys():
        if expected[name] != spelled[name]:
            raise UnsupportedModelError(
                f"the config.json in {folder.path} asks for {name} of shape {expected[name]}, but "
                f"the weights have {spelled[name]}; the two do not belong together."
            )
    return expected.keys() - spelled.keys()


def _refuse_larger(skeleton: Any, found: dict[str, tuple[int, ...]], folder: ModelFolder) -> None:
    """Refuse a model much larger than its weights, before memory for it is taken."""
    n_asked = sum(tensor.numel() for tensor in skeleton.parameters())
    n_found = sum(math.prod(shape) for shape in found.values())
    if n_asked > _SPARE_FACTOR * n_found:
        raise UnsupportedModelError(
            f"the config.json in {folder.path} asks for {n_asked} numbers, but the weights have "
            f"only {n_found}; the two do not belong together."
        )


def _position_limit(skeleton: Any) -> int:
    """Most tokens the model has positions for.

    RoBERTa and its relatives number positions from ``padding_idx + 1`` on, so their table takes
    fewer tokens than it has rows; a model without a table (rotary, relative) has only the length
    it was configured for.
    """
    configured = getattr(skeleton.config, "max_position_embeddings", None)
    limits = [] if configured is None else [int(configured)]
    for name, module in skeleton.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            offset = 0 if module.padding_idx is None else module.padding_idx + 1
            limits.append(module.num_embeddings - offset)
    if not limits:
        raise UnsupportedModelError(
            f"a model of type {skeleton.config.model_type!r} does not say how many tokens it takes."
        )
    return min(limits)


def load_tokenizer(folder: ModelFolder) -> TextTokenizer:
    """Load the tokenizer of a folder, freed of all state that a call could change."""
    try:
        with _quiet_transformers():
            loaded = transformers.AutoTokenizer.from_pretrained(
                folder.path, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # transformers raises whatever its parts raise
        raise UnsupportedModelError(
            f"the tokenizer in {folder.path} cannot be loaded: {error}"
        ) from error
    original = getattr(loaded, "backend_tokenizer", None)
    if original is None:
        raise UnsupportedModelError(
            f"the tokenizer in {folder.path} is written in Python only; a fast one "
            "(tokenizer.json) is needed."
        )
    backend = stateless_tokenizer(original)
    special_tokens = find_special_tokens(backend)
    if special_tokens is None:
        raise UnsupportedModelError(
            f"the tokenizer in {folder.path} puts no special tokens such as [CLS] and [SEP] around "
            "a text, so it does not belong to a BERT-like encoder."
        )
    if any(backend.encode("a").type_ids):
        raise UnsupportedModelError(
            f"the tokenizer in {folder.path} gives tokens of a single text another type than 0, "
            "which BERT-like encoders do not."
        )
    recorded = loaded.model_max_length
    return TextTokenizer(
        backend,
        special_tokens,
        find_pair_tokens(backend),
        int(recorded) if recorded and recorded < _NO_LIMIT else None,
    )


def _load_weights(folder: ModelFolder) -> tuple[Any, set[str]]:
    """Load a model in float32 on the CPU; also return which of its pooler weights are missing."""
    try:
        with _quiet_transformers(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            model, report = transformers.AutoModel.from_pretrained(
                folder.path,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:  # transformers raises whatever its parts raise
        raise ModelFilesError(f"the weights in {folder.path} cannot be loaded: {error}") from error
    missing = set(report["missing_keys"])
    needed = sorted(name for name in missing if not name.startswith("pooler."))
    if needed:
        raise UnsupportedModelError(
            f"the weights in {folder.path} lack {len(needed)} of the encoder's tensors "
            f"({', '.join(needed[:3])}{', ...' if len(needed) > 3 else ''}); they would be random."
        )
    return model, missing


def _sdpa_depends_on_threads(config: Any) -> bool:
    """Whether torch's scaled_dot_product_attention was seen to give other bits to other threads."""
    n_heads = int(getattr(config, "num_attention_heads", 0))
    return n_heads == 1 or (n_heads > 0 and config.hidden_size // n_heads == 8)


def load_encoder(folder: ModelFolder, device: torch.device, dtype: torch.dtype) -> Encoder:
    """Load the weights of a folder, in the form that is fastest on a device."""
    # tensors are made and some models tried out, which the caller's own torch code must not change
    with torch.autocast(device.type, enabled=False), torch.device("cpu"):
        return _encoder_on(device, folder, dtype)


def _encoder_on(device: torch.device, folder: ModelFolder, dtype: torch.dtype) -> Encoder:
    model, _ = _load_weights(folder)
    model.eval().requires_grad_(False)
    # a config.json may ask for output in another form, and for more of it
    model.config.return_dict = True
    model.config.output_hidden_states = model.config.output_attentions = False
    computed = dtype
    if device.type == "cpu" and (dtype == torch.float16 or not packing_works(dtype)):
        # Without kernels for a half precision, its rounded weights are used in float32: as precise
        # as asked for, faster than emulation, and "same text, same bits" holds.
        computed = torch.float32
    _own_weights(model, dtype, computed)
    n_layers = _count_layers(model.config)
    if device.type != "cpu":
        return Encoder(HookedModel(model.to(device), n_layers), device)
    fast = fast_bert(model, computed)
    if fast is not None:
        return Encoder(fast, device)
    stabilize_linears(model, computed)
    stabilize_activations(model)
    if _sdpa_depends_on_threads(model.config):
        model.set_attn_implementation("eager")
    return Encoder(HookedModel(model, n_layers), device)


def _own_weights(model: Any, dtype: torch.dtype, computed: torch.dtype) -> None:
    """Round the weights to `dtype`, hold them in `computed`, in memory of this process.

    As they were loaded they are a view of the file, and would change with it. Buffers, such as the
    frequencies of rotary positions, keep their precision.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).to(computed, copy=True)
    for buffer in model.buffers():
        buffer.data = buffer.data.clone()


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers from printing bars and reports, and leave its settings as they were."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_bars_disabled = are_progress_bars_disabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()  # the hub's bars too
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
        if bars and hub_bars_disabled:
            disable_progress_bars()
