"""The tests; `tests/support/` has what several folders of them share."""
