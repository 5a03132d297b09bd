"""Activations that leave for a store in the forward and come back in backward, before they are needed.

`offload` copies a value to a staging buffer and writes it from there, so that the value's own memory is free as soon as
Python and autograd let go of it. Backward asks in the reverse order: each reload begins to read the ones before.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

from memopt.errors import StoreError
from memopt.offload.residency import Buffers, Geometry, bytes_of, can_be_away, is_alone
from memopt.offload.sizes import pages_up
from memopt.offload.store import Extent, Store, Transfer, aligned_empty

# The value itself, the Python object of its storage, and what the caller looks at it with.
_NUM_HOLDERS = 4


class Stored:
    """The content of one value on a store."""

    __slots__ = ("__weakref__", "_buffer", "_owner", "_transfer", "extent", "geometry", "number", "was_reloaded")

    def __init__(self, owner: OffloadedActivations, geometry: Geometry, extent: Extent, number: int) -> None:
        self._owner, self.geometry, self.extent, self.number = owner, geometry, extent, number
        self._buffer: torch.Tensor | None = None  # page-aligned: what is written from, or read into
        self._transfer: Transfer | None = None
        self.was_reloaded = False  # what backward had once is not read ahead again

    @property
    def is_written(self) -> bool:
        return self._transfer is None or self._transfer.is_done

    def reload(self) -> torch.Tensor:
        """A tensor of the value's geometry with its content, over memory of its own. Raises StoreError."""
        return self._owner.reload(self)

    def __del__(self) -> None:
        self._owner.release(self)


class OffloadedActivations:
    """Activations of one model on a store.

    Args:
        store: where to.
        capacity_bytes: memory for values that are being written, and for those that are read ahead.
        note: takes a line of text about what was not followed.
    """

    def __init__(self, store: Store, capacity_bytes: int, note: Callable[[str], None]) -> None:
        self.store, self.capacity_bytes, self.note = store, capacity_bytes, note
        self._leaving: deque[Stored] = deque()
        self._used_bytes = 0
        self._buffers = Buffers()
        self._in_order: list[weakref.ref[Stored]] = []  # of this step's forward
        self._lock = threading.RLock()
        self._dead: deque[tuple[Extent, Transfer | None, torch.Tensor | None]] = deque()
        self._is_full = False
        self._is_closed = False

    def begin_step(self) -> None:
        """A training forward begins."""
        self._bury()
        self._in_order = [ref for ref in self._in_order if ref() is not None]  # graphs that still wait for backward
        for number, ref in enumerate(self._in_order):
            stored = ref()
            if stored is not None:
                stored.number = number

    def offload(self, t: torch.Tensor) -> Stored | None:
        """Send the content of `t` to the store. None if it must stay in memory: small, not dense, or no room."""
        if self._is_full or not can_be_away(t) or not is_alone(t, _NUM_HOLDERS):
            return None
        with self._lock:
            self._bury()
            return self._offload(t, Geometry.of(t))

    def _offload(self, t: torch.Tensor, geometry: Geometry) -> Stored | None:
        try:
            (extent,) = self.store.reserve([geometry.num_bytes])
        except StoreError as e:
            self._is_full = True
            self.note(f"activations stay in memory: {e}")
            return None
        num_bytes = pages_up(geometry.num_bytes)
        while self._leaving and (self._used_bytes + num_bytes > self.capacity_bytes or self._leaving[0].is_written):
            self._finish()
        self._buffers.fit(num_bytes, self.capacity_bytes - self._used_bytes)
        stored = Stored(self, geometry, extent, len(self._in_order))
        buffer = self._buffers.take(num_bytes)
        self._used_bytes += num_bytes
        buffer[: geometry.num_bytes].copy_(bytes_of(t))
        stored._buffer, stored._transfer = buffer, self.store.write(extent, buffer)
        self._leaving.append(stored)
        self._in_order.append(weakref.ref(stored))
        return stored

    def _finish(self) -> None:
        """Wait for the oldest write and take its buffer back."""
        stored = self._leaving.popleft()
        if stored._transfer is None or stored._buffer is None:
            return  # reloaded from its buffer meanwhile
        try:
            stored._transfer.wait()
        except StoreError as e:
            self.note(f"an activation stays in memory: {e}")
            stored._transfer = None  # the buffer is the value's only copy from here on
            self._used_bytes -= stored._buffer.numel()
            return
        self._take_back(stored)

    def _take_back(self, stored: Stored) -> None:
        assert stored._buffer is not None
        self._used_bytes -= stored._buffer.numel()
        self._buffers.give(stored._buffer)
        stored._buffer = stored._transfer = None

    def settle(self) -> None:
        """Wait for all writes and give the staging buffers back."""
        while self._leaving:
            self._finish()
        self._buffers.drop()

    def reload(self, stored: Stored) -> torch.Tensor:
        """See `Stored.reload`."""
        with self._lock:
            self._bury()
            return self._reload(stored)

    def _reload(self, stored: Stored) -> torch.Tensor:
        self.settle()
        if stored._transfer is not None:  # it was read ahead
            buffer = stored._buffer
            assert buffer is not None
            stored._transfer.wait()
            self._used_bytes -= buffer.numel()
            stored._buffer = stored._transfer = None
        elif stored._buffer is not None:  # it never left
            buffer = stored._buffer.clone()
        else:
            buffer = aligned_empty(stored.geometry.num_bytes)
            self.store.read(stored.extent, buffer).wait()
        stored.was_reloaded = True
        self._read_ahead(stored.number)
        return stored.geometry.over(buffer)

    def _read_ahead(self, number: int) -> None:
        """Begin to read what backward will ask for next, as much as there is room for."""
        for ref in reversed(self._in_order[:number]):
            stored = ref()
            if stored is None or stored._buffer is not None or stored.was_reloaded:
                continue
            num_bytes = pages_up(stored.geometry.num_bytes)
            if self._used_bytes + num_bytes > self.capacity_bytes:
                return
            self._used_bytes += num_bytes
            stored._buffer = aligned_empty(num_bytes)
            stored._transfer = self.store.read(stored.extent, stored._buffer)

    def release(self, stored: Stored) -> None:
        """Nobody will ask for a value again: its place is given back at the next occasion."""
        # A finalizer runs in any thread and at any moment, so it neither locks nor waits.
        self._dead.append((stored.extent, stored._transfer, stored._buffer))

    def _bury(self) -> None:
        """Give back the places of values that died. Memory that is still being read into is kept until that is done."""
        for _ in range(len(self._dead)):
            extent, transfer, buffer = self._dead.popleft()
            if transfer is not None and buffer is not None:  # read ahead in vain
                if not transfer.is_done:
                    self._dead.append((extent, transfer, buffer))
                    continue
                self._used_bytes -= buffer.numel()
            if not self._is_closed:
                self.store.release([extent])

    def close(self) -> None:
        """Nothing leaves any more. What is on the store comes into memory: its backward may still come."""
        self.settle()
        for ref in self._in_order:
            stored = ref()
            if stored is None:
                continue
            if stored._buffer is None:
                stored._buffer = aligned_empty(stored.geometry.num_bytes)
                stored._transfer = self.store.read(stored.extent, stored._buffer)
            if stored._transfer is not None:
                try:
                    stored._transfer.wait()
                except StoreError as e:  # its backward will say the same
                    self.note(f"an activation is lost: {e}")
                    continue
                stored._transfer = None
        self._is_closed = self._is_full = True
