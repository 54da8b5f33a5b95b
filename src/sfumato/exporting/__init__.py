"""What of a run is handed on, and how whoever receives it checks it.

An export is a folder of its run's public files (`sfumato.run_folder`) and of these:

==================== ============================================================= ==================
file                 what it is                                                    defined in
==================== ============================================================= ==================
model.onnx           from pixels to class and probabilities, for any program       `onnx_model`
predict.py           names the class of pictures with it; needs nothing of ours    `predict`
config.json          by which timm builds the network, where it can                `timm_folder`
README.md            the model card                                                `cards`
PRIVACY.md           the privacy card                                              `cards`
SHA256SUMS           digests of all others, as `sha256sum` checks them             `export`
==================== ============================================================= ==================
"""
