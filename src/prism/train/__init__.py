"""Train a model of any task: settings, loop, optimizers, checkpoints, data parallelism, export."""
