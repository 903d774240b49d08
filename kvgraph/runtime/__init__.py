"""Runs artifacts and generates tokens; never imports the compiler."""
