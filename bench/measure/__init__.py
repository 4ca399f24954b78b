"""Tools of the benchmarks: declarations, jobs, links, parts of a step, kernels."""
