"""The model being accelerated."""
