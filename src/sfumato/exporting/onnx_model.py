"""model.onnx: written, and compared with the network that it was made of."""

import importlib.metadata
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato.errors import InputError, refusing
from sfumato.evaluation.trained import Trained
from sfumato.exporting.deployed import Deployed, trial_images
from sfumato.json_record import pick
from sfumato.models.libraries import imported
from sfumato.run_folder.files import write_atomically
from sfumato.run_folder.record import Certificate

ONNX_FILE = "model.onnx"
FACTS = "sfumato"
"""The key of its metadata under which facts stand as JSON."""
_NEEDED = "which writing and checking model.onnx needs. Install it: pip install onnx onnxscript onnxruntime"
_ANEW = "Ask for the export anew."
_OPSET = 20
_ROWS, _NUMBERS = 32, 2**21
"""Made-up images that are compared, and numbers in all of them, where that is fewer."""
_LARGEST = 2**25
"""Numbers in one value of the graph, for so many rows at once."""
_TOLERANCE = 1e-5
_ROUNDING = 1e-6
"""Of a probability; or, where that is more, of the largest output over the temperature, which enlarge roundings."""
_MOST = 1e-2
"""Whatever the outputs: else a stranger's weights could excuse any probability."""


def write(trained: Trained, path: Path, certificate: Certificate) -> None:
    """Writes the network, with its constants, temperature and decision, and compares its answers with PyTorch's.

    Args:
        trained: The model.
        path: The file.
        certificate: Of its run, which its metadata repeats.

    Raises:
        InputError: If a package is not installed, the network cannot be expressed, or answers differ.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        imported(package, _NEEDED)
    deployed, pixels = Deployed(trained).eval(), trial_images(trained, _at_once(trained))
    remedy = "Write its forward method with operations that torch.onnx.export knows."
    with refusing("this network cannot be written as ONNX", remedy, Exception), torch.no_grad():
        program = torch.onnx.export(
            deployed,
            (pixels,),
            input_names=["pixels"],
            output_names=["class", "probabilities"],
            dynamic_shapes=({0: torch.export.Dim("rows")},),
            opset_version=_OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    _without_traces(model)
    versions = {name: importlib.metadata.version(name) for name in ("sfumato", "torch", "onnx")}
    entry = model.metadata_props.add()
    entry.key, entry.value = FACTS, json.dumps({**_facts(trained, certificate), "made_with": versions})
    write_atomically(path, model.SerializeToString())
    wrong = findings(trained, path, certificate)
    if wrong:
        raise InputError(f"{'; '.join(wrong)}: nothing was exported. {remedy}")


def _facts(trained: Trained, certificate: Certificate) -> dict[str, Any]:
    """What its metadata says to whoever runs it."""
    (channels, size, _), decoding, calibration = trained.shape, trained.decoding, trained.calibration
    thresholds = {} if calibration is None else calibration.model_dump(include={"threshold", "thresholds"})
    return {
        "classes": list(trained.classes),
        "image_size": size,
        "decoded_size": round(decoding["resize_ratio"] * size),
        "channels": channels,
        "resize": decoding["resize"],
        "is_calibrated": calibration is not None,
        "is_multilabel": trained.objective.is_multilabel,
        "threshold": None,
        **thresholds,
        **pick(certificate, "run_id", "weights_sha256", "epsilon", "delta", "unit"),
    }


def _without_traces(model: Any) -> None:
    """Takes out where in which file each operation was written: absolute paths of the machine."""
    graph = model.graph
    for each in (model, graph, *graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer):
        del each.metadata_props[:]
        each.ClearField("doc_string")


def findings(trained: Trained, path: Path, certificate: Certificate) -> list[str]:
    """In what its answers on made-up images and its metadata disagree with network and certificate. The file may be a
    stranger's.

    Raises:
        InputError: If it would read another file, take all memory, or is none.
    """
    runtime = imported("onnxruntime", _NEEDED)
    told = _checked(path, trained)
    expected = _facts(trained, certificate)
    others = sorted(key for key in expected.keys() | told.keys() if told.get(key) != expected.get(key))
    wrong = [f"{path.name} states another {', '.join(others)} than the run"] if others else []
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # what is wrong is raised
    options.intra_op_num_threads = 1
    worst, largest, misnamed, deployed = 0.0, 0.0, 0, Deployed(trained).eval()
    rows = max(4, min(_ROWS, _NUMBERS // math.prod(trained.shape)))
    with refusing(f"{path.name} cannot be run", _ANEW, Exception), torch.no_grad():
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        for pixels in trial_images(trained, rows).split(_at_once(trained)):
            decided, probabilities = session.run(["class", "probabilities"], {"pixels": pixels.numpy()})
            classes, shares = (value.numpy() for value in deployed(pixels))
            worst = max(worst, float(np.abs(probabilities - shares).max()))
            misnamed += int((decided != classes).sum())
            largest = max(largest, float(deployed.decisive(pixels).abs().max()))
    if not worst <= min(_MOST, max(_TOLERANCE, _ROUNDING * largest / deployed.temperature)) or misnamed:
        answers = f"{misnamed} of {rows} made-up images get another class, probabilities differ by up to {worst:.1e}"
        wrong.append(f"{path.name} answers otherwise than the weights: {answers}")
    return wrong


def _checked(path: Path, trained: Trained) -> dict[str, Any]:
    """The facts of its metadata, once nothing in it leads elsewhere, and no value is larger than the network's may be.

    Raises:
        InputError: If that is not so.
    """
    onnx = imported("onnx", _NEEDED)
    weights = sum(value.nbytes for value in trained.model.state_dict().values())
    if path.stat().st_size > 2 * weights + 2**22:
        raise InputError(f"{path.name} is far larger than the weights. {_ANEW}")
    with refusing(f"{path.name} is damaged", _ANEW, Exception):
        model = onnx.load_model(path, load_external_data=False)
        (facts,) = model.metadata_props  # of two of one key every program takes the one that it likes
        told = dict(json.loads({facts.key: facts.value}[FACTS]))
        told.pop("made_with", None)
    graph, tensor = model.graph, onnx.AttributeProto.TENSOR
    constants = [*graph.initializer, *(each.t for node in graph.node for each in node.attribute if each.type == tensor)]
    kinds = {each.type for node in graph.node for each in node.attribute}
    simple = {getattr(onnx.AttributeProto, name) for name in ("FLOAT", "INT", "STRING", "TENSOR", "FLOATS", "INTS")}
    is_elsewhere = any(each.data_location == onnx.TensorProto.EXTERNAL or each.external_data for each in constants)
    if is_elsewhere or model.functions or graph.sparse_initializer or not kinds <= simple:
        raise InputError(f"{path.name} has data in other files, loops or functions, as no export has. Do not run it.")
    with refusing(f"{path.name} is damaged", _ANEW, Exception):
        graph.input[0].type.tensor_type.shape.dim[0].dim_value = _at_once(trained)
        del graph.value_info[:]
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True).graph
    sizes = {value.name: _size(value) for value in (*inferred.value_info, *inferred.output)}
    made = [sizes.get(name, -1) for node in graph.node for name in node.output]
    if min(made, default=-1) < 0 or max(made) > _LARGEST:
        raise InputError(f"{path.name} has values of unknown size or of more than {_LARGEST} numbers. Do not run it.")
    return told


def _at_once(trained: Trained) -> int:
    """Images that are computed together."""
    return 4 if trained.shape[1] <= 128 else 2


def _size(value: Any) -> int:
    """How many numbers it has; -1: unknown."""
    kind = value.type.tensor_type
    known = kind.HasField("shape") and all(each.HasField("dim_value") for each in kind.shape.dim)
    return math.prod(each.dim_value for each in kind.shape.dim) if known else -1
