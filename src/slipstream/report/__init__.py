"""Results and traces as pictures and pages. Never imports the engine."""
