"""Training draft networks: tensors in, checkpoints out; no engine, no transformers."""
