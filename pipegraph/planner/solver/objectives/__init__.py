"""What cuts cost."""
