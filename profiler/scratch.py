"""Bytes that CPU kernels allocate for themselves while they run: no op of the step shows them, the allocator does.

The rules were fitted to the allocator's own events on torch 2.13 and hold for its default build (oneDNN); a test
compares
them with the allocator of the machine it runs on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def scratch_bytes(name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], num_threads: int) -> int:
    """Bytes beyond its outputs that the kernel of the overload `name` holds at its own peak, on a CPU."""
    rule = _RULES.get(name)
    return rule(inputs, outputs, num_threads) if rule is not None else 0


def _num_bytes(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()


def _blocked_bytes(t: torch.Tensor) -> int:
    """Bytes of a batch of images whose channels are padded to the blocks of eight of oneDNN's layout."""
    channels = t.shape[1]
    return _num_bytes(t) // max(channels, 1) * (-(-channels // 8) * 8)


def _is_pointwise(weight: torch.Tensor) -> bool:
    return all(k == 1 for k in weight.shape[2:])


def _convolution(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], num_threads: int) -> int:
    """oneDNN writes a blocked layout first, and for wide weights reorders those too (ATen/native/mkldnn/Conv.cpp)."""
    weight = inputs[1]
    if _is_pointwise(weight):
        return 0
    is_wide = weight.shape[0] >= 128 and weight.shape[1] >= 128
    return _blocked_bytes(outputs[0]) + (_num_bytes(weight) if is_wide else 0)


def _convolution_backward(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], num_threads: int) -> int:
    """Blocked copies of the output's gradient and the input, or of the weight's gradient."""
    gradient, x, weight = inputs[:3]
    if _is_pointwise(weight):
        return 0
    # Of an image with few channels the gradient comes out of the blocked copy's place.
    padded = _num_bytes(x) if x.shape[1] < 8 else 0
    return max(_blocked_bytes(gradient) + _blocked_bytes(x) - padded, _num_bytes(weight))


def _attention_rows(num_queries: int) -> int:
    """Query rows that one thread takes at a time (ATen/native/cpu/FlashAttentionKernel.cpp)."""
    return 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32


def _attention(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], num_threads: int) -> int:
    q, k, v = inputs[:3]
    rows, columns = min(_attention_rows(q.shape[-2]), q.shape[-2]), min(512, k.shape[-2])
    return num_threads * 4 * (rows * columns + 2 * rows + rows * v.shape[-1])


def _attention_backward(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], num_threads: int) -> int:
    q, k = inputs[1:3]
    rows, columns = min(_attention_rows(q.shape[-2]), q.shape[-2]), min(512, k.shape[-2])
    return _num_bytes(q) + num_threads * 2 * q.element_size() * rows * columns


def _first_input(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], num_threads: int) -> int:
    return _num_bytes(inputs[0])


_RULES: dict[str, Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], int], int]] = {
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
    "aten.native_batch_norm_backward.default": _first_input,
}
