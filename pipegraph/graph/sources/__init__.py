"""Where models come from: a Python file, or a Hugging Face configuration."""
