"""Routes, grouped by caller. Each only translates between HTTP and one use case."""
