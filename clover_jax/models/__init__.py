"""The frozen base model: one decoder for the Llama family, its cache, its checkpoints."""
