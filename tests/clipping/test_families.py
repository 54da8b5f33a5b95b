"""Our own networks in every order and normalisation, and families that others wrote, made narrow and shallow: the fast
engine against the loop over single images.
"""

import sys
from functools import partial

import pytest
import timm
import torch
from timm.layers import GroupNorm, GroupNorm1, GroupNorm1Act, GroupNormAct, LayerNorm2d
from timm.models._efficientnet_builder import round_channels
from torch import nn

from sfumato.clipping import clipped_grad, fix_groupnorm
from sfumato.models import build
from tests.clipping.problems import FIXED, cross_entropy, distance, norm

ORDERS = ("activation-norm", "norm-activation")
NETWORKS = [("small_cnn", {"width": 4, "order": order}) for order in ORDERS] + [
    ("wide_resnet", {"depth": 10, "width": 1, "groups": 4, "order": order, "weight_standardization": standardized})
    for order in ORDERS
    for standardized in (True, False)
]


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
    "convnext_atto": create("convnext_atto", **next_),
    "vit_tiny": create("vit_tiny_patch16_224", **vit),
    "torchvision_vit": torchvision_vit,
}
SLOW = {
    "swin_tiny": create("swin_tiny_patch4_window7_224", **swin),
    "resnet26": create("resnet26", norm_layer=GroupNorm1, **four),
    "nf_resnet26": create("nf_resnet26", **nf),
    "mobilenetv3_small": override("mobilenetv3_small_050", **narrow),
    "maxvit_nano_rw": create("maxvit_nano_rw_256", block_type=("M", "M"), **hybrid),
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


def shaken(factory):
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


def check(model, methods, examples=2, size=32):
    inputs, targets = torch.randn(examples, 2, 3, size, size, dtype=torch.float64), torch.tensor([1, 3, 0, 1, 2])
    graph, reference = (
        clipped_grad(
            model, cross_entropy, clipping_norm=1.0, augmult=2, microbatch_size=3, engine=engine, methods=given
        )(inputs, targets[:examples])
        for engine, given in (("graph", methods), ("reference", None))
    )
    torch.testing.assert_close(graph.grad_norms, reference.grad_norms, rtol=1e-9, atol=0)
    assert distance(graph.grad_sum, reference.grad_sum) <= 1e-9 * norm(reference.grad_sum)
    assert norm(reference.grad_sum) > 0.1


@pytest.mark.parametrize("name", QUICK)
def test_a_family_is_exact(name):
    check(shaken(QUICK[name]), FIXED)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK | SLOW)
def test_a_family_is_exact_by_the_fastest_methods(name):
    check(shaken((QUICK | SLOW)[name]), None)


@pytest.mark.parametrize(
    ("name", "options"),
    NETWORKS,
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_our_own_networks_are_exact(name, options):
    torch.manual_seed(0)
    check(build(name, image_size=12, channels=3, num_classes=4, options=options, seed=3).double(), None, 5, 12)


@pytest.mark.parametrize("name", ["small_cnn", "wide_resnet"])
def test_the_order_changes_what_the_network_computes_and_not_its_parameters(name):
    one, other = (
        build(name, image_size=12, channels=3, num_classes=4, options={"order": order}, seed=3) for order in ORDERS
    )
    inputs = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    weights = [torch.nn.utils.parameters_to_vector(model.parameters()) for model in (one, other)]
    assert torch.equal(*weights) and (one(inputs) - other(inputs)).abs().max() > 1e-2
