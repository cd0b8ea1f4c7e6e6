"""Routes, by who uses them. Each only translates between HTTP and one use case."""
