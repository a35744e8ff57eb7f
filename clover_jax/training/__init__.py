"""Train a draft head by distillation: losses, the step, the loop, the run."""
