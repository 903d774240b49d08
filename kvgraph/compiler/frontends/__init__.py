"""Frontends: each reads one kind of source and makes a Model that the pipeline exports."""
