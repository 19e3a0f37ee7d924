"""Plans become callables: the disk cache, loading, launching, interpreting, merging."""
