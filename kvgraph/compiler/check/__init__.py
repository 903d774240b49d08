"""The check of a compile: run two ragged rows in chunks, and compare with the model's logits."""
