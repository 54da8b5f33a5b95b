"""What a run leaves, and how it is read.

=================== ======================================== ============================ =======
file                what it holds                            defined in                   public
=================== ======================================== ============================ =======
recipe.toml         the settings, all choices made           `session`, `sfumato.config`  yes
privacy.json        the certificate                          `record.Certificate`         yes
result.json         accuracies and the claims                `record.Result`              yes
metrics.jsonl       accuracy and epsilon on the way          `record.Metrics`             yes
model.safetensors   the averaged weights, with their claims  `record.WeightsFacts`        yes
calibration.json    what the owner fitted after training     `record.CalibrationFacts`    yes
report.html         one page about all of these              `sfumato.reporting.page`     yes
ledger.jsonl        every release, noted before it happens   `ledger`, `entries`          yes
ledger.head         the ledger's last line, authenticated    `ledger`                     yes
metrics_private.jsonl losses and gradient norms              `record.PrivateMetrics`      no
audit_private.json  which canaries took part                 `coins.Coins`                no
metrics.csv         the same as metrics.jsonl (`run.log`)    `sfumato.training.logs`      yes
metrics_private.csv losses and gradient norms, if asked for  the same                     no
tensorboard/        event files (`run.log`)                  the same                     no
checkpoints/        states to go on from, authenticated      `checkpoint`                 no
sample.json         of an own loop: the sample that waits    `training.waiting_sample`    no
key                 what all randomness follows from         `key_file`                   no
data_root           where the images lie                     `session`, `files`           no
=================== ======================================== ============================ =======

`verification` says whether they agree with each other; `schemas` gives JSON schemas of those that
are JSON.
"""
