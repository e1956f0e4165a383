"""Training: settings, the loop, checkpoints, several processes as one, export."""
