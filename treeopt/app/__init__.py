"""Use cases, one per file: the only place where search, profiler, runtime and database meet."""
