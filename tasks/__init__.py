"""One module a stage of dvc.yaml: reads its inputs, calls k2, writes its outputs."""

import os

# OpenMP threads that spin for long at their barriers slow each other when stages share cores; threads that never spin are slower
# alone. A short spin before they sleep costs little in either case (docs/log.md).
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
# PyTorch's large buffers in huge pages: each step asks for hundreds of megabytes anew, and small pages take longer to fault in.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
