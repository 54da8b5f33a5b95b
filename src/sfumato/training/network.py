"""The network of a run: built, given its first weights, and cut where a part of it is fixed."""

from collections.abc import Collection

import torch
from torch import nn

from sfumato.clipping.microbatch import count_saved
from sfumato.data.examples import Dataset
from sfumato.errors import InputError, refusing
from sfumato.models import registry
from sfumato.models.lora import add_low_rank
from sfumato.models.textures import textures_for
from sfumato.models.trainable import (
    Backbone,
    centre_features,
    classifier_name,
    classifier_of,
    freeze_statistics,
    named_classifier,
    scale_features,
    select_trainable,
)
from sfumato.models.weights import Fitted, Weights, fit
from sfumato.planning.resolve import Plan

_SHAPE = "Give what it takes by --set data.image_size=PIXELS and --set data.channels=1 or 3, or take another model."


class Network:
    """A network as a recipe has it.

    Attributes:
        model: The whole, as it is published.
        trained: The part that examples pass through: the whole; or, where nothing else trains and each image is seen as
            it is, its classifier.
        backbone: The rest, whose features are computed once; None: there is none.
        fitted: How given weights met the network; None from scratch.
        low_rank: Names of the layers that have low-rank updates.
        gives_probabilities: Whether its outputs are positive and sum to 1, as after a softmax.

    Raises:
        InputError: If it cannot be built, an image has not one output for each class, or it keeps state that no
            checkpoint could hold.
    """

    def __init__(
        self,
        plan: Plan,
        dataset: Dataset,
        device: torch.device,
        trust: Collection[str] = (),
        weights: Weights | None = None,
    ) -> None:
        self._plan, self._trust, self._weights, self._device = plan, trust, weights, device
        self._shape, self._num_classes = dataset.train.shape, len(dataset.classes)
        self.fitted: Fitted | None = None
        self.low_rank: list[str] = []
        self.model = self._build(seed=0).to(device).train()
        self._require_outputs()
        self.trained, self.backbone = self._cut()

    def _build(self, seed: int) -> nn.Module:
        recipe, (channels, image_size, _) = self._plan.recipe, self._shape
        model = registry.build(
            recipe.model.name,
            image_size=image_size,
            channels=channels,
            num_classes=self._num_classes,
            options=recipe.model.options,
            fix=recipe.model.fix,
            seed=seed,
            trust=self._trust,
        )
        _refuse_other_state(model)
        if recipe.model.features == "unit":
            scale_features(model, named_classifier(model, self._num_classes))
        if self._weights is not None:
            classifier = classifier_name(model, self._num_classes)
            self.fitted = fit(model, self._weights, classifier)
            if recipe.model.fix and any(name.endswith("running_mean") for name in self.fitted.not_used):
                raise InputError(
                    "model.fix replaces the batch normalisation that the weights were made with, so they would compute "
                    "something else. Leave model.fix out: with given weights its statistics are frozen."
                )
            if recipe.model.features == "unit" and self.fitted.new_classifier and classifier is not None:
                with refusing(f"the model fails on images of shape {self._shape}", _SHAPE, Exception):
                    centre_features(model, classifier, textures_for(image_size, channels))
            freeze_statistics(model)
        if recipe.model.lora_rank is not None:
            classifier = named_classifier(model, self._num_classes)
            with refusing(f"the model fails on images of shape {self._shape}", _SHAPE, Exception):
                self.low_rank = add_low_rank(
                    model, recipe.model.lora_rank, classifier, torch.zeros(1, *self._shape), seed
                )
        select_trainable(model, recipe.model.trainable, self._num_classes)
        self._refuse_what_stays_random(model)
        return model

    def _refuse_what_stays_random(self, model: nn.Module) -> None:
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        lost = [name for name in (self.fitted.not_given if self.fitted else ()) if name not in trained]
        if lost:
            shown = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
            raise InputError(
                f"the weights lack {shown}, which do not train and would stay random for good. Take weights of this "
                "very network, or train them too: --set model.trainable=all."
            )

    def initialise(self, word: int) -> None:
        """Draws the initial weights from one uniform word of 64 bits."""
        self.model.load_state_dict(self._build(seed=word >> 1).state_dict())

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Takes the tensors of a checkpoint.

        Raises:
            InputError: If the network is another one than when they were written.
        """
        own = self.model.state_dict()
        other = next((name for name in own if name not in tensors or tensors[name].shape != own[name].shape), None)
        if other is not None:
            raise InputError(
                f"the model's tensor {other!r} is not that of the checkpoint: its code changed since the run began. "
                "Give it as it was, or start a new run with another --output; the epsilons of both add up."
            )
        self.model.load_state_dict(tensors, strict=False)

    def blank(self, rows: int = 1) -> torch.Tensor:
        """Blank images as the whole takes them."""
        return torch.zeros(rows, *self._shape, device=self._device)

    @torch.no_grad()
    def blank_examples(self, rows: int = 1) -> torch.Tensor:
        """Blank examples as `trained` takes them."""
        blank = self.blank(rows)
        return blank if self.backbone is None else torch.zeros_like(self.backbone(blank))

    def values_saved(self) -> int:
        """Numbers that autograd keeps of one more view; those kept once, whatever the batch (standardised weights), are
        left out.
        """
        counts = []
        self.trained.eval()
        for rows in (1, 2):
            with count_saved() as saved:
                self.trained(self.blank_examples(rows))
            counts.append(saved[0])
        self.trained.train()
        return counts[1] - counts[0]

    def _cut(self) -> tuple[nn.Module, Backbone | None]:
        recipe = self._plan.recipe
        if recipe.model.trainable != "classifier" or recipe.augmentation.augmult:
            return self.model, None
        name = named_classifier(self.model, self._num_classes)
        backbone = Backbone(self.model, name, self.blank())
        self.model.train()
        return classifier_of(self.model, name), backbone

    def _require_outputs(self) -> None:
        self.model.eval()
        with refusing(f"the model fails on images of shape {self._shape}", _SHAPE, Exception), torch.no_grad():
            outputs = self.model(self.blank(2))
        self.model.train()
        shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
        if shape != (2, self._num_classes):
            raise InputError(
                f"the model gives {shape} for 2 images, not (2, {self._num_classes}): there are {self._num_classes} "
                "classes, and each has one output. Have the factory pass num_classes on, and return the logits alone."
            )
        self.gives_probabilities = bool((outputs >= 0).all() and torch.allclose(outputs.sum(1), outputs.new_ones(2)))


def _refuse_other_state(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if any(nn.parameter.is_lazy(parameter) for parameter in module.parameters(recurse=False)):
            raise InputError(
                f"{type(module).__name__} at '{path}' gets its shape from the first images. Have the factory call the "
                "model once on made-up ones."
            )
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            where = f"{type(module).__name__} at '{path}'" if path else f"the model ({type(module).__name__})"
            raise InputError(
                f"{where} keeps state of its own (get_extra_state), which no checkpoint could hold. Keep it in "
                "buffers, or leave it out."
            )
