"""Results and traces as pictures and pages. Never imports the engine."""

MARK = '<meta name="generator" content="slipstream">'  # near the start of every page we write
