"""Networks of timm and torchvision by name: what a stranger's recipe may build, and how it ends."""

import json

import pytest
import torch

from sfumato import cli, config
from sfumato.data import loading
from sfumato.errors import InputError
from sfumato.models import build
from sfumato.models.registry import imported_module
from sfumato.models.weights import read_weights
from sfumato.run_folder.verification import verify_run

pytest.importorskip("timm")
pytest.importorskip("torchvision")

SMALL = {"num_classes": 5, "seed": 0}


@pytest.mark.parametrize(
    ("name", "channels", "size", "options"),
    [
        ("timm:test_vit", 1, 32, {}),  # takes its image size
        ("timm:test_resnet", 1, 40, {"act_layer": "silu"}),  # takes any
        ("timm:test_resnet.r160_in1k", 1, 40, {}),  # its weights have a tag
        ("timm:vit_tiny_patch16_224", 3, 32, {"patch_size": 8, "embed_dim": 48, "depth": 2}),
        ("torchvision:googlenet", 3, 32, {}),
    ],
)
def test_a_library_s_network_takes_the_data_s_shape(name, channels, size, options):
    model = build(name, image_size=size, channels=channels, options=options, **SMALL).eval()
    assert model(torch.zeros(2, channels, size, size)).shape == (2, 5)
    again = build(name, image_size=size, channels=channels, options=options, **SMALL)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert imported_module(name) is None


def test_a_stranger_s_recipe_reaches_nothing_but_architectures():
    for name, options, says in (
        ("timm:resnet5", {}, "Did you mean resnet50?"),
        ("timm:resnet50.a1_in2k", {}, "Did you mean resnet50.a1_in1k?"),
        ("timm:hf-hub:someone/model", {}, "timm has no such network"),
        ("timm:local-dir:/tmp/model", {}, "timm has no such network"),
        ("torchvision:resnet5", {}, "torchvision has no such network"),
        ("timm:test_vit", {"checkpoint_path": "/etc/passwd"}, "has no option checkpoint_path"),
        ("timm:test_vit", {"pretrained_cfg_overlay": "x"}, "has no option pretrained_cfg_overlay"),
        ("torchvision:resnet18", {"weights": "DEFAULT"}, "has no option weights"),
        ("timm:test_vit", {"depth": 10**9}, "at most 1000"),
        ("timm:test_resnet", {"num_heads": 3}, "cannot be built"),
        ("timm:test_vit", {"norm_layer": "no_such_layer"}, "cannot be built"),
    ):
        with pytest.raises(InputError) as error:
            build(name, image_size=32, channels=3, options=options, **SMALL)
        assert says in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(InputError, match=r"--set data\.channels=3"):
        build("torchvision:resnet18", image_size=32, channels=1, **SMALL)


def test_weights_that_no_hub_gives_are_refused_in_one_line(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, says in (
        ("timm:test_vit", "cannot be had from timm's hub"),  # nothing is reached from here
        ("timm:no_such", "timm has no such network"),
        ("small_cnn", 'is for networks named "timm:NAME"'),
    ):
        with pytest.raises(InputError) as error:
            read_weights(name, "timm")
        assert says in str(error.value) and "\n" not in str(error.value)


def recipe(tmp_path, name, **model):
    options = "".join(f", {key} = {json.dumps(value)}" for key, value in model.items())
    path = tmp_path / "recipe.toml"
    path.write_text(
        'data = { name = "digits", num_examples = 24, image_size = 32, channels = 3 }\n'
        f'model = {{ name = "{name}"{options} }}\nprivacy = {{ noise_multiplier = 1.0, delta = 1e-3 }}\n'
        "training = { num_steps = 1, batch_size = 4 }\noptimizer = { learning_rate = 0.1 }\n"
    )
    return str(path)


def test_it_trains_and_is_evaluated_without_trusting_a_module(tmp_path, capsys):
    run = str(tmp_path / "run")
    assert cli.run(["train", recipe(tmp_path, "timm:test_resnet", fix="groupnorm"), "--output", run]) == 0
    assert cli.run(["evaluate", run, "--json"]) == 0
    capsys.readouterr()


IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize("name", ["timm:resnet18.a1_in1k", "torchvision:resnet18"])
def test_images_are_normalised_as_a_library_s_weights_were_made_unless_the_recipe_says_otherwise(name, tmp_path):
    def scale_of(channels=3, model=name, start="w.pth", **data):
        given = {"name": model, "init_from": start, "pretrained_on": "ImageNet"} if start else {"name": model}
        values = {"data": {"name": "digits", "channels": channels, **data}, "model": given}
        dataset = loading.load_for(config.parse(values), None, said.append)
        return dataset.train.mean, dataset.train.std

    said = []
    assert scale_of() == IMAGENET
    assert "data.mean = [0.485, 0.456, 0.406]" in said[0] and "data.std" in said[1]
    assert scale_of(1) == tuple((pytest.approx(sum(each) / 3),) for each in IMAGENET)
    assert scale_of(mean=[0.1, 0.2, 0.3]) == ((0.1, 0.2, 0.3), IMAGENET[1])
    said.clear()
    plain = scale_of(start=None)
    assert plain != IMAGENET and scale_of(start=str(tmp_path)) == scale_of(model="small_cnn") == plain and not said


def test_the_certificate_names_what_was_adapted(tmp_path, capsys):
    torch.save(build("small_cnn", image_size=8, channels=1, **SMALL).state_dict(), tmp_path / "w.pth")
    given = {"init_from": str(tmp_path / "w.pth"), "pretrained_on": "nothing"}
    words = ["train", recipe(tmp_path, "small_cnn", **given), "--output", str(tmp_path / "run")]
    assert cli.run([*words, "--set", "data.image_size=8", "--set", "training.engine=func"]) == 0
    assert verify_run(tmp_path / "run")[0].public_inputs.init_adapted == ["0.weight"]
    assert "1 tensor(s) of the weights are for other channels or image sizes" in capsys.readouterr().err


def test_batch_normalisation_is_refused_with_the_key_that_helps(tmp_path, capsys):
    assert cli.run(["train", recipe(tmp_path, "timm:test_resnet"), "--output", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "mixes examples" in error and "--set model.fix=groupnorm" in error
