"""Does what was compiled compute what the model computes? Two ragged rows, in chunks."""
