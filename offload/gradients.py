"""Gradients that leave for a store as backward makes them, and come back in the bucket that the optimizer steps.

A gradient stays in memory until its write is done (a reader in between sees the true values), within a window of a
given number of bytes. When more is accumulated onto it, it is reloaded first and leaves again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memopt.errors import StoreError
from memopt.offload.residency import (
    Buffers,
    Geometry,
    Offloaded,
    OwnThread,
    Retired,
    bytes_of,
    can_be_away,
    is_alone,
)
from memopt.offload.store import Extent, Store, Transfer

# At the hook: the gradient, its storage's Python object, and the engine's own reference to what it accumulated.
_NUM_HOLDERS = 3


class OffloadedGradients:
    """The gradients of some parameters, kept on a store between backward and step.

    Args:
        parameters: whose gradients; sparse, small and shared ones stay in memory.
        store: where to.
        capacity_bytes: memory for gradients whose writes are under way.
        note: takes a line of text about what was not followed.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], store: Store, capacity_bytes: int, note: Callable[[str], None]
    ) -> None:
        self.store, self.capacity_bytes, self.note = store, capacity_bytes, note
        self.parameters = {id(p): p for p in parameters}
        self.extents: dict[int, Extent] = {}
        self.items: dict[int, Offloaded] = {}  # of the gradients that are there, by identity of the parameter
        self._retired = Retired(store)
        self._leaving: deque[tuple[int, Transfer]] = deque()
        self._buffers = Buffers()
        self._threads = OwnThread(note)
        self._used_bytes = 0
        self._is_settling_asked = False
        self._handles: list[RemovableHandle] = []
        self._accumulates = False
        sizes = {key: p.numel() * p.element_size() for key, p in self.parameters.items()}
        for key, extent in zip(sizes, store.reserve(list(sizes.values())), strict=True):
            self.extents[key] = extent
        self._hooked: set[int] = set()
        self._hook()

    def _hook(self) -> None:
        """Hook the parameters that train; others may do so later."""
        for key, p in self.parameters.items():
            if key not in self._hooked and p.requires_grad:
                self._hooked.add(key)
                self._handles.append(p.register_post_accumulate_grad_hook(_marked(self._accumulated)))

    # Backward

    def begin_step(self) -> None:
        """A training forward begins. If gradients are there already, more will be accumulated onto them."""
        self._is_settling_asked = False
        self._retired.sweep()
        self._hook()
        if not self._accumulates and any(p.grad is not None for p in self.parameters.values()):
            self._accumulates = True
            for p in self.parameters.values():
                if p.requires_grad:
                    self._handles.append(p.register_hook(_Reload(self, p)))

    def _accumulated(self, p: torch.Tensor) -> None:
        """Post-accumulate hook: let the gradient leave."""
        with self._threads.lock:
            if not self._threads.is_shared():
                self._leave(p)

    def _leave(self, p: torch.Tensor) -> None:
        self._settle_after_backward()
        g = p.grad
        key = id(p)
        if g is None:
            return
        item = self.items.get(key)
        if item is not None and item.tensor is g and item.is_ours:
            if item.buffer is not None:
                self._write(key, item)
            return  # else it was added to in place, on the store
        self._leave_place(key)
        if not can_be_away(g) or not is_alone(g, _NUM_HOLDERS):
            return
        if Geometry.of(g).num_bytes > self.extents[key].reserved_bytes:
            return
        item = Offloaded(g, self.store, self.extents[key])
        buffer = self._taken(item.num_bytes)
        buffer[: item.geometry.num_bytes].copy_(bytes_of(g))
        item.attach(buffer)
        self.items[key] = item
        self._write(key, item)

    def reload(self, p: torch.Tensor) -> None:
        """Make the gradient of `p` resident, if it is away."""
        item = self.items.get(id(p))
        if item is None or item.tensor is not p.grad or not item.is_ours or not item.is_away:
            return
        buffer = self._taken(item.num_bytes)
        self.store.read(item.extent, buffer).wait()
        item.attach(buffer)

    def _taken(self, num_bytes: int) -> torch.Tensor:
        while self._leaving and (self._used_bytes + num_bytes > self.capacity_bytes or self._leaving[0][1].is_done):
            self._finish()
        self._buffers.fit(num_bytes, self.capacity_bytes - self._used_bytes)
        self._used_bytes += num_bytes
        return self._buffers.take(num_bytes)

    def _write(self, key: int, item: Offloaded) -> None:
        assert item.buffer is not None
        item.version, item.is_changed = item.tensor._version, False
        item.seal()
        self._leaving.append((key, self.store.write(item.extent, item.buffer)))

    def _finish(self) -> None:
        """Wait for the oldest write; its gradient is away then, unless it must stay."""
        key, transfer = self._leaving.popleft()
        item = self.items.get(key)
        try:
            transfer.wait()
            if item is None or item.buffer is None or not item.is_ours:
                return
            if any(other == key for other, _ in self._leaving):
                return  # written again since
            if item.is_held:
                return
            if item.is_dirty:
                self.store.write(item.extent, item.buffer).wait()
        except StoreError as e:
            self.note(f"a gradient stays in memory: {e}")
            return
        buffer = item.detach()
        assert buffer is not None
        self._used_bytes -= item.num_bytes
        self._buffers.give(buffer)

    def _settle_after_backward(self) -> None:
        if not self._is_settling_asked:
            self._is_settling_asked = True
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self._is_settling_asked = False
        self.settle()

    def settle(self) -> None:
        """Wait for all writes and give the window back."""
        while self._leaving:
            self._finish()
        for key, item in list(self.items.items()):
            if item.tensor is not self.parameters[key].grad:
                self._forget(key)
        self._buffers.drop()

    def _forget(self, key: int) -> None:
        """The gradient is gone, or the user gave it other memory."""
        item = self.items.pop(key, None)
        if item is not None and item.buffer is not None:
            self._used_bytes -= item.num_bytes

    def _leave_place(self, key: int) -> None:
        """A new gradient comes. If somebody keeps the old one, that keeps its place, and the new one gets another."""
        old = self.items.get(key)
        self._forget(key)
        if old is not None and old.is_kept:
            (extent,) = self.store.reserve([self.extents[key].num_bytes])
            self._retired.add(old)
            self.extents[key] = extent

    # The rest

    def of(self, p: torch.Tensor) -> Offloaded | None:
        """The gradient of `p` if it is away."""
        item = self.items.get(id(p))
        if item is None or item.tensor is not p.grad or not item.is_ours or not item.is_away:
            return None
        return item

    def take_back(self) -> None:
        """Give all gradients ordinary memory again, and take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.settle()
        for item in self.items.values():
            item.take_back()
        self.items.clear()
        self._retired.sweep()
        self.store.release(self.extents.values())
        self.extents.clear()


class _Reload:
    """Tensor hook that brings a gradient back before more is added to it."""

    is_memopt = True

    def __init__(self, gradients: OffloadedGradients, p: torch.Tensor) -> None:
        self.gradients, self.parameter = gradients, p

    def __call__(self, grad: torch.Tensor) -> None:
        self.gradients.reload(self.parameter)


def _marked(hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    def marked(p: torch.Tensor) -> None:
        hook(p)

    marked.is_memopt = True  # type: ignore[attr-defined]
    return marked
