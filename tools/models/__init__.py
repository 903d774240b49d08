"""Which decoders of the installed transformers compile, and give its tokens: `docs/models.md`."""
