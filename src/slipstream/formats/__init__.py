"""Checkpoint folders: config.json and safetensors to draft networks and back."""
