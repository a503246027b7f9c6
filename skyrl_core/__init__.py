"""The learning system: configuration, data, rollouts, training, checkpoints. Imports no Prefect."""
