"""One module a stage of dvc.yaml: reads its inputs, calls k2, writes its outputs."""

import os

# OpenMP teams that spin for long at their barriers slow each other several times over when stages share cores; teams that never spin
# are slow alone. Some ten microseconds of spinning before a thread sleeps is near the better of the two in both (docs/log.md).
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
