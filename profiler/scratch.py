"""Bytes that CPU kernels allocate for themselves while they run: no op of the step shows them, the allocator does.

The rules were fitted to the allocator's own events on torch 2.13 and hold for its default build (oneDNN); a test
compares them with the allocator of the machine it runs on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def scratch_bytes(name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], num_threads: int) -> int:
    """Bytes beyond its outputs that the kernel of the overload `name` holds at its own peak, on a CPU."""
    rule = _RULES.get(name)
    return rule(inputs, outputs, num_threads) if rule is not None else 0


_LOSSES_IN_PLACE = ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
_FULL_SIZE_LOSSES = frozenset(f"aten.{name}.default" for name in _LOSSES_IN_PLACE)


def held_bytes(name: str, inputs: Sequence[torch.Tensor], output: torch.Tensor) -> int:
    """Bytes of an output's storage where it is larger than the output, else 0.

    A reduced loss of these kernels is a scalar in a buffer of its input's size (ATen/native/Loss.cpp): it holds that
    as long as the user holds the loss.
    """
    return _num_bytes(inputs[0]) if name in _FULL_SIZE_LOSSES and output.numel() == 1 else 0


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
    """Blocks per thread, and the gradient in the layout (batch, sequence, head, width) if it comes in another."""
    gradient, q, k = inputs[:3]
    rows, columns = min(_attention_rows(q.shape[-2]), q.shape[-2]), min(512, k.shape[-2])
    copied = 0 if gradient.transpose(1, 2).is_contiguous() else _num_bytes(gradient)
    return copied + num_threads * 2 * q.element_size() * rows * columns


def _batch_norm_backward(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], num_threads: int) -> int:
    return _num_bytes(inputs[0]) if inputs[0].is_contiguous() else 0


def _contiguous_copies(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], num_threads: int) -> int:
    """Kernels over rows copy each large input that is not contiguous: a sum's expanded gradient, a transposed view."""
    largest = max(t.numel() for t in inputs)
    return sum(_num_bytes(t) for t in inputs if t.numel() == largest and not t.is_contiguous())


def _product(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], num_threads: int) -> int:
    """A BLAS takes rows or columns that are dense; an expanded matrix is copied (of a batch, each matrix)."""
    return sum(_num_bytes(t) for t in inputs if t.dim() >= 2 and not _has_dense_lines(t))


def _has_dense_lines(t: torch.Tensor) -> bool:
    (rows, columns), (row_step, column_step) = t.shape[-2:], t.stride()[-2:]
    return (column_step == 1 and row_step >= max(1, columns)) or (row_step == 1 and column_step >= max(1, rows))


def _reduced_loss(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], num_threads: int) -> int:
    """The element-wise loss before its mean or sum (ATen/native/Loss.cpp)."""
    return _num_bytes(inputs[0]) if outputs[0].numel() == 1 else 0


_RULES: dict[str, Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], int], int]] = {
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten.native_layer_norm.default": _contiguous_copies,
    "aten.native_layer_norm_backward.default": _contiguous_copies,
    "aten.gelu_backward.default": _contiguous_copies,
    "aten._softmax.default": _contiguous_copies,
    "aten._softmax_backward_data.default": _contiguous_copies,
    "aten._log_softmax.default": _contiguous_copies,
    "aten._log_softmax_backward_data.default": _contiguous_copies,
    "aten.embedding_dense_backward.default": _contiguous_copies,
    "aten.mm.default": _product,
    "aten.addmm.default": _product,
    "aten.bmm.default": _product,
    "aten.baddbmm.default": _product,
    "aten.mse_loss.default": _reduced_loss,
    "aten.smooth_l1_loss.default": _reduced_loss,
    "aten.huber_loss.default": _reduced_loss,
    "aten.soft_margin_loss.default": _reduced_loss,
    "aten.binary_cross_entropy.default": _reduced_loss,
}
