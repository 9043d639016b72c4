"""What memory a piece of work takes, and what is left for it.

Receives work to run, or a device; returns bytes. Nothing of the work's values is looked at.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["free_bytes", "peak_bytes"]

CGROUP = Path("/sys/fs/cgroup")  # of a container, version 2


def peak_bytes(work: Callable[[], object]) -> int:
    """Run ``work``; return the most bytes that tensors made in it took at one time.

    Temporary storage inside one kernel is not seen.
    """
    mode = _PeakMemory()
    with mode:
        work()
    return mode.peak


def free_bytes(device: torch.device) -> int:
    """Bytes that new tensors may take on a device, of a CPU within the limit of its container."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free) + unused
    free = int(psutil.virtual_memory().available)
    limit, used = (CGROUP / "memory.max", CGROUP / "memory.current")
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return free


class _PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that functions return, for as long as they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._held = 0
        self._sizes: dict[int, int] = {}  # by address of the storage object

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        for t in _tensors(result):
            storage = t.untyped_storage()
            if storage._cdata in given or storage._cdata in self._sizes:
                continue
            self._sizes[storage._cdata] = storage.nbytes()
            self._held += storage.nbytes()
            self.peak = max(self.peak, self._held)
            weakref.finalize(storage, self._free, storage._cdata)
        return result

    def _free(self, address: int) -> None:
        self._held -= self._sizes.pop(address)


def _tensors(values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor)]
