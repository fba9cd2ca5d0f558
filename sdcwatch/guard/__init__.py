"""The guard inside the training loop: collectives, hooks, and the order in which checks run."""
