"""The rules for kernels' own scratch against the allocator of this machine."""

import pytest
import torch
from small_models import allocator_peak, one_thread, storage_bytes
from torch import nn

import memopt
from memopt.profiler.scratch import scratch_bytes

aten = torch.ops.aten
# A kernel's small fixed buffers, and a tenth: the rules are for what matters in a step.
TOLERANCE, ROOM_BYTES = 0.1, 4096


def measured_scratch(op, args):
    """The kernel's peak beyond its outputs, and the outputs."""
    with one_thread():
        out = op(*args)  # the first call makes what a library keeps
        outputs = [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor)]
        peak = allocator_peak(lambda: op(*args))
    return peak - storage_bytes(outputs), outputs


def check(op, args):
    measured, outputs = measured_scratch(op, args)
    inputs = [a for a in args if isinstance(a, torch.Tensor)]
    ruled = scratch_bytes(str(op), inputs, outputs, 1)
    size = storage_bytes([*outputs, *inputs])
    # Within a tenth of itself, or too small beside what the op holds anyway to matter.
    assert abs(ruled - measured) <= max(TOLERANCE * measured, 0.02 * size) + ROOM_BYTES, (ruled, measured)


CONVOLUTIONS = [
    ((11, 3, 65, 63), 17, 3),
    ((11, 17, 33, 31), 29, 3),
    ((5, 64, 31, 33), 96, 3),
    ((3, 128, 17, 19), 128, 3),
    ((3, 192, 13, 11), 256, 1),
]


@pytest.mark.parametrize(("shape", "channels", "kernel"), CONVOLUTIONS)
def test_convolution(shape, channels, kernel):
    x, w, b = torch.randn(shape), torch.randn(channels, shape[1], kernel, kernel), torch.randn(channels)

    check(aten.convolution.default, (x, w, b, [1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 1))


@pytest.mark.parametrize(("shape", "channels", "kernel"), CONVOLUTIONS)
def test_convolution_backward(shape, channels, kernel):
    x, w = torch.randn(shape), torch.randn(channels, shape[1], kernel, kernel)
    g = torch.randn(shape[0], channels, *shape[2:])

    check(
        aten.convolution_backward.default,
        (g, x, w, [channels], [1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 1, [True, True, True]),
    )


ATTENTIONS = [(2, 4, 97, 18), (3, 8, 256, 64), (1, 6, 1024, 32), (2, 12, 512, 64)]


@pytest.mark.parametrize("shape", ATTENTIONS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_attention(shape, is_causal):
    q, k, v = (torch.randn(shape) for _ in range(3))

    check(aten._scaled_dot_product_flash_attention_for_cpu.default, (q, k, v, 0.0, is_causal))


@pytest.mark.parametrize("shape", ATTENTIONS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_backward(shape, is_causal):
    q, k, v = (torch.randn(shape) for _ in range(3))
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, is_causal)

    check(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        (torch.randn_like(out), q, k, v, out, logsumexp, 0.0, is_causal),
    )


def test_batch_norm_backward():
    x, w = torch.randn(11, 17, 33, 31), torch.randn(17)
    _, mean, inverse = aten.native_batch_norm.default(x, w, w, None, None, True, 0.1, 1e-5)

    check(
        aten.native_batch_norm_backward.default,
        (torch.randn_like(x), x, w, None, None, mean, inverse, True, 1e-5, [True, True, True]),
    )


@pytest.mark.parametrize("op", ["aten.gelu.default", "no.such.op"])
def test_other_ops_take_none(op):
    x = torch.randn(1001)

    assert scratch_bytes(op, [x], [x], 4) == 0


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "binary_cross_entropy", "huber_loss", "l1_loss"])
@pytest.mark.parametrize("normed", [False, True])
def test_forecast_of_a_reduced_loss_is_the_allocators(name, normed):
    # Given a loss that is a scalar in a buffer of its input's size, or hands backward an expanded gradient
    x, target = torch.randn(1024, 48), torch.rand(1024, 48)
    blocks = [nn.Sequential(nn.Linear(48, 48), nn.GELU(), *([nn.LayerNorm(48)] if normed else [])) for _ in range(3)]
    model = nn.Sequential(*blocks)
    head = (lambda o: o.sigmoid()) if name == "binary_cross_entropy" else (lambda o: o)

    def loss(output):
        return getattr(nn.functional, name)(head(output), target)

    # When a step is profiled and then run
    profile = memopt.profile(memopt.Workload(model, args=(x,), loss=loss))
    session = memopt.apply(memopt.plan(profile, profile.peak_bytes), model)
    loss(model(x)).backward()
    model.zero_grad()
    session.measure(lambda: loss(model(x)).backward())
    measured = session.measured.peak_bytes + x.nbytes + target.nbytes

    # Then the forecast is the measurement and the headroom for small scratch
    assert measured <= profile.peak_bytes <= measured + profile.scratch_bytes + 4096
