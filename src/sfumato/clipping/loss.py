"""A user's loss on many examples, so that none can tell what another's is.

PyTorch traces the loss of one example (its outputs for K views, its target) and that loss's gradient
to a graph, on shapes alone. A graph that holds only operations that raise no error and draw no
numbers, whatever their values, is then applied to all examples side by side (`torch.func.vmap`).
None of the user's code runs in it: it can neither catch an error, count, nor keep anything, and no
formula is chosen by values. The graph is traced anew for each call, since the loss may have been
changed between two of them.

Any other loss (it branches on values, holds a `try` or another library, has a backward pass of its
own) could keep something of one image for the next, in more places than any search finds. So it
needs its author's word that it does not (`pure`), and is called for one example after another.
"""

import collections
import contextlib
import dataclasses
import functools
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.func import functionalize, grad_and_value, vmap
from torch.fx import GraphModule, Node
from torch.nn.functional import embedding, one_hot
from torch.overrides import TorchFunctionMode

from sfumato.clipping.agreement import first_line
from sfumato.clipping.outputs import is_usual
from sfumato.clipping.protocol import Loss
from sfumato.errors import InputError
from sfumato.torch_internals import (
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    is_wrapped,
    make_graph,
    tree_flatten,
    tree_unflatten,
)

F = TypeVar("F", bound=Callable[..., Any])
# Losses (m,), and for each of the outputs the gradient of their sum; None for whole numbers.
LossesAndGradients = tuple[torch.Tensor, list[torch.Tensor | None]]


class ErrorsSeen(TorchFunctionMode):
    """Within, notes the first error that an operation raises, whoever handles it."""

    error: Exception | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self.error = self.error or error
            raise


class KernelErrorsSeen(TorchDispatchMode):
    """The same for what runs in a backward pass, where a mode of functions is off: hooks, and
    backward passes of the model's own.
    """

    error: Exception | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self.error = self.error or error
            raise


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

_pure: "weakref.WeakValueDictionary[tuple[int, int], Any]" = weakref.WeakValueDictionary()
"""By function and object, what lives as long as the promise."""
_graphs_of_pure: "weakref.WeakKeyDictionary[Any, dict[Any, GraphModule | None]]" = weakref.WeakKeyDictionary()
"""Of functions that are promised: they are the same for every engine, so they are traced once."""
_batched: collections.deque[str] = collections.deque(maxlen=64)
"""Operations that vmap took lately: it need not try them again."""
_user_code = threading.RLock()
"""The code of users' losses is called by one thread at a time, whichever loss it is: they may share
what they keep.
"""


def pure(loss_fn: F) -> F:
    """Promises that a loss is a function of its arguments alone, now and later: what it gives for one
    image depends on no other image, no earlier call and nothing that changes.

    The guarantee of `clipped_grad` rests on that promise where the loss cannot be written down as a
    graph. Where it can, the promise spares that a new graph is made at every call (10 to 40 ms).

    A method that is promised in the body of its class is promised for all objects of that class; one
    of an object for that object alone.

    Returns:
        The same object, so that it can be a decorator.
    """
    owner = getattr(loss_fn, "__self__", None)
    held = loss_fn if owner is None else owner
    try:
        # By identity: an attribute would be copied by functools.wraps.
        _pure[_key(loss_fn)] = held
    except TypeError:  # no weak reference to an object with slots
        raise InputError(f"a {type(held).__name__} cannot be marked. Wrap it in a function.") from None
    return loss_fn


def _key(loss_fn: Any) -> tuple[int, int]:
    """A bound method is another object at each look."""
    owner = getattr(loss_fn, "__self__", None)
    return id(getattr(loss_fn, "__func__", loss_fn)), 0 if owner is None else id(owner)


def _is_promised(loss_fn: Any) -> bool:
    function = getattr(loss_fn, "__func__", loss_fn)
    return _key(loss_fn) in _pure or _pure.get((id(function), 0)) is function


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Outputs and targets of some structure, shapes and types."""

    leaves: tuple[Any, ...]  # what is no tensor, in its place
    structure: Any
    parts: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]  # of outputs, then of targets
    num_outputs: int
    views: int

    @property
    def key(self) -> tuple[Any, ...]:
        return self.parts, self.num_outputs, str(self.structure), tuple(map(repr, self.leaves)), self.views

    @property
    def floats(self) -> tuple[int, ...]:
        """The outputs that have a gradient."""
        return tuple(place for place in range(self.num_outputs) if self.parts[place][1].is_floating_point)

    def nested(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Outputs as the model returns them."""
        found = iter(tensors)
        return tree_unflatten([next(found) if leaf is _TENSOR else leaf for leaf in self.leaves], self.structure)


class _Tensor:
    """Stands for a tensor among what a model returns."""

    def __repr__(self) -> str:
        return "tensor"


_TENSOR = _Tensor()


class ExampleLosses:
    """One loss for each example, of that example's outputs and targets alone, and its gradients with
    respect to these outputs.

    A loss that compares rows (with their mean, with each other's targets, with their number) sees
    one example's views only. Where an example's outputs hold NaN or infinity (less than infinite may
    be meant: a masked class) it sees zeros: its loss is NaN.
    """

    def __init__(self, loss_fn: Loss) -> None:
        self._loss_fn = loss_fn
        self._is_pure = _is_promised(loss_fn)
        self._kinds: dict[Any, _Kind] = {}  # that made-up images gave, as calls will
        self._graphs: dict[Any, GraphModule | None] = {}
        if self._is_pure and isinstance(loss_fn, types.FunctionType):
            self._graphs = _graphs_of_pure.setdefault(loss_fn, {})
        self._notes = self._is_closed = False

    def renew(self, targets: tuple[torch.Tensor, ...]) -> None:
        """For a new call: the loss may be another than at the last one. All is traced before a model
        sees a private image, which it may take a note of.

        Args:
            targets: As the call's will be, by shape and type.

        Raises:
            InputError: As `require`.
        """
        if not self._is_pure:
            self._graphs = {}
            wanted = tuple((target.shape[1:], target.dtype, target.device) for target in targets)
            for kind in self._kinds.values():
                if kind.parts[kind.num_outputs :] == wanted:
                    self._graph(kind)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Within, outputs are those of made-up images, of the kinds that calls will have; afterwards
        no loss is traced for any other.
        """
        self._notes, self._is_closed = True, False
        try:
            yield
        finally:
            self._notes, self._is_closed = False, True

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Within, outputs are those of made-up images, of whatever kind."""
        was, self._is_closed = self._is_closed, False
        try:
            yield
        finally:
            self._is_closed = was

    def require(self, outputs: Any, targets: tuple[torch.Tensor, ...], views: int) -> None:
        """Raises InputError where such a loss is neither a graph nor promised to be `pure`."""
        self._graph(_kind(outputs, targets, views))

    def __call__(self, outputs: Any, targets: tuple[torch.Tensor, ...], views: int) -> LossesAndGradients:
        """(m,) losses, each the mean over K views, and their gradients.

        Args:
            outputs: Any nesting of tensors (m, *shape of the model's output for K rows), without a
                gradient's history; what else is in it goes to the loss as it is.
            targets: Each (m, ...).
        """
        tensors = [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, torch.Tensor)]
        usual = is_usual(tensors)
        shown = [_where(usual, tensor, 0.0) if tensor.is_floating_point() else tensor for tensor in tensors]
        kind = _kind(outputs, targets, views)
        if self._notes:
            self._kinds[kind.key] = kind
        if self._is_closed and not self._is_pure and kind.key not in self._kinds:
            raise InputError(
                "the model returns for an image what it returned for no made-up one (another shape, or a number that "
                "is no tensor), so that loss_fn would be told of it. Return tensors, of one shape for all images."
            )
        graph = self._graph(kind)
        if graph is not None:
            with torch.no_grad():  # a network that the loss holds may have parameters that train elsewhere
                gradients, losses = vmap(graph)(*shown, *targets)
        else:
            gradients, losses = self._one_by_one(kind, shown, targets)
        found = iter(gradients)
        by_output = [next(found) if tensor.is_floating_point() else None for tensor in tensors]
        return _where(usual, losses, torch.nan), by_output

    def _loss(self, kind: _Kind, *parts: torch.Tensor) -> torch.Tensor:
        """The mean loss of one example's outputs and targets; copies, for a loss may write to what it
        is given.
        """
        rows = kind.nested(part.clone() for part in parts[: kind.num_outputs])
        repeated = (target.expand(kind.views, *target.shape).clone() for target in parts[kind.num_outputs :])
        loss: torch.Tensor = self._loss_fn(rows, *repeated).mean()
        return loss

    def _graph(self, kind: _Kind) -> GraphModule | None:
        with _user_code:
            if kind.key not in self._graphs:
                graph, reason = self._traced(kind)
                if graph is None and not self._is_pure:
                    raise InputError(
                        f"loss_fn cannot be written down as a graph ({reason}), so nothing shows that it keeps "
                        "nothing of one image for the next. Write it with operations on tensors alone (no .item(), "
                        "no `if` or `assert` on values), or, if it is a function of its arguments alone, promise so: "
                        "loss_fn = sfumato.clipping.pure(loss_fn), which is slower."
                    )
                self._graphs[kind.key] = graph
            return self._graphs[kind.key]

    def _traced(self, kind: _Kind) -> tuple[GraphModule | None, str]:
        """From one example's outputs and targets to gradients, of the outputs that have one, and the
        loss; or why the loss is no such graph.
        """
        made_up = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in kind.parts]
        mean_loss = functools.partial(self._loss, kind)
        of_example = grad_and_value(mean_loss, argnums=kind.floats) if kind.floats else lambda *p: ((), mean_loss(*p))
        self._run_on(made_up, kind)  # what it computes once and for all (a table in a cache) holds numbers
        before = _counts(self._loss_fn)
        try:
            # vmap writes to nothing unbatched; PyTorch takes no constants apart that are written to.
            graph, reason = _graph_of(functionalize(of_example), made_up)
            if graph is None:
                graph, other = _graph_of(of_example, made_up)
                reason = reason if "INTERNAL ASSERT" not in reason else other
        finally:
            self._run_on(made_up, kind)  # what it noted of the last call holds numbers again
        after = _counts(self._loss_fn)
        changed = [name for name in after if before.get(name, after[name]) != after[name]]
        if changed:
            return None, f"it changes {changed[0]} when it is called: count outside of it"
        return graph, reason

    def _run_on(self, made_up: list[torch.Tensor], kind: _Kind) -> None:
        """Calls the loss on made-up numbers, for targets that it may take."""
        for fill in (torch.zeros_like, torch.ones_like):
            targets = map(fill, made_up[kind.num_outputs :])
            with contextlib.suppress(Exception), torch.no_grad():
                self._loss(kind, *made_up[: kind.num_outputs], *targets)

    def _one_by_one(
        self, kind: _Kind, shown: list[torch.Tensor], targets: tuple[torch.Tensor, ...]
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        losses, gradients = [], [torch.zeros_like(tensor) for tensor in shown if tensor.is_floating_point()]
        with _user_code:
            for place in range(len(shown[0])):
                with torch.enable_grad():
                    own = [tensor[place].detach().requires_grad_(tensor.is_floating_point()) for tensor in shown]
                    loss = self._loss(kind, *own, *(target[place] for target in targets))
                    floats = [tensor for tensor in own if tensor.requires_grad]
                    found: tuple[torch.Tensor | None, ...] = (None,) * len(floats)
                    if floats and loss.requires_grad:
                        found = torch.autograd.grad(loss, floats, allow_unused=True)
                for gradient, of_example in zip(gradients, found, strict=True):
                    if of_example is not None:
                        gradient[place] = of_example
                losses.append(loss.detach())
        return gradients, torch.stack(losses)


def _graph_of(function: Callable[..., Any], made_up: list[torch.Tensor]) -> tuple[GraphModule | None, str]:
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


_MOST = 5000
"""Values that are looked at for counters."""


def _counts(loss_fn: Any) -> dict[str, str]:
    """Plain values that a loss leads to and may count in: by attributes, enclosing variables, the
    globals that it names, partials and containers. Calls of a loss are no steps: it is called to be
    traced.
    """
    found: dict[str, str] = {}
    seen: set[int] = set()
    waiting: collections.deque[tuple[str, Any]] = collections.deque([("", loss_fn)])
    while waiting and len(seen) < _MOST:
        path, value = waiting.popleft()
        if isinstance(value, (bool, int, float, str)):
            found[path] = repr(value)
        elif id(value) not in seen:
            seen.add(id(value))
            waiting.extend((f"{path}.{name}".lstrip("."), part) for name, part in _parts_of(value))
    return found


def _parts_of(value: Any) -> list[tuple[str, Any]]:
    """What a value leads to, by name."""
    if isinstance(value, (torch.Tensor, type, types.ModuleType, types.BuiltinFunctionType)):
        return []
    if isinstance(value, types.MethodType):
        return [("", value.__self__), ("", value.__func__)]
    if isinstance(value, types.FunctionType):
        if value.__module__.partition(".")[0] in ("torch", "sfumato"):
            return []
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        parts = [(name, cell.cell_contents) for name, cell in cells if cell != types.CellType()]
        named = ((name, value.__globals__.get(name)) for name in value.__code__.co_names)
        return [*parts, *named, *((f"default {i}", part) for i, part in enumerate(value.__defaults__ or ()))]
    if isinstance(value, functools.partial):
        return [("", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, dict):
        return [(str(key), part) for key, part in value.items()]
    if isinstance(value, (list, tuple, set, collections.deque)):
        return [(str(number), part) for number, part in enumerate(value)]
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()) if hasattr(value, name)]
    return [*getattr(value, "__dict__", {}).items(), *((name, getattr(value, name)) for name in slots)]


def _kind(outputs: Any, targets: tuple[torch.Tensor, ...], views: int) -> _Kind:
    leaves, structure = tree_flatten(outputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    parts = tuple((part.shape[1:], part.dtype, part.device) for part in (*tensors, *targets))
    named = tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return _Kind(named, structure, parts, len(tensors), views)


def _where(condition: torch.Tensor, value: torch.Tensor, other: float) -> torch.Tensor:
    return torch.where(condition.view(-1, *[1] * (value.ndim - 1)), value, other)


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
