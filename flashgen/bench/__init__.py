"""Benchmarks: suites, peers, and the tables they write."""
