"""One module a stage of dvc.yaml: reads its inputs, calls k2, writes its outputs."""

import os

# OpenMP teams that spin at their barriers slow each other several times over when stages share cores: let waiting threads sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
