"""`make bench`."""

from benchmarks import paired, train_step

paired.summary(train_step.main())
