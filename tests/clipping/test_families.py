"""Families of networks that others wrote, made narrow and shallow: the fast engine against the loop over single
images.
"""

import sys
from functools import partial

import pytest
import torch
from torch import nn

from sfumato.clipping import clipped_grad, fix_groupnorm
from tests.clipping.problems import cross_entropy as loss_fn

timm = pytest.importorskip("timm")
from timm.layers import GroupNorm, GroupNorm1, GroupNorm1Act, GroupNormAct, LayerNorm2d  # noqa: E402
from timm.models._efficientnet_builder import round_channels  # noqa: E402


def create(name, **arguments):
    return partial(timm.create_model, name, pretrained=False, num_classes=5, drop_path_rate=0.0, **arguments)


def override(name, **arguments):
    """A registered model with arguments that its entry point does not let one give."""

    def make():
        module = sys.modules[timm.model_entrypoint(name).__module__]
        original = module.build_model_with_cfg
        module.build_model_with_cfg = lambda cls, variant, pretrained=False, **others: original(
            cls, variant, pretrained, **(others | arguments)
        )
        try:
            return timm.create_model(name, num_classes=5)
        finally:
            module.build_model_with_cfg = original

    return make


def fixed(factory):
    return lambda: fix_groupnorm(factory())


def torchvision_vit():
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=3, hidden_dim=48, mlp_dim=96, num_classes=5
    )


group_norm, group_norm_act = partial(GroupNorm, num_groups=4), partial(GroupNormAct, num_groups=4)
four = {"layers": (1, 1, 1, 1), "channels": (8, 16, 16, 16)}
nf = {"depths": (1, 1, 1, 1), "channels": (32, 32, 64, 64), "stem_chs": 16}
next_ = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}
vit = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
swin = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 4)}
mixer = {"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 48}
hybrid = {
    "img_size": 32,
    "embed_dim": (16, 32),
    "depths": (1, 1),
    "stem_width": 8,
    "conv_norm_layer": "layernorm2d",
    "transformer_norm_layer": "layernorm2d",
    "transformer_dim_head": 8,
}
narrow = {
    "round_chs_fn": partial(round_channels, multiplier=0.25),
    "stem_size": 8,
    "num_features": 64,
    "norm_layer": GroupNorm1Act,
    "drop_path_rate": 0.0,
}

QUICK = {
    "nf_resnet26": create("nf_resnet26", **nf),
    "resnet26": create("resnet26", norm_layer=GroupNorm1, **four),
    "convnext_atto": create("convnext_atto", **next_),
    "vit_tiny": create("vit_tiny_patch16_224", **vit),
    "swin_tiny": create("swin_tiny_patch4_window7_224", **swin),
    "mobilenetv3_small": override("mobilenetv3_small_050", **narrow),
    "maxvit_nano_rw": create("maxvit_nano_rw_256", block_type=("M", "M"), **hybrid),
    "torchvision_vit": torchvision_vit,
}
SLOW = {
    "nf_seresnet50": create("nf_seresnet50", **nf),
    "dm_nfnet_f0": create("dm_nfnet_f0", **nf, num_features=64, group_size=8),
    "eca_nfnet_l0": create("eca_nfnet_l0", **nf, num_features=64, group_size=8),
    "resnext50": create("resnext50_32x4d", norm_layer=group_norm, cardinality=4, base_width=16, **four),
    "res2net50": create("res2net50_26w_4s", norm_layer=GroupNorm1, base_width=16, **four),
    "resnest14d": create("resnest14d", norm_layer=group_norm, channels=(16, 16, 32, 32), layers=(1, 1, 1, 1)),
    "resnetv2_50x1_bit": override(
        "resnetv2_50x1_bit", layers=(1, 1, 1, 1), channels=(32, 32, 64, 64), stem_chs=16, norm_layer=group_norm_act
    ),
    "densenet121": override("densenet121", norm_layer=GroupNorm1Act, growth_rate=8, block_config=(2, 2, 1, 1)),
    "efficientnet_b0": override("efficientnet_b0", **narrow),
    "mobilenetv2": override("mobilenetv2_035", **narrow),
    "convnextv2_atto": create("convnextv2_atto", **next_),
    "convmixer": fixed(override("convmixer_768_32", dim=16, depth=2)),
    "deit3_small": create("deit3_small_patch16_224", **vit),
    "vit_relpos": create("vit_relpos_small_patch16_224", **vit),
    "vit_attention_pool": create("vit_base_patch16_siglip_224", **vit),
    "vit_differential": create("vit_dlittle_patch16_reg1_gap_256", **vit),
    "beit": create("beit_base_patch16_224", **vit),
    "eva02_tiny": create("eva02_tiny_patch14_224", **vit),
    "cait_xxs24": create("cait_xxs24_224", **vit),
    "xcit_nano": fixed(create("xcit_nano_12_p16_224", **vit)),
    "swinv2_tiny": create("swinv2_tiny_window8_256", **swin),
    "coatnet_nano_rw": create("coatnet_nano_rw_224", block_type=("C", "T"), **hybrid),
    "mixer_s32": override("mixer_s32_224", **mixer),
    "resmlp_12": override("resmlp_12_224", **mixer),
    "gmlp_ti16": override("gmlp_ti16_224", **mixer),
    "poolformer_s12": override("poolformer_s12", **next_),
    "caformer_s18": override("caformer_s18", depths=(1, 1, 1, 1), dims=(16, 32, 32, 64)),
    "davit_tiny": create(
        "davit_tiny", embed_dims=(8, 16, 16, 32), num_heads=(1, 2, 2, 4), depths=(1, 1, 1, 1), window_size=4
    ),
    "inception_next": create("inception_next_atto", norm_layer=LayerNorm2d, depths=(1, 1, 1, 1), dims=(16, 16, 24, 32)),
    "repvit": fixed(override("repvit_m0_9", embed_dim=(8, 16, 24, 32), depth=(1, 1, 1, 1))),
}


def build(factory):
    torch.manual_seed(0)
    model = factory().double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():  # zeros, and scales of 1e-6, hide what lies behind them
        for parameter in model.parameters():
            flat = parameter.numel() < 2 or parameter.std() < 1e-3
            parameter += (0.2 if flat else 0.02) * torch.randn_like(parameter)
    return model


def check(factory, methods):
    model = build(factory)
    inputs, targets = torch.randn(2, 2, 3, 32, 32, dtype=torch.float64), torch.tensor([1, 3])
    graph, reference = (
        clipped_grad(
            model, loss_fn, clipping_norm=1.0, augmult=2, engine=engine, methods=methods if engine == "graph" else None
        )(inputs, targets)
        for engine in ("graph", "reference")
    )
    torch.testing.assert_close(graph.grad_norms, reference.grad_norms, rtol=1e-9, atol=0)
    size = torch.stack([value.norm() for value in reference.grad_sum.values()]).norm()
    error = torch.stack([(graph.grad_sum[name] - value).norm() for name, value in reference.grad_sum.items()]).norm()
    assert error <= 1e-9 * size


@pytest.mark.parametrize("name", QUICK)
def test_a_family_is_exact(name):
    check(QUICK[name], {"memory_format": "contiguous"})


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK | SLOW)
def test_a_family_is_exact_by_the_fastest_methods(name):
    check((QUICK | SLOW)[name], None)
