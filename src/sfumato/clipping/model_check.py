"""May this model be trained privately? What its layers say of it; `engine_check` holds it to what it does."""

import copy
import dataclasses
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from sfumato.clipping.probe import made_up_images, random_state_kept, shifted
from sfumato.errors import InputError, first_line, refusing
from sfumato.torch_internals import tree_leaves

_REPLACE_BATCH_NORM = (
    "Replace it: --set model.fix=groupnorm, in code model = sfumato.fix_groupnorm(model), before the optimizer is made."
)
# So many made-up images are tried before a parameter is said to receive no gradient.
_IMAGES = 12
_SHARDING = {"DTensor", "FSDPModule", "FullyShardedDataParallel"}


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
    """What stands between a model in train mode and private training; empty if nothing shows.

    Neither the model nor the global random state changes, and nothing of the example but its shape, type
    and device is used. What a model's own code does with its rows, only `GradFn.prepare` finds.

    Args:
        model: Any module whose forward takes one tensor of rows.
        example_input: (B, ...) rows, at least one.

    Raises:
        InputError: If the model cannot be copied, or fails on such images.
    """
    if sharded := list(_sharded(model)):  # which cannot be copied either
        return sharded
    with random_state_kept(example_input):
        with refusing("the model cannot be copied", "Keep what cannot be outside of its modules.", Exception):
            probe = copy.deepcopy(model).train()
        return list(layer_findings(probe)) or list(_gradient_findings(probe, example_input))


def require_private(model: nn.Module, example_input: torch.Tensor) -> None:
    """Raises InputError with the first of the `findings`, if there is one.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        >>> require_private(model, torch.zeros(1, 3, 8, 8))
        Traceback (most recent call last):
        sfumato.errors.InputError: BatchNorm2d at '1' mixes examples, so per-example gradients do
        not exist and no privacy guarantee holds. Replace it: --set model.fix=groupnorm, in code model =
        sfumato.fix_groupnorm(model), before the optimizer is made.
    """
    for finding in findings(model, example_input):
        raise InputError(str(finding))


def images_second(model: nn.Module) -> str:
    """A hint at a layer that counts images along the second dimension."""
    kinds = [type(module).__name__ for module in model.modules() if getattr(module, "batch_first", True) is False]
    return f" {kinds[0]} counts images along the second dimension: set batch_first=True." if kinds else ""


def layer_findings(model: nn.Module) -> Iterator[Finding]:
    """Layers, in the mode that they are in, that mix examples or keep something of them; parameters that nothing can
    be done with.
    """
    yield from _sharded(model)
    for path, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            reason = "mixes examples, so per-example gradients do not exist and no privacy guarantee holds"
            yield Finding(path, kind, reason, _REPLACE_BATCH_NORM)
        elif isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
            reason = "keeps statistics of private images in its buffers, which no noise covers"
            yield Finding(path, kind, reason, "Turn the tracking off: track_running_stats=False.")
        elif getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            yield Finding(path, kind, "gives sparse gradients, which cannot be clipped here", "Set sparse=False.")
        for name, parameter in module.named_parameters(recurse=False):
            if nn.parameter.is_lazy(parameter):
                reason = f"has a parameter '{name}' that gets its shape from the first images"
                yield Finding(path, kind, reason, "Call the model once on made-up ones before.")
            elif parameter.requires_grad and parameter.is_complex():
                reason = f"has a complex trainable parameter '{name}', and norms and noise are those of real ones"
                remedy = "Keep real and imaginary parts in a last dimension of two, joined by torch.view_as_complex."
                yield Finding(path, kind, reason, remedy)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        reason = "has no trainable parameter"
        yield Finding("", type(model).__name__, reason, "Set requires_grad on what is to be trained.")


def _sharded(model: nn.Module) -> Iterator[Finding]:
    """Modules whose parameters torch shards over processes: gathered for a forward pass, they end the process."""
    for path, module in model.named_modules():
        parameters = module.parameters(recurse=False)
        names = {base.__name__ for kind in (type(module), *map(type, parameters)) for base in kind.__mro__}
        if found := sorted(names & _SHARDING):  # by name: their modules take a second to import
            reason = f"is sharded over processes ({found[0]}), so no process has an example's whole gradient"
            yield Finding(path, type(module).__name__, reason, "Give the model as it was before that.")


def _gradient_findings(probe: nn.Module, example_input: torch.Tensor) -> Iterator[Finding]:
    """Trainable parameters that the output of made-up images sends no gradient to."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.copy_(shifted(parameter, generator))
    images = made_up_images(_IMAGES, 1, example_input[:1], 0, only_pixels=True).flatten(0, 1)
    missing = {name: parameter for name, parameter in probe.named_parameters() if parameter.requires_grad}
    for image in images:
        fails = f"the model fails on images of shape {tuple(image.shape)}"
        with refusing(fails, "Name the shape that it takes: image_size, channels.", Exception), torch.enable_grad():
            leaves = [leaf for leaf in tree_leaves(probe(image[None])) if isinstance(leaf, torch.Tensor)]
            ends = [leaf.sum() for leaf in leaves if leaf.requires_grad]
        if not ends or not missing:
            continue
        try:
            gradients = torch.autograd.grad(ends, list(missing.values()), allow_unused=True)
        except RuntimeError as error:
            reason = f"has an operation without a derivative (PyTorch says: {first_line(error).rstrip('.')})"
            remedy = "Replace it, or detach its result if nothing before it is to be trained."
            yield Finding("", type(probe).__name__, reason, remedy)
            return
        pairs = zip([*missing.items()], gradients, strict=True)
        missing = {name: parameter for (name, parameter), gradient in pairs if gradient is None}
    for path, _, own in (name.rpartition(".") for name in missing):
        reason = f"has a trainable parameter '{own}' that receives no gradient from the output, so it would never train"
        remedy = "Freeze it by requires_grad_(False), or use it in the model's output."
        yield Finding(path, type(probe.get_submodule(path)).__name__, reason, remedy)
