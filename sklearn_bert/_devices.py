"""Which device computes, and what about it decides the bits of a result."""

from __future__ import annotations

import hashlib
import os
import platform
from functools import cache
from typing import Any

import tokenizers
import torch
import transformers

from ._packed_linear import packing_works

__all__ = ["computing_environment", "resolve_device"]

# Environment variables by which instruction sets are forbidden.
_KERNEL_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


def resolve_device(device: Any) -> torch.device:
    """Turn the `device` parameter into a device that is there.

    Raises
    ------
    TypeError, ValueError
        If it does not name a device.
    RuntimeError
        If this machine does not have it.
    """
    if isinstance(device, str) and device == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        device = found if found is not None else "cpu"
    if not isinstance(device, str | torch.device):
        raise TypeError(f"device must be 'auto' or the name of a torch device; got {device!r}.")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device={device!r} is not a device; use 'auto', 'cpu', 'cuda', 'cuda:1' or 'mps'."
        ) from error
    if resolved.type != "cpu" and not _is_available(resolved):
        raise RuntimeError(
            f"device={device!r} is not available on this machine; use set_params(device='auto') "
            "or set_params(device='cpu')."
        )
    if resolved.type == "cpu":
        return torch.device("cpu")
    index = torch.accelerator.current_device_index() if resolved.index is None else resolved.index
    return torch.device(resolved.type, index)


def computing_environment(device: torch.device) -> str:
    """Describe all of this process that decides the bits of a state.

    Library versions, and the kernels that they choose from: for a CPU the instruction sets it has
    and those that the environment allows, for an accelerator its name; and the precision in which
    torch was told to multiply matrices of float32.
    """
    modules = (torch, transformers, tokenizers)
    versions = ", ".join(f"{module.__name__} {module.__version__}" for module in modules)
    if device.type != "cpu":
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        return f"{versions}, {device.type} {name} {_product_precision(device)}"
    limits = [os.environ.get(name, "") for name in _KERNEL_LIMITS]
    packed = [packing_works(dtype) for dtype in (torch.float32, torch.bfloat16)]
    return (
        f"{versions}, cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()} "
        f"{_cpu_flags()} {limits} {packed} {_product_precision(device)}"
    )


def _product_precision(device: torch.device) -> str:
    # torch.get_float32_matmul_precision raises once a single backend has been told another one
    backend = torch.backends.mkldnn if device.type == "cpu" else torch.backends.cuda
    return str(backend.matmul.fp32_precision)


@cache
def _cpu_flags() -> str:
    """Digest of the instruction sets of the processor, where the system tells them."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line for line in file if line.startswith(("flags", "Features"))]
    except OSError:
        lines = [platform.processor()]
    return hashlib.sha256(lines[0].encode() if lines else b"").hexdigest()[:16]


def _is_available(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device.type:
        return False
    return device.index is None or device.index < torch.accelerator.device_count()
