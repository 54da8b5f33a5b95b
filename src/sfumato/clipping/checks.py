"""May this model be trained privately? Found by what it does, never by what its layers are called.

Clipping bounds one image's influence only if image i's output depends on image i alone.
So: change one image of a small made-up batch, in train mode, and see that no other
image's output moves. That finds BatchNorm under any name, and hand-written operations.
"""

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from sfumato.clipping.stand_in import tensors_kept
from sfumato.errors import InputError
from sfumato.torch_internals import TorchDispatchMode, tree_leaves, tree_map

# Rows of the made-up batch: enough for operations on pairs and fours to show, and seldom
# equal to another dimension of an intermediate tensor.
_ROWS = 7
# A change below this fraction of the largest output is the device's rounding, not mixing.
_ROUNDING = 1e-6
# So many are tried before a parameter is said to receive no gradient.
_MORE_BATCHES = 8
# Of the draws that a module with dropout is tried with.
_SEEDS = (0, 1, 2, 3)


_REPLACE_BATCH_NORM = "Replace it: --set model.fix=groupnorm, in code fix_groupnorm(model)."


@dataclasses.dataclass(frozen=True)
class Finding:
    """One reason why a model cannot be trained privately as it is.

    Attributes:
        path: The module's dotted path; empty for the model itself.
        kind: The module's class name.
        reason: What it does, and why that stands in the way.
        remedy: What to do about it.
    """

    path: str
    kind: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        place = f"{self.kind} at '{self.path}'" if self.path else f"the model ({self.kind})"
        return f"{place} {self.reason}. {self.remedy}"


def findings(model: nn.Module, example_input: torch.Tensor) -> list[Finding]:
    """Everything that stands between a model and private training; empty if nothing does.

    The model is judged in train mode, since that is how it will be used, and by a copy of it
    with slightly shifted parameters: a layer that starts at zero must not hide what is behind it.
    Dropout and its like draw the same numbers in every comparison; a layer whose count of draws
    depends on the images (RReLU) is reported, since one image then shifts another's draws. Neither
    the model nor the global random state changes, and nothing of the example but its shape, type
    and device is used.

    Args:
        model: Any module whose forward takes one tensor of rows.
        example_input: (B, ...) floating point rows, at least one.
    """
    is_complex = complex_findings(model)
    if is_complex:  # nor can the rest be told
        return is_complex
    with random_state_kept(example_input):
        probe = copy.deepcopy(model).train()
        torch.manual_seed(0)
        _shift_parameters(probe)
        inputs = torch.randn(_ROWS, *example_input.shape[1:], dtype=example_input.dtype, device=example_input.device)
        with torch.no_grad():
            found = _buffer_findings(probe, inputs)
            mixing = _mixing_findings(probe, inputs) if _mixes(probe, (inputs,), {}) else []
        blamed = {finding.path for finding in mixing}
        return mixing + [finding for finding in found if finding.path not in blamed] + _gradient_findings(probe, inputs)


def require_private(model: nn.Module, example_input: torch.Tensor) -> None:
    """Raises InputError with the first of the `findings`, if there is one.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        >>> require_private(model, torch.zeros(1, 3, 8, 8))
        Traceback (most recent call last):
        sfumato.errors.InputError: BatchNorm2d at '1' mixes examples, so per-example gradients do
        not exist and no privacy guarantee holds. Replace it: --set model.fix=groupnorm, in code
        fix_groupnorm(model).
    """
    found = findings(model, example_input)
    if found:
        raise InputError(str(found[0]))


def missing_gradients(model: nn.Module, scalar: torch.Tensor) -> list[str]:
    """Names of the trainable parameters on which `scalar` does not depend, as autograd sees it."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not scalar.requires_grad:
        return names
    gradients = torch.autograd.grad(scalar, parameters, allow_unused=True)
    return [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]


@contextmanager
def random_state_kept(on: torch.Tensor) -> Iterator[None]:
    """Leaves the global random state, of the CPU and of a tensor's device, as it was."""
    with torch.random.fork_rng(devices=[on.device] if on.is_cuda else []):
        yield


def seed_generators(seed: int, on: torch.Tensor) -> None:
    """`torch.manual_seed`, of the CPU alone for a tensor there: for each kind of device that a machine lacks that notes
    where it was called, which takes longer than a small network's forward pass.
    """
    if on.device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _shift_parameters(probe: nn.Module) -> None:
    with torch.no_grad():
        for parameter in probe.parameters():
            if parameter.is_floating_point():
                spread = parameter.std(correction=0)
                parameter.add_(torch.randn_like(parameter) * torch.where(spread > 0, 0.1 * spread, 0.1))


def _mixes(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether changing one row of the tensors that a module is called with moves another row of its
    output.

    A module that draws random numbers is tried with several draws, and with nothing dropped:
    stochastic depth that drops all the made-up rows must not hide what it dropped.
    """
    draws = [partial(_call, seed=seed) for seed in _SEEDS] + [_call_with_nothing_dropped]
    for number, call in enumerate(draws):
        with tensors_kept(module):
            before = call(module, args, kwargs)
        if number == 0 and not _drew(args, seed=_SEEDS[0]):
            draws[1:] = []
        for row in range(_ROWS):
            with tensors_kept(module):  # a buffer that every call moves mixes nothing
                if _moved_elsewhere(before, call(module, *_change_row((args, kwargs), row)), row):
                    return True
    return False


def _drew(args: tuple[Any, ...], seed: int) -> bool:
    """Whether random numbers were drawn since that seed was set."""
    device = next((leaf.device for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)), torch.device("cpu"))
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    torch.manual_seed(seed)
    fresh = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    return any(not torch.equal(state, new) for state, new in zip(states, fresh, strict=True))


class _NothingDropped(TorchDispatchMode):
    """Lets every random choice between keeping and dropping be to keep."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        out = func(*args, **(kwargs or {}))
        if name in ("bernoulli_", "uniform_"):
            return out.fill_(1)
        return torch.ones_like(out) if name in ("bernoulli", "rand", "rand_like") else out


def _call_with_nothing_dropped(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    with _NothingDropped():
        return _call(module, args, kwargs)


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    # Copies: an in-place operation must not touch the original.
    args, kwargs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
    return [leaf.clone() for leaf in tree_leaves(module(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]


def _change_row(values: tuple[tuple[Any, ...], dict[str, Any]], row: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def change(leaf: Any) -> Any:
        if not (isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.ndim and len(leaf) == _ROWS):
            return leaf
        changed = leaf.clone()
        changed[row] = -2 * changed[row].flip(-1) + 0.5
        return changed

    return tree_map(change, values)


def _moved_elsewhere(before: list[torch.Tensor], after: list[torch.Tensor], row: int) -> bool:
    for old, new in zip(before, after, strict=True):
        if old.ndim and len(old) == _ROWS:
            others = torch.arange(_ROWS, device=old.device) != row
            old, new = old[others], new[others]
        if old.is_complex():
            old, new = torch.view_as_real(old), torch.view_as_real(new)
        old, new = old.double().nan_to_num(), new.double().nan_to_num()
        if old.numel() and (old - new).abs().max() > _ROUNDING * old.abs().max():
            return True
    return False


def _mixing_findings(probe: nn.Module, inputs: torch.Tensor) -> list[Finding]:
    """Blames the innermost modules that mix rows when called again by themselves."""
    guilty: dict[str, nn.Module] = {}
    testing = False

    def hook_for(path: str):
        def test_alone(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            nonlocal testing
            inner_is_guilty = any(name.startswith(f"{path}.") or not path for name in guilty)
            if testing or path in guilty or inner_is_guilty:
                return
            testing = True
            if _mixes(module, args, kwargs):
                guilty[path] = module
            testing = False

        return test_alone

    handles = [module.register_forward_hook(hook_for(path), with_kwargs=True) for path, module in probe.named_modules()]
    _call(probe, (inputs,), {})
    for handle in handles:
        handle.remove()
    guilty = guilty or {"": probe}
    is_norm = {path: isinstance(module, nn.modules.batchnorm._BatchNorm) for path, module in guilty.items()}
    return [
        Finding(
            path,
            type(module).__name__,
            "mixes examples, so per-example gradients do not exist and no privacy guarantee holds",
            _REPLACE_BATCH_NORM if is_norm[path] else "Replace it by an operation on each image alone.",
        )
        for path, module in guilty.items()
    ]


def _buffer_findings(probe: nn.Module, inputs: torch.Tensor) -> list[Finding]:
    """Buffers that a forward pass changes: running statistics, which no noise would cover."""
    before = {name: buffer.clone() for name, buffer in probe.named_buffers()}
    _call(probe, (inputs,), {})
    found: list[Finding] = []
    for name, buffer in probe.named_buffers():
        if name in before and torch.equal(before[name], buffer):
            continue
        path, _, buffer_name = name.rpartition(".")
        module = probe.get_submodule(path)
        if any(finding.path == path for finding in found):
            continue
        found.append(
            Finding(
                path,
                type(module).__name__,
                f"changes its buffer '{buffer_name}' during a forward pass, so statistics of "
                "private images would be kept without noise",
                _REPLACE_BATCH_NORM
                if isinstance(module, nn.modules.batchnorm._BatchNorm)
                else "Turn the tracking off (for example track_running_stats=False), or put it into eval mode.",
            )
        )
    return found


def complex_findings(model: nn.Module) -> list[Finding]:
    """Noise would be added to real parts alone."""
    found = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            path, _, parameter_name = name.rpartition(".")
            reason = f"has a complex trainable parameter '{parameter_name}', and norms and noise are those of real ones"
            remedy = "Keep real and imaginary parts in a last dimension of two, and join them by torch.view_as_complex."
            found.append(Finding(path, type(model.get_submodule(path)).__name__, reason, remedy))
    return found


def _gradient_findings(probe: nn.Module, inputs: torch.Tensor) -> list[Finding]:
    if not any(parameter.requires_grad for parameter in probe.parameters()):
        return [
            Finding(
                "", type(probe).__name__, "has no trainable parameter", "Set requires_grad on what is to be trained."
            )
        ]
    torch.manual_seed(0)
    missing: list[str] | None = None
    with torch.enable_grad():
        for _ in range(_MORE_BATCHES):
            tensors = [leaf for leaf in tree_leaves(probe(inputs)) if isinstance(leaf, torch.Tensor)]
            outputs = [tensor for tensor in tensors if tensor.is_floating_point()]
            try:
                now = missing_gradients(probe, torch.stack([output.sum() for output in outputs]).sum())
            except RuntimeError as error:
                return [_derivative_finding(probe, inputs, error)]
            missing = now if missing is None else [name for name in missing if name in now]
            if not missing:
                break
            inputs = torch.randn_like(inputs)  # of a mixture's experts some may have had no row
    found = []
    for name in missing or []:
        path, _, parameter_name = name.rpartition(".")
        found.append(
            Finding(
                path,
                type(probe.get_submodule(path)).__name__,
                f"has a trainable parameter '{parameter_name}' that receives no gradient from the "
                "output, so it would never be trained",
                "Freeze it by requires_grad_(False), or use it in the model's output.",
            )
        )
    return found


def _derivative_finding(probe: nn.Module, inputs: torch.Tensor, error: RuntimeError) -> Finding:
    """Blames the first module, innermost first, from whose output no gradient comes back."""
    blamed: list[str] = []

    def fails(values: Any) -> bool:
        ends = [leaf.sum() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        starts = [parameter for parameter in probe.parameters() if parameter.requires_grad]
        try:
            torch.autograd.grad(ends, starts, retain_graph=True, allow_unused=True)
        except RuntimeError:
            return True
        return False

    def before(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not blamed and fails((args, kwargs)):  # broken on its way from one module to this one
            blamed.append(path.rpartition(".")[0])

    def after(path: str, output: Any) -> None:
        if not blamed and fails(output):
            blamed.append(path)

    handles = []
    for path, module in probe.named_modules():
        handles.append(
            module.register_forward_pre_hook(
                lambda _, args, kwargs, path=path: before(path, args, kwargs), with_kwargs=True
            )
        )
        handles.append(module.register_forward_hook(lambda _, args, output, path=path: after(path, output)))
    torch.manual_seed(0)
    probe(inputs)
    for handle in handles:
        handle.remove()
    path = blamed[0] if blamed else ""
    reason = str(error).strip().splitlines()[0].partition(". ")[0].rstrip(".")
    return Finding(
        path,
        type(probe.get_submodule(path)).__name__,
        f"has an operation without a derivative (PyTorch says: {reason})",
        "Replace it by one that has a derivative, or detach its result if nothing before it is to be trained.",
    )
