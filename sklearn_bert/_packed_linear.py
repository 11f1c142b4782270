"""Linear layers whose rows do not depend on how many rows there are.

torch's own ``Linear`` on CPU hands small matrices to other kernels than large ones, so a text
alone gets other bits than the same text in a batch. oneDNN with weights packed once does not, and
is faster in float32: 1.25 times to more than twice, by processor. The operators used here are those
that torch's compiler emits; they are not documented, so they are looked for, tried, and done
without where they fail.

oneDNN makes a kernel for every number of rows it meets and keeps it, which takes more than half a
megabyte each. So the rows are filled up with zeros to one of a few numbers: see ``padded_height``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import activations

__all__ = [
    "PackedLinear",
    "PaddedLinear",
    "Pointwise",
    "StableActivation",
    "packing_works",
    "pad_rows",
    "padded_height",
    "stabilize_activations",
    "stabilize_linears",
]

# Number of rows the packing is laid out for. A hint: results are right for any number.
_ROWS_HINT = 1024
# Up to this many rows torch's own kernels were seen to differ from those for more.
_FEWEST_ROWS = 16


class PackedLinear(nn.Module):
    """A frozen linear layer on oneDNN with packed weights (CPU, float32 or bfloat16).

    Parameters
    ----------
    linear : nn.Linear
        Layer to copy; it is left as it is.
    activation : {"none", "gelu"}, default="none"
        What is done to the result; "gelu" is the exact one.
    """

    def __init__(self, linear: nn.Linear, activation: str = "none") -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.activation = activation
        self.bias = None if linear.bias is None else linear.bias.detach()
        # plain attributes, not buffers: a packed tensor cannot be moved or cast
        self.packed_weight = torch.ops.mkldnn._reorder_linear_weight(
            linear.weight.detach(), _ROWS_HINT
        )

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Return ``activation(x @ weight.T + bias) + add``.

        `x` is of shape ``(..., in_features)``, `add` of that of the result. Only one of the two,
        `add` and an activation, can be had.
        """
        n_rows = x.numel() // self.in_features
        height = padded_height(n_rows)
        if height == n_rows:
            return self._rows(x, add)
        rows = pad_rows(x.reshape(n_rows, -1), height)
        add = None if add is None else pad_rows(add.reshape(n_rows, -1), height)
        return self._rows(rows, add)[:n_rows].view(*x.shape[:-1], -1)

    def _rows(self, x: Tensor, add: Tensor | None) -> Tensor:
        linear = _product()
        if not _one_pass_pays():
            result = linear(x, self.packed_weight, self.bias, "none", [], "none")
            if add is not None:
                return result.add_(add)
            return torch.ops.aten.gelu_(result) if self.activation == "gelu" else result
        if add is not None:
            return linear.binary(x, add, self.packed_weight, self.bias, "add")
        # "none" names the way GELU is computed: without approximation
        return linear(x, self.packed_weight, self.bias, self.activation, [], "none")


@cache
def _one_pass_pays() -> bool:
    """Whether activations and sums are computed in the same pass over memory as the product.

    The code oneDNN has for them there is slow without the registers of AVX-512: all-MiniLM-L6-v2
    took 6 to 8 % longer on a processor of AMD without them.
    """
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def padded_height(n_rows: int) -> int:
    """Return the number of rows that a matrix of `n_rows` is filled up to.

    There are 127 of them up to 1024, and 32 from there to twice that and so on: few, but at most a
    sixteenth of the rows is padding, none below 32 rows, and half a percent in a full batch. One
    single row, which takes another kernel with other bits when rows are long, becomes two.

    Examples
    --------
    >>> [padded_height(n) for n in (1, 2, 63, 65, 1000, 1024)]
    [2, 2, 64, 68, 1008, 1024]
    """
    n_bits = n_rows.bit_length()
    step = 1 << max(0, min(4, n_bits - 5), n_bits - 6)
    return max(2, -(-n_rows // step) * step)


def pad_rows(rows: Tensor, height: int) -> Tensor:
    """Fill a matrix up with rows of zeros."""
    missing = height - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows


class PaddedLinear(nn.Module):
    """A frozen linear layer on torch's own kernels, never with a small number of rows.

    Used where packing is not to be had. It keeps "same text, same bits" on every kernel library
    that switches by the number of rows only below ``_FEWEST_ROWS``.

    Parameters
    ----------
    linear : nn.Linear
        Layer to use; its weights are shared.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias`` for `x` of shape ``(..., in_features)``."""
        rows = x.reshape(-1, self.in_features)
        n_rows = len(rows)
        if n_rows < _FEWEST_ROWS:
            rows = nn.functional.pad(rows, (0, 0, 0, _FEWEST_ROWS - n_rows))
        return self.linear(rows)[:n_rows].reshape(*x.shape[:-1], self.out_features)


class Pointwise(nn.Module):
    """A one-dimensional convolution of width 1, as the linear layer that it is.

    Parameters
    ----------
    linear : nn.Module
        Layer from input to output channels.
    """

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """Convolve `x` of shape ``(n_texts, in_channels, n_tokens)``."""
        return self.linear(x.transpose(1, 2)).transpose(1, 2)


def _product() -> Any:
    """Return torch's operator for a product with packed weights."""
    return torch.ops.mkldnn._linear_pointwise


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether packed linear layers exist here and agree with torch's own for `dtype`."""
    # whatever the caller's own torch code has switched on
    with torch.inference_mode(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        return _packing_works(dtype)


def _packing_works(dtype: torch.dtype) -> bool:
    numbers = torch.arange(48 * 64, dtype=torch.float32)
    weight = (numbers.reshape(48, 64) * 0.37).sin()
    x = (numbers[: 5 * 64].reshape(5, 64) * 0.73).cos()
    linear = nn.Linear(64, 48, bias=False, device="meta").to_empty(device="cpu")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    plain = linear(x)
    expected = torch.stack([plain, nn.functional.gelu(plain), plain + plain])
    try:
        layer, with_gelu = PackedLinear(linear.to(dtype)), PackedLinear(linear, "gelu")
        few, result = x.to(dtype), plain.to(dtype)
        one = layer(few[:1], add=result[:1])
        got = torch.stack([layer(few), with_gelu(few), layer(few, add=result)])
        got[2, :1] = one
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    # bfloat16 keeps 8 bits: relative to the largest value, sums of 64 terms agree to 1/50
    tolerance = (1e-5 if dtype == torch.float32 else 2e-2) * float(expected.abs().max())
    return bool((got.float() - expected).abs().max() <= tolerance)


def stabilize_linears(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace every ``nn.Linear`` of a CPU model, in place, by one that keeps bits per row.

    Parameters
    ----------
    model : nn.Module
        Model on the CPU, in `dtype`, for inference only.
    dtype : torch.dtype
        Type of its weights.
    """
    replacement = PackedLinear if packing_works(dtype) else PaddedLinear
    packed: dict[int, nn.Module] = {}  # a layer used in several places stays one layer
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                packed.setdefault(id(child), replacement(child))
                setattr(parent, name, packed[id(child)])
            elif type(child) is nn.Conv1d and child.kernel_size == (1,) and child.groups == 1:
                linear = nn.Linear(
                    child.in_channels, child.out_channels, child.bias is not None, device="meta"
                )
                linear.weight = nn.Parameter(child.weight[:, :, 0], requires_grad=False)
                if child.bias is not None:
                    linear.bias = nn.Parameter(child.bias, requires_grad=False)
                setattr(parent, name, Pointwise(replacement(linear)))


class StableActivation(nn.Module):
    """An activation function whose values do not depend on how threads share the work.

    torch computes the end of each thread's part of a tensor with other code than the rest. For
    some functions the two give other bits, and where the parts end depends on the number of
    threads and on the size of the batch.

    Parameters
    ----------
    function : callable
        Elementwise function.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Return the function of each element."""
        return self.function(x)


def _gelu(x: Tensor) -> Tensor:
    return nn.functional.gelu(x.contiguous())  # oneDNN, but only for contiguous tensors


def _gelu_tanh(x: Tensor) -> Tensor:
    # multiplication, addition and torch.tanh give the same bits in both pieces of code
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + torch.tanh(inner))


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _quick_gelu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-1.702 * x))


_STABLE_FUNCTIONS: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    activations.GELUActivation: _gelu,
    activations.GELUTanh: _gelu_tanh,
    nn.SiLU: _silu,
    activations.SiLUActivation: _silu,
    nn.Sigmoid: _sigmoid,
    activations.QuickGELUActivation: _quick_gelu,
}


def stabilize_activations(model: nn.Module) -> None:
    """Replace activations of a CPU model, in place, by ones whose bits do not depend on threads."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in _STABLE_FUNCTIONS:
                setattr(parent, name, StableActivation(_STABLE_FUNCTIONS[type(child)]))
