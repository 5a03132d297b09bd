"""Which module's forward is running, and how often each op was called there: the names that plans use.

The profiler and the tape count with the same code, so a key that one wrote is the key that the other sees.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

UNKNOWN = "?"  # a module that is not in the tree of the root


class Frame:
    """Calls counted so far in the module at `path`, over all its calls since the root's forward began."""

    __slots__ = ("counts", "path", "planned")

    def __init__(self, path: str, planned: Any) -> None:
        self.path, self.planned = path, planned
        self.counts: dict[Any, int] = {}

    def next_call(self, op: Any) -> int:
        """Count one more call of `op` and return how many came before it."""
        call = self.counts.get(op, 0)
        self.counts[op] = call + 1
        return call


def paths_of(model: nn.Module) -> dict[int, str]:
    """The dotted name of each module of `model` by identity; a shared module has the first of its names."""
    return {id(module): name for name, module in model.named_modules()}


class ModuleFrames:
    """Context that follows the calls of modules in this thread, by torch's global module hooks.

    The hooks are there only while it is open, and belong to no module: nothing to pickle, copy or restore.
    """

    def __init__(self, paths: dict[int, str], planned: dict[str, Any] | None = None) -> None:
        self._paths, self._planned = paths, planned or {}
        self._frames: dict[str, Frame] = {}
        self.current = self._frame("")
        self._stack: list[Frame] = []
        self._thread = 0
        self._handles: list[Any] = []
        self.on_exit: Callable[[nn.Module, Any], None] | None = None

    def _frame(self, path: str) -> Frame:
        frame = self._frames.get(path)
        if frame is None:
            frame = self._frames[path] = Frame(path, self._planned.get(path))
        return frame

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            self._stack.append(self.current)
            self.current = self._frame(self._paths.get(id(module), UNKNOWN))

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        # After an exception in a module's own hook this may be called once too few times; the root ends all frames.
        if threading.get_ident() == self._thread and self._stack:
            self.current = self._stack.pop()
            if self.on_exit is not None:
                self.on_exit(module, output)

    def __enter__(self) -> ModuleFrames:
        self._thread = threading.get_ident()
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._exit, always_call=True),
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
