"""Pictures: SVG and PNG."""
