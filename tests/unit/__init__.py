"""Each room by itself."""
