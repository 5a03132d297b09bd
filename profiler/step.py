"""Run one training step of a copy of the user's model under the recorder."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from memopt.errors import FakeStepError, MemoptError, UnsupportedError
from memopt.profiler.calibration import load_calibration
from memopt.profiler.fake import autocast_without_cache, deepcopies, in_own_context, untouched_generators
from memopt.profiler.frames import ModuleFrames, paths_of
from memopt.profiler.hardware import CATALOGUE, Hardware, hardware_named
from memopt.profiler.isolate import ChildError, can_fork, in_fork
from memopt.profiler.ops import tensors_in
from memopt.profiler.profile import Kind, Phase, Profile
from memopt.profiler.record import Recorder

logger = logging.getLogger("memopt")

Loss = Callable[[Any], torch.Tensor]

_NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)


def profile_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss: Loss,
    optimizer: torch.optim.Optimizer | None,
    *,
    mode: str,
    hardware: Hardware | None = None,
    micro_batches: int = 1,
    keeps_output: bool = False,
) -> Profile:
    """Profile one step on copies of `model`, its inputs and its optimizer; nothing of the user's changes.

    mode "fake" allocates nothing; "run" trains a real copy for two steps and measures the second one's ops. With
    `micro_batches` above one the gradients of an earlier micro-batch are there during the forward. `keeps_output`: the
    caller's variables hold the model's output until the step ends.

    Raises FakeStepError if a fake profile is asked for and the step can't be followed there,
    UnsupportedError for a model that can't be copied or a loss that is none.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "meta":
        if mode != "fake":
            raise UnsupportedError(f'mode="{mode}"', "the model is on the meta device: it has no values to run with")
        device = torch.device("cpu")
    hardware = hardware or hardware_of(device)
    num_threads = torch.get_num_threads()
    fake = FakeTensorMode(allow_non_fake_inputs=True) if mode == "fake" else None

    def run() -> Profile:
        own_model, own_args, own_kwargs, own_optimizer = _copies(model, args, kwargs, optimizer, fake)
        recorder = Recorder(hardware=hardware, fake=fake, device_type=device.type, num_threads=num_threads)
        with torch.enable_grad(), fake or nullcontext(), autocast_without_cache(device.type):
            if fake is None:
                _step(None, own_model, own_args, own_kwargs, loss, own_optimizer, keeps_output)
                own_model.zero_grad()
            if micro_batches > 1:
                for p in own_model.parameters():
                    if p.requires_grad:
                        p.grad = torch.zeros_like(p)
            _give(recorder, own_model, own_args, own_kwargs, own_optimizer)
            _step(recorder, own_model, own_args, own_kwargs, loss, own_optimizer, keeps_output)
            _name_what_stays(recorder, own_model, own_optimizer)
            notes = () if optimizer is not None else ("no optimizer given: its states are not counted",)
            found = recorder.profile(model=own_model, mode=mode, micro_batches=micro_batches, notes=notes)
            return replace(found, parameters=tuple((name, p.numel()) for name, p in own_model.named_parameters()))

    def run_fake() -> Profile:
        try:
            return run()
        except MemoptError:
            raise
        except Exception as e:
            why = "needs the values of its data" if isinstance(e, _NEEDS_DATA) else f"fails with {type(e).__name__}"
            text = str(e).strip().splitlines()
            raise FakeStepError(
                f"a profile of {type(model).__name__} on fake tensors",
                f"{_line_of(e)} {why}: {text[0] if text else ''}",
            ) from e

    if fake is not None and can_fork(device.type):
        try:
            return in_fork(run_fake)
        except ChildError as e:
            logger.warning("memopt: profiling in this process, for a child could not: %s", e)
    with untouched_generators():
        return in_own_context(run_fake if fake is not None else run)


def hardware_of(device: torch.device) -> Hardware:
    """Speeds of a device that is here, as `memopt calibrate` measured them, else the catalogue's."""
    calibration = load_calibration(device_name(device), torch.get_num_threads())
    return calibration.hardware if calibration is not None else catalogued(device)


def catalogued(device: torch.device) -> Hardware:
    """The catalogue's entry for a device that is here; an unknown GPU counts as an A100."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return CATALOGUE["cpu"]
    try:
        return hardware_named(torch.cuda.get_device_name(device))
    except ValueError:
        return CATALOGUE["a100"]


def device_name(device: torch.device) -> str:
    """What a calibration is kept under: the GPU's own name, "cpu" for all else."""
    is_gpu = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if is_gpu else "cpu"


def _copies(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None,
    fake: FakeTensorMode | None,
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], torch.optim.Optimizer | None]:
    try:
        copies = deepcopies((model, tuple(args), dict(kwargs), optimizer), fake)
    except Exception as e:
        raise UnsupportedError(
            f"the profile of {type(model).__name__}", f"it can't be copied: {type(e).__name__}: {e}"
        ) from e
    own_model: nn.Module = copies[0]
    for p in own_model.parameters():
        p.grad = None
    return own_model, copies[1], copies[2], copies[3]


def _give(
    recorder: Recorder, model: nn.Module, args: Any, kwargs: Any, optimizer: torch.optim.Optimizer | None
) -> None:
    """Make known what is there before the step."""
    for name, p in model.named_parameters():
        recorder.give(p, Kind.PARAMETER, name)
        if p.grad is not None:
            recorder.give(p.grad, Kind.GRADIENT, name)
    for name, b in model.named_buffers():
        recorder.give(b, Kind.BUFFER, name)
    for t in torch.utils._pytree.tree_leaves((args, kwargs)):
        if isinstance(t, torch.Tensor):
            recorder.give(t, Kind.INPUT, "input")
    for name, t in _states_of(model, optimizer):
        recorder.give(t, Kind.OPTIMIZER_STATE, name)


def _states_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[tuple[str, torch.Tensor]]:
    """The optimizer's state tensors, each with the name of its parameter ("" for what belongs to none)."""
    if optimizer is None:
        return []
    names = {id(p): name for name, p in model.named_parameters()}
    return [
        (names.get(id(p), ""), t)
        for p, state in optimizer.state.items()
        for t in tensors_in(list(state.values()) if isinstance(state, dict) else [state])
    ]


def _step(
    recorder: Recorder | None,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_of: Loss,
    optimizer: torch.optim.Optimizer | None,
    keeps_output: bool,
) -> None:
    """One step, in phases; recorded if there is a recorder."""
    hooks = torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack) if recorder else nullcontext()
    with recorder or nullcontext():
        with hooks:
            with ModuleFrames(paths_of(model)) as frames:
                if recorder:
                    recorder.frames = frames
                out = model(*args, **kwargs)
            if recorder:
                recorder.frames, recorder.phase, recorder.forward_ends_at = None, Phase.LOSS, recorder.tick()
            loss = loss_of(out)
        kept = out if keeps_output else None
        del out
        _check_loss(loss)
        if recorder:
            recorder.phase = Phase.BACKWARD
        loss.backward()
        if recorder:
            recorder.phase = Phase.STEP
        if optimizer is not None:
            type(optimizer).step(optimizer)
    del kept


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(type(loss).__name__)
        raise UnsupportedError("the loss", f"it must be a tensor of one element, not {what}; give Workload(loss=...)")
    if not loss.requires_grad:
        raise UnsupportedError("the loss", "it does not require a gradient: no parameter of the model reaches it")


def _name_what_stays(recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Tell gradients and optimizer states from other storages. States that the first step made count from the start."""
    for name, p in model.named_parameters():
        if p.grad is not None and (value := recorder.value_of(p.grad)) is not None:
            storage = recorder.storages[recorder.values[value].storage]
            storage.kind, storage.module = Kind.GRADIENT, name
    for name, t in _states_of(model, optimizer):
        if (value := recorder.value_of(t)) is not None:
            storage = recorder.storages[recorder.values[value].storage]
            storage.kind, storage.birth, storage.module = Kind.OPTIMIZER_STATE, 0, name


def _line_of(e: BaseException) -> str:
    """The user's line that raised, as file:line."""
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parent), sys.prefix + "/lib/python")
    frames = [f for f in traceback.extract_tb(e.__traceback__) if not f.filename.startswith(inside[:2])]
    if not frames:
        return "inside torch"
    frame = frames[-1]
    return f"{frame.filename}:{frame.lineno} `{frame.line}`"
