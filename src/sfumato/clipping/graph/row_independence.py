"""What a graph may do with the dimension that counts rows: hand it on, and nothing else.

Tests on made-up images cannot try every number of rows, every place, every value. Therefore the
graph itself must show that no row can learn its place, how many others there are, or anything of
them: in every value that the batch touches, rows lie along exactly one dimension, and every
operation is one that is known to compute each row by itself. What is not known to is refused, and
left to `torch.func`, which never shows a model two images.

Along its dimension a value has outer * rows * inner entries: windows of one image may lie between
rows, or be repeated around them (`RowLayout`). Views may fold rows in no other way, or a row would
change its place.
"""

import math
import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from sfumato.torch_internals import OpOverload


class RowLayout(NamedTuple):
    """Where rows lie along their dimension: row = index // inner % rows."""

    outer: int = 1
    inner: int = 1


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ARITHMETIC = (operator.mul, operator.floordiv, operator.add, operator.sub)
# Arguments that may hold the number of rows: they make shapes of it.
_SHAPE_ARGUMENTS = _names("size shape sizes repeats")
# Each entry by itself, besides what PyTorch tags as such.
_POINTWISE = _names(
    "clone contiguous detach alias to _to_copy type_as lift_fresh_copy where masked_fill dropout "
    "native_dropout alpha_dropout feature_dropout feature_alpha_dropout bernoulli normal "
    "normal_functional uniform exponential rand_like randn_like randint_like zeros_like "
    "ones_like full_like __and__ __or__ __xor__ __iand__ __ior__ __ixor__ copy fill relu6 "
    "hardswish hardtanh mish selu elu celu softplus logsigmoid log_sigmoid gelu silu prelu rrelu "
    "clamp expand_as "
    # Other names of operations that bear the tag.
    "floor_divide divide multiply subtract negative absolute greater less greater_equal less_equal "
    "not_equal fix arccos arcsin arctan arccosh arcsinh arctanh arctan2 isclose isreal "
)
# They change where entries lie, not their order.
_VIEWS = _names("view reshape _unsafe_view flatten unflatten view_as reshape_as")
# They take nothing of a tensor but its type, device or shape.
_FACTORIES = _names("zeros ones full rand randn randint new_zeros new_ones new_full")
_FORGETS = _names("new_zeros new_ones new_full new_empty sym_size")
# A dimension of theirs says where values lie.
_MOVES = _names("transpose permute movedim moveaxis swapaxes swapdims unsqueeze squeeze stack t mT numpy_T")
_MOVES |= _names("expand broadcast_to broadcast_tensors")
# They work along the dimensions that they are told, which must not be the rows'.
_ALONG = _names(
    "sum mean amax amin max min argmax argmin var std var_mean std_mean norm linalg_vector_norm "
    "logsumexp softmax _softmax log_softmax _log_softmax cumsum cumprod cummax cummin "
    "logcumsumexp sort argsort topk kthvalue median mode flip roll all any count_nonzero "
    "unbind split split_with_sizes chunk unsafe_split unsafe_split_with_sizes unsafe_chunk "
    "tensor_split narrow slice select index_select index_fill index_add index_copy gather "
    "scatter scatter_add slice_scatter select_scatter cat concat diff unfold glu aminmax "
    "linalg_norm normalize"
)
_DIMENSIONS = ("dim", "dims", "dim0", "dim1", "dimension")
# They work on the last so many dimensions; rows must lie before these.
_LAST = {
    **dict.fromkeys(("linear", "layer_norm", "rms_norm", "native_layer_norm", "bilinear"), 1),
    **dict.fromkeys(("scaled_dot_product_attention", "tril", "triu", "diagonal", "matrix_exp"), 2),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), 3),
}
# They take rows first and then channels, followed by so many dimensions; None: by any number.
_ROWS_FIRST: dict[str, int | None] = {
    **{
        f"{name}{k}d": k
        for name in ("conv", "avg_pool", "max_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")
        for k in (1, 2, 3)
    },
    **{f"max_pool{k}d_with_indices": k for k in (2, 3)},
    **{f"{name}{k}d": k for name in ("reflection_pad", "replication_pad", "_adaptive_avg_pool") for k in (1, 2, 3)},
    **{
        "conv_transpose1d": 1,
        "conv_transpose2d": 2,
        "conv_transpose3d": 3,
        "im2col": 2,
        "col2im": 1,
        "grid_sampler": 2,
        "grid_sampler_2d": 2,
    },
    **{
        f"upsample_{kind}": k
        for kind, k in (("nearest1d", 1), ("nearest2d", 2), ("bilinear2d", 2), ("bicubic2d", 2), ("linear1d", 1))
    },
    **dict.fromkeys(
        (
            "convolution",
            "group_norm",
            "native_group_norm",
            "instance_norm",
            "batch_norm",
            "_native_batch_norm_legit_no_training",
        ),
        None,
    ),
    **dict.fromkeys(("feature_dropout", "feature_alpha_dropout", "channel_shuffle", "native_channel_shuffle"), None),
}
# Sums of products of two operands along a dimension that both must have: rows that are added up are
# gone from the result, and rows of two operands that do not belong together stand in it twice.
_PRODUCTS = _names("matmul mm bmm addmm baddbmm")
# A shared index, or a shared source, may be shorter than the rows: it would be meant for the first
# ones alone.
_SCATTERED = _names("scatter scatter_add gather index_add index_copy")
_WHOLE = 2**63 - 1
# On constants, parameters and buffers every one of the operations above gives the same again, and
# these besides. Not among them is what hands memory out as others left it: empty, resize,
# as_strided and their kin.
_REPEATABLE = _names(
    "prod isin mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy embedding_bag "
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional zero arange "
    "linspace logspace eye scalar_tensor tril_indices triu_indices meshgrid cartesian_prod "
    "combinations hann_window hamming_window blackman_window kaiser_window bartlett_window outer "
    "ger kron dot vdot mv addmv addr inner tensordot trace det logdet inverse cholesky "
    "cholesky_solve cholesky_inverse qr svd pinverse matrix_power matrix_rank block_diag "
    "chain_matmul cdist _cdist_forward pdist dist cosine_similarity cross rot90 tile take "
    "take_along_dim masked_select nonzero unique _unique2 bincount histc bucketize searchsorted "
    "one_hot vander renorm trapezoid cov corrcoef view_as_real view_as_complex complex polar "
    "real imag resolve_conj resolve_neg conj _conj diag diag_embed diagonal_scatter item "
    "_local_scalar_dense hstack vstack dstack column_stack atleast_1d atleast_2d atleast_3d "
    "ravel squeeze_ pad constant_pad_nd repeat repeat_interleave embedding index index_put "
    "_unsafe_index einsum sym_size sym_numel sym_stride _weight_norm _weight_norm_interface "
    "masked_scatter movedim fliplr flipud nan_to_num nansum nanmean quantile nanquantile lerp "
    "addcmul addcdiv affine_grid_generator stft istft frobenius_norm nuclear_norm numel "
    "is_nonzero"
)
_UNFILLED = _names("empty empty_like new_empty empty_strided new_empty_strided empty_permuted")
_FILLS = _names(
    "fill zero copy zeros_like ones_like full_like uniform normal_functional exponential rand_like randn_like"
)
_REPEATABLE_FAMILIES = ("fft_", "_fft_", "linalg_", "_linalg_", "special_", "upsample_", "_upsample_", "bitwise_")


def gives_the_same_again(node: Node) -> bool:
    """Whether an operation that nothing of the batch reaches is known to depend on its arguments
    alone.

    Random ones are another matter (`sfumato.clipping.law`).
    """
    if node.target is operator.getitem or node.target in _ARITHMETIC:
        return True
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    tags, name = node.target.tags, _name(node)
    if name in _UNFILLED and node.users and all(_fills(user, node) for user in node.users):
        return True  # nobody sees what was there
    known = (
        name in _SHARED
        or name.startswith(_REPEATABLE_FAMILIES)
        or torch.Tag.pointwise in tags
        or torch.Tag.nondeterministic_seeded in tags
    )
    return known and "out" not in node.kwargs


_SHARED = (
    _POINTWISE
    | _VIEWS
    | _FACTORIES
    | _MOVES
    | _ALONG
    | _PRODUCTS
    | _SCATTERED
    | _REPEATABLE
    | _LAST.keys()
    | _ROWS_FIRST.keys()
)


def _fills(user: Node, unfilled: Node) -> bool:
    """Whether an operation takes nothing of a tensor but its shape and type: it writes, or draws, all of
    it.
    """
    others = [value for value in (*user.args[1:], *user.kwargs.values()) if isinstance(value, Node)]
    fills = _name(user) in _FILLS or str(user.target) == "aten.bernoulli.p"  # bernoulli(x) reads x
    return fills and user.args[0] is unfilled and unfilled not in others


class RowDimension:
    """Walks along a graph and says what is not known to leave rows apart.

    Args:
        images: The graph's input, rows first.
    """

    def __init__(self, images: Node) -> None:
        self._rows: dict[Node, RowLayout] = {images: RowLayout()}

    def misuse(self, node: Node) -> str | None:
        """What an operation on data does with the rows that it may not, in words; None if nothing.

        Args:
            node: Operations must come in the order of the graph.
        """
        try:
            return self._misuse(node)
        except Exception:  # an operation that is written otherwise than thought of: no proof
            return "is not followed by the proof that each row is computed by itself"

    def _misuse(self, node: Node) -> str | None:
        made = node.meta.get("val")
        if isinstance(made, (torch.SymInt, int)) and not isinstance(made, bool):
            is_size = node.target in _ARITHMETIC or _name(node) == "sym_size"
            return None if is_size and _is_multiple(made) else "computes with the number of rows"
        if node.target is operator.getitem:
            return self._hand_on(node, [other for other in node.all_input_nodes if other in self._rows])
        if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
            return "is not one of PyTorch's operations"
        given = _arguments(node)
        for name, value in given.items():
            if name not in _SHAPE_ARGUMENTS and any(_is_number_of_rows(entry) for entry in _entries(value)):
                return "computes with the number of rows"
        name = _name(node)
        data = [other for other in node.all_input_nodes if other in self._rows and name not in _FORGETS]
        if not data and not any(_row_dims(value) for value in _tensors(made)):
            return None  # made of a tensor's type and of constants: there are no rows in it
        refusal = self._refusal(node, name, given, data)
        return refusal or self._hand_on(node, data)

    def _refusal(self, node: Node, name: str, given: dict[str, Any], data: list[Node]) -> str | None:
        """Whether the operation is not known, or works along rows."""
        if name in _UNFILLED:
            is_seen = not node.users or not all(_fills(user, node) for user in node.users)
            return "hands out memory that nobody has filled" if is_seen else None
        if name in _FACTORIES or name in ("repeat", "sym_size") or name in _VIEWS or name in _MOVES:
            return None
        if name == "diagonal" and any(
            given[dim] % _ndim(other) == _row_dim(other) for other in data for dim in ("dim1", "dim2")
        ):
            return "acts along the dimension of the rows"
        if name in _LAST:
            return (
                None
                if all(_row_dim(other) < _ndim(other) - _LAST[name] for other in data)
                else "acts along the dimension of the rows"
            )
        if name == "batch_norm" and given.get("training"):
            return "takes statistics of all rows"
        if name in _ROWS_FIRST:
            return self._refusal_of_rows_first(node, data, _ROWS_FIRST[name])
        if name in ("constant_pad_nd", "pad"):
            padded = len(given["pad"]) // 2
            return None if _row_dim(data[0]) < _ndim(data[0]) - padded else "adds rows"
        if name == "embedding":
            return None if given["weight"] not in self._rows else "looks rows up in a table made of rows"
        if name in ("index", "index_put", "_unsafe_index"):
            return self._refusal_of_index(name, given)
        if name == "einsum":
            return self._refusal_of_einsum(given)
        if name in _SCATTERED:
            tensors = [
                value
                for value in given.values()
                if isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor)
            ]
            alike = [
                value for value in tensors if value.meta["val"].ndim == _ndim(data[0])
            ]  # an index along one dimension is for all rows
            if not all(value in self._rows for value in alike):
                return "picks rows by their place"
        if name == "repeat_interleave":
            return None if isinstance(given.get("repeats"), int) and given.get("dim") is not None else "repeats rows"
        of_two = name in ("max", "min") and str(node.target).endswith(
            ".other"
        )  # the larger of two tensors, entry by entry
        if name in _ALONG and not of_two:
            return _refusal_along(node, name, given, data)
        if name in _PRODUCTS or name in _POINTWISE or of_two or torch.Tag.pointwise in node.target.tags:  # type: ignore[union-attr]
            return None
        return "is not known to compute each row by itself"

    def _refusal_of_rows_first(self, node: Node, data: list[Node], spatial: int | None) -> str | None:
        image, *others = node.all_input_nodes
        is_first = data[:1] == [image] and _row_dim(image) == 0 and (spatial is None or _ndim(image) == spatial + 2)
        of_rows = [other for other in others if other in self._rows]
        is_grid = "grid" in _name(node) and all(_row_dim(other) == 0 for other in of_rows)
        return None if is_first and (not of_rows or is_grid) else "acts along the dimension of the rows"

    def _refusal_of_index(self, name: str, given: dict[str, Any]) -> str | None:
        value, indices = given["self"], given["indices"]
        if value not in self._rows:
            return (
                "looks rows up in a table"
                if sum(index in self._rows for index in indices if index is not None) > 1
                else None
            )
        spread = [
            index for index in indices for _ in range(index.meta["val"].ndim if _is_condition(index) else 1)
        ]  # one for each dimension
        dim = _row_dim(value)
        if dim >= len(spread) or spread[dim] is None:
            return (
                None
                if not any(index in self._rows for index in indices if index is not None)
                else "picks values by values of rows"
            )
        # One value, written where a condition on the tensor's own values holds: to each by itself.
        is_mask = len(indices) == 1 and _is_condition(indices[0]) and indices[0] in self._rows
        one_value = (
            name == "index_put" and given["values"] not in self._rows and given["values"].meta["val"].numel() == 1
        )
        return None if is_mask and one_value else "picks rows by their place"

    def _refusal_of_einsum(self, given: dict[str, Any]) -> str | None:
        """The rows must bear one label in every operand that has them, and keep it."""
        equation = given["equation"].replace(" ", "")
        inputs, arrow, output = equation.partition("->")
        labels = {
            part[_row_dim(operand)]
            for part, operand in zip(inputs.split(","), given["tensors"], strict=True)
            if operand in self._rows
        }
        if not arrow or "." in equation or len(labels) != 1 or next(iter(labels)) not in output:
            return "adds rows up"
        return None

    def _hand_on(self, node: Node, data: list[Node]) -> str | None:
        """Notes where the rows of a result lie."""
        made, name = node.meta.get("val"), _name(node)
        known = {self._rows[other] for other in data}
        for value in _tensors(made):
            dims = _row_dims(value)
            if len(dims) > 1 or any(not _is_multiple(value.shape[dim]) for dim in dims):
                return "takes rows together in groups"
            if not dims:
                if data:
                    return "makes one value of all rows"
                continue
            per_row = _per_row(value.shape[dims[0]])
            if not data:  # the same for every row
                known = {RowLayout(1, per_row)}
            elif name in _VIEWS:
                source = data[0].meta["val"]
                refolded = _refolded(source.shape, self._rows[data[0]], value.shape)
                if refolded is None:
                    return "folds rows so that they change their places"
                known = {refolded}
            elif name in ("repeat", "repeat_interleave"):
                before = self._rows[data[0]]
                factor = per_row // (before.outer * before.inner)
                known = {
                    RowLayout(before.outer * factor, before.inner)
                    if name == "repeat"
                    else RowLayout(before.outer, before.inner * factor)
                }
            if len(known) != 1 or math.prod(next(iter(known))) != per_row:
                return "joins rows that lie in different orders"
            self._rows[node] = next(iter(known))
        return None


def _refusal_along(node: Node, name: str, given: dict[str, Any], data: list[Node]) -> str | None:
    if (
        name in ("slice", "slice_scatter")
        and given.get("start") in (None, 0)
        and given.get("end") in (None, _WHOLE)
        and given.get("step", 1) == 1
    ):
        return None
    if name == "roll" and not given.get("dims"):
        return "rolls rows"
    told = [given[argument] for argument in _DIMENSIONS if argument in given]
    dims = [dim for entry in told for dim in (entry if isinstance(entry, (list, tuple)) else [entry])]
    if not dims or not all(isinstance(dim, int) for dim in dims):
        return "acts on all rows at once"
    is_along = any(dim % _ndim(other) == _row_dim(other) for other in data for dim in dims)
    return "acts along the dimension of the rows" if is_along else None


def _refolded(shape: torch.Size, rows: RowLayout, other: torch.Size) -> RowLayout | None:
    """Where rows lie after a view; None if they would lie otherwise than one after another."""

    def around(shape: torch.Size) -> tuple[int, int]:
        (dim,) = (dim for dim, size in enumerate(shape) if isinstance(size, torch.SymInt) and _symbols(size))
        return math.prod(int(size) for size in shape[:dim]), math.prod(int(size) for size in shape[dim + 1 :])

    (before, after), (new_before, new_after) = around(shape), around(other)
    outer, inner = before * rows.outer, rows.inner * after  # of the whole list of entries
    if not new_before or not new_after or outer % new_before or inner % new_after:
        return None
    return RowLayout(outer // new_before, inner // new_after)


def _is_condition(index: Node | None) -> bool:
    return index is not None and index.meta["val"].dtype in (torch.bool, torch.uint8)


def _arguments(node: Node) -> dict[str, Any]:
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return given | dict(zip((argument.name for argument in schema), node.args, strict=False)) | dict(node.kwargs)


def _entries(value: Any) -> list[Any]:
    return [entry for each in value for entry in _entries(each)] if isinstance(value, (list, tuple)) else [value]


def _name(node: Node) -> str:
    if isinstance(node.target, OpOverload):
        return node.target.overloadpacket.__name__
    return getattr(node.target, "__name__", str(node.target))


def _is_number_of_rows(value: Any) -> bool:
    if isinstance(value, Node):
        value = value.meta.get("val")
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and _symbols(value)


def _symbols(value: Any) -> bool:
    return bool(value.node.expr.free_symbols)


def _row_dims(value: torch.Tensor) -> list[int]:
    """The dimensions whose size depends on the number of rows."""
    return [dim for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt) and _symbols(size)]


def _tensors(made: Any) -> list[torch.Tensor]:
    return [value for value in (made if isinstance(made, (tuple, list)) else [made]) if isinstance(value, torch.Tensor)]


def _row_dim(node: Node) -> int:
    value = node.meta["val"]
    return next(iter(_row_dims(value[0] if isinstance(value, (tuple, list)) else value)))


def _ndim(node: Node) -> int:
    value = node.meta["val"]
    return (value[0] if isinstance(value, (tuple, list)) else value).ndim


def _is_multiple(size: Any) -> bool:
    """Whether a size is the number of rows times a whole number, or has nothing to do with it."""
    if not isinstance(size, torch.SymInt) or not _symbols(size):
        return True
    symbols = size.node.expr.free_symbols
    return len(symbols) == 1 and bool((size.node.expr / next(iter(symbols))).is_Integer)


def _per_row(size: Any) -> int:
    return int(size.node.expr / next(iter(size.node.expr.free_symbols)))
