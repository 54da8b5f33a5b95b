"""The user's own model, holding other values for a while: shifted, in double precision, and
afterwards the very tensors that it had.

A copy of a model will not do for checking it: `copy.deepcopy` drops hooks on parameters. Values as
they are will not do either: behind a head of zeros nothing shows.
"""

import dataclasses
import pickle
import signal
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# A module's dotted path and the name of one of its parameters or buffers.
Place = tuple[str, str]
# One model may be shared by threads: while one holds it to other values, no other does.
_one_at_a_time = threading.RLock()


@contextmanager
def stand_in(model: nn.Module, dtype: torch.dtype | None, shift_seed: int | None) -> Iterator[None]:
    """Within, every parameter and buffer holds a copy; afterwards its own memory again, whatever
    happened to the copy.

    Every `.grad` is None within. Afterwards it is what it was, and so are attributes, modes, hooks,
    `requires_grad` and what modules are made of. An interrupt waits until then.

    Args:
        dtype: Of the copies of floating-point values; None leaves each as it is.
        shift_seed: Moves parameters by a tenth of their spread, by 0.1 where they have none. None:
            they stay.
    """
    with _one_at_a_time, interrupts_wait(), attributes_kept(model):
        parameters = list(model.parameters())
        tensors = [*parameters, *model.buffers()]
        own = [(tensor, tensor.data, tensor.grad, tensor.requires_grad) for tensor in tensors]  # the same memory
        generator = torch.Generator().manual_seed(shift_seed or 0)
        try:
            for number, tensor in enumerate(tensors):
                tensor.grad = None
                value = tensor.data.clone()
                if shift_seed is not None and number < len(parameters) and value.is_floating_point():
                    value = _shifted(value, generator)
                tensor.data = value.to(dtype) if dtype is not None and value.is_floating_point() else value
            yield
        finally:
            for tensor, data, grad, trains in own:
                tensor.grad = None
                tensor.data = data
                tensor.requires_grad_(trains)
                tensor.grad = grad


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards every module has the attributes, hooks and parts that it had; lists, dictionaries
    and tensors among them hold what they held.

    Not what helpers, other containers and globals hold.
    """
    before = [
        (
            vars(module),
            dict(vars(module)),
            [(value, value.copy()) for value in vars(module).values() if type(value) in (dict, OrderedDict, list)],
            [(own, own.data, own.detach().clone()) for own in vars(module).values() if type(own) is torch.Tensor],
        )
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for now, attributes, contents, tensors in before:
            for name in now.keys() - attributes.keys():
                del now[name]
            for name, value in attributes.items():
                if now.get(name) is not value:
                    now[name] = value
            for value, content in contents:
                if isinstance(value, list):
                    value[:] = content
                elif list(value) != list(content) or any(value[name] is not content[name] for name in content):
                    value.clear()
                    value.update(content)
            for tensor, memory, held in tensors:
                if same_bits(tensor.detach(), held):
                    continue
                if tensor.is_inference():
                    with torch.inference_mode():  # where alone such a tensor may be written to
                        tensor.copy_(held)
                else:
                    tensor.data = memory
                    memory.copy_(held)


@contextmanager
def tensors_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards every parameter and buffer lies where it lay, and holds what it held.

    A forward pass may write to them: `nn.Embedding(max_norm=...)` shortens the rows that an image
    looks up, and a constraint on weights is often written so. One image's must not be others'.
    """
    held = Held(model)
    try:
        yield
    finally:
        held.put_back()


class Held:
    """Copies of a model's parameters and buffers, to put them back from."""

    def __init__(self, model: nn.Module) -> None:
        tensors = [own for own in [*model.parameters(), *model.buffers()] if not nn.parameter.is_lazy(own)]
        self._before = [(own, own.data, own.detach().clone(), own.requires_grad) for own in tensors]

    def put_back(self) -> None:
        """Whatever has been written since. PyTorch does not count what is written through `.data`, so
        values are compared.
        """
        for own, memory, held, trains in self._before:
            if own.data_ptr() != memory.data_ptr() or own.shape != memory.shape or own.dtype != memory.dtype:
                own.data = memory
            if not same_bits(memory, held):
                memory.copy_(held)
            if own.requires_grad != trains:
                own.requires_grad_(trains)


@contextmanager
def model_kept(model: nn.Module, held: Held | None = None) -> Iterator[None]:
    """For calls of a model's own code on one private image: afterwards it is what it was, as far as
    `attributes_kept` and `tensors_kept` say.

    Args:
        held: Copies of its tensors, if there are some already.
    """
    held = Held(model) if held is None else held
    with attributes_kept(model):
        try:
            yield
        finally:
            held.put_back()


@contextmanager
def grads_kept(model: nn.Module) -> Iterator[None]:
    """Every `.grad` is None within, and afterwards what it was."""
    grads = [(tensor, tensor.grad) for tensor in [*model.parameters(), *model.buffers()]]
    try:
        for tensor, _ in grads:
            tensor.grad = None
        yield
    finally:
        for tensor, grad in grads:
            tensor.grad = grad


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """SIGINT and SIGTERM within are delivered afterwards; the third one at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    waiting: list[int] = []

    def wait(number: int, frame: Any) -> None:
        waiting.append(number)
        handler = before[signal.Signals(number)]
        if len(waiting) > 2 and callable(handler):
            handler(number, frame)

    caught = [number for number, handler in before.items() if callable(handler)]
    for number in caught:
        signal.signal(number, wait)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, before[number])
        if waiting:
            signal.raise_signal(waiting[0])


def has_accumulator_hooks(model: nn.Module) -> bool:
    """Whether somebody (DistributedDataParallel, for one) holds on to the nodes that add gradients
    up.

    PyTorch lets go of such a node when its parameter's type changes, and with it of the hooks on
    it.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            with torch.enable_grad():
                _accumulator(parameter).metadata["sfumato"] = True
                if "sfumato" in _accumulator(parameter).metadata:  # it outlived our own reference
                    return True
    return False


def _accumulator(parameter: nn.Parameter) -> Any:
    return parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a model keeps: parameters, frozen ones included, buffers, kept in checkpoints or not,
    and what of it trains.
    """

    tensors: dict[Place, torch.Tensor]
    flags: dict[Place, Any]

    @classmethod
    def of(cls, model: nn.Module) -> "Snapshot":
        """Copies of all of it."""
        return cls({place: tensor.detach().clone() for place, tensor in _places(model).items()}, _flags(model))

    def changed(self, model: nn.Module) -> Place | None:
        """The first parameter, buffer or mode that is no longer what it was, came in or is gone;
        None if all is as it was.
        """
        now = _places(model)
        for place in [*now, *self.tensors]:
            if place not in now or place not in self.tensors or not same_bits(now[place].detach(), self.tensors[place]):
                return place
        flags = _flags(model)
        return next((place for place in [*flags, *self.flags] if flags.get(place) != self.flags.get(place)), None)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are alike in type, shape and every bit; NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if torch.equal(one, other):
        return True
    if one.dtype.is_floating_point or one.dtype.is_complex:
        return bool(
            torch.equal(one.nan_to_num(nan=0.0), other.nan_to_num(nan=0.0)) and torch.equal(one.isnan(), other.isnan())
        )
    return False


def _places(model: nn.Module) -> dict[Place, torch.Tensor]:
    return {
        (path, name): tensor
        for path, module in model.named_modules()
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]
        if tensor is not None
    }


def _flags(model: nn.Module) -> dict[Place, Any]:
    flags: dict[Place, Any] = {(path, "training"): module.training for path, module in model.named_modules()}
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            flags[path, "extra state"] = pickle.dumps(module.get_extra_state())
    return flags | {place: tensor.requires_grad for place, tensor in _places(model).items()}


def _shifted(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    spread = value.float().std(correction=0) if value.numel() else value.new_zeros(())
    noise = torch.randn(value.shape, generator=generator).to(value)
    return value + noise * torch.where(spread > 0, 0.1 * spread, 0.1).to(value)
