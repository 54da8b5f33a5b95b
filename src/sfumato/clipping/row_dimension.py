"""What a graph may do with the dimension that counts rows: hand it on, and nothing else.

Tests on made-up images cannot try every number of rows. Therefore: in every value that the
batch touches, rows lie along exactly one dimension, a whole multiple of their number long;
no operation acts along that dimension; and the number itself goes into shapes of views,
expansions and fills alone. So no row can learn its place, or how many others there are.
"""

import operator
from typing import Any

import torch
from torch.fx import Node

# Operations that may be told the number of rows: they make shapes of it.
_SHAPES = frozenset(
    (
        *("view", "reshape", "_unsafe_view", "expand", "broadcast_to", "repeat", "unflatten"),
        *("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"),
        *("rand", "randn", "randint", "sym_size"),  # random numbers are drawn for each row by itself (`draws`)
    )
)
_ARITHMETIC = (operator.mul, operator.floordiv, operator.add, operator.sub)
# Operations whose dimension says where values lie, not along what they are computed.
_MOVES = frozenset(
    ("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "unsqueeze", "squeeze", "sym_size", "unflatten", "flatten", "stack")
)
# Operations that take nothing of a tensor but its type, device or shape.
_FACTORIES = frozenset(("new_zeros", "new_ones", "new_full", "new_empty", "sym_size", "_assert_tensor_metadata"))
_DIMENSIONS = ("dim", "dims", "dim0", "dim1")
_WHOLE = 2**63 - 1


def misuse(node: Node) -> str | None:
    """What an operation does with the rows that it may not, in words; None if nothing.

    Args:
        node: An operation of a graph that was traced for any number of rows; its inputs are in order.
    """
    name = _name(node)
    inputs = [other.meta.get("val") for other in node.all_input_nodes]
    numbers = [value for value in inputs if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and _symbols(value)]
    if numbers and not (name in _SHAPES or node.target in _ARITHMETIC):
        return "computes with the number of rows"
    if isinstance(node.meta.get("val"), (torch.SymFloat, torch.SymBool)):
        return "computes with the number of rows"
    tensors = [value for value in inputs if isinstance(value, torch.Tensor) and _row_dims(value)]
    made = node.meta.get("val")
    for value in made if isinstance(made, (tuple, list)) else [made]:
        if isinstance(value, torch.Tensor):
            dims = _row_dims(value)
            if len(dims) > 1 or any(not _is_multiple(value.shape[dim]) for dim in dims):
                return "takes rows together in groups"
            if tensors and not dims and name not in _FACTORIES:
                return "makes one value of all rows"
    return _acts_along_rows(node, name) if tensors else None


def _acts_along_rows(node: Node, name: str) -> str | None:
    """Whether an operation selects, orders or adds up along the dimension of the rows."""
    if name in _MOVES or not isinstance(node.target, torch._ops.OpOverload):
        return None
    given: dict[str, Any] = dict(zip((argument.name for argument in node.target._schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    lists = given.get("tensors") if name in ("cat", "concat") else None
    value = (lists[0] if lists else given.get("self", node.all_input_nodes[0])).meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    (row_dim,) = _row_dims(value) or (None,)
    if name in ("index", "index_put", "_unsafe_index") and row_dim is not None:
        indices = given["indices"]
        if row_dim >= len(indices) or indices[row_dim] is None or (name == "index_put" and _is_mask(indices, given["values"])):
            return None
        return "picks rows by their place"
    if name in ("take", "masked_select", "nonzero", "put"):
        return "picks values wherever they lie"
    if name == "repeat_interleave" or (name in ("slice", "slice_scatter") and _takes_all(given)):
        return None
    along = [given[argument] for argument in _DIMENSIONS if argument in given]
    if name == "roll" and not given.get("dims"):
        return "rolls rows"
    dims = [dim for entry in along for dim in (entry if isinstance(entry, (list, tuple)) else [entry]) if isinstance(dim, int)]
    if not along and any(argument.name == "dim" for argument in node.target._schema.arguments):
        dims = [_default_dim(node.target)]
    if row_dim is not None and any(dim % max(value.ndim, 1) == row_dim for dim in dims):
        return "acts along the dimension of the rows"
    return None


def _is_mask(indices: list[Any], values: Node) -> bool:
    """Whether one value is written where a condition on the tensor's own values holds: to each by itself."""
    return len(indices) == 1 and indices[0].meta["val"].dtype == torch.bool and values.meta["val"].numel() == 1


def _takes_all(given: dict[str, Any]) -> bool:
    return given.get("start") in (None, 0) and given.get("end") in (None, _WHOLE) and given.get("step", 1) == 1


def _default_dim(target: torch._ops.OpOverload) -> int:
    default = next(argument.default_value for argument in target._schema.arguments if argument.name == "dim")
    return default if isinstance(default, int) else _WHOLE


def _name(node: Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.overloadpacket.__name__
    return getattr(node.target, "__name__", str(node.target))


def _symbols(value: Any) -> bool:
    return bool(value.node.expr.free_symbols)


def _row_dims(value: torch.Tensor) -> list[int]:
    """The dimensions whose size depends on the number of rows."""
    return [dim for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt) and _symbols(size)]


def _is_multiple(size: Any) -> bool:
    """Whether a size is the number of rows times a whole number."""
    symbols = size.node.expr.free_symbols
    return len(symbols) == 1 and bool((size.node.expr / next(iter(symbols))).is_Integer)
