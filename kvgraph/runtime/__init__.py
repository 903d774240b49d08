"""From an artifact to tokens; never imports the compiler."""
