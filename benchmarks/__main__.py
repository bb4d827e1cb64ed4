"""`make bench`."""

from benchmarks import train_step

train_step.main()
