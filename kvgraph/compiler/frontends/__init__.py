"""Where a model comes from: each frontend gives a Model that the pipeline exports."""
