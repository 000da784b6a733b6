"""Runs in which a random rank is killed, stopped or interrupted at a random moment: who is gone, and who is blamed."""
