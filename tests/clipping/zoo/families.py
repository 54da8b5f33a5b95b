"""Networks that others wrote, with random weights, made narrow and shallow where they can be: what each needs today.

`FAMILIES` is a table of (name, factory, image size, engine): "graph" or "func" for the engine that `auto` takes,
"refused" for what is refused, "any" for what may train or be refused.
"""

from functools import partial

from timm import create_model
from torch import nn
from torchvision import models
from torchvision.models import densenet, regnet, resnet, shufflenetv2, swin_transformer
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

from sfumato.models import build
from tests.clipping import test_families as before
from tests.clipping.test_families import NETWORKS, create, fixed, override


def own(name, options):
    return lambda: build(name, image_size=32, channels=3, num_classes=5, options=options, seed=3)


def groups_of_four(channels):
    return nn.GroupNorm(4, channels)


def swin(**options):
    sizes = {"patch_size": [2, 2], "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    return models.SwinTransformer(**sizes, num_classes=5, stochastic_depth_prob=0.0, **options)


def swin_v2():
    return swin(block=swin_transformer.SwinTransformerBlockV2, downsample_layer=swin_transformer.PatchMergingV2)


def convnext():
    return ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, 24, 1), CNBlockConfig(24, None, 1)], num_classes=5)


def maxvit():
    return models.MaxVit((32, 32), 8, 2, [8, 16], [1, 1], head_dim=4, stochastic_depth_prob=0.0, num_classes=5)


def regnet_y():
    widths = regnet.BlockParams([1, 1], [16, 24], [8, 8], [1.0, 1.0], [2, 2], se_ratio=0.25)
    return models.RegNet(widths, num_classes=5)


four = {"depths": (1, 1, 1, 1)}
next_ = four | {"dims": (8, 16, 24, 32)}
vit = {"img_size": 32, "patch_size": 8, "embed_dim": 48}
pyramid = four | {"embed_dims": (8, 16, 16, 32), "num_heads": (1, 2, 2, 4)}
nest = {"img_size": 32, "patch_size": 2, "embed_dims": (16, 16, 32), "num_heads": (1, 2, 4), "depths": (1, 1, 1)}
levit = {"img_size": 64, "embed_dim": (32, 48, 64), "num_heads": (2, 3, 4), "depth": (1, 1, 1), "key_dim": 8}

NAMED = [("_".join([name, *map(str, options.values())]), name, options) for name, options in NETWORKS]
OWN = [(full_name, own(name, options), 32, "graph") for full_name, name, options in NAMED]
# In float32 tracing these ends in an error of PyTorch's (a buffer in float32 meets parameters in float64).
MIXED_TYPES = ("vit_relpos", "xcit_nano", "swinv2_tiny")
BEFORE = before.QUICK | before.SLOW
TESTED_BEFORE = [(name, factory, 32, "any" if name in MIXED_TYPES else "graph") for name, factory in BEFORE.items()]
TORCHVISION = [
    ("torchvision_convnext", convnext, 32, "graph"),
    ("torchvision_swin", swin, 32, "graph"),
    ("torchvision_swin_v2", swin_v2, 32, "any"),
    (
        "torchvision_resnet",
        partial(resnet.ResNet, resnet.BasicBlock, [1, 1, 1, 1], num_classes=5, norm_layer=groups_of_four),
        32,
        "graph",
    ),
    (
        "torchvision_resnext",
        partial(
            resnet.ResNet,
            resnet.Bottleneck,
            [1, 1, 1, 1],
            num_classes=5,
            groups=4,
            width_per_group=4,
            norm_layer=groups_of_four,
        ),
        32,
        "graph",
    ),
    ("torchvision_densenet", fixed(lambda: densenet.DenseNet(8, (2, 2), 16, num_classes=5)), 32, "graph"),
    ("torchvision_regnet", fixed(regnet_y), 32, "graph"),
    (
        "torchvision_shufflenet",
        fixed(lambda: shufflenetv2.ShuffleNetV2([1, 1, 1], [8, 16, 24, 32, 64], num_classes=5)),
        64,
        "graph",
    ),
    ("torchvision_squeezenet", lambda: models.squeezenet1_1(num_classes=5, dropout=0.0), 32, "graph"),
    ("torchvision_maxvit", fixed(maxvit), 32, "graph"),
    (
        "torchvision_mobilenet_v2",
        fixed(lambda: models.MobileNetV2(num_classes=5, width_mult=0.25, dropout=0.0)),
        32,
        "graph",
    ),
]
TIMM = [
    ("tnt", override("tnt_s_legacy_patch16_224", **vit, inner_dim=12, depth=2, num_heads_outer=3), 32, "graph"),
    ("focalnet", override("focalnet_tiny_srf", **four, embed_dim=16), 32, "graph"),
    (
        "hiera",
        override("hiera_tiny_224", img_size=(64, 64), embed_dim=16, num_heads=1, stages=(1, 1, 1, 1)),
        64,
        "graph",
    ),
    ("twins_svt", override("twins_svt_small", **pyramid, img_size=32), 32, "graph"),
    ("pvt_v2", override("pvt_v2_b0", **pyramid), 32, "graph"),
    ("convit", override("convit_tiny", **vit, depth=4, num_heads=4, local_up_to_layer=2), 32, "refused"),
    (
        "sequencer2d",
        override("sequencer2d_s", img_size=32, layers=(1, 1, 1, 1), embed_dims=(16,) * 4, hidden_sizes=(8,) * 4),
        32,
        "graph",
    ),
    ("nest", override("nest_tiny", **nest), 32, "graph"),
    ("edgenext", fixed(override("edgenext_xx_small", **four, dims=(8, 16, 16, 32), heads=(2, 2, 2, 2))), 32, "graph"),
    ("mobilevit", fixed(create("mobilevit_xxs")), 32, "graph"),
    ("levit", fixed(override("levit_128s", **levit)), 64, "graph"),
    (
        "visformer",
        fixed(override("visformer_tiny", img_size=64, init_channels=8, embed_dim=48, depth=(1, 1, 1), num_heads=3)),
        64,
        "graph",
    ),
    (
        "volo",
        override("volo_d1_224", img_size=32, layers=(1, 1, 1, 1), embed_dims=(24, 48, 48, 48), num_heads=(2, 4, 4, 4)),
        32,
        "refused",
    ),
    ("crossvit", override("crossvit_tiny_240"), 240, "graph"),
    ("mambaout", override("mambaout_femto", **next_), 32, "graph"),
    ("starnet", fixed(override("starnet_s1", **four, base_dim=8)), 32, "graph"),
    ("regnety_002", fixed(create("regnety_002")), 32, "graph"),
    ("ghostnet", fixed(override("ghostnet_050", width=0.2)), 64, "graph"),
    ("dla34", fixed(override("dla34", channels=[8, 8, 8, 16, 16, 32])), 32, "graph"),
    ("efficientformer", fixed(override("efficientformer_l1", **four, embed_dims=(8, 16, 24, 32))), 224, "graph"),
    ("naflexvit", create("naflexvit_base_patch16_gap", embed_dim=48, depth=2, num_heads=3), 32, "graph"),
    ("vovnet", fixed(override("ese_vovnet19b_dw")), 32, "graph"),
    ("convformer", override("convformer_s18", **four, dims=(16, 32, 32, 64)), 32, "graph"),
    ("hgnetv2", fixed(create("hgnetv2_b0")), 32, "graph"),
    ("resnet18_batch_norm", lambda: create_model("resnet18", num_classes=5), 32, "refused"),
]
FAMILIES = [*OWN, *TESTED_BEFORE, *TORCHVISION, *TIMM]
