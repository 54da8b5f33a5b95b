"""How per-example gradients are computed at each operation where weights meet images.

Rules are for operations of PyTorch (ATen), not for layers; most layers need none. For a new
operation:

1. Is it known to compute each row by itself? The table of `sfumato.clipping.graph.rows` must list
   it, or no model that has it is taken ("is not known to compute each row by itself"). Often that is
   all. Add a model to `ALLOWED` in tests/clipping/test_rows.py, and one that joins rows by it, if
   any does, to `REFUSED`.
2. Is a rule needed? Without one `site.by_vmap` differentiates the operation alone: right, and slow
   where PyTorch warns of a missing batching rule. A rule makes it faster.
3. Write a method, `f(SiteRecord, argument) -> PerExampleGrads`: `MaterializedGrads` where it writes
   gradients out; else a class with `square_norms` (and a bound on their rounding, docs/engine.md)
   and `weighted_sum`.
4. Name it in `METHODS`, and let `candidates` return that name; one that never writes gradients out
   in `GHOSTS` as well. An argument that is not made of rows has no layout (`site.arg_layouts`): where
   that may be, let `candidates` look first, and return "vmap" then.
5. Add cases to tests/clipping/test_rules.py, which compares each method with a loop over single
   images (`meet` there makes rows of the first argument alone); for a ghost also to
   tests/clipping/test_cancelling.py. Add a layer to `LAYERS` of
   tests/clipping/test_graph_engine.py, and a model to the zoo (tests/clipping/zoo/harmless.py): `-m
   slow` runs all of it, and `REPRESENTATIVES` in its test_zoo.py are the quick ones.
"""

import torch
from torch.fx import Node

from sfumato.clipping.graph.rows import draws, module_path, name_of
from sfumato.clipping.graph.rules import convolution, linear, normalization, site
from sfumato.clipping.graph.rules.site import Method, SiteRecord
from sfumato.errors import InputError

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", *convolution.TRANSPOSED)
EXPANSIONS = ("expand", "repeat")
NORMS = ("group_norm", "layer_norm", "instance_norm", "rms_norm")

METHODS: dict[str, Method] = {
    "bias": linear.bias,
    "rows": linear.rows,
    "ghost": linear.ghost,
    "ghost_at_once": linear.ghost_at_once,
    "conv_bias": convolution.bias,
    "loop": convolution.loop,
    "grouped": convolution.grouped,
    "unfold": convolution.unfold,
    "conv_ghost": convolution.GhostGrads,
    "patch_ghost": convolution.PatchGhost,
    "affine": normalization.affine,
    "repeated": site.repeated,
    "vmap": site.by_vmap,
}
# They add up, and multiply no matrices: of small images one thread has done that before others have woken.
SUMS = ("bias", "affine")
# They never write per-example gradients out; how many numbers they keep at their peak.
GHOSTS = {
    "ghost": linear.gram_values,
    "ghost_at_once": linear.gram_values,
    "conv_ghost": convolution.gram_values,
    "patch_ghost": convolution.patch_gram_values,
}

# From so many views on, one image's convolution is large enough to be computed by itself.
_MANY_VIEWS = 4
# On a GPU, launching a convolution for each of more examples than that takes longer than computing
# them.
_MOST_IN_LOOP = 16
# Numbers that a ghost norm's inner products may take: 256 MiB in float32.
_MAX_GRAM_VALUES = 2**26
# Where inner products take less than this part of the memory of written-out gradients, these are
# not tried.
_FAR_LESS = 0.3


def candidates(record: SiteRecord, argument: str, examples: int) -> list[str]:
    """Names of the methods that fit a site and, for so many examples, its memory; what is most
    often the fastest first.
    """
    operation = record.site.operation

    def values(name: str) -> int:  # that a ghost norm keeps of so many examples
        return GHOSTS[name](record) * examples // record.examples

    if operation == "linear":
        if argument == "bias":
            return ["bias"]
        if values("ghost") > _MAX_GRAM_VALUES:
            return ["rows"]
        ghosts = ["ghost", "ghost_at_once"] if linear.is_divided(record) else ["ghost"]
        is_smaller = values("ghost") <= record.args["weight"].numel() * examples
        return [*ghosts, "rows"] if is_smaller else ["rows", *ghosts]
    if operation in CONVOLUTIONS:
        if argument == "bias":
            return ["conv_bias"]
        found = ["loop", "grouped"] if record.views >= _MANY_VIEWS else ["grouped", "loop"]
        if operation in convolution.TRANSPOSED:
            found = ["loop"]
        if convolution.can_unfold(record):
            ghosts = [] if convolution.overlaps(record) else ["patch_ghost"]
            ghosts += ["conv_ghost"] if convolution.can_ghost(record) else []
            found += ["unfold", *(name for name in ghosts if values(name) <= _MAX_GRAM_VALUES)]
        if record.grad.is_cuda and examples > _MOST_IN_LOOP:
            return [name for name in found if name != "loop"] or ["vmap"]
        return found
    return ["affine"] if operation in NORMS else ["repeated"] if operation in EXPANSIONS else ["vmap"]


def worth_trying(names: list[str], record: SiteRecord, argument: str) -> list[str]:
    """The methods that fit, without those that write gradients out where a ghost norm needs far
    less memory.

    A CPU's clock would mislead: on the few images that methods are tried on there, written-out
    gradients stay in the processor's cache, and few share a ghost norm's one weight gradient.
    """
    if record.grad.is_cuda:
        return names
    written_out = record.args[argument].numel() * record.examples
    sparing = [name for name in names if name in GHOSTS and GHOSTS[name](record) < _FAR_LESS * written_out]
    return sparing or names


def refuse(node: Node) -> None:
    """Raises InputError for an operation with weights whose per-example gradient is not known to be
    right.
    """
    made, operation = node.meta.get("val"), name_of(node)
    tensors = [other.meta.get("val") for other in node.all_input_nodes]
    if not isinstance(made, torch.Tensor):
        why = "gives several results"
    elif made.is_complex():
        why = "gives complex numbers"
    elif draws(node):
        why = "draws random numbers"
    elif operation not in EXPANSIONS and not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        why = "depends on the number of rows"
    else:
        return
    raise InputError(f"{node.target} in '{module_path(node) or 'the model'}' takes trainable parameters and {why}")
