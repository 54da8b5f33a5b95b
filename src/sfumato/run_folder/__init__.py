"""What a run leaves, and how it is read.

=================== ======================================== ============================ =======
file                what it holds                            defined in                   public
=================== ======================================== ============================ =======
recipe.toml         the settings, all choices made           `launch`, `sfumato.config`   yes
privacy.json        the certificate                          `record.Certificate`         yes
result.json         accuracies and the claims                `record.Result`              yes
metrics.jsonl       accuracy and epsilon on the way          `record.Metrics`             yes
model.safetensors   the averaged weights, with their claims  `record.WeightsFacts`        yes
calibration.json    what the owner fitted after training     `record.CalibrationFacts`    yes
evaluation.json     the test set of the report           `tested.Tested`              yes
report.html         one page about all of these              `sfumato.reporting.page`     yes
ledger.jsonl        every release, noted before its noise    `ledger`                     yes
metrics.csv         the same as metrics.jsonl (`run.log`)    `sfumato.training.logs`      yes
owner/              all below, for the owner alone           `files`                      no
  checkpoints/      states to go on from                     `checkpoint`                 no
  metrics_private.* losses and gradient norms                `record.PrivateMetrics`      no
  canaries.json     which canaries took part                 `launch.Coins`               no
  images_sha256     digest of what is trained on             `launch`                     no
  trained_on, fitted_on  digests of these images (.json)     `tested`                     no
  data_root, init_from  where images and weights lie         `files`                      no
  budget            where the file of its budget lies        `files`                      no
  tensorboard/      event files (`run.log`)                  `sfumato.training.logs`      no
=================== ======================================== ============================ =======

`verification` says whether they agree with each other, `sfumato schema` gives JSON schemas of those
that are JSON. `budget` is the file that runs on the same images share.
"""
