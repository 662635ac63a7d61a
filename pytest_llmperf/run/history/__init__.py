"""What runs before this one have measured: kept in a store, read from it or from ``--perf-json`` files."""
