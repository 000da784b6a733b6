"""What a trace depends on in a stage's modules, and what it must leave as it was."""
