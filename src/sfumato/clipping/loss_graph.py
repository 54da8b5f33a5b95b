"""A loss as a graph of harmless operations, or why it is none."""

import collections
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.func import vmap
from torch.fx import GraphModule, Node
from torch.nn.functional import embedding, one_hot

from sfumato.clipping.agreement import first_line
from sfumato.clipping.errors_seen import ErrorsSeen
from sfumato.torch_internals import FakeTensorMode, OpOverload, is_wrapped, make_graph

_batched: collections.deque[str] = collections.deque(maxlen=64)
"""Operations that vmap took lately: it need not try them again."""


def graph_of(function: Callable[..., Any], made_up: list[torch.Tensor]) -> tuple[GraphModule | None, str]:
    """A function as a graph of harmless operations that vmap takes, or why it is none."""
    log = logging.getLogger("torch._subclasses.fake_tensor")  # tells of each operation that fails
    was, log.disabled = log.disabled, True
    try:
        with _Tracing() as seen:  # a handler of the loss's own may take what tracing raises
            graph = make_graph(function, made_up)
        if seen.error is not None:
            return None, _reason(seen.error)
        harmful = _harmful(graph)
        if harmful is not None:
            return None, harmful
        operations = _operations(graph, made_up)
        if operations not in _batched:
            with FakeTensorMode(allow_non_fake_inputs=True) as fake:  # no label is wrong
                vmap(graph)(*(fake.from_tensor(part).expand(2, *part.shape) for part in made_up))
            _batched.append(operations)
    except Exception as error:  # it looks at values, or does what no graph holds, or vmap does not take
        return None, _reason(error)
    finally:
        log.disabled = was
    return graph, ""


def _operations(graph: GraphModule, made_up: list[torch.Tensor]) -> str:
    """All that vmap sees of a graph before it has numbers."""
    constants = [getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr"]
    return graph.code + repr([(part.shape, part.stride(), part.dtype, part.device) for part in [*made_up, *constants]])


class _Tracing(ErrorsSeen):
    """The same; no tensor of the user's is given the memory of one that holds no numbers, and
    `one_hot` does not look at its values: a label that is no class has zeros alone.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__set__":
            self.error = RuntimeError("it sets an attribute of a tensor")
            raise self.error
        if func in _READ_ANOTHER_WAY:
            return _READ_ANOTHER_WAY[func](*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _one_hot(input: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    if num_classes < 1:
        raise RuntimeError("one_hot without num_classes looks at values")
    return (input.unsqueeze(-1) == torch.arange(num_classes, device=input.device)).long()


def _embedding(input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
    """vmap would take a row of the next image's table for an index that is none of this one's."""
    if any(value not in (None, False) for key, value in options.items() if key != "norm_type"):
        raise RuntimeError("embedding with options is not known to be each image's own")
    return weight.index_select(0, input.reshape(-1)).view(*input.shape, *weight.shape[1:])


_READ_ANOTHER_WAY: dict[Any, Callable[..., torch.Tensor]] = {one_hot: _one_hot, embedding: _embedding}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What raises no error for any values, besides what PyTorch tags as working entry by entry. Not among
# them are decompositions and solvers, which refuse some matrices, and what checks its values
# (binary_cross_entropy). Indices outside of what they index raise: they come from labels.
_HARMLESS = _names(
    "clone contiguous detach alias to _to_copy lift_fresh_copy where masked_fill view reshape "
    "_unsafe_view flatten unflatten zeros ones full zeros_like ones_like full_like new_zeros new_ones "
    "new_full scalar_tensor arange eye transpose permute t movedim unsqueeze squeeze stack cat expand "
    "repeat split split_with_sizes chunk unbind slice select narrow slice_scatter select_scatter "
    "diagonal diag_embed select_backward slice_backward diagonal_backward expand_as flip roll tril "
    "triu sum mean amax amin max min argmax argmin var std var_mean std_mean norm linalg_vector_norm "
    "logsumexp _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data cumsum cumprod "
    "prod cummax cummin logcumsumexp sort argsort topk all any gather scatter scatter_add "
    "index_select index_add index index_put nll_loss_forward nll_loss_backward nll_loss2d_forward "
    "nll_loss2d_backward multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_forward "
    "multilabel_margin_loss_backward mse_loss mse_loss_backward smooth_l1_loss "
    "smooth_l1_loss_backward huber_loss huber_loss_backward soft_margin_loss "
    "soft_margin_loss_backward log_sigmoid_forward log_sigmoid_backward matmul mm bmm mv dot addmm "
    "addmv baddbmm outer copy fill zero constant_pad_nd masked_scatter _euclidean_dist sym_size "
    "softplus_backward leaky_relu_backward elu_backward hardtanh_backward mish_backward hardsigmoid_backward "
    "hardswish_backward hardshrink_backward softshrink_backward glu glu_backward _prelu_kernel _prelu_kernel_backward "
    "trace linspace median nanmedian kthvalue bucketize searchsorted _cdist_forward _cdist_backward "
    "native_layer_norm native_layer_norm_backward convolution convolution_backward avg_pool1d "
    "avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward upsample_nearest1d "
    "upsample_nearest1d_backward upsample_nearest2d upsample_nearest2d_backward upsample_linear1d "
    "upsample_linear1d_backward upsample_bilinear2d upsample_bilinear2d_backward upsample_bicubic2d "
    "upsample_bicubic2d_backward nansum aminmax dist renorm reflection_pad1d reflection_pad1d_backward "
    "reflection_pad2d reflection_pad2d_backward replication_pad2d replication_pad2d_backward "
    "max_pool2d_with_indices max_pool2d_with_indices_backward unsafe_split unsafe_chunk "
)
_EMPTY = _names("empty empty_like new_empty new_empty_strided empty_strided")


def _harmful(graph: GraphModule) -> str | None:
    """What in a graph raises an error, draws numbers, or writes to what the graph did not make
    itself, for some values at least.
    """
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            constant = getattr(graph, node.target)
            if type(constant) not in (torch.Tensor, torch.nn.Parameter) or is_wrapped(constant):
                return "it uses a tensor that it made while it was traced: make that before"
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.op != "call_function":
            return f"it calls {node.target}"
        if not isinstance(node.target, OpOverload):
            if getattr(node.target, "__name__", "") != "getitem":
                return f"it calls {node.target}"
            continue
        name, tags = node.target.overloadpacket.__name__, node.target.tags
        if torch.Tag.nondeterministic_seeded in tags:
            return f"{name} draws random numbers"
        is_known = name.removesuffix("_") in _HARMLESS or torch.Tag.pointwise in tags or _is_filled(node)
        if node.target.namespace != "aten" or not is_known:
            return f"{name} is not known to raise no error at any value"
        for number, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
                if given is not None and not _is_own(given):
                    return f"{name} writes to a tensor that loss_fn keeps"
    return None


# What a tensor is made by, with memory of its own, besides what works entry by entry.
_FRESH = _names("clone zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full _to_copy")
# What shows its first argument's memory.
_VIEWS = _names(
    "detach alias view reshape _unsafe_view flatten unflatten transpose permute t movedim unsqueeze squeeze expand "
    "slice select narrow diagonal split split_with_sizes chunk unbind"
)


def _is_own(node: Any) -> bool:
    """Whether what is written to goes back to something that the graph made: through views, and
    through what wrote to it before.
    """
    while isinstance(node, Node) and node.op == "call_function":
        if isinstance(node.target, OpOverload):
            name, schema = node.target.overloadpacket.__name__, node.target._schema
            aliases = any(value.alias_info is not None for value in (*schema.arguments, *schema.returns))
            if not aliases and (name in _FRESH or torch.Tag.pointwise in node.target.tags):
                return True
            if name not in _VIEWS and not (name.endswith("_") and aliases):
                return False
        node = node.args[0]
    return False


def _is_filled(node: Node) -> bool:
    """Whether memory that nobody filled is given to what fills all of it, and to nothing else."""
    made = node.target.overloadpacket.__name__ in _EMPTY  # type: ignore[union-attr]
    return made and all(
        getattr(user.target, "overloadpacket", None) in (torch.ops.aten.fill, torch.ops.aten.copy, torch.ops.aten.zero)
        and user.args[0] is node
        and node not in user.args[1:]
        for user in node.users
    )


def _reason(error: Exception) -> str:
    if "DataDependent" in type(error).__name__ or "unallocated storage" in str(error):
        return "it looks at values; of torch.distributions set validate_args=False"
    reason = first_line(error).rstrip(".")
    return f"{reason}; convert whole-number labels by .long()" if "int32/int64 for index" in reason else reason
