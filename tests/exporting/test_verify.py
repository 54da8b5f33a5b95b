"""A receiver finds what was altered, and nothing that was received can do harm."""

import contextlib
import io
import json
import os
import shutil
import struct
import tempfile
import warnings
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import safetensors.torch
import torch

import sfumato
from sfumato.accounting.mechanism import Mechanism
from sfumato.errors import InputError
from sfumato.exporting.export import sha256_of
from sfumato.exporting.onnx_model import FACTS
from sfumato.exporting.verify import check
from sfumato.planning.claims import claims_of
from sfumato.run_folder.files import write_with_metadata
from sfumato.run_folder.verification import read_model_file, verify_run
from tests.cli.test_cli import call, json_of, refused

CERTIFICATE = "privacy.json"


def seal(folder: Path) -> None:
    """Digests as if nothing had been altered."""
    names = [path.name for path in sorted(folder.iterdir()) if path.name != "SHA256SUMS"]
    (folder / "SHA256SUMS").write_text("".join(f"{sha256_of(folder / name)}  {name}\n" for name in names))


def zipped(folder: Path, path: Path, prefix: str = "model/") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in folder.iterdir():
            archive.write(file, prefix + file.name)
    return path


def restate(folder: Path, **changes) -> None:
    """Alters the certificate, and makes every number in it follow from the others."""
    path = folder / CERTIFICATE
    told = json.loads(path.read_text()) | changes
    told["public_inputs"] |= {key: value for key, value in changes.items() if key in ("num_examples", "num_people")}
    kept = {key: told[key] for key in ("num_examples", "batch_size", "noise_multiplier", "num_steps")}
    mechanism = Mechanism(**kept, images_per_unit=1)
    claimed = claims_of(mechanism, told["delta"]).as_json()
    epsilons = {key: claimed[key] for key in ("epsilon", "epsilon_pld", "epsilon_rdp", "attacker")}
    told |= {**epsilons, "epsilon_so_far": claimed["epsilon"], "sampling_prob": mechanism.sampling_prob}
    path.write_text(json.dumps(told))


def smaller_epsilon(folder):
    sigma = json.loads((folder / CERTIFICATE).read_text())["noise_multiplier"]
    restate(folder, noise_multiplier=3 * sigma)  # what a third of the epsilon asks for


def weights(folder):
    path = folder / "model.safetensors"
    _, _, tensors, metadata = read_model_file(path)
    name = max(tensors)
    tensors[name] = tensors[name] + 1e-3
    write_with_metadata(path, safetensors.torch.save(tensors), metadata)


def another_certificate(folder):
    """Of another run of the same recipe on as many images: these three differ."""
    restate(folder, run_id="0" * 32, weights_sha256="0" * 64, ledger_sha256="0" * 64)


def swapped_onnx(folder):
    """Of weights that are hardly another training's, and metadata that says nothing of it."""
    path = folder / "model.onnx"
    model = onnx.load(path)
    last = next(tensor for tensor in model.graph.initializer if tensor.dims and tensor.dims[0] == 2)
    numbers = np.frombuffer(last.raw_data, np.float32).copy()
    numbers[: len(numbers) // 2] += 0.1  # of one class
    last.raw_data = numbers.tobytes()
    onnx.save(model, path)


TAMPERINGS = {
    "N": lambda folder: restate(folder, num_examples=4000),
    "epsilon": smaller_epsilon,
    "unit": lambda folder: restate(folder, unit="one person, all images together", person_groups="stated"),
    "weights": weights,
    "another certificate": another_certificate,
    "onnx": swapped_onnx,
}


@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_each_alteration_of_one_file_is_found_even_where_digests_were_made_anew(received, tampering):
    TAMPERINGS[tampering](received)
    found = check(received)
    assert not found.valid and any("digest" in line for line in found.findings)
    seal(received)
    again = check(received)
    assert not again.valid and not any("digest" in line for line in again.findings)
    assert all("\n" not in line and str(received) not in line for line in found.findings)


def test_what_is_whole_is_believed_as_folder_zip_and_run(exported, run, tmp_path):
    for path in (exported, zipped(exported, tmp_path / "x.zip"), zipped(exported, tmp_path / "y.zip", ""), run):
        found = check(path)
        assert found.valid and not found.findings and len(found.checked) >= 1 and found.not_proved
    assert check(exported).not_checked == []


def test_an_export_that_lost_its_recipe_is_judged_all_the_same(received):
    (received / "recipe.toml").unlink()
    found = check(received)
    assert not found.valid and any("recipe.toml" in line for line in found.findings)


def test_names_of_classes_and_predict_py_are_compared_too(received):
    model = onnx.load(received / "model.onnx")
    told = json.loads(model.metadata_props[0].value)
    model.metadata_props[0].value = json.dumps(told | {"classes": told["classes"][::-1]})
    onnx.save(model, received / "model.onnx")
    (received / "predict.py").write_text("print('mine')\n")
    (received / "config.json").write_text(json.dumps({"architecture": "resnet18"}))
    seal(received)
    said = " ".join(check(received).findings)
    assert "states another classes" in said and "predict.py" in said and "config.json" in said


class Marks:
    def __reduce__(self):
        return os.mkdir, (str(Path.cwd() / "ran"),)


def graph_of(*nodes, initializers=()):
    value = onnx.helper.make_tensor_value_info
    inputs = [value("pixels", onnx.TensorProto.UINT16, ["rows", 16, 16, 1])]
    outputs = [value("class", onnx.TensorProto.INT64, None), value("probabilities", onnx.TensorProto.FLOAT, None)]
    graph = onnx.helper.make_graph([*nodes], "g", inputs, outputs, [*initializers])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)])
    model.metadata_props.add(key=FACTS, value="{}")
    return model


def elsewhere(folder):
    (folder.parent / "secret").write_bytes(bytes(64))
    tensor = onnx.TensorProto(name="x", data_type=onnx.TensorProto.FLOAT, dims=[16])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")
    node = onnx.helper.make_node("Identity", ["x"], ["probabilities"])
    onnx.save(graph_of(node, initializers=[tensor]), folder / "model.onnx")


def onnx_bomb(folder):
    shape = onnx.numpy_helper.from_array(np.array([200_000, 200_000]), "shape")
    node = onnx.helper.make_node("ConstantOfShape", ["shape"], ["probabilities"])
    onnx.save(graph_of(node, initializers=[shape]), folder / "model.onnx")


def onnx_of_unknown_size(folder):
    cast = onnx.helper.make_node("Cast", ["pixels"], ["numbers"], to=onnx.TensorProto.INT64)
    flat = onnx.helper.make_node("Flatten", ["numbers"], ["flat"], axis=0)
    shape = onnx.helper.make_node("Squeeze", ["flat"], ["shape"])
    node = onnx.helper.make_node("ConstantOfShape", ["shape"], ["probabilities"])
    onnx.save(graph_of(cast, flat, shape, node), folder / "model.onnx")


def large_onnx(folder):
    tensor = onnx.numpy_helper.from_array(np.zeros(2**23, np.float32), "x")
    onnx.save(graph_of(initializers=[tensor]), folder / "model.onnx")


def hole(name, size):
    def make(folder):
        with (folder / name).open("r+b") as file:
            file.truncate(size)

    return make


def header(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**26) + b" " * 2**26)


def replaced(name, content):
    return lambda folder: (folder / name).write_bytes(content)


HOSTILE = {
    "a pickle": lambda folder: torch.save({"a": Marks()}, folder / "model.safetensors"),
    "a link": lambda folder: ((folder / CERTIFICATE).unlink(), (folder / CERTIFICATE).symlink_to("/etc/passwd")),
    "a digest of a file elsewhere": lambda folder: (folder / "SHA256SUMS").write_text("00  ../../secret\n"),
    "a key of many parts": replaced("recipe.toml", b"a." * 40_000 + b"a = 1\n"),
    "lists within lists": replaced(CERTIFICATE, b"[" * 2_000_000),
    "long lines": replaced("ledger.jsonl", b"{}" * 2**25),
    "a hole in the weights": hole("model.safetensors", 2**40),
    "a hole in the page": hole("report.html", 2**40),
    "a header of 64 MB": header,
    "a network that asks for all memory": onnx_bomb,
    "a network of unknown size": onnx_of_unknown_size,
    "a network that is too large": large_onnx,
    "a network whose weights lie elsewhere": elsewhere,
    "no network": replaced("model.onnx", b"\x08\x0a" * 1000),
}


WHY = {
    "a network of unknown size": "of unknown size",
    "a network whose weights lie elsewhere": "data in other files",
    "a link": "is a link",
    "a header of 64 MB": "a header of",
}


def zip_of(path, members):
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        warnings.simplefilter("ignore")  # two of one name
        for name, content in members:
            archive.writestr(name, content)
    return path


ZIPS = {
    "up": [("../model.onnx", b"x")],
    "from the root": [("/tmp/model.onnx", b"x")],
    "two folders": [("a/README.md", b"x"), ("b/PRIVACY.md", b"x")],
    "of another name": [("README.md", b"x"), ("README.md.exe", b"x")],
    "twice": [("README.md", b"x"), ("README.md", b"y")],
    "a bomb of text": [(CERTIFICATE, b" " * 2**27)],
    "a bomb of weights": [("model.safetensors", bytes(2**27))],
    "down by backslashes": [("..\\\\model.onnx", b"x")],
    "empty": [],
}


@pytest.fixture(autouse=True)
def place_for_temporary_folders(tmp_path_factory, monkeypatch):
    """Of this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))


def refuses(path) -> str:
    """Why, in one line; nothing ran, nothing is left anywhere, and memory grew by less than 100 MB."""

    def state() -> tuple:
        temporary = {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("sfumato-")}
        return temporary, sorted(os.listdir())

    def megabytes(key: str) -> float:
        told = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(told[key].split()[0]) / 1024

    before = state()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that since now
    rested = megabytes("VmRSS")
    try:
        said = " ".join(check(path).findings)
    except InputError as error:
        said = str(error)
    assert said and "\n" not in said
    assert before == state() and megabytes("VmHWM") - rested < 100
    return said


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_export_is_refused_in_one_line_and_does_nothing(received, exported, tmp_path, monkeypatch, hostile):
    monkeypatch.chdir(tmp_path)
    HOSTILE[hostile](received)
    if hostile != "a digest of a file elsewhere" and "hole" not in hostile:
        seal(received)
    check(exported)  # what is imported for it is not counted
    assert WHY.get(hostile, "") in refuses(received)
    if hostile in ("a pickle", "a hole in the weights", "a header of 64 MB"):
        with pytest.raises(InputError):
            sfumato.load(received)


@pytest.mark.parametrize("kind", ZIPS)
def test_a_hostile_zip_is_refused_before_anything_of_it_is_written(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    path = zip_of(tmp_path / "x.zip", ZIPS[kind])
    refuses(path)


def test_a_zip_that_lies_about_what_it_packs_or_is_encrypted_is_refused(exported, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    zip_of(tmp_path / "x.zip", [("model.safetensors", bytes(2**27))])
    content = bytearray((tmp_path / "x.zip").read_bytes())
    directory = content.rfind(b"PK\1\2")
    content[directory + 20 : directory + 24] = struct.pack("<L", 2**26)  # its packed size
    (tmp_path / "lie.zip").write_bytes(content)
    assert "more than it has" in refuses(tmp_path / "lie.zip")
    for place, value in ((8, 1), (10, 99), (8, 2**11)):  # encrypted, an unknown method, a name that is no UTF-8
        content = bytearray(zipped(exported, tmp_path / "y.zip").read_bytes())
        content[content.rfind(b"PK\1\2") + place] = value & 255
        (tmp_path / "odd.zip").write_bytes(content)
        with contextlib.suppress(InputError):  # no other error; what is read all the same is whole
            assert check(tmp_path / "odd.zip").valid


def test_what_carriers_leave_is_passed_over_and_what_can_run_is_not(received, tmp_path):
    for name in (".gitattributes", ".DS_Store"):
        (received / name).write_text("x")
    (received / "__MACOSX").mkdir()
    assert check(received).valid
    with zipfile.ZipFile(tmp_path / "mac.zip", "w") as archive:
        archive.comment = b"git archive"
        for file in filter(Path.is_file, received.iterdir()):
            archive.write(file, f"model/{file.name}")
            archive.writestr(f"__MACOSX/model/._{file.name}", b"x")
    assert check(tmp_path / "mac.zip").valid
    (received / "onnxruntime.py").write_text("print('mine')")
    for sums in (True, False):
        if not sums:
            (received / "SHA256SUMS").unlink()
        with pytest.raises(InputError, match="onnxruntime.py"):
            check(received)
    (received / "onnxruntime.py").unlink()
    assert any("SHA256SUMS" in line for line in check(received).findings)


def test_facts_of_the_network_are_told_once_and_epsilons_on_the_way_are_no_lower_than_they_were(received):
    model = onnx.load(received / "model.onnx")
    told = json.loads(model.metadata_props[0].value)
    model.metadata_props.add(key=FACTS, value=json.dumps(told | {"classes": told["classes"][::-1]}))
    onnx.save(model, received / "model.onnx")
    seal(received)
    assert "model.onnx is damaged" in " ".join(check(received).findings)
    path = received / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2]["epsilon"] *= 0.9
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "metrics.jsonl states less epsilon" in " ".join(check(received).findings)


def test_a_claim_that_an_attack_refuted_is_not_handed_on_and_is_found(run, received, tmp_path, capsys):
    attack = {"epsilon_lower_bound": 30.0, "bound": "x", "confidence": 0.95, "delta": 1e-4, "num_canaries": 9}
    attack |= {"num_guesses": 9, "num_right": 9, "perfect": 40.0, "violated": True}
    attack["scores"] = {"edges": [0.0, 1.0], "members": [9], "non_members": [0]}
    own = shutil.copytree(run, tmp_path / "own")
    for folder in (own, received):
        told = json.loads((folder / CERTIFICATE).read_text())
        (folder / CERTIFICATE).write_text(json.dumps(told | {"audit": attack}))
    assert verify_run(own)[0].audit.violated  # the run itself can be attacked again
    status, _, err = call(capsys, "resume", own)
    assert status == 0 and "warning" in err and "refutes" in err  # and is told again
    with pytest.raises(InputError, match="an attack that refutes"):
        sfumato.export(own, tmp_path / "made")
    assert any("refutes" in line for line in check(received).findings)


def many_values(folder):
    shape = onnx.numpy_helper.from_array(np.array([2**25]), "shape")
    nodes = [onnx.helper.make_node("ConstantOfShape", ["shape"], [f"x{number}"]) for number in range(16)]
    total = onnx.helper.make_node("Sum", [f"x{number}" for number in range(16)], ["probabilities"])
    cast = onnx.helper.make_node("Cast", ["pixels"], ["class"], to=onnx.TensorProto.INT64)
    model = graph_of(*nodes, total, cast, initializers=[shape])
    own = onnx.load(folder / "model.onnx")
    model.metadata_props[0].value, model.ir_version = own.metadata_props[0].value, own.ir_version
    onnx.save(model, folder / "model.onnx")


def test_what_takes_more_than_its_size_allows_ends_a_process_of_its_own(received):
    many_values(received)
    seal(received)
    try:
        said = " ".join(sfumato.verify(received).findings)
    except InputError as error:
        said = str(error)
    assert "alloc" in said.lower() or "more memory" in said
    assert "\n" not in said


def test_a_zip_that_is_cut_or_none_is_refused(exported, tmp_path):
    whole = zipped(exported, tmp_path / "x.zip").read_bytes()
    for content in (whole[:-30], whole[: len(whole) // 2], b"", b"PK", io.BytesIO(whole).read(100)):
        (tmp_path / "cut.zip").write_bytes(content)
        with pytest.raises(InputError):
            check(tmp_path / "cut.zip")


def test_the_commands_answer_in_json_and_by_their_status(run, exported, received, tmp_path, capsys):
    told = json_of(capsys, "export", run, "--output", tmp_path / "made", "--license", "other")
    assert set(told["files"]) == {path.name for path in (tmp_path / "made").iterdir()}
    assert json_of(capsys, "verify", exported)["valid"] is True
    TAMPERINGS["weights"](received)
    status, out, _ = call(capsys, "verify", received, "--json")
    assert status == 1 and json.loads(out)["valid"] is False and json.loads(out)["findings"]
    assert "there is no" in refused(capsys, "verify", tmp_path / "nothing")
