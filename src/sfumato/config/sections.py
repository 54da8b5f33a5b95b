"""The recipe's sections: every key, its type, its limits and what it means."""

import dataclasses
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from sfumato.config.pretrained import with_what_its_name_implies
from sfumato.errors import InputError

FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Spread = Annotated[float, Field(ge=1e-6, le=1)]
"""What images may be divided by: float32 holds the result."""
Resize = Literal["crop", "pad", "stretch"]
AugmentationKind = Literal["none", "flip", "crop", "crop_flip", "rrc", "tan", "simclr"]


@dataclasses.dataclass(frozen=True)
class MayChange:
    """Marks a key that says where and how fast a run happens, or what it notes for its owner: never what it releases.

    A run may go on with another value of it.
    """


class Section(pydantic.BaseModel):
    """One section of a recipe: immutable, and closed to unknown keys."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, validate_default=True)


class DataConfig(Section):
    """Which images. Every value here is a public input, never computed from private images."""

    name: Literal[
        "digits",
        "mnist",
        "fashion_mnist",
        "cifar10",
        "cifar100",
        "svhn",
        "imagenet32",
        "imagenet",
        "places365",
        "folder",
    ]
    """A public benchmark, or "folder": images of your own."""
    path: Annotated[str | None, MayChange()] = None
    """Folder of images (`folder`), relative to the working directory; `--data-root` overrides it. A
    run keeps it for its owner alone.
    """
    layout: str | None = None
    """What each folder above a folder's images is, where images lie otherwise than directly in class folders, or in
    those of train/, valid/ and test/: "{part}/*/{group}/{class}" (`*`: any; a name: that one). {group} is whose they
    are, for `group_by = "group"`.
    """
    exclude: list[str] = Field(default_factory=list)
    """What is left out of a folder: patterns such as "*.txt", "masks" or "fold1/*", in which * stands for slashes."""
    tables: list[str] = Field(default_factory=list)
    """Tables of labels of other names than labels.csv, such as "train.csv". The column of their files is found by the
    endings; of each path the end counts, and what is not in the folder is passed over.
    """
    split: Literal["train", "train+valid"] = "train+valid"
    """What is trained on: "train" holds out the validation split, "train+valid" the test split."""
    held_out: Literal["valid", "test"] | None = None
    """Where accuracies are measured: on the split that is held out, unless "test" is asked for with
    split = "train" (De et al. 2022, Table 11: ImageNet and Places).
    """
    num_examples: PositiveInt | None = None
    """Train on this many of a named data set's images: a fixed choice, of which a smaller one is a
    part. As many as "train" has are those of "train".
    """
    classes: Annotated[list[str], Field(min_length=1)] | None = None
    """Class names in label order; without them, the names of the class folders. A table of labels needs them stated."""
    task: Literal["classes", "multilabel"] | None = None
    """Whether an image is of one class, or has any number of labels, each of `classes` or unknown. A table with a
    column for each of `classes` says "multilabel"; one with a column `label`, in which | or ; part several, needs it
    stated.
    """
    class_proportions: list[PositiveFloat] | None = None
    """Public share of each class; used in the loss and in the decision."""
    image_size: Annotated[int, Field(ge=8, le=1024)] | None = None
    """Height and width in pixels to which images are resized."""
    resize_ratio: Annotated[float, Field(ge=1, le=2)] = 1.0
    """Images are resized to this multiple of image_size: crops are parts of it, drawn at random, without
    padding, and what is not cropped at random is its centre (De et al. 2022, C.2: 1.2 for ImageNet).
    """
    resize: Resize = "crop"
    """How oblong pictures become squares: by their middle alone, by black beside them, or by other proportions."""
    channels: Literal[1, 3] | None = None
    """1: grey, 3: colour."""
    mean: list[Annotated[float, Field(ge=0, le=1)]] | None = None
    """Public constant per channel, subtracted from images scaled to [0, 1]: constants of [0, 255] divided by 255."""
    std: list[Spread] | None = None
    """Public constant per channel, by which images are divided."""
    group_by: str | None = None
    """What makes images belong together (a person): a column of the tables of labels, such as "group"; "PatientID", of
    DICOM files, which is not written anywhere; or a regular expression whose first group is read from each relative
    path."""

    def stored_size(self, image_size: int) -> int:
        """Height and width of the images that parts of `image_size` are taken of."""
        return round(self.resize_ratio * image_size)

    @pydantic.field_validator("layout")
    @classmethod
    def _names_the_class_once(cls, layout: str | None) -> str | None:
        counts = [(layout or "{class}").count(word) for word in ("{class}", "{part}", "{group}")]
        if counts[0] != 1 or max(counts) > 1:
            raise InputError(f"data.layout = {layout!r} must name {{class}} once, {{part}} and {{group}} at most once.")
        return layout

    @pydantic.model_validator(mode="after")
    def _refuse_what_was_trained_on(self) -> "DataConfig":
        if self.held_out == "valid" and self.split == "train+valid":
            raise InputError(
                'data.held_out = "valid" with data.split = "train+valid" would measure accuracies on images that are '
                "trained on. Give --set data.split=train, or leave data.held_out out."
            )
        return self


class ModelConfig(Section):
    """Which network: a registry name, or "package.module:factory" for any module."""

    name: str | None = None
    """A network that `sfumato models` names, one of timm or torchvision, or package.module:factory."""
    options: dict[str, bool | int | FiniteFloat | str] = Field(default_factory=dict)
    """Keyword arguments of the factory, such as depth and width."""
    fix: Literal["groupnorm"] | None = None
    """What is changed in the network first: "groupnorm" replaces every batch normalisation, which
    mixes images, by group normalisation; scales and shifts are kept.
    """
    init_from: Annotated[str | None, MayChange()] = None
    """Public weights to start from: "package", "timm" (its hub), a .safetensors or .pth file, or a run
    folder. None: from scratch.
    """
    init_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """Digest of these weights (names, types, shapes, values): others are refused. A run fills it in."""
    init_recipe: Annotated[str | None, MayChange()] = None
    """A shipped recipe whose run makes such weights: what a run that lacks `init_from` names, and is refused by."""
    pretrained_on: str | None = None
    """Which images made the weights, in words for the certificate: they are not covered."""
    trainable: Literal["all", "classifier", "norms", "lora"] | Annotated[list[str], Field(min_length=1)] | None = None
    """What trains: everything, the final linear layer, that and the normalisation layers' scales and
    shifts, that and low-rank updates of the linear layers (LoRA), or the parameters whose names match a pattern.
    """
    lora_rank: Annotated[int, Field(ge=1, le=256)] | None = None
    """Rank of each update of trainable = "lora" (Hu et al. 2022)."""
    features: Literal["raw", "unit"] | None = None
    """What the classifier is given: as the network makes it; or scaled to length 1: where public weights have batch
    normalisations, less its mean over synthetic textures, and scaled again.
    """

    @property
    def missing_weights(self) -> str | None:
        """What to say where the recipe is for weights and none are given."""
        if self.init_recipe is None or self.init_from is not None:
            return None
        images = f", pre-trained on {self.pretrained_on}" if self.pretrained_on else ""
        return (
            f"the recipe starts from weights{images}, and none are given: add --set model.init_from=RUN-OR-FILE. A run "
            f"that makes them: sfumato train {self.init_recipe} --non-private."
        )

    def refuse_missing_weights(self) -> None:
        """Raises InputError where the recipe is for weights and none are given."""
        if self.missing_weights is not None:
            raise InputError(self.missing_weights)

    @pydantic.model_validator(mode="after")
    def _refuse_what_does_not_go_together(self) -> "ModelConfig":
        if self.lora_rank is not None and self.trainable != "lora":
            raise InputError('model.lora_rank is for model.trainable = "lora". Leave it out, or set that.')
        if self.init_from is not None and self.pretrained_on is None:
            raise InputError(
                "model.init_from names weights that others made, and no budget covers the images behind them: say in "
                'model.pretrained_on which they were, for example --set model.pretrained_on="ImageNet".'
            )
        return self


class AugmentationConfig(Section):
    """Which views of each image a step averages (De et al. 2022, Section 3.1 and C.2; Sander et al.
    2022, Section 4.2).
    """

    kind: AugmentationKind | None = None
    """Random views of each image (docs/augmentation.md): mirror images, crops, or those of a paper."""
    augmult: Annotated[int, Field(ge=0, le=256)] | None = None
    """K views per image, averaged before clipping; 0 means no augmentation."""
    padding: Annotated[int, Field(ge=0, le=64)] | None = None
    """Pixels of mirror padding on each edge before a random crop."""
    test_views: Annotated[int, Field(ge=0, le=256), MayChange()] = 0
    """Views of each held-out image that decide together, reported beside the plain accuracy (AugTest); 0: not done."""


class PrivacyConfig(Section):
    """The budget, and the mechanism that spends it."""

    target_epsilon: Annotated[float, Field(ge=1e-9, allow_inf_nan=False)] | None = None
    """The budget, of one unit: smaller is more private; never exceeded. At least 1e-9."""
    unit: Literal["image", "person"] = "image"
    """Whom epsilon is for: each image by itself, or each person with all images of hers, at most
    `max_images_per_person`.
    """
    delta: Annotated[float, Field(ge=1e-100, lt=1)] | None = None
    """The guarantee's other number: well below 1 / N (docs/privacy.md)."""
    noise_multiplier: Literal[0] | Annotated[float, Field(ge=1e-12, le=1e12)] | None = None
    """Standard deviation of the noise over `clipping_norm`. Left out: the least that keeps target_epsilon."""
    clipping_norm: Annotated[float, Field(ge=1e-12, allow_inf_nan=False)] = 1.0
    """C: each image's gradient is scaled to at most this length, so no image counts for more. At least 1e-12."""
    sampling: Literal["poisson", "shuffled"] = "poisson"
    """"poisson": each image by its own coin, as epsilon is computed. "shuffled" carries no certificate."""
    accountant: Literal["pld", "rdp"] = "pld"
    """By privacy loss distributions (tighter), or Renyi differential privacy, as the papers."""
    max_images_per_person: PositiveInt | None = None
    """Where `data.group_by` says which images are one person's, training images beyond this many are
    left out; elsewhere this is taken to be so.
    """
    person_sampling: Literal["images", "persons"] | None = None
    """What each update draws where the unit is a person: images, each by itself, or people, each with
    the mean over their images as one example.
    """
    search_data: Literal["public", "private"] | None = None
    """On which images the hyper-parameters were searched, if they were: the certificate repeats it.
    """
    selected_from: Annotated[float, Field(ge=1, le=1e6)] | None = None
    """Expected number of private runs, random and secret, of which this one is published because it
    scored best: epsilon covers that.
    """
    selection_shape: Annotated[float, Field(gt=-1, le=100)] = 0.0
    """Shape of that number's distribution, a truncated negative binomial; 0 is logarithmic, 1 geometric."""
    score_noise: Annotated[float, Field(ge=1e-3, le=1e9)] | None = None
    """Standard deviation of the noise on how many images of the validation split a run judges
    right, by which runs are compared.
    """

    @property
    def images_per_unit(self) -> int:
        """How many images, at most, epsilon covers together."""
        if self.unit == "image" or self.person_sampling == "persons":  # a person is one example then
            return 1
        return self.max_images_per_person or 1

    @pydantic.model_validator(mode="after")
    def _know_how_many_images_a_person_has(self) -> "PrivacyConfig":
        if self.unit == "person" and self.max_images_per_person is None:
            raise InputError(
                'privacy.unit = "person" needs privacy.max_images_per_person (--images-per-person). Give it.'
            )
        if self.person_sampling is not None and self.unit != "person":
            raise InputError('privacy.person_sampling is for privacy.unit = "person". Leave it out, or set that.')
        if self.unit == "person" and self.accountant == "rdp" and self.person_sampling != "persons":
            raise InputError(
                'privacy.unit = "person" is accounted for by PLD alone. Leave privacy.accountant = "rdp" out.'
            )
        return self


class OptimizerConfig(Section):
    """What is done with the private gradient: post-processing, which costs no privacy whatever it is."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    """What the noisy sums are given to."""
    learning_rate: Annotated[float, Field(gt=0, le=1e30)] | None = None
    """How far an update moves the weights, in units of gradients of length clipping_norm (docs/defaults.md)."""
    momentum: Annotated[float, Field(ge=0, le=1)] = 0.0
    """SGD alone, as is `dampening`."""
    dampening: Annotated[float, Field(ge=0, le=1)] = 0.0
    """SGD alone: share of each gradient that momentum leaves out."""
    nesterov: bool = False
    """SGD alone: looks ahead by the momentum (Sutskever et al. 2013, as PyTorch computes it)."""
    beta1: Fraction | None = None
    """Adam and AdamW alone (Kingma and Ba 2015), as are `beta2` and `adam_epsilon`: decay of the
    average of gradients.
    """
    beta2: Fraction | None = None
    """Decay of the average of squared gradients."""
    adam_epsilon: PositiveFloat | None = None
    """Added to the root of that average; nothing to do with privacy."""
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Each update pulls every weight towards 0. SGD and Adam add weight_decay x weight to the
    gradient; AdamW takes off learning_rate x weight_decay x weight, beside Adam's update
    (Loshchilov and Hutter 2019).
    """
    schedule: Literal["constant", "cosine", "step"] = "constant"
    """What the learning rate does after its warm-up: stays, falls along half a cosine to 0, or falls
    at `milestones`.
    """
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Updates in which the learning rate rises linearly to its value."""
    milestones: Annotated[list[PositiveInt], Field(min_length=1)] | None = None
    """Updates after each of which the learning rate is multiplied by `gamma`; schedule "step" alone."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """See `milestones`."""
    max_grad_norm: PositiveFloat | None = None
    """Ordinary training only: bound on the norm of the batch's mean gradient, which is then divided by it."""

    @pydantic.model_validator(mode="after")
    def _refuse_what_does_not_go_together(self) -> "OptimizerConfig":
        foreign, owner = ("momentum", "dampening", "nesterov"), "sgd"
        if self.name == "sgd":
            foreign, owner = ("beta1", "beta2", "adam_epsilon"), "adam"
        for key in foreign:
            if getattr(self, key) != type(self).model_fields[key].default:
                raise InputError(
                    f"optimizer.{key} = {getattr(self, key)} has no meaning for optimizer.name = "
                    f"{self.name!r}. Leave it out, or take {owner!r}."
                )
        if self.nesterov and (not self.momentum or self.dampening):
            raise InputError(
                "optimizer.nesterov = true needs optimizer.momentum above 0 and optimizer.dampening = 0. Set these, or "
                "take nesterov out."
            )
        if (self.schedule == "step") != (self.milestones is not None):
            raise InputError('optimizer.schedule = "step" and optimizer.milestones go together. Give both, or neither.')
        if self.milestones is not None and sorted(set(self.milestones)) != self.milestones:
            raise InputError(
                f"optimizer.milestones = {self.milestones} do not ascend. Give each update once, the earliest first."
            )
        return self


class EmaConfig(Section):
    """Parameter averaging (De et al. 2022, C.3): decay min(d, (1 + t) / (10 + t)), once per update."""

    decay: Fraction | Annotated[list[Fraction], Field(min_length=1)] = 0.9999
    """One decay or several; the first is the one that is reported and kept."""

    @property
    def decays(self) -> list[float]:
        return self.decay if isinstance(self.decay, list) else [self.decay]


class TrainingConfig(Section):
    """How long, and how fast."""

    batch_size: PositiveInt | None = None
    """How many images an update draws in the mean; the sum is divided by it."""
    num_steps: Annotated[int, Field(ge=0)] | None = None
    """How many updates are made."""
    label_smoothing: Fraction = 0.0
    """Share of each label that is spread evenly over all classes in the loss (Szegedy et al. 2016)."""
    microbatch_size: Annotated[PositiveInt | Literal["auto"], MayChange()] = "auto"
    """Images that are computed at once: memory against speed, nothing else."""
    engine: Annotated[Literal["auto", "graph", "func", "reference"], MayChange()] = "auto"
    """How gradients of single images are computed (docs/engine.md): the fastest that fits."""
    precision: Literal["float32", "tf32", "bf16"] = "float32"
    """What convolutions and products round to. "tf32" needs a GPU, where it is far faster than
    "float32", and "bf16" is faster still.
    """
    compile: Annotated[bool, MayChange()] = False
    """Compiles the step, which takes a minute or more, and pays on a GPU or for transformers."""
    shard_state: Annotated[bool, MayChange()] = False
    """Under torchrun: each rank keeps the optimizer's memory and the averages of its share of the parameters alone."""
    rank_timeout: Annotated[float, Field(ge=1, le=604_800), MayChange()] = 300.0
    """Under torchrun: seconds that a rank waits for one that is not heard of before all end. Many times as long as an
    update, so that no large batch ends them: such ends would tell which batches were large.
    """
    evaluate_every: Annotated[PositiveInt | None, MayChange()] = None
    """Steps between two evaluations on held-out images."""
    checkpoint_every: Annotated[PositiveInt | None, MayChange()] = None
    """Steps between two checkpoints, beside one every five minutes; default: a fiftieth of all."""
    norm_histogram_every: Annotated[PositiveInt | None, MayChange()] = None
    """Steps between two histograms of gradient norms, step 1 included, in metrics_private.jsonl:
    not private, for the owner alone.
    """


class AuditConfig(Section):
    """What a run trains on besides, so that it can be attacked afterwards (`sfumato audit one-run`)."""

    canaries: Annotated[int, Field(ge=0)] = 0
    """Made-up examples, each of which takes part if a coin falls so (Steinke et al. 2023). They count in N, of which
    they may be 5 %.
    """


class RunConfig(Section):
    """About the run itself."""

    seed: Annotated[int, Field(ge=0)] | None = None
    """For tests and simulations: all randomness from a public seed, hence not private."""
    issuer: Annotated[str | None, MayChange()] = None
    """Who answers for the model, in any words: the report and the recipe publish it."""
    log: Annotated[Literal["csv", "tensorboard"] | list[Literal["csv", "tensorboard"]] | None, MayChange()] = None
    """What is written while the run trains, of what metrics.jsonl says: "csv" (metrics.csv),
    "tensorboard" (the folder tensorboard), or a list of both.
    """
    log_private: Annotated[bool, MayChange()] = False
    """Log statistics of training images too, losses and gradient norms: not private, for the owner alone."""


class Recipe(Section):
    """A whole recipe. No `privacy` section means ordinary, non-private training.

    A network whose weights are packaged implies them, and images as it was trained on; one from a formula that its
    classifier alone trains.
    """

    data: DataConfig
    model: ModelConfig = ModelConfig()
    augmentation: AugmentationConfig = AugmentationConfig()
    privacy: PrivacyConfig | None = None
    optimizer: OptimizerConfig = OptimizerConfig()
    ema: EmaConfig = EmaConfig()
    training: TrainingConfig = TrainingConfig()
    audit: AuditConfig = AuditConfig()
    run: RunConfig = RunConfig()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _with_what_its_name_implies(cls, values: Any) -> Any:
        return with_what_its_name_implies(values)
