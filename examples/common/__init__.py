"""Code that examples, the demo and the benchmarks share: ranks, training, fair rounds, text."""
