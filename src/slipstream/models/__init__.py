"""Draft networks, shared by drafting and training; torch only."""
