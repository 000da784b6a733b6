"""Which cuts cost the least."""
