"""Training data: conversations, the target's own answers, features on disk."""
