"""Train a model of any task: settings, loop, optimizers, checkpoints, data parallelism, export.

What enters here knows no product: a task (task.py) brings batches and a loss. Start with loop.py (the order of a run), then
step.py (forward, backward, update), checkpoint.py and run.py (the folder, and what a resumed run may not change).
"""
