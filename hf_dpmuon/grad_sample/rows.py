"""Whose rows a function leaves: what it does to the leading dimension of a tensor of the batch.

A gradient per sample is read off the rows of activations, so that rows must be the samples'.
Functions that move or mix rows are known here by name, and judged only where the batch is known to
come first: after a permutation, "dimension 0" may be anything, and the shape has to tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Order", "Rows", "order_after"]


class Order(IntEnum):
    """What is known of the rows of a tensor that was made of the batch."""

    SAMPLES = 0  # some to a sample, sample by sample
    UNSURE = 1  # only the shape may tell
    MOVED = 2  # the batch is in another dimension
    MIXED = 3  # picked by value, reordered or reduced: of no known sample, whatever comes after


class Rows(NamedTuple):
    """The order of a tensor's rows, and the function that made it so; the worst is the maximum."""

    order: Order
    by: str = ""


# Which rows there are, and whose they are, depends on values.
PICKS_BY_VALUE = frozenset(
    {"masked_select", "masked_scatter", "masked_scatter_", "nonzero", "argwhere", "take"}
    | {"unique", "unique_consecutive", "bincount", "histc"}
)
INDEXED = frozenset({"index_select", "gather", "take_along_dim"})

# Functions that mix what lies along a dimension: where that is among the arguments, and which it is
# if it is not said (None: all of them).
ALONG: Mapping[str, tuple[int, int | None]] = {
    **dict.fromkeys(
        ["sum", "nansum", "mean", "nanmean", "prod", "std", "var", "std_mean", "var_mean"],
        (1, None),
    ),
    **dict.fromkeys(["max", "min", "amax", "amin", "aminmax", "median", "nanmedian"], (1, None)),
    **dict.fromkeys(["argmax", "argmin", "any", "all", "logsumexp", "count_nonzero"], (1, None)),
    **dict.fromkeys(["norm", "linalg_norm", "linalg_vector_norm", "quantile", "roll"], (2, None)),
    **dict.fromkeys(["cumsum", "cumprod", "logcumsumexp", "softmax", "log_softmax"], (1, -1)),
    **dict.fromkeys(["sort", "argsort", "msort", "mode"], (1, -1)),
    **dict.fromkeys(["topk", "kthvalue"], (2, -1)),
    **dict.fromkeys(["flip", "index_select", "gather", "select", "narrow"], (1, 0)),
    **dict.fromkeys(["cat", "concat", "concatenate", "unbind"], (1, 0)),
    **dict.fromkeys(["chunk", "split", "tensor_split"], (2, 0)),
    **dict.fromkeys(["vstack", "row_stack", "flipud"], (9, 0)),
    "take_along_dim": (2, None),
    "normalize": (2, 1),
}
VARIADIC = frozenset({"flip", "permute", "repeat", "tile"})
EXCHANGES = frozenset({"transpose", "transpose_", "swapaxes", "swapdims", "movedim", "moveaxis"})
WHOLE_TRANSPOSITIONS = frozenset({Tensor.T.__get__, Tensor.H.__get__})  # type: ignore[attr-defined]
MATRIX_TRANSPOSITIONS = frozenset({Tensor.mT.__get__, Tensor.mH.__get__})  # type: ignore[attr-defined]
RESHAPES = frozenset({"reshape", "view", "flatten", "unflatten", "ravel", "repeat_interleave"})


def order_after(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
    *,
    before: Order,
    batch_size: int,
    of_batch: Sequence[Tensor],
) -> Order:
    """Say what a function makes of the rows of tensors of which ``before`` is the worst.

    Args:
        func: As torch hands it to a mode.
        args: Its arguments.
        kwargs: Its named arguments.
        result: What it returned.
        before: The order of its operands that were made of the batch.
        batch_size: Samples in the batch.
        of_batch: These operands.
    """
    name = func.__name__
    args = args or [kwargs.get("input", kwargs.get("tensors"))]
    first = args[0] if isinstance(args[0], Tensor) else None
    if before is Order.MIXED or name in PICKS_BY_VALUE or (name == "where" and len(args) == 1):
        return Order.MIXED
    if name == "__getitem__" and first is not None:
        return _after_indexing(first, args[1], before, of_batch)
    if name == "repeat_interleave" and _among([*args[1:], *kwargs.values()], of_batch):
        return Order.MIXED
    mixes = name in ALONG and _mixes_first(name, args, kwargs)
    if mixes and name in INDEXED and _among([*args[1:], *kwargs.values()], of_batch):
        return Order.MIXED
    if before is not Order.SAMPLES:
        return Order.UNSURE
    if mixes:
        return Order.MIXED
    return _after_moving(func, args, kwargs, result, batch_size)


def _among(values: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
    return any(value is t for value in values for t in tensors)


def _mixes_first(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    position, default = ALONG[name]
    dims = next((kwargs[key] for key in ("dim", "dims", "axis") if key in kwargs), None)
    if dims is None:
        given = args[position:] if name in VARIADIC else args[position : position + 1]
        dims = given[0] if len(given) == 1 else list(given) or default
    if isinstance(dims, (Tensor, bool)):  # max(x, y) is taken row by row; std(x, unbiased)
        return isinstance(dims, bool)
    if dims is None or dims in ([], ()):
        return True
    operand = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
    if not isinstance(operand, Tensor):
        return False
    return 0 in {d % max(operand.dim(), 1) for d in ([dims] if isinstance(dims, int) else dims)}


def _after_moving(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, batch_size: int
) -> Order:
    """Where the batch is that came first."""
    name = func.__name__
    if not isinstance(result, Tensor):
        return Order.SAMPLES
    moved = Order.MOVED if result.dim() and result.shape[0] > 1 else Order.UNSURE
    first = args[0] if isinstance(args[0], Tensor) else None
    numbers = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, int)]
    if name == "stack":
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return moved if dim % result.dim() == 0 else Order.SAMPLES
    if first is None:
        return Order.UNSURE if name == "einsum" else Order.SAMPLES
    if name == "permute":
        dims = numbers or kwargs.get("dims", args[-1])
        return Order.SAMPLES if dims[0] % first.dim() == 0 else moved
    if name in EXCHANGES:
        if len(numbers) != 2:
            return Order.UNSURE
        ends = [d % first.dim() == 0 for d in numbers]
        return moved if ends[0] != ends[1] else Order.SAMPLES
    if name == "t" or func in WHOLE_TRANSPOSITIONS or func in MATRIX_TRANSPOSITIONS:
        untouched = first.dim() < 2 or (first.dim() > 2 and func in MATRIX_TRANSPOSITIONS)
        return Order.SAMPLES if untouched else moved
    if name in RESHAPES and not any(
        isinstance(v, Tensor) for v in args[1:]
    ):  # rows stay sample by sample if each sample has its share of them
        shared_out = result.dim() and result.shape[0] % batch_size == 0
        return Order.SAMPLES if shared_out else Order.UNSURE
    if name in ("expand", "expand_as", "broadcast_to") and result.dim() > first.dim():
        return moved
    if name in ("repeat", "tile"):
        sizes = numbers or args[1]
        return Order.SAMPLES if len(sizes) <= first.dim() and sizes[0] == 1 else Order.UNSURE
    same = result.dim() and first.dim() and result.shape[0] == first.shape[0]
    return Order.SAMPLES if same else Order.UNSURE


def _after_indexing(target: Tensor, key: Any, before: Order, of_batch: Sequence[Tensor]) -> Order:
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(isinstance(k, Tensor) and k.dtype == torch.bool and _among([k], of_batch) for k in keys):
        return Order.MIXED
    if keys and keys[0] is Ellipsis:
        reaches_first = sum(k is not None for k in keys[1:]) == target.dim()
        keys = keys[1:] if reaches_first else [slice(None)]
    head = keys[0] if keys else slice(None)
    if not _among([target], of_batch):  # a constant, read at places that the samples say
        return before if _among([head], of_batch) else Order.UNSURE
    known = before is Order.SAMPLES
    if isinstance(head, Tensor) and head.dim() and (known or _among([head], of_batch)):
        return before if _is_range(head, len(target)) else Order.MIXED
    if not known or head is None:
        return Order.UNSURE
    whole = isinstance(head, slice) and head.indices(len(target)) == (0, len(target), 1)
    return Order.SAMPLES if whole else Order.MIXED


def _is_range(index: Tensor, length: int) -> bool:
    """Whether row i of the result is of row i, as in ``x[torch.arange(len(x)), places]``."""
    if index.dtype == torch.bool or len(index) != length:
        return False
    rows = torch.arange(length, device=index.device)
    return bool((index.reshape(length, -1) == rows[:, None]).all())
