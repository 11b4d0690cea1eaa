"""Training objectives, one file each: (model, batch, readout) to Loss."""
