"""Linear layers whose rows do not depend on how many rows there are.

torch's own ``Linear`` on CPU hands small matrices to other kernels than large ones, so a text
alone gets other bits than the same text in a batch. oneDNN with weights packed once does not, and
is about twice as fast in float32. The operators used here are those that torch's compiler emits;
they are not documented, so they are looked for, tried, and done without where they fail.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

__all__ = [
    "PackedLinear",
    "PaddedLinear",
    "packing_works",
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
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        # plain attributes, not buffers: a packed tensor cannot be moved or cast
        self.packed_weight = torch.ops.mkldnn._reorder_linear_weight(
            linear.weight.detach(), _ROWS_HINT
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias`` for `x` of shape ``(..., in_features)``."""
        if x.numel() == x.shape[-1]:
            # one single row takes another kernel, with other bits, when in_features is large
            return self._rows(x.expand(2, *x.shape).contiguous())[0]
        return self._rows(x)

    def _rows(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed_weight, self.bias, "none", [], "")


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


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether packed linear layers exist here and agree with torch's own for `dtype`."""
    weight = (torch.arange(48 * 64, dtype=torch.float32).reshape(48, 64) * 0.37).sin()
    x = (torch.arange(5 * 64, dtype=torch.float32).reshape(5, 64) * 0.73).cos()
    linear = nn.Linear(64, 48, bias=False, device="meta").to_empty(device="cpu")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    expected = linear(x)
    try:
        got = PackedLinear(linear.to(dtype))(x.to(dtype))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    # bfloat16 keeps 8 bits: relative to the largest value, sums of 64 terms agree to 1/50
    tolerance = (1e-5 if dtype == torch.float32 else 2e-2) * float(expected.abs().max())
    return bool((got.float() - expected).abs().max() <= tolerance)


def _contiguous(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0].contiguous(), *args[1:])


def stabilize_activations(model: nn.Module) -> None:
    """Give activations of a CPU model contiguous tensors, in place.

    The exact GELU is then computed by oneDNN, the same for every element. On a slice of a larger
    tensor (gated layers take one) torch computes the elements at the border of two threads' shares
    by another formula than the rest.
    """
    for module in model.modules():
        if type(module).__module__ == "transformers.activations" or type(module) is nn.GELU:
            module.register_forward_pre_hook(_contiguous)


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
